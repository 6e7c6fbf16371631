"""Words, keys, values and names that the tasks are made of, all drawn from a generator that the caller seeds."""

import random
import uuid
from collections.abc import Callable, Iterator


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words("""
able active agile amber ample ancient arid azure basic bitter bland blank blond bold brave breezy brief bright brisk
broad bronze calm candid careful cheap cheery chilly civil clean clear clever close coarse cold comfy cosmic costly
cozy crimson crisp cruel curly dainty damp dark deep dense dizzy double dreary dry dull dusty eager early easy elegant
empty even exact faint fair famous fancy fast fierce final fine firm flat fluffy fond formal frail free fresh frosty
full funny fuzzy gentle giant glad gleaming gloomy golden grand grave great green grim gruff handy happy hard harsh
hasty heavy hidden hollow honest huge humble hungry icy ideal idle jolly keen kind large late lavish lazy light lively
local lofty lonely long loud loyal lucky lush major mellow merry mild minor misty modern modest moist narrow neat
nimble noble noisy novel odd olive open orange pale patient plain polite proud public pure purple quick quiet rapid
rare ready regal rigid ripe robust rosy rough round royal rural rusty sacred salty scarlet secret serene shallow sharp
shiny short shy silent silky silver simple sleepy slim slow small smart smooth snowy soft solar solid sour spare spicy
stark steady steep stern still stormy strict strong sturdy subtle sunny sweet swift tall tame tender thick thin tidy
tight tiny tough tranquil true urban vague vast velvet violet vital vivid warm weary wide wild windy wise witty wooden
young zesty
""")

NOUNS = _words("""
acorn airport album alley almond anchor angle ankle antler anvil apple apron arch arrow atlas attic autumn avenue
badge bagel bakery balcony ballad bamboo banjo banner barley barrel basin basket beach beacon beaver bench berry
bicycle blanket blossom board bonnet border bottle boulder bracelet branch bread brick bridge broom brush bucket
buckle bugle bundle burrow butter button cabbage cabin cable cactus cake camel camera candle canoe canvas canyon
captain caravan carpet carrot castle cavern cedar cellar chain chalk chapel cherry chest chimney chisel church cinder
circle citadel clay cliff clock cloud clover coach coast cobbler coconut coffee collar comet compass copper coral
cotton cottage couch cousin cradle crane crater cricket crown crystal cupboard curtain cushion daisy dancer desert
desk dinner dolphin donkey door dragon drawer dream drum eagle easel echo elbow elephant elm ember engine estuary
fabric falcon farmer feather fence fern ferry fiddle field finger flag flame flask flute forest fork fossil fountain
fox galaxy garden garlic gate gazelle geyser ginger glacier glass globe glove goose granite grape gravel guitar hammer
hammock harbor harp harvest hatchet hazel hedge helmet heron hill hinge honey hornet horse hotel island ivory jacket
jasmine jewel journal jungle juniper kayak kennel kettle kitchen kite kitten ladder lagoon lake lamp lantern larch
laurel lawn leather ledger lemon lens letter library lily lion lizard lobster locket loom lotus magnet magpie mango
mantle maple marble market marsh meadow melon mill mirror mitten monastery monkey moon mortar moss motor mountain
muffin museum napkin needle nest notebook nutmeg oasis ocean onion orchard organ otter oven owl oyster paddle palace
panther paper parade parrot pasture path peach pebble pelican pencil pepper piano picnic pigeon pillow pine pirate
planet plum pocket pond porch portrait potato prairie prism pumpkin puppet quarry quartz quilt rabbit raft railway
rainbow raven reef ribbon river robin rocket roof rope rudder saddle sailor salmon sandal satchel scarf school
scissors seal shadow shelf shell shepherd ship shore shovel shrine signal sketch sled slipper smoke snail sofa soup
spade sparrow spider spindle spoon spruce squirrel stable stairs statue stone stove straw stream street sugar summer
swan sword table tailor tavern teapot temple tent theater thimble thistle thread throne thunder ticket tiger timber
toast tomato torch tower trail train treasure trumpet tulip tunnel turnip turtle twig umbrella uncle valley vase
village vine violin volcano wagon wallet walnut walrus water weaver whale wheat wheel whistle willow window winter
wizard wolf wool yarn zebra
""")
WORDS = sorted({*ADJECTIVES, *NOUNS})

FIRST_NAMES = _words("""
Ada Adam Agnes Alan Alice Amos Amy Andrew Anna Arthur Beatrice Ben Bruno Carl Carmen Cecil Clara Claude Cora Daniel
Daphne David Dora Edgar Edith Elena Elias Ella Emil Emma Erik Esther Eva Felix Fiona Frank Freda George Gina Grace
Greta Hannah Harold Hector Helen Henry Hugo Ida Igor Ines Iris Irma Isaac Ivan Jack Jane Jasper Joan Jonas Judith
Julia Karl Kate Klara Laura Leon Lily Linda Louis Lucy Lydia Marco Maria Martin Mary Max Mila Mona Nadia Nina Nora
Oscar Otto Paul Peter Petra Quentin Ralph Rita Robert Rosa Ruth Samuel Sara Simon Sofia Stella Theo Tilda Tom Ursula
Vera Victor Viola Walter Wanda Wendy
""")

LAST_NAMES = _words("""
Abbott Adler Archer Bailey Baker Barnes Becker Bennett Berger Bishop Blake Bowen Brandt Brooks Burke Butler Carter
Chandler Clarke Coleman Cooper Crane Cross Curtis Dalton Dawson Dixon Doyle Drake Duncan Eaton Ellis Evans Farrell
Fisher Fletcher Foster Fuller Garner Gibson Gordon Graham Grant Griffin Hale Hansen Harper Hayes Holland Howard Hughes
Hunter Ingram Jansen Jensen Keller Kerr Klein Knight Lambert Larsen Lawson Lindgren Logan Lowell Mason Meyer Miller
Monroe Morgan Murphy Nash Nelson Nolan Norris Olsen Osborne Owens Palmer Parker Payne Perry Porter Powell Quinn Ramsey
Reed Reyes Richter Rivera Rossi Russell Sawyer Schmidt Shaw Silva Sloan Spencer Stone Sutton Tanner Taylor Thorne
Tucker Turner Vance Vogel Wagner Walker Walsh Warren Weber Wells Winter Young Zimmer
""")


def draw_words(generator: random.Random) -> str:
    """An adjective and a noun, "quiet-lantern"."""
    return f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"


def draw_numbers(generator: random.Random) -> str:
    """Seven digits."""
    return str(generator.randint(10**6, 10**7 - 1))


def draw_uuids(generator: random.Random) -> str:
    """A random UUID, version 4."""
    return str(uuid.UUID(int=generator.getrandbits(128), version=4))


DRAW = {"words": draw_words, "numbers": draw_numbers, "uuids": draw_uuids}


def distinct(draw: Callable[[random.Random], str], generator: random.Random) -> Iterator[str]:
    """Endless draws, none of them twice."""
    seen = set()
    while True:
        drawn = draw(generator)
        if drawn not in seen:
            seen.add(drawn)
            yield drawn


def draw_name(generator: random.Random) -> str:
    """A first name, an initial and a last name."""
    initial = generator.choice("ABCDEFGHIJKLMNOPRSTVW")
    return f"{generator.choice(FIRST_NAMES)} {initial}. {generator.choice(LAST_NAMES)}"

"""Variable tracking: RULER's chain of assignments (arXiv:2404.06654), one chain of four hops, one example first."""

import random
import string
from itertools import pairwise

from ..haystack import NOISE
from ..samples import Render, Request, Sample
from ..vocabulary import distinct

HOPS = 4
# The misspelt word belongs to RULER's prompt.
TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
GEN_PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the "
    "value {value}, they are:"
)
EXAMPLE_NOISE = 8


def variable_tracking(request: Request) -> Render:
    """All five variables of the chain are asked for. The example, with shorter names, is the same in every sample."""
    example = _chain(request.random("example"), letters=3, noise=EXAMPLE_NOISE)
    shot = f"{example.prompt}{example.answer}\n\n"

    def render(index: int, units: int) -> Sample:
        asked = _chain(request.random("chain", index), letters=5, noise=units)
        return Sample(shot + asked.input, asked.outputs, asked.answer, asked.gen_prefix)

    return render


def _chain(generator: random.Random, letters: int, noise: int) -> Sample:
    names = distinct(lambda draw: "".join(draw.choices(string.ascii_uppercase, k=letters)), generator)
    variables = [next(names) for _ in range(HOPS + 1)]
    value = generator.randint(10000, 99999)
    statements = [f"VAR {variables[0]} = {value}"]
    statements += [f"VAR {new} = VAR {old}" for old, new in pairwise(variables)]
    # Fractions of the noise, so that a statement stays where it is when the noise grows.
    places = sorted(generator.random() for _ in statements)
    pieces = [f"{NOISE}\n"] * noise
    for place, statement in reversed(list(zip(places, statements, strict=True))):
        pieces.insert(int(place * (noise + 1)), statement)
    return Sample(
        input=TEMPLATE.format(context=" ".join(pieces), value=value),
        outputs=variables,
        answer=f" {' '.join(variables)}",
        gen_prefix=GEN_PREFIX.format(count=len(variables), value=value),
    )

"""Multi-query associative recall (MQAR, arXiv:2312.04927) in words: pairs, then their keys among filler, then a key."""

from functools import cache

from ..samples import Render, Request, Sample
from ..vocabulary import NOUNS, distinct, draw_words

POWER = 0.01
# Of all lines, the share that states the pairs; the paper's tasks range from an eighth to a half.
PAIR_SHARE = 0.25


def associative_recall(request: Request) -> Render:
    """A quarter of the lines are pairs; each key but the asked one returns with its value in one of the other lines.

    As in the paper the gap to a key's return follows a power law (a = 0.01), and the lines that remain are filler; the
    asked key returns last, so that the prompt has the length asked for. The depth is its place among the pairs. A unit
    of filler is another line; one text of pairs serves as many questions as there are depths.
    """
    per_text = len(request.depths)

    @cache
    def layout(number: int, count: int) -> tuple[list[tuple[str, str]], list[str], dict[int, int]]:
        """Pairs, filler lines, and the pair that returns in each line after the pairs."""
        generator = request.random("pairs", number)
        keys = distinct(draw_words, generator)
        num_pairs = max(2, int(count * PAIR_SHARE))
        pairs = [(next(keys), generator.choice(NOUNS)) for _ in range(num_pairs)]
        filler = [f"{generator.choice(NOUNS)}: {generator.choice(NOUNS)}" for _ in range(count - num_pairs - 1)]
        # Drawing without replacement by weight w: the largest u^(1/w) first (Efraimidis and Spirakis).
        order = sorted(range(len(filler)), key=lambda gap: -(generator.random() ** ((gap + 1) ** (1 - POWER))))
        return pairs, filler, dict(zip(order, range(num_pairs), strict=False))

    def render(index: int, units: int) -> Sample:
        depth = request.depth(index)
        pairs, filler, returning = layout(index // per_text, units + 8)
        place = round(depth * (len(pairs) - 1))
        key, value = pairs[place]
        stated = [f"{own}: {its_value}" for own, its_value in pairs]
        later = [
            stated[returning[line]] if returning.get(line, place) != place else other
            for line, other in enumerate(filler)
        ]
        return Sample(input="\n".join([*stated, *later, f"{key}:"]), outputs=[value], answer=f" {value}", depth=depth)

    return render

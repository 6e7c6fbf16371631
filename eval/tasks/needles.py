"""Needles in a haystack: RULER's eight tasks (arXiv:2404.06654), whose prompt texts these are."""

from functools import cache
from itertools import islice

from ..haystack import filler
from ..samples import Render, Request, Sample
from ..vocabulary import DRAW, distinct

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
# "one" asks for a single value, "all" for several.
TEMPLATES = {
    "one": "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    "all": "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n{context}\n"
    "What are all the special magic {kind}s for {query} mentioned in the provided text?",
}
GEN_PREFIXES = {
    "one": "The special magic {kind} for {query} mentioned in the provided text is",
    "all": "The special magic {kind}s for {query} mentioned in the provided text are",
}
# RULER's grid, of which the needles that are all asked for take a place each.
GRID = [round(100 * place / 39) / 100 for place in range(40)]


def needles(
    request: Request,
    *,
    haystack: str,
    key: str = "words",
    value: str = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Render:
    """`keys` needles with `values` values each, of which `queries` keys are asked for, in "noise", "text" or "needles".

    Where one of several needles is asked for, one haystack serves as many questions as it has needles (depths, in a
    haystack of needles). Noise and needles stand one a line; sentences of a text are joined by spaces.
    """
    if haystack == "needles":
        return _haystack_of_needles(request, key, value)
    sentences = filler(haystack, request.seed, request.text)
    separator = "\n" if haystack == "noise" else " "
    single = queries == values == 1
    per_haystack = keys if single else 1

    @cache
    def hidden(number: int) -> tuple[dict[str, list[str]], list[float]]:
        """Values by key, and the needles' depths."""
        generator = request.random("needles", number)
        found_keys = islice(distinct(DRAW[key], generator), keys)
        found_values = distinct(DRAW[value], generator)
        by_key = {found: list(islice(found_values, values)) for found in list(found_keys)}
        if single:
            depths = [request.depth(number * keys + place) for place in range(keys)]
        else:
            depths = generator.sample(GRID, keys * values)
        return by_key, depths

    def render(index: int, units: int) -> Sample:
        by_key, depths = hidden(index // per_haystack)
        asked = [list(by_key)[index % per_haystack]] if single else list(by_key)
        text_of = [NEEDLE.format(kind=value, key=own, value=one) for own, all_of in by_key.items() for one in all_of]
        pieces = sentences(units)
        # From the last to the first, so that a place counts sentences alone.
        for depth, needle in sorted(zip(depths, text_of, strict=True), reverse=True):
            pieces.insert(int(depth * units), needle)
        answers = [one for own in asked for one in by_key[own]]
        return question(separator.join(pieces), value, asked, answers, depths[index % keys] if single else None)

    return render


def _haystack_of_needles(request: Request, key: str, value: str) -> Render:
    per_haystack = len(request.depths)

    @cache
    def pairs(number: int, count: int) -> list[tuple[str, str]]:
        generator = request.random("needles", number)
        keys, values = distinct(DRAW[key], generator), distinct(DRAW[value], generator)
        return [(next(keys), next(values)) for _ in range(count)]

    @cache
    def context(number: int, count: int) -> str:
        return "\n".join(NEEDLE.format(kind=value, key=own, value=one) for own, one in pairs(number, count))

    def render(index: int, units: int) -> Sample:
        number, depth = index // per_haystack, request.depth(index)
        asked, answer = pairs(number, units + 1)[round(depth * units)]
        return question(context(number, units + 1), value, [asked], [answer], depth)

    return render


def question(context: str, values: str, asked: list[str], answers: list[str], depth: float | None) -> Sample:
    """The prompt that asks for the `values` ("numbers" or "uuids") of the keys `asked`."""
    number = "one" if len(answers) == 1 else "all"
    names = {"kind": values.removesuffix("s"), "query": enumeration(asked)}
    return Sample(
        input=TEMPLATES[number].format(context=context, **names),
        gen_prefix=GEN_PREFIXES[number].format(**names),
        outputs=answers,
        answer=f" {enumeration(answers)}",
        depth=depth,
    )


def enumeration(items: list[str]) -> str:
    """The items as English lists them: `a`, `a, and b`, `a, b, and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"

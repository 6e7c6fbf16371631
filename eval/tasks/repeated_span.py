"""Repeated span: a run of random words comes back at the end of a text, and the model continues it."""

from ..haystack import filler
from ..samples import Render, Request, Sample
from ..vocabulary import WORDS

SPAN_WORDS = 32
GIVEN_WORDS = 16


def repeated_span(request: Request) -> Render:
    """What induction heads do (arXiv:2209.11895), over a distance; our definition: 16 of 32 words are given.

    Scored by whether greedy decoding writes the other 16. A unit of filler is a sentence.
    """
    sentences = filler("text", request.seed, request.text)

    def render(index: int, units: int) -> Sample:
        span = request.random("span", index).sample(WORDS, k=SPAN_WORDS)
        depth = request.depth(index)
        pieces = sentences(units)
        pieces.insert(int(depth * units), " ".join(span) + ".")
        rest = " ".join(span[GIVEN_WORDS:])
        return Sample(input=" ".join([*pieces, *span[:GIVEN_WORDS]]), outputs=[rest], answer=f" {rest}", depth=depth)

    return render

"""Passkey retrieval (arXiv:2305.16300): a number said three times amid noise, asked for at the end."""

from ..haystack import filler
from ..samples import Render, Request, Sample

PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key."


def passkey(request: Request) -> Render:
    """Five digits. A unit of filler is a line of noise."""
    lines = filler("noise", request.seed, request.text)

    def render(index: int, units: int) -> Sample:
        key, depth = str(request.random("key", index).randint(10000, 99999)), request.depth(index)
        pieces = lines(units)
        pieces.insert(int(depth * units), PASSKEY.format(key=key))
        context = "\n".join(pieces)
        return Sample(
            input=f"A pass key is hidden in the text below. Find it and remember it.\n{context}\nWhat is the pass key?",
            outputs=[key],
            answer=f" {key}",
            gen_prefix="The pass key is",
            depth=depth,
        )

    return render

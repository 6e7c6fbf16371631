"""The text that needles are hidden in and language modelling reads."""

import functools
import random
import re
from collections.abc import Callable

from hf_hybrid.conversion.text_data import load_text

# RULER's noise (arXiv:2404.06654).
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def filler(kind: str, seed: int, path: str | None) -> Callable[[int], list[str]]:
    """The first n pieces of a haystack as a function of n: "noise" sentences or sentences of a "text".

    A longer haystack continues a shorter one. The seed chooses the sentence at which the text begins; at its end the
    text starts over.
    """
    if kind == "noise":
        return lambda count: [NOISE] * count
    all_sentences = sentences(path)
    start = random.Random(f"{seed}/haystack").randrange(len(all_sentences))
    turned = all_sentences[start:] + all_sentences[:start]
    return lambda count: turned * (count // len(turned)) + turned[: count % len(turned)]


@functools.lru_cache(maxsize=4)
def sentences(path: str | None) -> list[str]:
    """Sentences of 20 to 300 characters; the rest is mostly tables and program text."""
    flat = re.sub(r"\s+", " ", load_text(path)).strip()
    found = [piece for piece in re.split(r"(?<=[.!?]) (?=[A-Z\"'(])", flat) if 20 <= len(piece) <= 300]
    if not found:
        raise ValueError(f"text: {path!r} holds no sentence of 20 to 300 characters that ends in a full stop")
    return found

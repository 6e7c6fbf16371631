"""Language modelling at a length: the loss of the same last words after contexts of different lengths."""

import re
from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate

from hf_hybrid.conversion.text_data import load_text

from ..samples import Render, Request, Sample
from ..settings import TokenCounter

TARGET_WORDS = 64


def last_tokens(request: Request) -> Render:
    """The last 64 words of a stretch of text: at every length the same words, after as much of what precedes them.

    A unit of filler is about one token.
    """
    words, tokens_before = _words(request.text, request.count)
    # The first word that has the longest context before it; whole-text estimates are within a few per cent.
    first = bisect_left(tokens_before, 1.1 * request.longest)
    last = len(words) - TARGET_WORDS
    if first >= last:
        raise ValueError(
            f"{request.task}: the text of about {tokens_before[-1]} tokens is too short for a length of "
            f"{request.longest}; give a longer one as metadata text"
        )

    def render(index: int, units: int) -> Sample:
        target = request.random("target", index).randrange(first, last)
        start = min(target - 1, bisect_left(tokens_before, tokens_before[target + TARGET_WORDS] - units))
        context = "".join(words[start:target]).lstrip()
        rest = "".join(words[target : target + TARGET_WORDS])
        return Sample(input=context, outputs=[rest], answer=rest)

    return render


@lru_cache(maxsize=2)
def _words(path: str | None, count: TokenCounter) -> tuple[list[str], list[int]]:
    """The text as words, each with the white space before it, and the tokens that come before each word."""
    words = re.findall(r"\s*\S+", load_text(path))
    return words, list(accumulate(count(words), initial=0))

"""Exact copying, line by line, of lines of equal or of very unequal length.

After the copy task of 2D-RoPE, of which only the abstract is public. Our definition: words in lines, of eight words
each (balanced) or of 1 to 32 words, log-uniformly (imbalanced); the copy is written up to a line, and the model writes
that line. The score is the share of lines that teacher-forced copying gets exactly right, by position in the text.
"""

from bisect import bisect_right
from functools import cache
from itertools import accumulate

from ..samples import Render, Request, Sample
from ..vocabulary import WORDS

BALANCED_WORDS = 8
MOST_WORDS = 32


def copying(request: Request, *, balanced: bool) -> Render:
    """The depth is the share of the copy that is written. A unit of filler is about one token.

    The more is written, the shorter the text, so that every prompt has the length asked for. One text, or its
    beginning, serves as many questions as there are depths.
    """
    per_text = len(request.depths)

    @cache
    def text(number: int) -> tuple[list[str], list[int]]:
        """Lines, and the tokens of the first n of them."""
        generator = request.random("lines", number)
        lines, words = [], 0
        # A word is at least a token, so these are more lines than fit.
        while words <= request.length or len(lines) < 3:
            size = BALANCED_WORDS if balanced else round(MOST_WORDS ** generator.random())
            lines.append(" ".join(generator.choices(WORDS, k=size)))
            words += size
        return lines, list(accumulate(request.count([f"{line}\n" for line in lines]), initial=0))

    def render(index: int, units: int) -> Sample:
        depth = request.depth(index)
        lines, tokens = text(index // per_text)

        def written(count: int) -> int:
            return round(depth * (count - 1))

        count = bisect_right(
            range(len(lines) + 1), units, lo=2, key=lambda count: tokens[count] + tokens[written(count)]
        )
        count = max(2, count - 1)
        line = lines[written(count)]
        return Sample(
            input="\n".join(
                ["Copy the text, line by line.", "", "Text:", *lines[:count], "", "Copy:", *lines[: written(count)], ""]
            ),
            outputs=[line],
            answer=line,
            depth=depth,
        )

    return render

"""Aggregation: RULER's most common words of a list and most frequent words of a coded text (arXiv:2404.06654)."""

import math
import random
import string
from functools import cache
from itertools import islice

from ..samples import Render, Request, Sample
from ..vocabulary import WORDS, distinct, draw_words

COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
COMMON_GEN_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
NUM_COMMON = 10
FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FREQUENT_GEN_PREFIX = "Answer: According to the coded text above, the three most frequently appeared words are:"
# Fewer words leave the third and the fourth equally frequent.
LEAST_FREQUENT_WORDS = 100


def common_words(request: Request) -> Render:
    """Ten words stand 30 times in the list and the others 3 times; below 4,096 tokens, 6 times and once.

    Before it comes one example (40 words, 10 and 3 times; below 4,096 tokens 20 words, 3 times and once), the same in
    every sample. A unit of filler is another uncommon word.
    """
    short = request.length < 4096
    shot = _word_list(request.random("example"), 10 if short else 30, *((3, 1) if short else (10, 3)))

    def render(index: int, units: int) -> Sample:
        asked = _word_list(request.random("list", index), NUM_COMMON + units, *((6, 1) if short else (30, 3)))
        return Sample(f"{shot.prompt}{shot.answer}\n{asked.input}", asked.outputs, asked.answer, asked.gen_prefix)

    return render


def _word_list(generator: random.Random, uncommon: int, common_times: int, uncommon_times: int) -> Sample:
    words = list(islice(_shuffled_words(generator), NUM_COMMON + uncommon))
    common = words[:NUM_COMMON]
    entries = common * common_times + words[NUM_COMMON:] * uncommon_times
    generator.shuffle(entries)
    return Sample(
        input=COMMON_TEMPLATE.format(context=_numbered(entries)),
        outputs=common,
        answer=f" {_numbered(common)}",
        gen_prefix=COMMON_GEN_PREFIX,
    )


def _shuffled_words(generator: random.Random):
    """Single words as far as there are, then pairs of them."""
    yield from generator.sample(WORDS, k=len(WORDS))
    yield from distinct(draw_words, generator)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(request: Request) -> Render:
    """Coded words with zeta-distributed frequencies, alpha = 2: the first rank is dots, the next three are asked for.

    A unit of filler is about one token of the whole text.
    """
    num_words = max(request.length // 50, 10)
    # Counts of RULER: rank^-2 / zeta(2) of the words, rounded down.
    shares = [6 / (math.pi * rank) ** 2 for rank in range(1, num_words + 1)]

    @cache
    def vocabulary(index: int) -> list[str]:
        coded = distinct(
            lambda draw: "".join(draw.choices(string.ascii_lowercase, k=6)), request.random("words", index)
        )
        return ["...", *islice(coded, num_words - 1)]

    @cache
    def tokens_per_word(index: int) -> float:
        sizes = request.count([f" {word}" for word in vocabulary(index)])
        return sum(size * share for size, share in zip(sizes, shares, strict=True))

    def render(index: int, units: int) -> Sample:
        total = LEAST_FREQUENT_WORDS + units / tokens_per_word(index)
        words = [word for word, share in zip(vocabulary(index), shares, strict=True) for _ in range(int(total * share))]
        request.random("order", index).shuffle(words)
        asked = vocabulary(index)[1:4]
        return Sample(
            input=FREQUENT_TEMPLATE.format(context=" ".join(words)),
            outputs=asked,
            answer=f" {', '.join(asked)}",
            gen_prefix=FREQUENT_GEN_PREFIX,
        )

    return render

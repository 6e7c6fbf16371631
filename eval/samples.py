"""How a task describes its samples, and how they are cut to a length in tokens.

A task is a pure function `builder(request, **options)` that returns `render(index, units)`: sample number `index` with
`units` pieces of filler (sentences, lines, words: whatever the task is filled with), 0 being the shortest that there
is. Builders draw from `request.random(...)` alone, so a sample depends on nothing but task, seed, length and index.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from .settings import TokenCounter


@dataclass(frozen=True)
class Sample:
    """A question and its answer. `prompt + answer` is the text that a perfect model writes."""

    input: str
    outputs: list[str]
    """What the score looks for."""
    answer: str
    """The continuation that scores 1, beginning with its space where a space belongs there."""
    gen_prefix: str = ""
    """The beginning of the answer that the model is given; a chat template puts it into the assistant's turn."""
    depth: float | None = None
    """Where in the text the answer stands: 0 its start, 1 its end; None when it stands in several places."""

    @property
    def prompt(self) -> str:
        """What the model reads. lm-eval joins the two parts with its `target_delimiter`, a space."""
        return f"{self.input} {self.gen_prefix}" if self.gen_prefix else self.input


Render = Callable[[int, int], Sample]


@dataclass(frozen=True)
class Request:
    """Samples of one task at one length, as a builder sees them."""

    task: str
    length: int
    longest: int
    """The longest length of the run, for tasks whose samples share something over all lengths."""
    num_samples: int
    depths: tuple[float, ...]
    seed: int
    text: str | None
    count: TokenCounter

    def random(self, *purpose: int | str) -> random.Random:
        """A generator for one purpose. The length is no part of its seed: the same needle is asked for at every one."""
        return random.Random("/".join(map(str, (self.seed, self.task, *purpose))))

    def depth(self, index: int) -> float:
        """The depth of sample `index`: all depths in turn, in a shuffled order, so that the first few are spread."""
        order = random.Random(f"{self.seed}/depths").sample(self.depths, k=len(self.depths))
        return order[index % len(order)]


class TooShortError(ValueError):
    """A length below what the task's frame takes; `shortest` is the shortest possible."""

    def __init__(self, task: str, length: int, shortest: int):
        self.shortest = shortest
        super().__init__(
            f"{task}: a length of {length} tokens is too short; the shortest possible with this tokenizer is {shortest}"
        )


def fit(
    task: str, length: int, num_samples: int, render: Render, tokens: Callable[[list[Sample]], list[int]]
) -> list[Sample]:
    """The samples with as much filler as lets the longest of them need at most `length` tokens.

    All samples get the same filler, so that what precedes their needles is identical and its cache can be shared.
    `tokens(samples)` is what each of them needs, counted on the final strings: merges cross the seams. The amount is
    searched with the sample that is longest without filler, and verified with all; the others rarely need a second go,
    since the search leaves them a little room.

    Raises TooShortError when the samples do not fit without filler.
    """
    bare = tokens([render(index, 0) for index in range(num_samples)])
    if max(bare) > length:
        raise TooShortError(task, length, max(bare))
    longest = bare.index(max(bare))
    aim = max(max(bare), length - length // 64)

    # units fit, too_many do not: between them the guess follows the tokens that a unit has taken so far.
    units, spare, too_many, per_unit = 0, aim - max(bare), math.inf, None
    guess = 8
    while too_many - units > 1:
        (needed,) = tokens([render(longest, guess)])
        per_unit = max(needed - max(bare), 1) / guess
        if needed > aim:
            too_many = guess
        else:
            units, spare = guess, aim - needed
            if spare < per_unit:
                break
        guess = units + max(1, int(spare / per_unit))
        if guess >= too_many:
            guess = (units + too_many) // 2

    while True:
        samples = [render(index, units) for index in range(num_samples)]
        excess = max(tokens(samples)) - length
        if excess <= 0:
            return samples
        units = max(0, units - math.ceil(excess / per_unit))

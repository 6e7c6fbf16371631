"""lm-eval's Hugging Face model, reading what several requests begin with once.

Twenty questions about one haystack repeat the haystack. Here the requests become a tree of shared prefixes; each is
read once, in pieces, into an ordinary transformers cache (keys and values, and recurrent states), and every question
goes on from a copy of it. Copies, because a recurrent state cannot be taken back to an earlier token.

Answers are those of the requests one by one. Behind a cache nothing stands between prefix and question: only questions
of equal lengths are answered in one batch, and scored ones are padded on the right, where no token of theirs looks. A
model whose cache cannot be continued by several tokens is told by a check before the first use, and shares nothing.
"""

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Cache

logger = logging.getLogger(__name__)

# A shared piece below this many tokens is read again: a copy of the cache costs more.
SHORTEST_SHARED = 32
# Tokens of a prefix that are read at once: more would only hold more scores.
CHUNK = 1024


@dataclass
class Branch:
    """Tokens `start` to `end` that all sequences below share. `members` part from each other there, alone; `children`
    are branches that go on."""

    start: int
    end: int
    members: list[int] = field(default_factory=list)
    children: list["Branch"] = field(default_factory=list)


def prefix_tree(sequences: Sequence[Sequence[int]], shortest: int = SHORTEST_SHARED) -> Branch:
    """The branches of at least `shortest` tokens that two or more sequences share; members are their numbers.

    The root stands for the empty prefix: its members share nothing.
    """
    order = sorted(range(len(sequences)), key=lambda number: tuple(sequences[number]))

    def fill(parent: Branch, numbers: list[int], depth: int) -> None:
        """Hangs sorted sequences, equal in their first `depth` tokens, below `parent`."""
        if len(numbers) == 1:
            parent.members += numbers
            return
        first, last = sequences[numbers[0]], sequences[numbers[-1]]
        while depth < min(len(first), len(last)) and first[depth] == last[depth]:
            depth += 1
        if depth - parent.end >= shortest:
            parent.children.append(parent := Branch(parent.end, depth))
        by_next = defaultdict(list)
        for number in numbers:
            if len(sequences[number]) == depth:
                parent.members.append(number)
            else:
                by_next[sequences[number][depth]].append(number)
        for same in by_next.values():
            fill(parent, same, depth)

    root = Branch(0, 0)
    if order:
        fill(root, order, 0)
    return root


def tokens_read(branch: Branch, sequences: Sequence[Sequence[int]]) -> int:
    """Tokens that a model reads when it shares the prefixes of the tree."""
    alone = sum(len(sequences[number]) - branch.end for number in branch.members)
    return branch.end - branch.start + alone + sum(tokens_read(child, sequences) for child in branch.children)


def split(items: list[int], size: int) -> list[list[int]]:
    """Runs of `size` items; the last may be shorter."""
    return [items[first : first + size] for first in range(0, len(items), size)]


class SharedPrefixLM(HFLM):
    """`HFLM` for causal models, with shared prefixes, without truncation, and with the logits of answers only.

    Takes the arguments of `HFLM`, and

    - `share=False` to read every request by itself, as a model whose cache cannot be continued is read in any case;
    - `longest`, up to which prompts are taken even if the model's configuration says that it was trained with less.

    Raises:
        ValueError: a request with the room for its answer is longer than `max_length`.
    """

    def __init__(self, *args, share: bool = True, longest: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.longest = longest
        # Without it a model gives the logits of all tokens, of which the last are taken.
        self.keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self.model.eval()
        self.shares = share and self._continues_exactly()

    @property
    def max_length(self) -> int:
        return max(super().max_length, self.longest)

    # Requests

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        by_options = defaultdict(list)
        for number, request in enumerate(requests):
            by_options[repr(request.args[1])].append(number)
        results: list[str] = [""] * len(requests)
        with self._bar(len(requests), "generating", disable_tqdm) as bar:
            for numbers in by_options.values():
                for number, text in self._generate([requests[number] for number in numbers]):
                    results[numbers[number]] = text
                    self.cache_hook.add_partial("generate_until", requests[numbers[number]].args, text)
                    bar.update()
        return results

    def _generate(self, requests: list[Instance]) -> Iterator[tuple[int, str]]:
        """(Number, text) of requests with the same options, in the order in which they are done."""
        options = normalize_gen_kwargs(requests[0].args[1], self.max_gen_toks)
        until = handle_stop_sequences(
            options.pop("until", None), eos=self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        )
        most = options.pop("max_gen_toks")
        prompts = [self._encode_prompt(request.args[0]) for request in requests]
        for prompt in prompts:
            self._require_room(len(prompt), most)
        # At least one token stays to be read: its logits choose the first one of the answer. Beams are rows of their
        # own, which a cache of the prompts has not.
        alone = options.get("num_beams", 1) > 1
        prefixes = [[] if alone else prompt[:-1] for prompt in prompts]
        for numbers, _, cache in self._shared(prefixes, prompts, equal_lengths=True):
            rows = [torch.tensor(prompts[number]) for number in numbers]
            context = pad_sequence(rows, batch_first=True, padding_side="left").to(self.device)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
            written = self._model_generate(
                context,
                max_length=context.shape[1] + most,
                stop=until,
                attention_mask=mask.to(self.device),
                **({} if cache is None else {"cache": cache}),
                **copy.deepcopy(options),
            )
            for number, row in zip(numbers, written[:, context.shape[1] :].tolist(), strict=True):
                if isinstance(self.think_end_token, int) and self.think_end_token in row:
                    row = row[len(row) - row[::-1].index(self.think_end_token) :]
                ending = self.think_end_token if isinstance(self.think_end_token, str) else None
                yield number, postprocess_generated_text(self.tok_decode(row), stop=until, think_end_token=ending)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        # The last token of an answer is not read: nothing follows it.
        inputs = [context + answer[:-1] for _, context, answer in requests]
        for tokens in inputs:
            self._require_room(len(tokens), 0)
        with self._bar(len(requests), "scoring", disable_tqdm) as bar:
            for numbers, start, cache in self._shared([context[:-1] for _, context, _ in requests], inputs):
                rest = [torch.tensor(inputs[number][start:]) for number in numbers]
                answers = [torch.tensor(requests[number][2], device=self.device) for number in numbers]
                padded = pad_sequence(rest, batch_first=True).to(self.device)
                length = padded.shape[1]
                first = min(len(row) - len(answer) for row, answer in zip(rest, answers, strict=True))
                logits = self._forward(padded, cache, length - first).logits[:, -(length - first) :]
                for number, row, answer, scores in zip(numbers, rest, answers, logits, strict=True):
                    scores = scores[len(row) - len(answer) - first : len(row) - first]
                    logs = F.log_softmax(scores, dim=-1, dtype=self.softmax_dtype or torch.float32)
                    total = logs.gather(-1, answer[:, None]).sum().item()
                    results[number] = (total, bool((scores.argmax(-1) == answer).all()))
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], results[number])
                    bar.update()
        return results

    # Shared reading

    def _shared(
        self, prefixes: Sequence[list[int]], inputs: Sequence[list[int]], *, equal_lengths: bool = False
    ) -> Iterator[tuple[list[int], int, Cache | None]]:
        """Batches of requests, with what of them is read already.

        Args:
            prefixes: the tokens of each request that may be shared.
            inputs: all tokens that each request reads; they begin with its prefix.
            equal_lengths: behind a cache, batch only inputs of equal lengths.

        Yields:
            The requests' numbers, how many of their tokens the cache holds, and the cache, which is theirs to change:
            one row for each; None when it holds nothing.
        """
        tree = prefix_tree(prefixes) if self.shares else Branch(0, 0, members=list(range(len(prefixes))))
        yield from self._walk(tree, None, inputs, equal_lengths)

    def _walk(
        self, branch: Branch, cache: Cache | None, inputs: Sequence[list[int]], equal_lengths: bool
    ) -> Iterator[tuple[list[int], int, Cache | None]]:
        """Reads the branch into the cache, which is used up, and goes through all that hangs on it."""
        if branch.end > branch.start:
            below = branch
            while not below.members:
                below = below.children[0]
            tokens = torch.tensor([inputs[below.members[0]][branch.start : branch.end]], device=self.device)
            for piece in tokens.split(CHUNK, dim=1):
                cache = self._forward(piece, cache, 1, use_cache=True).cache
        # The longest first: what does not fit in memory fails at once.
        members = sorted(branch.members, key=lambda number: -len(inputs[number]))
        alike = groupby(members, lambda number: len(inputs[number]) if equal_lengths and cache is not None else 0)
        size = self.batch_size if isinstance(self.batch_size, int) else 1
        batches = [batch for _, same in alike for batch in split(list(same), size)]
        uses = len(batches) + len(branch.children)

        def own() -> Cache | None:
            nonlocal uses
            uses -= 1
            return copy.deepcopy(cache) if uses else cache

        for child in branch.children:
            yield from self._walk(child, own(), inputs, equal_lengths)
        for numbers in batches:
            rows = own()
            if rows is not None and len(numbers) > 1:
                rows.reorder_cache(torch.zeros(len(numbers), dtype=torch.long, device=self.device))
            yield numbers, branch.end, rows

    @torch.no_grad()
    def _forward(self, input_ids: Tensor, cache: Cache | None, kept: int, use_cache: bool | None = None):
        """One pass over tokens behind those of the cache, with the logits of the last `kept`."""
        with torch.autocast(
            device_type=self.device.type,
            dtype=self.mixed_precision_dtype,
            enabled=self.mixed_precision_dtype is not None,
        ):
            use_cache = cache is not None if use_cache is None else use_cache
            options = {} if cache is None else {"cache": cache}
            if self.keeps_logits:
                options["logits_to_keep"] = kept
            return self.model(input_ids=input_ids, use_cache=use_cache, **options)

    def _continues_exactly(self) -> bool:
        """Whether several tokens read behind a cache give the logits of one pass over all of them."""
        length, split = 24, 13
        tokens = torch.randint(self.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        tokens = tokens.to(self.device)
        try:
            whole = self._forward(tokens, None, length).logits.float()
            start = self._forward(tokens[:, :split], None, 1, use_cache=True).cache
            cache = copy.deepcopy(start)
            cache.reorder_cache(torch.zeros(2, dtype=torch.long, device=self.device))
            rest = self._forward(tokens[:, split:].expand(2, -1), cache, length - split).logits.float()
        except (TypeError, AttributeError, NotImplementedError, ValueError, RuntimeError) as error:
            logger.warning("No shared prefixes: the cache of %s cannot be used so (%s)", type(self.model), error)
            return False
        error = (rest - whole[:, -rest.shape[1] :]).abs().max() / whole.std()
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.2
        if error > tolerance:
            logger.warning("No shared prefixes: %s is off by %.1e behind a cache", type(self.model), error)
        return bool(error <= tolerance)

    def _encode_prompt(self, text: str) -> list[int]:
        """The tokens that `HFLM.generate_until` would read, none of them cut off."""
        return self.tok_batch_encode([text])[0][0].tolist()

    def _require_room(self, tokens: int, answer: int) -> None:
        if tokens + answer > self.max_length:
            room = f" and {answer} for the answer" if answer else ""
            raise ValueError(
                f"a prompt of {tokens} tokens{room} is longer than max_length {self.max_length}: prompts are never "
                "truncated; give a longer max_length, or shorter lengths"
            )

    def _bar(self, total: int, what: str, disabled: bool):
        return tqdm(total=total, desc=what, disable=disabled or self.rank != 0)

"""What a user asks of every task: the keys that `lm_eval --metadata '{...}'` may hold."""

import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any

TRAIN_LENGTH_MULTIPLES = (0.5, 1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Lengths are tokens of `tokenizer`, special tokens and room for the answer included; depths go from 0 to 1.

    Raises ValueError that names key, value and what would be right.
    """

    tokenizer: str
    lengths: tuple[int, ...] = ()
    train_length: int | None = None
    """Stands for the lengths 0.5, 1, 2, 4, 8 and 16 times as long, where `lengths` is not given."""
    depths: tuple[float, ...] = tuple(tenth / 10 for tenth in range(11))
    num_samples: int = 100
    """Samples of each length."""
    seed: int = 42
    text: str | None = None
    """A UTF-8 text file for haystacks and language modelling; without it, Python's own language reference."""
    data_files: Mapping[str, str] = field(default_factory=dict)
    """Of real-text recall: task name to a local JSON-lines file."""
    tokenizer_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.tokenizer, str) or not self.tokenizer:
            raise ValueError(f"tokenizer: {self.tokenizer!r} must be the name or folder of the model's tokenizer")
        if self.train_length is not None:
            _require_count("train_length", self.train_length)
        if not self.lengths:
            multiples = TRAIN_LENGTH_MULTIPLES if self.train_length else (1, 2, 4)
            lengths = tuple(int(multiple * (self.train_length or 1024)) for multiple in multiples)
        else:
            lengths = _as_tuple(self.lengths)
        for length in lengths:
            _require_count("lengths", length)
        object.__setattr__(self, "lengths", tuple(sorted(set(lengths))))

        depths = _as_tuple(self.depths)
        for depth in depths:
            if isinstance(depth, bool) or not isinstance(depth, Real) or not 0 <= depth <= 1:
                raise ValueError(f"depths: {depth!r} must be a number between 0 (start of the text) and 1 (its end)")
        if not depths:
            raise ValueError("depths: an empty list; give numbers between 0 and 1")
        object.__setattr__(self, "depths", tuple(float(depth) for depth in dict.fromkeys(depths)))

        _require_count("num_samples", self.num_samples)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed: {self.seed!r} must be an integer")
        if self.text is not None and not Path(self.text).is_file():
            raise ValueError(f"text: {self.text!r} is not a file; give the path of a UTF-8 text file")
        if not isinstance(self.data_files, Mapping):
            raise ValueError(f"data_files: {self.data_files!r} must map task names to JSON-lines files")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Settings":
        """Takes what concerns the tasks out of lm-eval's metadata, where it stands among the model's arguments.

        The tokenizer is `tokenizer` or, as for the model, `pretrained`. A key that only resembles one of ours is an
        error, since the mistyped key would otherwise be taken for an argument of the model.
        """
        own = {f.name for f in fields(cls)} - {"tokenizer", "tokenizer_options"}
        renamed = {"max_seq_lengths": "lengths", "max_seq_length": "lengths"}
        for key in metadata.keys() - own - {"tokenizer"}:
            meant = renamed.get(key) or next(iter(difflib.get_close_matches(key, own, n=1, cutoff=0.8)), None)
            if meant:
                raise ValueError(f"metadata: unknown key {key!r}; the tasks of hf_hybrid read {meant!r}")
        tokenizer = next((metadata[key] for key in ("tokenizer", "pretrained", "model") if metadata.get(key)), None)
        if tokenizer is None:
            raise ValueError(
                "metadata: no tokenizer, and lengths are counted in tokens of the model under test; "
                'add "tokenizer": "<name or folder>" to --metadata, or give the model as --model_args pretrained=...'
            )
        options = {key: metadata[key] for key in ("revision", "subfolder", "trust_remote_code") if key in metadata}
        values = {key: metadata[key] for key in own if metadata.get(key) is not None}
        return cls(tokenizer=tokenizer, tokenizer_options=options, **values)

    @property
    def count(self) -> "TokenCounter":
        """Counts tokens of the model under test; raises ValueError for a tokenizer without a vocabulary."""
        return TokenCounter(_load_tokenizer(self.tokenizer, tuple(sorted(self.tokenizer_options.items()))))


@dataclass(frozen=True)
class TokenCounter:
    """Counts texts in tokens of one tokenizer."""

    tokenizer: Any

    def __call__(self, texts: Sequence[str], *, special: bool = False) -> list[int]:
        """Tokens of each text; with `special`, also those that the tokenizer puts around a prompt."""
        if not self.tokenizer.is_fast:
            return [len(ids) for ids in self.tokenizer(list(texts), add_special_tokens=special)["input_ids"]]
        # What a call of the tokenizer runs, without the offsets and lists that cost as much again.
        encoded = self.tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [len(encoding) for encoding in encoded]


@functools.lru_cache(maxsize=4)
def _load_tokenizer(name: str, options: tuple):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **dict(options))
    if not tokenizer("The grass is green.", add_special_tokens=False)["input_ids"]:
        raise ValueError(f"tokenizer: {name!r} encodes a sentence to no token; does its folder hold a tokenizer.json?")
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _require_count(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: {value!r} must be a positive integer")

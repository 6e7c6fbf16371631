"""What the healing stages share: opening the two models, choosing the text, writing the healed folder."""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_hybrid import HwHConfig, HwHForCausalLM
from hf_hybrid.conversion import text_data
from hf_hybrid.conversion.convert import convert

RECORD = "healing.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "*.py")


class HealingError(ValueError):
    """The models or the text do not fit a healing stage; the message says what is wrong and what would be right."""


@dataclass
class Pair:
    """A source and the hybrid that was made from it, both in float32 and evaluation mode.

    Attributes:
        folder: the hybrid's folder.
        source: the source model in exact HwH form.
        hybrid: the model to heal.
        tokenizer: theirs.
        dtype: what the hybrid's weights were stored in, and will be.
    """

    folder: Path
    source: HwHForCausalLM
    hybrid: HwHForCausalLM
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype


def load_hybrid(folder: str | Path) -> HwHForCausalLM:
    """A converted model in float32. Raises `HealingError` unless `folder` holds an HwH checkpoint."""
    if not (Path(folder) / "config.json").is_file():
        raise HealingError(f"{folder} is not a model folder: it has no config.json; make one with hf-hybrid convert")
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, HwHConfig):
        raise HealingError(
            f"{folder} holds a {config.model_type} model: healing works on HwH models (hf-hybrid convert)"
        )
    return HwHForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_exact(source: str | Path, *, gguf_file: str | None = None, revision: str | None = None) -> HwHForCausalLM:
    """The source model as an HwH model with every head full and rotated, in float32: the same function."""
    with tempfile.TemporaryDirectory() as folder:
        convert(source, Path(folder) / "exact", exact=True, dtype=torch.float32, gguf_file=gguf_file, revision=revision)
        return HwHForCausalLM.from_pretrained(Path(folder) / "exact").eval()


def load_pair(
    hybrid: str | Path, source: str | Path, *, gguf_file: str | None = None, revision: str | None = None
) -> Pair:
    """Opens both models. Raises `HealingError` when their sizes show that one wasn't made from the other."""
    student = load_hybrid(hybrid)
    teacher = load_exact(source, gguf_file=gguf_file, revision=revision)
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        ours, theirs = getattr(student.config, field), getattr(teacher.config, field)
        if ours != theirs:
            raise HealingError(
                f"{hybrid} has {field} {ours}, {source} has {theirs}: give the model that it was made from"
            )
    dtype = AutoConfig.from_pretrained(hybrid).dtype or torch.float32
    return Pair(Path(hybrid), teacher, student, AutoTokenizer.from_pretrained(hybrid), dtype)


@dataclass(frozen=True)
class HealingText:
    """Training rows: `sequences` `[S, T]` of text, and `starts` `[N]`, each to stand alone in a row of its own."""

    sequences: Tensor
    starts: Tensor
    digest: str


def healing_text(
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path | None,
    *,
    num_tokens: int,
    length: int,
    num_starts: int,
    seed: int,
) -> HealingText:
    """The first `num_tokens` tokens of the training text in rows of `length`, and random start tokens.

    Raises:
        HealingError: the text is too short, or less than one row is asked for.
    """
    rows = num_tokens // length
    if rows < 1 or length < 2:
        raise HealingError(f"{num_tokens} tokens in rows of {length}: ask for at least one row of at least 2 tokens")
    tokens = text_data.training_tokens(tokenizer, path)
    if len(tokens) < rows * length:
        raise HealingError(
            f"the text has {len(tokens)} training tokens, {rows * length} were asked for: give a longer text or a "
            f"smaller budget"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokenizer), (num_starts,), generator=generator)
    digest = text_data.text_digest(text_data.load_text(path))
    return HealingText(tokens[: rows * length].view(rows, length), starts, digest)


def refuse_existing(out: str | Path) -> Path:
    """Raises `FileExistsError` when `out` is there already."""
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists and is not overwritten. Choose another folder, or remove it.")
    return out


def write_healed(pair: Pair, out: str | Path, stage: dict[str, Any]) -> Path:
    """Writes the healed model beside what the hybrid's folder held, and appends `stage` to its record.

    The folder appears under its name when it is complete.
    """
    out = refuse_existing(out)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(pair.folder, partial, ignore=shutil.ignore_patterns(*WEIGHTS, "__pycache__"))
    pair.hybrid.to(pair.dtype).save_pretrained(partial)
    pair.hybrid.float()
    record = partial / RECORD
    stages = json.loads(record.read_text()) if record.is_file() else []
    record.write_text(json.dumps([*stages, stage], indent=2) + "\n")
    card = partial / "README.md"
    if card.is_file():
        settings = ", ".join(f"{name} {value}" for name, value in stage.items() if name != "stage")
        card.write_text(f"{card.read_text().rstrip()}\n\n## Healing: {stage['stage']}\n\n{settings}.\n")
    partial.rename(out)
    return out

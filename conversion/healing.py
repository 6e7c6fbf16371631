"""What the healing stages share: opening the two models, choosing the text, writing the healed folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_hybrid import HwHConfig, HwHForCausalLM
from hf_hybrid.conversion import text_data
from hf_hybrid.conversion.checkpoint_stream import FLOAT_DTYPES, ShardReader
from hf_hybrid.conversion.convert import convert
from hf_hybrid.conversion.files import atomic_folder, read_json, write_json
from hf_hybrid.conversion.source_model import load_complete
from hf_hybrid.validators import validate_at_least

RECORD = "healing.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "*.py")


class HealingError(ValueError):
    """The models or the text do not fit a healing stage; the message says what is wrong and what would be right."""


@dataclass(frozen=True)
class Pair:
    """A source and the hybrid that was made from it, both in float32 and evaluation mode.

    Attributes:
        folder: the hybrid's folder.
        source: the source model in exact HwH form.
        hybrid: the model to heal.
        dtypes: what each tensor of the hybrid is stored in, and will be.
        record: the stages that the hybrid has gone through.
    """

    folder: Path
    source: HwHForCausalLM
    hybrid: HwHForCausalLM
    dtypes: dict[str, torch.dtype]
    record: list[dict[str, Any]]


def check_hybrid(folder: str | Path) -> Path:
    """The folder as a path. Raises `HealingError` unless it holds an HwH model, by its configuration."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise HealingError(f"{folder} is not a model folder: it has no config.json; make one with hf-hybrid convert")
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, HwHConfig):
        raise HealingError(
            f"{folder} holds a {config.model_type} model: healing works on HwH models (hf-hybrid convert)"
        )
    return folder


def load_hybrid(folder: str | Path) -> HwHForCausalLM:
    """A converted model in float32.

    Raises:
        HealingError: `folder` holds no HwH model.
        SourceError: it holds one, but not all of its tensors.
    """
    return load_complete(HwHForCausalLM, check_hybrid(folder), dtype=torch.float32).eval()


def load_exact(source: str | Path, *, gguf_file: str | None = None, revision: str | None = None) -> HwHForCausalLM:
    """The source model as an HwH model with every head full and rotated, in float32: the same function."""
    with TemporaryDirectory() as folder:
        convert(source, Path(folder) / "exact", exact=True, dtype=torch.float32, gguf_file=gguf_file, revision=revision)
        return load_complete(HwHForCausalLM, source, Path(folder) / "exact").eval()


def stages(folder: Path) -> list[dict[str, Any]]:
    """What the model in `folder` has gone through after its conversion."""
    return read_json(folder / RECORD, list, HealingError) if (folder / RECORD).is_file() else []


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor in the safetensors files of `folder`."""
    reader = ShardReader(folder)
    dtypes = {name: FLOAT_DTYPES[spec.dtype] for name, spec in reader.specs.items()}
    reader.close()
    return dtypes


def load_pair(
    hybrid: str | Path,
    source: str | Path | HwHForCausalLM,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
) -> Pair:
    """Opens both models; the source may be one that `load_exact` gave.

    Raises:
        HealingError: one was not made from the other, by their sizes or by the tensors that conversion and healing
            leave alone (embedding, norms, MLPs, head).
        SourceError: one of them is incomplete.
    """
    student, folder = load_hybrid(hybrid), Path(hybrid)
    given = source if isinstance(source, str | Path) else "the source"
    teacher = load_exact(source, gguf_file=gguf_file, revision=revision) if isinstance(source, str | Path) else source
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        ours, theirs = getattr(student.config, field), getattr(teacher.config, field)
        if ours != theirs:
            raise HealingError(
                f"{hybrid} has {field} {ours}, {given} has {theirs}: give the model that it was made from"
            )
    dtypes = stored_dtypes(folder)
    ours, theirs = student.state_dict(), teacher.state_dict()
    for name, dtype in dtypes.items():
        if "token_mixer" not in name and not ours[name].to(dtype).equal(theirs[name].to(dtype)):
            raise HealingError(
                f"{hybrid} and {given} differ in {name}, which conversion copies and healing leaves alone: give the "
                "model that it was made from"
            )
    return Pair(folder, teacher, student, dtypes, stages(folder))


@dataclass(frozen=True)
class HealingText:
    """Training rows.

    Attributes:
        sequences: `[S, T]` tokens of text.
        starts: `[N]` tokens, each to stand alone in a row of its own.
        seed: of the start tokens.
        digest: of the whole text.
    """

    sequences: Tensor
    starts: Tensor
    seed: int
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
        ValueError: `length` or `num_starts` is too small.
    """
    validate_at_least("length", length, 2, " tokens a row")
    validate_at_least("starts", num_starts, 1, " row of one start token")
    rows = num_tokens // length
    if rows < 1:
        raise HealingError(f"{num_tokens} tokens in rows of {length}: ask for at least one row")
    tokens = text_data.training_tokens(tokenizer, path)
    if len(tokens) < rows * length:
        raise HealingError(
            f"the text has {len(tokens)} training tokens, {num_tokens} were asked for: give a longer text or a "
            f"smaller budget"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokenizer), (num_starts,), generator=generator)
    digest = text_data.text_digest(text_data.load_text(path))
    return HealingText(tokens[: rows * length].view(rows, length), starts, seed, digest)


def write_healed(pair: Pair, out: str | Path, stage: dict[str, Any]) -> None:
    """Writes the healed model, see [`write_stage`]."""
    write_stage(pair.hybrid, pair.folder, pair.dtypes, out, [*pair.record, stage])


def write_stage(
    model: PreTrainedModel,
    folder: Path,
    dtypes: dict[str, torch.dtype],
    out: str | Path,
    record: list[dict[str, Any]],
) -> None:
    """Writes a changed model beside what its old folder held, and what it has gone through.

    The folder appears under its name when it is complete. `model` is rounded to what it is stored in.

    Args:
        model: in float32.
        folder: the model before the change.
        dtypes: what each tensor is stored in.
        out: the folder to write.
        record: all stages; the last one, this one's, is added to the model card.

    Raises:
        HealingError: a value is not finite; nothing is written.
    """
    stage = record[-1]
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise HealingError(
                f"{name} has values that are not finite after the stage {stage['stage']!r}, so nothing is written: "
                "check the source's weights, or take a smaller learning rate or a stronger ridge"
            )
    with atomic_folder(out) as new:
        ignored = shutil.ignore_patterns(*WEIGHTS, "__pycache__")
        shutil.copytree(folder, new, ignore=ignored, dirs_exist_ok=True)
        for name, parameter in model.named_parameters():
            # Each in its own: decay parameters are float32 whatever the model's dtype is.
            parameter.data = parameter.data.to(dtypes[name])
        model.save_pretrained(new)
        model.float()
        write_json(new / RECORD, record)
        card = new / "README.md"
        if card.is_file():
            settings = ", ".join(f"{name} {value}" for name, value in stage.items() if name != "stage")
            card.write_text(f"{card.read_text().rstrip()}\n\n## Stage: {stage['stage']}\n\n{settings}.\n")

"""Loading the source: a model and its tokenizer from a folder, a hub id or a GGUF file, as plain dense weights."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# What the libraries raise for files that they cannot make sense of, beside Python's own errors.
FORMAT_ERRORS = (StrictDataclassError, SafetensorError, struct.error)


class SourceError(ValueError):
    """The source model or text cannot be used as asked; the message says what is wrong and what would be right."""


def load_source(
    model: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    gguf_file: str | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model and the tokenizer of MODEL, in evaluation mode on `device`.

    Args:
        model: a folder, a hub id, a `.gguf` file, or a folder that holds one `.gguf` file and no `config.json`.
        dtype: of the weights; "auto" keeps the checkpoint's.
        gguf_file: the file's name inside `model`, needed only where the folder or hub repository holds several.
        revision: of a hub repository.
    Raises:
        SourceError: if there is no such model, it is quantised (a GGUF file is unpacked instead), it is not a causal
            language model that transformers knows, tensors are missing or of another shape, or it has no tokenizer.
        ImportError: if it is a GGUF file and the package `gguf` is missing.
    """
    location, gguf_file = locate(model, gguf_file)
    if revision is not None and Path(model).exists():
        raise SourceError(f"revision is {revision!r}, but {model} is local and has only one")
    options = {"revision": revision, "gguf_file": gguf_file}
    if gguf_file is None:
        _refuse_quantised(model, _read(AutoConfig, model, location, **options))
    else:
        # Otherwise the weights may stay packed, depending on which kernels are installed.
        options["quantization_config"] = GgufConfig(dequantize=True)
    device = checked_device(device)
    loaded = load_complete(
        AutoModelForCausalLM, model, location, dtype=dtype, attn_implementation=attn_implementation, **options
    )
    # Head maps and reports name the model by this: a hub id as it is, a local one without the machine's path.
    path = Path(model)
    loaded.config._name_or_path = path.resolve().name if path.exists() else str(model)
    options.pop("quantization_config", None)
    return loaded.to(device).eval(), load_tokenizer(model, location, **options)


def load_complete(
    model_class: type, name: str | Path, location: str | Path | None = None, **options
) -> PreTrainedModel:
    """`model_class.from_pretrained(location, **options)`, with every tensor from the checkpoint.

    Args:
        name: what messages call the model.
        location: where it is; default: its name.

    Raises:
        SourceError: it cannot be read, or lacks a tensor that its configuration asks for, which transformers would
            draw at random.
    """
    loaded, info = _read(model_class, name, location or name, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise SourceError(
            f"{name} lacks {len(missing)} of the tensors that its configuration asks for, first {missing[0]!r}: fetch "
            "or make the model again"
        )
    return loaded


def load_tokenizer(model: str | Path, location: str | Path | None = None, **options) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `model`, which lies at `location`. Raises `SourceError` if there is none."""
    missing = f"{model} has no usable tokenizer; put the tokenizer's files (tokenizer.json, ...) beside the weights"
    try:
        tokenizer = AutoTokenizer.from_pretrained(location or model, **options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{missing}: {first_line(error)}") from error
    # Without files transformers may hand out the architecture's tokenizer with an empty vocabulary.
    if not tokenizer("A", add_special_tokens=False)["input_ids"]:
        raise SourceError(missing)
    return tokenizer


def locate(model: str | Path, gguf_file: str | None) -> tuple[str, str | None]:
    """Where transformers is to look, and the GGUF file's name in there, if it is one."""
    path = Path(model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise SourceError(f"{model} is a file; a model is a folder, a hub id or a .gguf file")
        return str(path.parent), path.name
    if path.is_dir() and gguf_file is None and not (path / "config.json").exists():
        files = sorted(file.name for file in path.glob("*.gguf"))
        if not files:
            raise SourceError(f"{model} is not a model folder: it holds neither config.json nor a .gguf file")
        if len(files) > 1:
            raise SourceError(f"{model} holds {len(files)} GGUF files; name one as the gguf file: {', '.join(files)}")
        return str(path), files[0]
    if path.is_dir() and gguf_file is not None and not (path / gguf_file).exists():
        raise SourceError(f"{model} holds no file {gguf_file!r}")
    return str(model), gguf_file


def _refuse_quantised(model: str | Path, config) -> None:
    quantisation = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation.quant_method
        raise SourceError(f"{model} is quantised ({method}); use the unquantised checkpoint that it was made from")


def checked_device(device: torch.device | str) -> torch.device | str:
    """The device as it is. Raises `SourceError` if it cannot be used here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SourceError(
            f"device is {str(device)!r}, which cannot be used here: {first_line(error)}; give cpu, or a device of "
            "this machine"
        ) from error
    return device


def _read(auto_class: type, model: str | Path, location: str | Path, **options):
    try:
        return auto_class.from_pretrained(location, **options)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, *FORMAT_ERRORS) as error:
        raise SourceError(f"cannot read the model {model}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    # The strict data classes' first line only says which of their checks failed.
    text = str(getattr(error, "__cause__", None) or error) if isinstance(error, StrictDataclassError) else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0]

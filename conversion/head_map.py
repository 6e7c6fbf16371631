"""The head map: scores of every attention head of a source model, in a checked and versioned file.

One direction everywhere: `rpd` is LOW for retrieval heads and HIGH for positional heads. RPD (RoPE positional
dependence, arXiv 2609.02986) is the divergence between a head's attention with and without rotation. Scores that other
tools make high for retrieval heads (DuoAttention's gate values, Retrieval_Head's copy scores, both in 0..1) are stored
as `1 - score`; `metadata["source"]` tells which is which.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from hf_hybrid.conversion.files import read_json, write_atomically

FORMAT = "hf_hybrid.head_map"
VERSION = 1

SHAPES = {
    "rpd": "LH",
    "rfis": "LHF",
    "mean_distance": "LH",
    "mean_log_distance": "LH",
    "entropy": "LH",
    "wavelengths": "F",
}
GRANULARITIES = ("query_head", "kv_group")
FOLDINGS = {"mean": torch.mean, "min": torch.amin}
SOURCES = ("hf_hybrid", "duo_attention", "retrieval_head")
METADATA_TYPES = {
    "model": str,
    "revision": (str, type(None)),
    "model_type": (str, type(None)),
    "text_digest": (str, type(None)),
    "settings": dict,
    "granularity": str,
    "folding": str,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "training_length": (int, type(None)),
    "tool_version": str,
    "source": str,
}


class HeadMapError(ValueError):
    """A head map, or a file that should hold one, is unusable; the message says what, its value and what is right."""


@dataclass(frozen=True, eq=False)
class HeadMap:
    """Scores of all heads of one model; checked when made, so every instance is a valid one.

    Attributes:
        tensors: float32, finite. L layers, H heads (query heads, or KV groups when folded), F rotary pairs.
            rpd [L, H] (required): mean divergence between attention with and without rotation, >= 0; at most 1 unless
                `settings["divergence"]` is "kl" (unbounded). Low = retrieval, high = positional.
            rfis [L, H, F]: mean divergence when pair f alone is taken out (raw, not normalised), same range.
            mean_distance [L, H]: mean attended distance in tokens. mean_log_distance [L, H]: mean of log(1 + tokens).
            entropy [L, H]: attention entropy in nats.
            wavelengths [F]: tokens per turn of each rotary pair, 2 pi / angular frequency; required with rfis.
        metadata: JSON values.
            model (id or name), revision, model_type, text_digest (sha256 of the analysed text), settings (dict),
            granularity ("query_head" or "kv_group"), folding ("mean" or "min": how the RPD of the query heads becomes
            the one of their KV group; every other score folds by its mean), num_attention_heads, num_key_value_heads,
            training_length (tokens), tool_version (filled in if absent), source ("hf_hybrid", "duo_attention" or
            "retrieval_head"). Optional: head_dim; wavelength_layers, the layers whose pairs turn at `wavelengths`
            (absent = all), where a model has layers without rotation or with another. Further keys are kept.

    Raises:
        HeadMapError: on any tensor or metadata value that breaks the above.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", {"tool_version": importlib.metadata.version("hf-hybrid"), **self.metadata})
        _check_metadata(self.metadata)
        _check_tensors(self.tensors, self.metadata)

    @property
    def rpd(self) -> Tensor:
        """Rotary position dependence, `[layers, heads]`, at least 0."""
        return self.tensors["rpd"]

    @property
    def num_layers(self) -> int:
        return self.rpd.shape[0]

    @property
    def wavelength_layers(self) -> list[int]:
        """The layers whose rotary pairs have the map's wavelengths."""
        return self.metadata.get("wavelength_layers", list(range(self.num_layers)))

    @property
    def group_size(self) -> int:
        """Query heads per KV group of the source model."""
        return self.metadata["num_attention_heads"] // self.metadata["num_key_value_heads"]

    def digest(self) -> str:
        """sha256 over all tensors and metadata; names this map in the files made from it."""
        state = hashlib.sha256(json.dumps(self.metadata, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            state.update(f"{name} {list(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
        return state.hexdigest()

    def fold_to_groups(self) -> HeadMap:
        """The map per KV group: query heads h with one h // group_size become one column. Itself if folded already."""
        if self.metadata["granularity"] == "kv_group":
            return self

        def fold(name: str, tensor: Tensor) -> Tensor:
            if SHAPES[name][:2] != "LH":
                return tensor
            reduce = FOLDINGS[self.metadata["folding"]] if name == "rpd" else torch.mean
            return reduce(tensor.unflatten(1, (-1, self.group_size)).double(), dim=2).float()

        tensors = {name: fold(name, tensor) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, metadata={**self.metadata, "granularity": "kv_group"})

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically; an existing file is replaced."""
        header = {"format": FORMAT, "version": str(VERSION), "head_map": json.dumps(self.metadata, sort_keys=True)}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        write_atomically(path, safetensors.torch.save(tensors, header))

    @classmethod
    def load(cls, path: str | Path) -> HeadMap:
        """Read and check a file written by `save`.

        Raises:
            HeadMapError: if the file is not a head map, has another version, or breaks the format.
            FileNotFoundError: if there is none.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"head map {path} is not a file: write one with hf-hybrid analyze")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (safetensors.SafetensorError, OSError) as error:
            raise HeadMapError(f"{path} is not a readable safetensors file: {error}") from error
        if header.get("format") != FORMAT:
            raise HeadMapError(
                f"{path} is not a head map: its format is {header.get('format')!r}, a head map's is {FORMAT!r}"
            )
        if header.get("version") != str(VERSION):
            raise HeadMapError(f"{path} has head map version {header.get('version')!r}; this program reads {VERSION}")
        try:
            metadata = json.loads(header["head_map"])
        except (KeyError, json.JSONDecodeError) as error:
            raise HeadMapError(f"{path}: the header entry 'head_map' must be a JSON object: {error!r}") from error
        try:
            return cls(tensors, metadata)
        except HeadMapError as error:
            raise HeadMapError(f"{path}: {error}") from error


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    for key, types in METADATA_TYPES.items():
        if key not in metadata:
            raise HeadMapError(f"head map metadata lacks {key!r}")
        value = metadata[key]
        if not isinstance(value, types) or isinstance(value, bool):
            names = " or ".join(t.__name__ for t in (types if isinstance(types, tuple) else (types,)))
            raise HeadMapError(f"head map metadata: {key} must be {names}, not {value!r}")
    for key, allowed in (("granularity", GRANULARITIES), ("folding", tuple(FOLDINGS)), ("source", SOURCES)):
        if metadata[key] not in allowed:
            raise HeadMapError(f"head map metadata: {key} is {metadata[key]!r}, must be one of {', '.join(allowed)}")
    for key in ("num_attention_heads", "num_key_value_heads", "training_length", "head_dim"):
        value = metadata.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise HeadMapError(f"head map metadata: {key} is {value!r}, must be a whole number of at least 1")
    heads, groups = metadata["num_attention_heads"], metadata["num_key_value_heads"]
    if heads % groups:
        raise HeadMapError(
            f"head map metadata: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise HeadMapError(f"head map metadata must hold JSON values only: {error}") from error


def _check_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    if unknown := sorted(set(tensors) - set(SHAPES)):
        raise HeadMapError(f"head map has unknown tensor {unknown[0]!r}; known are {', '.join(SHAPES)}")
    if "rpd" not in tensors:
        raise HeadMapError("head map lacks the tensor 'rpd' [layers, heads]")
    if "rfis" in tensors and "wavelengths" not in tensors:
        raise HeadMapError("head map has 'rfis' but lacks 'wavelengths' [pairs], which says what its pairs are")

    column = "num_attention_heads" if metadata["granularity"] == "query_head" else "num_key_value_heads"
    sizes = {"H": metadata[column]}
    for name, axes in SHAPES.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tensor.dtype != torch.float32:
            raise HeadMapError(f"head map tensor {name!r} is {tensor.dtype}, must be torch.float32")
        if tensor.ndim != len(axes) or 0 in tensor.shape:
            raise HeadMapError(f"head map tensor {name!r} has shape {list(tensor.shape)}, must be [{', '.join(axes)}]")
        for axis, size in zip(axes, tensor.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                origin = f"{column} {sizes[axis]}" if axis == "H" else f"{sizes[axis]} of the other tensors"
                raise HeadMapError(f"head map tensor {name!r} has {axis} = {size}, which contradicts {origin}")
        _check_values(name, tensor, metadata)
    layers = metadata.get("wavelength_layers", [0])
    if not (isinstance(layers, list) and layers and all(layer in range(sizes["L"]) for layer in layers)):
        raise HeadMapError(
            f"head map metadata: wavelength_layers is {layers!r}, must be a list of layers in 0 .. {sizes['L'] - 1}"
        )


def _check_values(name: str, tensor: Tensor, metadata: Mapping[str, Any]) -> None:
    if not tensor.isfinite().all():
        place = (~tensor.isfinite()).nonzero()[0].tolist()
        raise HeadMapError(f"head map tensor {name!r} is {tensor[tuple(place)].item()} at {place}, must be finite")
    low, high = -math.inf, math.inf
    if name in ("rpd", "rfis"):
        low, high = 0.0, math.inf if metadata["settings"].get("divergence") == "kl" else 1.0
    elif name in ("mean_distance", "mean_log_distance", "entropy"):
        low = 0.0
    elif name == "wavelengths":
        # No rotary pair turns faster than once in one token, and that only by a scaled frequency.
        low = 1.0
    # A divergence that is a sum of many float32 terms may leave its range by rounding alone.
    outside = (tensor < low - 1e-5) | (tensor > high + 1e-5)
    if outside.any():
        place = outside.nonzero()[0].tolist()
        raise HeadMapError(
            f"head map tensor {name!r} is {tensor[tuple(place)].item():g} at {place}, must be in {low:g} .. {high:g}"
        )


def read_duo_attention(path: str | Path, *, num_attention_heads: int, model: str | None = None) -> HeadMap:
    """DuoAttention's `full_attention_heads.tsv` (arXiv 2410.10819): gate values [layers, KV heads], high = retrieval.

    A `config.json` beside the table, as DuoAttention writes it, is kept in the settings and names the model.

    Raises:
        HeadMapError: if the table is ragged, not numeric or outside 0..1.
    """
    path = Path(path)
    rows = [line.split() for line in _read_text(path).splitlines() if line.strip()]
    if not rows:
        raise HeadMapError(f"{path} is empty, must be a table [layers, KV heads] of gate values")
    for index, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise HeadMapError(f"{path}: row {index} has {len(row)} columns, row 0 has {len(rows[0])}")
    try:
        scores = [[float(value) for value in row] for row in rows]
    except ValueError as error:
        raise HeadMapError(f"{path} is not a table of numbers: {error}") from error
    config_path = path.with_name("config.json")
    config = read_json(config_path, error=HeadMapError) if config_path.exists() else {}
    return _imported_map(
        path,
        scores,
        source="duo_attention",
        granularity="kv_group",
        num_attention_heads=num_attention_heads,
        num_key_value_heads=len(rows[0]),
        model=model or config.get("model_name") or path.parent.name,
        settings={"duo_attention": config},
    )


def read_retrieval_head(path: str | Path, *, num_key_value_heads: int, model: str | None = None) -> HeadMap:
    """Retrieval_Head's JSON (arXiv 2404.15574): {"layer-head": [scores]} over query heads, high = retrieval.

    A head's score is the mean of its list.

    Raises:
        HeadMapError: if a key, a list or a score is malformed, or a head of some layer is absent.
    """
    path = Path(path)
    table = read_json(path, error=HeadMapError)
    if not table:
        raise HeadMapError(f'{path} is empty, must be an object {{"layer-head": [scores]}}')
    means: dict[tuple[int, int], float] = {}
    for key, scores in table.items():
        if not re.fullmatch(r"\d+-\d+", key):
            raise HeadMapError(f"{path}: the key {key!r} is not of the form 'layer-head'")
        if not (isinstance(scores, list) and scores and all(isinstance(score, int | float) for score in scores)):
            raise HeadMapError(f"{path}: head {key} must have a list of one or more numbers")
        layer, head = map(int, key.split("-"))
        means[layer, head] = math.fsum(scores) / len(scores)
    layers, heads = (1 + max(indices) for indices in zip(*means, strict=True))
    for layer in range(layers):
        for head in range(heads):
            if (layer, head) not in means:
                raise HeadMapError(f"{path}: head {layer}-{head} is absent from a map of {layers} x {heads} heads")
    return _imported_map(
        path,
        [[means[layer, head] for head in range(heads)] for layer in range(layers)],
        source="retrieval_head",
        granularity="query_head",
        num_attention_heads=heads,
        num_key_value_heads=num_key_value_heads,
        model=model or path.stem,
        settings={},
    )


def load_head_map(
    path: str | Path,
    *,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    model: str | None = None,
) -> HeadMap:
    """Read a head map of any known kind: our `.safetensors`, DuoAttention's `.tsv`, Retrieval_Head's `.json`.

    DuoAttention's table does not say how many query heads share a KV head, and Retrieval_Head's does not say how many
    KV heads there are: the caller does. What a file does say must agree with what the caller says.

    Raises:
        HeadMapError: if the file is malformed, a needed number is not given, or a given one contradicts the file.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        head_map = HeadMap.load(path)
    elif path.suffix == ".tsv":
        if num_attention_heads is None:
            raise HeadMapError(f"{path} has one column per KV head: num_attention_heads must be given with it")
        head_map = read_duo_attention(path, num_attention_heads=num_attention_heads, model=model)
    elif path.suffix == ".json":
        if num_key_value_heads is None:
            raise HeadMapError(f"{path} has one entry per query head: num_key_value_heads must be given with it")
        head_map = read_retrieval_head(path, num_key_value_heads=num_key_value_heads, model=model)
    else:
        raise HeadMapError(
            f"{path} is of no known kind: a head map is .safetensors, .tsv (DuoAttention) or .json (Retrieval_Head)"
        )
    given = {
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "model": model,
    }
    for key, value in given.items():
        if value is not None and value != head_map.metadata[key]:
            raise HeadMapError(f"{path} has {key} {head_map.metadata[key]!r}, but {value!r} was given")
    return head_map


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HeadMapError(f"{path} is not a text file: {error}") from error


def _imported_map(path: Path, scores: list[list[float]], **metadata: Any) -> HeadMap:
    for layer, row in enumerate(scores):
        for head, score in enumerate(row):
            if not 0.0 <= score <= 1.0:
                raise HeadMapError(f"{path}: layer {layer} head {head} has score {score}, must be in 0 .. 1")
    metadata["settings"] = {**metadata["settings"], "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    unknown = {"revision": None, "model_type": None, "text_digest": None, "training_length": None, "folding": "mean"}
    try:
        return HeadMap({"rpd": (1.0 - torch.tensor(scores, dtype=torch.float64)).float()}, {**unknown, **metadata})
    except HeadMapError as error:
        raise HeadMapError(f"{path}: {error}") from error

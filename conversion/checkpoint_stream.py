"""Safetensors checkpoints as streams: one tensor in memory at a time, on the way in and on the way out.

The library's own `save_file` wants a whole shard in memory. Here a shard's header is written from planned shapes and
the tensors follow one by one, so that memory is bounded by the largest tensor and not by the shard.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_hybrid.conversion.files import atomic_file, read_json, write_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CODES = {dtype: code for code, dtype in FLOAT_DTYPES.items()}


class TensorSpec(NamedTuple):
    """What a checkpoint says of a tensor without reading it. `dtype` is the safetensors code, e.g. "BF16"."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """The shape and dtype of `tensor`."""
        return cls(tuple(tensor.shape), _CODES[tensor.dtype])

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * FLOAT_DTYPES[self.dtype].itemsize


class TensorReader(Protocol):
    """Named tensors that are read on demand."""

    specs: Mapping[str, TensorSpec]

    def tensor(self, name: str) -> Tensor: ...

    def close(self) -> None: ...


class StateDictReader:
    """Tensors that are in memory already (a model loaded from GGUF)."""

    def __init__(self, state_dict: Mapping[str, Tensor]):
        self.specs = {name: TensorSpec.of(tensor) for name, tensor in state_dict.items()}
        self._state_dict = state_dict

    def tensor(self, name: str) -> Tensor:
        return self._state_dict[name]

    def close(self) -> None:
        pass


class ShardReader:
    """Tensors of a safetensors checkpoint folder, one file or shards with an index.

    At most one shard is open at a time. A tensor is a view of the mapped file, so the shard's pages stay mapped for as
    long as one of its tensors is alive.

    Raises:
        FileNotFoundError: no safetensors weights in the folder, or a shard named by the index is missing.
        ValueError: a file is not readable safetensors, or the index and the shards disagree on the tensors.
    """

    def __init__(self, folder: str | os.PathLike):
        self.files, indexed = _weight_files(Path(folder))
        self.specs: dict[str, TensorSpec] = {}
        self._file_of: dict[str, Path] = {}
        self._current: tuple[Path, safe_open] | None = None
        for path in self.files:
            with _open(path) as shard:
                for name in shard.offset_keys():
                    tensor = shard.get_slice(name)
                    self.specs[name] = TensorSpec(tuple(tensor.get_shape()), tensor.get_dtype())
                    self._file_of[name] = path
        if indexed is not None and indexed != {name: path.name for name, path in self._file_of.items()}:
            found = {name: path.name for name, path in self._file_of.items()}
            wrong = sorted(name for name in indexed.keys() | found.keys() if indexed.get(name) != found.get(name))
            raise ValueError(
                f"{folder}: {INDEX} and the shards disagree on {len(wrong)} tensors, first {wrong[0]!r}: "
                f"the index says {indexed.get(wrong[0])}, the shards say {found.get(wrong[0])}. Fetch the model again."
            )

    def tensor(self, name: str) -> Tensor:
        path = self._file_of[name]
        if self._current is None or self._current[0] != path:
            self.close()
            self._current = (path, _open(path).__enter__())
        return self._current[1].get_tensor(name)

    def close(self) -> None:
        if self._current is not None:
            self._current[1].__exit__(None, None, None)
            self._current = None


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}). Fetch it again.") from error


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The weight files in order, and the index's tensor -> file name (None for a single file)."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], None
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not (isinstance(weight_map, dict) and weight_map and all(map(_is_file_name, weight_map.values()))):
            raise ValueError(f"{folder / INDEX} must have a 'weight_map' from tensor names to file names of the folder")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        if missing := [path.name for path in files if not path.is_file()]:
            raise FileNotFoundError(f"{folder}: {INDEX} names {', '.join(missing)}, which is not there.")
        return files, weight_map
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    raise FileNotFoundError(
        f"{folder} holds no {WEIGHTS} and no {INDEX}"
        + (
            f", only pickled weights ({pickled[0]}), which are never opened here. Where you trust them, save them as "
            "safetensors first: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
            if pickled
            else "."
        )
    )


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name == Path(name).name


def fingerprint(path: Path, blocks: int = 16, block_bytes: int = 4096) -> str:
    """SHA-256 of the file's size and of evenly spaced blocks from its first to its last bytes.

    Tells one checkpoint from another without reading gigabytes; it is not an integrity check.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(blocks):
            file.seek(max(size - block_bytes, 0) * block // (blocks - 1))
            digest.update(file.read(block_bytes))
    return digest.hexdigest()


class Shard(NamedTuple):
    """One planned output file: its name and the specs of its tensors in file order."""

    name: str
    specs: dict[str, TensorSpec]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs.values())

    @property
    def header(self) -> bytes:
        """The safetensors header: length, then JSON padded to 8 bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, spec in self.specs.items():
            start, end = end, end + spec.num_bytes
            entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def plan_shards(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[Shard]:
    """Splits tensors, in order, into files of at most `max_shard_bytes` (a larger tensor gets a file of its own).

    The split follows from the specs alone, so file names are final from the start and a resumed run makes the same.
    """
    groups: list[dict[str, TensorSpec]] = [{}]
    used = 0
    for name, spec in specs.items():
        if groups[-1] and used + spec.num_bytes > max_shard_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = spec
        used += spec.num_bytes
    shards = []
    for number, group in enumerate(groups, 1):
        name = WEIGHTS if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # Wider dtypes first: every tensor then starts at a multiple of its item size.
        widest_first = sorted(group.items(), key=lambda item: -FLOAT_DTYPES[item[1].dtype].itemsize)
        shards.append(Shard(name, dict(widest_first)))
    return shards


def shard_is_written(folder: Path, shard: Shard) -> bool:
    """Whether the folder holds this very shard, complete (header and length)."""
    path = folder / shard.name
    header = shard.header
    if not path.is_file() or path.stat().st_size != len(header) + shard.num_bytes:
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header


def write_shard(folder: Path, shard: Shard, tensor: Callable[[str], Tensor]) -> None:
    """Writes one shard, asking `tensor` for each of its tensors in turn and holding only that one.

    Raises:
        ValueError: a tensor is not what its spec says.
    """
    with atomic_file(folder / shard.name) as file:
        file.write(shard.header)
        for name, spec in shard.specs.items():
            value = tensor(name)
            if TensorSpec.of(value) != spec:
                raise ValueError(f"{name}: planned as {spec}, made as {TensorSpec.of(value)}.")
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_index(folder: Path, shards: list[Shard]) -> None:
    """Writes the index that sharded checkpoints need; a single file needs none."""
    if len(shards) == 1:
        return
    weight_map = {name: shard.name for shard in shards for name in shard.specs}
    total = sum(shard.num_bytes for shard in shards)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})

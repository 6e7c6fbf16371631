"""The safetensors stream: what is written is what the library reads, nothing half-written ever has a final name."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hybrid.conversion.checkpoint_stream import (
    FLOAT_DTYPES,
    INDEX,
    WEIGHTS,
    Shard,
    ShardReader,
    StateDictReader,
    TensorSpec,
    fingerprint,
    plan_shards,
    shard_is_written,
    write_index,
    write_shard,
)


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 5), "b": (7,), "c": (2, 3, 1), "scalar": (), "empty": (0, 4), "d": (11, 2), "e": (1,)}
    dtypes = list(FLOAT_DTYPES.values())
    return {
        name: torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)])
        for i, (name, shape) in enumerate(shapes.items())
    }


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], max_shard_bytes: int) -> list[Shard]:
    shards = plan_shards({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, max_shard_bytes)
    for shard in shards:
        write_shard(folder, shard, tensors.__getitem__)
    write_index(folder, shards)
    return shards


@pytest.mark.parametrize("max_shard_bytes", [1, 60, 10_000])
def test_written_checkpoint_is_read_back(tmp_path, max_shard_bytes):
    tensors = random_tensors()
    shards = write_checkpoint(tmp_path, tensors, max_shard_bytes)
    assert (len(shards) == 1) == (max_shard_bytes == 10_000)

    by_library = {}
    for shard in shards:
        by_library |= safetensors.torch.load_file(tmp_path / shard.name)
    reader = ShardReader(tmp_path)
    assert by_library.keys() == reader.specs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert reader.specs[name] == TensorSpec.of(tensor)
        for read in (by_library[name], reader.tensor(name)):
            assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    reader.close()


def test_index_names_every_tensor_and_the_total_size(tmp_path):
    tensors = random_tensors()
    shards = write_checkpoint(tmp_path, tensors, 60)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"] == {name: shard.name for shard in shards for name in shard.specs}
    (tmp_path / "single").mkdir()
    write_checkpoint(tmp_path / "single", tensors, 10_000)
    assert not (tmp_path / "single" / INDEX).exists()


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    codes=st.lists(st.sampled_from(list(FLOAT_DTYPES)), min_size=20, max_size=20),
    limit=st.integers(1, 200),
)
def test_shards_are_bounded_aligned_and_complete(sizes, codes, limit):
    specs = {f"t{i}": TensorSpec((size,), code) for i, (size, code) in enumerate(zip(sizes, codes, strict=False))}
    shards = plan_shards(specs, limit)
    assert {name: spec for shard in shards for name, spec in shard.specs.items()} == specs
    for number, shard in enumerate(shards, 1):
        assert shard.num_bytes <= limit or len(shard.specs) == 1
        assert shard.name == (WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        entries = json.loads(shard.header[8:])
        for name, spec in shard.specs.items():
            assert entries[name]["data_offsets"][0] % FLOAT_DTYPES[spec.dtype].itemsize == 0
        assert len(shard.header) % 8 == 0


def test_interrupted_shard_has_no_final_name(tmp_path):
    tensors = random_tensors()
    shard, *_ = plan_shards({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 10_000)

    def fail_late(name):
        if name == list(shard.specs)[-1]:
            raise KeyboardInterrupt
        return tensors[name]

    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path, shard, fail_late)
    assert not shard_is_written(tmp_path, shard) and not (tmp_path / shard.name).exists()
    write_shard(tmp_path, shard, tensors.__getitem__)
    assert shard_is_written(tmp_path, shard) and [path.name for path in tmp_path.iterdir()] == [shard.name]


def test_only_the_very_same_complete_shard_counts_as_written(tmp_path):
    (shard,) = write_checkpoint(tmp_path, random_tensors(), 10_000)
    content = (tmp_path / shard.name).read_bytes()
    (tmp_path / shard.name).write_bytes(content[:-1])
    assert not shard_is_written(tmp_path, shard)
    (tmp_path / shard.name).write_bytes(content.replace(b'"scalar"', b'"vector"'))
    assert not shard_is_written(tmp_path, shard)
    (tmp_path / shard.name).write_bytes(content)
    assert shard_is_written(tmp_path, shard)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.bfloat16)], ids=["shape", "dtype"])
def test_tensor_that_breaks_the_plan_is_refused(tmp_path, wrong):
    shard = Shard(WEIGHTS, {"a": TensorSpec((3, 5), "F32")})
    with pytest.raises(ValueError, match="a: planned as"):
        write_shard(tmp_path, shard, lambda name: wrong)
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mapped files are listed in /proc/self/maps, on Linux")
def test_reader_maps_one_shard_at_a_time(tmp_path):
    shards = write_checkpoint(tmp_path, random_tensors(), 60)
    reader = ShardReader(tmp_path)

    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {Path(line.split()[-1]).name for line in lines if str(tmp_path) in line}

    assert mapped() == set()
    for shard in shards:
        for name in shard.specs:
            reader.tensor(name)
            assert mapped() <= {shard.name}
    reader.close()
    assert mapped() == set()


def test_state_dict_is_read_as_it_is():
    tensors = random_tensors()
    reader = StateDictReader(tensors)
    assert reader.specs == {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    assert all(reader.tensor(name) is tensor for name, tensor in tensors.items())


def break_index(folder):
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["b"]
    (folder / INDEX).write_text(json.dumps(index))


def lose_shard(folder):
    next(folder.glob("model-00002-*")).unlink()


def cut_shard(folder):
    path = next(folder.glob("model-00002-*"))
    path.write_bytes(path.read_bytes()[:-3])


def pickle_weights(folder):
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (break_index, ValueError, "disagree on 1 tensors, first 'b'"),
        (lose_shard, FileNotFoundError, "model-00002-of"),
        (cut_shard, ValueError, "model-00002-of-.* is not a readable safetensors file"),
        (pickle_weights, FileNotFoundError, r"pytorch_model\.bin.*save_pretrained"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_checkpoint_is_refused_by_name(tmp_path, damage, error, message):
    write_checkpoint(tmp_path, random_tensors(), 60)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        ShardReader(tmp_path)


def test_fingerprint_tells_checkpoints_apart(tmp_path):
    path = tmp_path / "file"
    content = torch.randint(0, 256, (300_007,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = set()
    for place in (None, 0, 158_000, 300_006):
        changed = content.clone()
        if place is not None:
            changed[place] += 1
        path.write_bytes(changed.numpy().tobytes())
        seen.add(fingerprint(path))
    path.write_bytes(content[:-1].numpy().tobytes())
    seen.add(fingerprint(path))
    assert len(seen) == 5
    path.write_bytes(content.numpy().tobytes())
    assert fingerprint(path) in seen
    (tmp_path / "tiny").write_bytes(b"abc")
    assert fingerprint(tmp_path / "tiny") not in seen

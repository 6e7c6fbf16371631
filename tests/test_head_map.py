"""The head map file: what is written is what is read, folding, the formats of other tools, and every refusal."""

import json
import os

import pytest
import safetensors.torch
import torch

from hf_hybrid.conversion.head_map import HeadMap, HeadMapError, load_head_map

LAYERS, HEADS, GROUPS, PAIRS = 3, 6, 2, 5

METADATA = {
    "model": "a/model",
    "revision": "abc123",
    "model_type": "llama",
    "text_digest": "0" * 64,
    "settings": {"divergence": "js", "queries": 64},
    "granularity": "query_head",
    "folding": "mean",
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "training_length": 8192,
    "source": "hf_hybrid",
}


def make_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "rpd": torch.rand(LAYERS, HEADS, generator=generator),
        "rfis": torch.rand(LAYERS, HEADS, PAIRS, generator=generator),
        "mean_distance": 100 * torch.rand(LAYERS, HEADS, generator=generator),
        "mean_log_distance": 4 * torch.rand(LAYERS, HEADS, generator=generator),
        "entropy": 5 * torch.rand(LAYERS, HEADS, generator=generator),
        "wavelengths": torch.logspace(1, 5, PAIRS),
    }


def make_map(**metadata):
    return HeadMap(make_tensors(), {**METADATA, **metadata})


def test_save_load_round_trip(tmp_path):
    path = tmp_path / "sub" / "map.safetensors"
    made = make_map(head_dim=64)
    made.save(path)
    read = HeadMap.load(path)
    assert read.metadata == made.metadata and read.metadata["head_dim"] == 64
    assert read.metadata["tool_version"]
    assert read.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        assert torch.equal(read.tensors[name], tensor), name
    assert read.digest() == made.digest()
    assert os.listdir(path.parent) == ["map.safetensors"]


def test_only_rpd_is_required(tmp_path):
    path = tmp_path / "map.safetensors"
    HeadMap({"rpd": make_tensors()["rpd"]}, METADATA).save(path)
    assert list(HeadMap.load(path).tensors) == ["rpd"]


def test_digest_sees_every_value():
    digests = {make_map().digest(), make_map(revision=None).digest()}
    tensors = make_tensors()
    tensors["entropy"][1, 2] += 0.125
    digests.add(HeadMap(tensors, METADATA).digest())
    assert len(digests) == 3


def test_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "map.safetensors"
    make_map().save(path)

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("hf_hybrid.conversion.files.os.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        make_map(model="another").save(path)
    assert HeadMap.load(path).metadata["model"] == "a/model"
    assert os.listdir(tmp_path) == ["map.safetensors"]


@pytest.mark.parametrize("folding", ["mean", "min"])
def test_fold_to_groups(folding):
    head_map = make_map(folding=folding)
    folded = head_map.fold_to_groups()
    size = HEADS // GROUPS
    for layer in range(LAYERS):
        for group in range(GROUPS):
            members = slice(group * size, (group + 1) * size)
            rpd = head_map.rpd[layer, members]
            expected = rpd.mean() if folding == "mean" else rpd.min()
            assert folded.rpd[layer, group].item() == pytest.approx(expected.item(), abs=1e-6)
            for name in ("rfis", "mean_distance", "mean_log_distance", "entropy"):
                expected = head_map.tensors[name][layer, members].mean(dim=0)
                torch.testing.assert_close(folded.tensors[name][layer, group], expected)
    assert torch.equal(folded.tensors["wavelengths"], head_map.tensors["wavelengths"])
    assert folded.metadata == {**head_map.metadata, "granularity": "kv_group"}
    assert folded.fold_to_groups() is folded


def changed(name, tensor):
    return {**make_tensors(), name: tensor}


def poked(name, place, value):
    tensors = make_tensors()
    tensors[name][place] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"entropy": torch.ones(LAYERS, HEADS)}, "lacks the tensor 'rpd'"),
        (changed("scores", torch.ones(1)), "unknown tensor 'scores'"),
        ({k: v for k, v in make_tensors().items() if k != "wavelengths"}, "lacks 'wavelengths'"),
        (changed("rpd", torch.rand(LAYERS, HEADS).double()), "'rpd' is torch.float64, must be torch.float32"),
        (changed("rpd", torch.rand(HEADS)), r"'rpd' has shape \[6\], must be \[L, H\]"),
        (changed("rpd", torch.rand(0, HEADS)), r"'rpd' has shape \[0, 6\]"),
        (changed("rpd", torch.rand(LAYERS, 5)), "H = 5, which contradicts num_attention_heads 6"),
        (changed("entropy", torch.rand(4, HEADS)), "'entropy' has L = 4, which contradicts 3"),
        (changed("wavelengths", torch.logspace(1, 5, 4)), "'wavelengths' has F = 4, which contradicts 5"),
        (poked("rpd", (1, 2), float("nan")), r"'rpd' is nan at \[1, 2\], must be finite"),
        (poked("rfis", (1, 2, 3), float("inf")), r"'rfis' is inf at \[1, 2, 3\], must be finite"),
        (poked("rpd", (2, 5), 1.5), r"'rpd' is 1.5 at \[2, 5\], must be in 0 .. 1"),
        (poked("rfis", (0, 0, 4), -0.25), r"'rfis' is -0.25 at \[0, 0, 4\], must be in 0 .. 1"),
        (poked("mean_distance", (0, 1), -1.0), "'mean_distance' is -1 at"),
        (poked("wavelengths", 0, 0.0), "'wavelengths' is 0 at"),
    ],
)
def test_refuses_tensors(tensors, message):
    with pytest.raises(HeadMapError, match=message):
        HeadMap(tensors, METADATA)


def test_kl_is_not_bounded_by_one():
    tensors = poked("rpd", (2, 5), 7.5)
    assert HeadMap(tensors, {**METADATA, "settings": {"divergence": "kl"}}).rpd[2, 5] == 7.5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "model must be str, not None"),
        ("revision", 3, "revision must be str or NoneType, not 3"),
        ("num_attention_heads", True, "num_attention_heads must be int, not True"),
        ("granularity", "head", "granularity is 'head', must be one of query_head, kv_group"),
        ("folding", "median", "folding is 'median', must be one of mean, min"),
        ("source", "elsewhere", "source is 'elsewhere'"),
        ("training_length", 0, "training_length is 0, must be a whole number of at least 1"),
        ("num_key_value_heads", 4, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ("settings", {"x": float("nan")}, "JSON values only"),
        ("settings", {"x": torch.ones(1)}, "JSON values only"),
        ("wavelength_layers", [0, 3], r"wavelength_layers is \[0, 3\], must be a list of layers in 0 .. 2"),
        ("wavelength_layers", [], "must be a list of layers"),
    ],
)
def test_refuses_metadata(key, value, message):
    with pytest.raises(HeadMapError, match=message):
        make_map(**{key: value})


def test_refuses_absent_metadata():
    with pytest.raises(HeadMapError, match="metadata lacks 'source'"):
        HeadMap(make_tensors(), {key: value for key, value in METADATA.items() if key != "source"})


def test_load_refuses_foreign_and_newer_files(tmp_path):
    path = tmp_path / "map.safetensors"
    with pytest.raises(FileNotFoundError, match="is not a file"):
        HeadMap.load(path)
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(HeadMapError, match="not a readable safetensors file"):
        HeadMap.load(path)
    safetensors.torch.save_file({"rpd": torch.rand(2, 2)}, path)
    with pytest.raises(HeadMapError, match="not a head map: its format is None"):
        HeadMap.load(path)
    header = {"format": "hf_hybrid.head_map", "version": "2"}
    safetensors.torch.save_file({"rpd": torch.rand(2, 2)}, path, header)
    with pytest.raises(HeadMapError, match="version '2'; this program reads 1"):
        HeadMap.load(path)
    safetensors.torch.save_file({"rpd": torch.rand(2, 2)}, path, {**header, "version": "1"})
    with pytest.raises(HeadMapError, match="'head_map' must be a JSON object"):
        HeadMap.load(path)
    contents = {**header, "version": "1", "head_map": json.dumps({**METADATA, "tool_version": "0"})}
    safetensors.torch.save_file({"rpd": torch.rand(2, 2)}, path, contents)
    with pytest.raises(HeadMapError, match=f"{path}.*contradicts num_attention_heads 6"):
        HeadMap.load(path)


def write_duo(path, rows, **config):
    path.write_text("\n".join("\t".join(f"{value:.18e}" for value in row) for row in rows) + "\n")
    if config:
        path.with_name("config.json").write_text(json.dumps(config))
    return path


def test_duo_attention(tmp_path):
    rows = [[0.605, 0.0], [1.0, 0.25], [0.5, 0.125]]
    path = write_duo(tmp_path / "full_attention_heads.tsv", rows, model_name="models/L", sink_size=128)
    head_map = load_head_map(path, num_attention_heads=6)
    # The highest gate, layer 1 group 0, is the most retrieval-like: its score is the lowest.
    torch.testing.assert_close(head_map.rpd, 1 - torch.tensor(rows))
    assert head_map.rpd.argmin() == 2
    metadata = head_map.metadata
    assert (metadata["source"], metadata["granularity"], metadata["model"]) == ("duo_attention", "kv_group", "models/L")
    assert (metadata["num_attention_heads"], metadata["num_key_value_heads"]) == (6, 2)
    assert metadata["settings"]["duo_attention"]["sink_size"] == 128
    head_map.save(tmp_path / "map.safetensors")
    assert HeadMap.load(tmp_path / "map.safetensors").digest() == head_map.digest()


def test_retrieval_head(tmp_path):
    # Keys in no order, lists of unequal length.
    scores = {"1-0": [0.5, 1.0], "0-3": [0.0], "0-1": [0.25, 0.0, 0.5], "1-3": [0], "0-0": [1], "0-2": [0.125]}
    scores |= {"1-1": [0.75], "1-2": [0.375, 0.375]}
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(scores))
    head_map = load_head_map(path, num_key_value_heads=2)
    expected = 1 - torch.tensor([[1.0, 0.25, 0.125, 0.0], [0.75, 0.75, 0.375, 0.0]])
    torch.testing.assert_close(head_map.rpd, expected)
    metadata = head_map.metadata
    assert (metadata["source"], metadata["granularity"], metadata["model"]) == ("retrieval_head", "query_head", "llama")
    assert (metadata["num_attention_heads"], metadata["num_key_value_heads"]) == (4, 2)
    torch.testing.assert_close(head_map.fold_to_groups().rpd, expected.unflatten(1, (2, 2)).mean(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("0.5\t0.5\n0.5\n", "row 1 has 1 columns, row 0 has 2"),
        ("0.5\tx\n", "not a table of numbers"),
        ("0.5\t1.25\n", "layer 0 head 1 has score 1.25, must be in 0 .. 1"),
        ("0.5\tnan\n", "layer 0 head 1 has score nan"),
        ("0.5\t0.5\t0.5\t0.5\n", "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
    ],
)
def test_refuses_duo_attention(tmp_path, text, message):
    path = tmp_path / "full_attention_heads.tsv"
    path.write_text(text)
    with pytest.raises(HeadMapError, match=message):
        load_head_map(path, num_attention_heads=6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ("{}", "is empty"),
        ('{"format": "hf_hybrid.allocation"}', "the key 'format' is not of the form 'layer-head'"),
        ('{"0-0": []}', "head 0-0 must have a list of one or more numbers"),
        ('{"0-0": ["a"]}', "head 0-0 must have a list of one or more numbers"),
        ('{"0-0": [0.5], "1-0": [0.5], "1-1": [0.5]}', "head 0-1 is absent from a map of 2 x 2 heads"),
        ('{"0-0": [2.0]}', "layer 0 head 0 has score 2.0"),
        ('{"0-0": [0], "0-1": [0], "0-2": [0]}', "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
    ],
)
def test_refuses_retrieval_head(tmp_path, text, message):
    path = tmp_path / "scores.json"
    path.write_text(text)
    with pytest.raises(HeadMapError, match=message):
        load_head_map(path, num_key_value_heads=2)


def test_load_head_map_by_kind(tmp_path):
    path = tmp_path / "map.safetensors"
    make_map().save(path)
    assert load_head_map(path, num_attention_heads=HEADS, num_key_value_heads=GROUPS, model="a/model").num_layers == 3
    with pytest.raises(HeadMapError, match="has num_key_value_heads 2, but 3 was given"):
        load_head_map(path, num_key_value_heads=3)
    duo = write_duo(tmp_path / "full_attention_heads.tsv", [[0.5, 0.5]])
    with pytest.raises(HeadMapError, match="num_attention_heads must be given"):
        load_head_map(duo)
    with pytest.raises(HeadMapError, match="has num_key_value_heads 2, but 1 was given"):
        load_head_map(duo, num_attention_heads=4, num_key_value_heads=1)
    scores = tmp_path / "scores.json"
    scores.write_text('{"0-0": [0.5], "0-1": [1]}')
    with pytest.raises(HeadMapError, match="num_key_value_heads must be given"):
        load_head_map(scores)
    with pytest.raises(HeadMapError, match="has num_attention_heads 2, but 4 was given"):
        load_head_map(scores, num_attention_heads=4, num_key_value_heads=1)
    with pytest.raises(HeadMapError, match="no known kind"):
        load_head_map(tmp_path / "map.bin")

"""Saving and loading, code from a folder, offloading, compilation, classification heads, golden checkpoints."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from families import (
    FAMILIES,
    alone,
    assert_same,
    build,
    configure,
    every_model,
    first_of_each_family,
    place,
    random_tokens,
)
from golden.make import GOLDEN, folder_of
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    StaticCache,
)

AUTO_CLASSES = [
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
]


def build_random(case, **overrides):
    """A model none of whose parameters has a value that a fresh one could have."""
    model = build(case, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(-0.7 + 0.2 * torch.randn(parameter.shape))
    return model


def logits_of(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


@every_model
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_save_and_load(case, tied, dtype, tmp_path):
    """Every value survives, and the decay's parameters stay float32 in a model of any dtype."""
    model = build_random(case, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=dtype)
    loaded.save_pretrained(tmp_path / "second")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "second", dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    for name, parameter in model.named_parameters():
        kept = torch.float32 if ".decay." in name else dtype
        for other in (loaded, again):
            found = other.get_parameter(name)
            assert found.dtype == kept, name
            assert torch.equal(found, parameter.to(kept)), name
    assert ("lm_head.weight" in load_file(tmp_path / "second" / "model.safetensors")) != tied
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    tokens = random_tokens(2, 9)
    assert torch.equal(logits_of(again, tokens), logits_of(loaded, tokens))
    assert_same(logits_of(again, tokens).float(), logits_of(model, tokens), 1e-5 if dtype == torch.float32 else 2e-2)


@every_model
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_missing_tensor_is_the_only_new_one(case, tied, tmp_path):
    model = build_random(case, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    # One of each kind, from the last layer that has it.
    for name in {name.partition(".layers.")[2].partition(".")[2] or name: name for name in tensors}.values():
        save_file({other: tensors[other] for other in tensors if other != name}, path, metadata={"format": "pt"})
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        expected = {name, "lm_head.weight"} if tied and "embed_tokens" in name else {name}
        assert report["missing_keys"] == expected
        for other, parameter in model.named_parameters():
            found = loaded.get_parameter(other)
            assert found.isfinite().all()
            if other == name and name.endswith(("norm.weight", "head_scale")):
                assert found.eq(1).all()
            assert torch.equal(found, parameter) == (other != name), (name, other)


@every_model
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [103, 90])
def test_resize_embeddings(case, tied, size, tmp_path):
    model = build(case, tie_word_embeddings=tied)
    tokens = random_tokens(2, 9) % 90
    before = logits_of(model, tokens)
    model.resize_token_embeddings(size)
    after = logits_of(model, tokens)
    assert after.shape[-1] == model.config.vocab_size == size
    assert_same(after[..., :90], before[..., :90])
    tokens[0, 3] = size - 1
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(logits_of(loaded, tokens), logits_of(model, tokens))


@first_of_each_family
@pytest.mark.parametrize("auto_name", AUTO_CLASSES)
def test_auto_classes(case, auto_name, tmp_path):
    """By registration: `from_config`, and a folder without any code."""
    auto_class = getattr(transformers, auto_name)
    model = build(case, auto_class=auto_class, num_labels=5)
    model.save_pretrained(tmp_path)
    for path in tmp_path.glob("*.py"):
        path.unlink()
    assert type(AutoConfig.from_pretrained(tmp_path)) is FAMILIES[case[0]].config_class
    loaded = auto_class.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    tokens = random_tokens(1, 9)
    with torch.no_grad():
        assert torch.equal(loaded(tokens)[0], model(tokens)[0])


# Loads every folder of the list with every Auto class, saves it, and loads that; prints what the first ones return.
LOAD_CODE_FROM_FOLDERS = """
import json, sys
from importlib.abc import MetaPathFinder
from pathlib import Path

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_hybrid":
            raise ImportError(f"{name} is not to be imported here")

sys.meta_path.insert(0, Refuse())

import torch
import transformers

folders, tokens = json.loads(sys.argv[1]), torch.tensor(json.loads(sys.argv[2]))
outputs = {}
with torch.no_grad():
    for folder, auto_names in folders.items():
        for auto_name in auto_names:
            auto_class = getattr(transformers, auto_name)
            model = auto_class.from_pretrained(folder, trust_remote_code=True).eval()
            first = model(tokens)[0]
            copy = Path(f"{folder}-{auto_name}-copy")
            model.save_pretrained(copy)
            again = auto_class.from_pretrained(copy, trust_remote_code=True).eval()
            assert copy.name in type(again).__module__.replace("_hyphen_", "-"), type(again)
            assert torch.equal(again(tokens)[0], first), (folder, auto_name)
            assert {path.name for path in copy.glob("*.py")} == {path.name for path in Path(folder).glob("*.py")}
            if "CausalLM" in auto_name:
                model.generate(tokens, max_new_tokens=2, do_sample=False)
            if auto_name == auto_names[0]:
                outputs[folder] = first.tolist()
print(json.dumps(outputs))
"""


def test_code_from_a_folder_in_a_process_without_the_package(tmp_path):
    """trust_remote_code, offline. A model saved by any class can be loaded as any other."""
    tokens, expected, folders = random_tokens(1, 9), {}, {}
    for name, family in FAMILIES.items():
        case = (name, next(iter(family.variants)))
        for auto_name in AUTO_CLASSES:
            model = build(case, auto_class=getattr(transformers, auto_name), num_labels=5)
            folder = str(tmp_path / f"{name}-{auto_name}")
            model.save_pretrained(folder)
            # Its own class first; the heads that a checkpoint lacks are new.
            folders[folder] = sorted(AUTO_CLASSES, key=lambda other: other != auto_name)
            with torch.no_grad():
                expected[folder] = model(tokens)[0]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    command = [sys.executable, "-I", "-c", LOAD_CODE_FROM_FOLDERS, json.dumps(folders), json.dumps(tokens.tolist())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    for folder, output in json.loads(done.stdout.splitlines()[-1]).items():
        assert_same(torch.tensor(output), expected.pop(folder))
    assert not expected


@every_model
def test_disk_offload(case, tmp_path):
    """Each module must be called for its weights to be there, so none may be read from outside."""
    model = build(case)
    model.save_pretrained(tmp_path)
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "disk"
    )
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    tokens = random_tokens(2, 7)
    assert torch.equal(logits_of(offloaded, tokens), logits_of(model, tokens))
    arguments = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(offloaded.generate(tokens, **arguments), model.generate(tokens, **arguments))


@first_of_each_family
def test_compiled_whole(case):
    """One graph without breaks; what a backend makes of it is not ours to test."""
    model = build(case)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    tokens, mask, places = place([random_tokens(4, seed=1), random_tokens(6, seed=2)], 6, "left")
    with torch.no_grad():
        assert_same(compiled(tokens, use_cache=False).logits, model(tokens).logits)
        padded = compiled(tokens, attention_mask=mask, use_cache=False).logits
        for row, index in enumerate(places):
            assert_same(padded[row, index], alone(model, tokens[row, index]))
        cache = StaticCache(model.config, max_cache_len=8)
        model(tokens[:, :4], cache=cache)
        steps = [compiled(tokens[:, [place]], cache=cache).logits for place in (4, 5)]
        assert_same(torch.cat(steps, dim=1), model(tokens).logits[:, 4:])


@first_of_each_family
def test_training_compiled_whole(case):
    tokens, found = random_tokens(2, 6), []
    for compiled in (False, True):
        model = build(case).train()
        torch.compiler.reset()
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        run(tokens, labels=tokens, use_cache=False).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert_same(found[1][name], gradient)


@every_model
@pytest.mark.parametrize("where", ["left", "right"])
def test_sequence_classification_of_padded_rows(case, where):
    model = build(case, auto_class=AutoModelForSequenceClassification, num_labels=5)
    sequences = [random_tokens(n, seed=n) for n in (5, 9, 13)]
    tokens, mask, _ = place(sequences, 15, where)
    tokens = tokens.masked_fill(mask == 0, model.config.pad_token_id)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits
    assert_same(logits, torch.cat([logits_of(model, sequence[None]) for sequence in sequences]))


@every_model
@pytest.mark.parametrize("where", ["left", "right", "both"])
def test_token_classification_of_padded_rows(case, where):
    model = build(case, auto_class=AutoModelForTokenClassification, num_labels=5)
    sequences = [random_tokens(n, seed=n) for n in (5, 9, 13)]
    tokens, mask, places = place(sequences, 15, where)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits
    for row, sequence in enumerate(sequences):
        assert_same(logits[row, places[row]], logits_of(model, sequence[None])[0])


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_checkpoint(name):
    """A checkpoint that an older version wrote loads without a new tensor and returns what it returned then."""
    folder = folder_of(name)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    expected = load_file(folder / "expected.safetensors")
    with torch.no_grad():
        logits = model(expected["input_ids"], attention_mask=expected["attention_mask"]).logits
    real = expected["attention_mask"].bool()
    assert_same(logits[real], expected["logits"][real])


def test_every_family_has_a_golden_checkpoint():
    families = {type(AutoConfig.from_pretrained(folder_of(name))) for name in GOLDEN}
    assert families == {family.config_class for family in FAMILIES.values()}


@first_of_each_family
def test_configuration_round_trip(case, tmp_path):
    config = configure(case)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}


@every_model
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casting_leaves_the_decay_in_float32(case, cast):
    before = build(case)
    after = getattr(build(case), cast)()
    for (name, old), (_, new) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        if ".decay." in name:
            assert new.dtype == torch.float32
            assert new.equal(old)
        else:
            assert new.dtype == {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}[cast]

"""Tapering a checkpoint: which neurons go, what new ones do, and the command from a Llama to a folder that loads."""

import json

import pytest
import torch
from families import assert_same, build, random_tokens
from tiny_tokenizer import save_tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_hybrid import HwHForCausalLM
from hf_hybrid.cli.main import app
from hf_hybrid.conversion.source_model import SourceError
from hf_hybrid.conversion.taper import neuron_importance, open_zoo_model, taper

TAPER = {"multiple_of": 4}
WIDTHS = [84, 56, 28]


def uniform(variant="headwise", **fields):
    """A model of 3 layers whose MLPs are 56 wide, biases included."""
    model = build(("hwh", variant), mlp_taper=None, per_layer_config=None, mlp_bias=True, **fields)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                projection.bias.normal_(0, 0.2)
    return model


def logits(model, rows):
    with torch.no_grad():
        return model(rows, use_cache=False).logits


def test_importance_is_the_energy_that_each_neuron_adds():
    model, rows = uniform(), random_tokens(3, 9)
    inputs = {}
    importance = neuron_importance(model, rows)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda module, args, index=index: inputs.update({index: args[0]}))
    logits(model, rows)
    for index, layer in enumerate(model.model.layers):
        active = layer.mlp.act_fn(layer.mlp.gate_proj(inputs[index])) * layer.mlp.up_proj(inputs[index])
        for neuron in (0, 7, 55):
            added = active[:, 1:, neuron, None] * layer.mlp.down_proj.weight[:, neuron]
            assert_same(importance[index][neuron], added.pow(2).sum(-1).mean())


def test_the_least_important_neurons_go_and_the_others_stay():
    model, masked, rows = uniform(), uniform(), random_tokens(2, 11)
    importance = neuron_importance(model, rows)
    assert taper(model, importance, mlp_taper=TAPER) == WIDTHS
    with torch.no_grad():
        gone = importance[2].argsort()[: 56 - 28]
        masked.model.layers[2].mlp.down_proj.weight[:, gone] = 0
    assert_same(logits(model, rows), logits(masked, rows))
    assert model.num_parameters() == masked.num_parameters()


def test_growing_only_leaves_the_function_and_trains():
    model, rows = uniform(), random_tokens(2, 11)
    before = logits(model, rows)
    assert taper(model, None, mlp_taper=TAPER, grow_only=True) == [84, 56, 56]
    assert_same(logits(model, rows), before)
    model(rows, labels=rows).loss.backward()
    assert model.model.layers[0].mlp.down_proj.weight.grad[:, 56:].abs().min() > 0


def test_new_neurons_depend_on_the_seed_alone():
    first, again, other = (uniform() for _ in range(3))
    for model, seed in ((first, 3), (again, 3), (other, 4)):
        taper(model, None, mlp_taper=TAPER, grow_only=True, seed=seed)
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (first, again, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


@pytest.mark.parametrize("grow_only", [False, True])
def test_the_configuration_follows_and_loads(tmp_path, grow_only):
    model, rows = uniform(), random_tokens(2, 7)
    taper(model, neuron_importance(model, rows), mlp_taper=TAPER, grow_only=grow_only)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.mlp_taper == (None if grow_only else TAPER)
    assert_same(logits(again, rows), logits(model, rows))


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=600, hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=3
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    save_tiny_tokenizer(tmp_path / "llama")
    return tmp_path / "llama"


def run(*arguments):
    return CliRunner().invoke(app, ["taper", *map(str, arguments)])


def test_the_command_keeps_the_dtype_and_records_what_it_did(llama, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 80)
    options = ("--text", text, "--tokens", 256, "--length", 64)
    result = run(llama, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    model = HwHForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert [layer.mlp.up_proj.out_features for layer in model.model.layers] == [48, 32, 16]
    stage = json.loads((tmp_path / "out" / "healing.json").read_text())[-1]
    assert (stage["stage"], stage["tokens"]) == ("taper", 256)
    # Once more is refused, and so is a place that is taken.
    again = run(tmp_path / "out", tmp_path / "twice", *options)
    assert again.exit_code == 1
    assert "several widths already" in again.output
    assert "exists" in run(llama, tmp_path / "out", *options).output


def test_a_taper_that_does_not_fit_writes_nothing(llama, tmp_path):
    result = run(llama, tmp_path / "out", "--multiple-of", 32)
    assert result.exit_code == 1
    assert "start 1.5 of intermediate_size 32" in result.output
    assert not (tmp_path / "out").exists()


def test_a_model_of_several_widths_is_refused(tmp_path):
    build(("hwh", "upcycling")).save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="several widths already"), open_zoo_model(tmp_path):
        pass

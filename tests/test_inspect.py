"""The sizes that `hf-hybrid inspect` states: against the parameters and the cache of the model itself."""

import pytest
import torch
from families import FAMILIES, SIZES, build, configure, every_model, first_of_each_family, random_tokens
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)
from typer.testing import CliRunner

from hf_hybrid import HwHConfig
from hf_hybrid.cli.main import app
from hf_hybrid.conversion.allocate import cache_bytes_per_token
from hf_hybrid.conversion.inspect_model import inspect_config, read_config
from hf_hybrid.conversion.source_model import SourceError

STOCK_SIZES = {name: size for name, size in SIZES.items() if name != "eos_token_id"} | {"hidden_size": 48}
STOCK = {
    "llama": LlamaConfig(**STOCK_SIZES, attention_bias=True),
    "qwen3": Qwen3Config(**STOCK_SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**STOCK_SIZES, sliding_window=4),
}


def bytes_of_cache(model, batch, length):
    """Bytes of every tensor that the cache holds after a pass over `length` tokens, per sequence."""
    with torch.no_grad():
        cache = model(random_tokens(batch, length), use_cache=True).cache
    total = 0
    for layer in cache.layers:
        states = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        states += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        total += sum(state.nbytes for state in states if state is not None)
    return total / batch


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_cache_of_every_family(case, dtype):
    model = build(case).to(dtype)
    size = inspect_config(configure(case, dtype=dtype))
    for batch, length in [(3, 1), (1, 7), (2, 23)]:
        assert size.cache_bytes(length) == bytes_of_cache(model, batch, length)
    assert size.recurrent_bytes + size.conv_bytes == size.cache_bytes(0)


@pytest.mark.parametrize("name", STOCK)
def test_cache_and_parameters_of_transformers(name):
    model = AutoModelForCausalLM.from_config(STOCK[name])
    size = inspect_config(STOCK[name])
    for batch, length in [(3, 1), (1, 7), (2, 23)]:
        assert size.cache_bytes(length) == bytes_of_cache(model, batch, length)
    assert size.num_parameters == model.num_parameters()
    assert size.parameters["linear mixers"] == size.parameters["other"] == 0
    assert (size.parameters["head"] == 0) == (name == "qwen3")


@every_model
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parameters_by_part(case, tied):
    model = build(case, tie_word_embeddings=tied)
    size = inspect_config(model.config)

    def count(*modules):
        return sum(p.numel() for module in modules if module is not None for p in module.parameters())

    def of_mixers(*names):
        return count(*(getattr(layer.token_mixer, name, None) for layer in model.model.layers for name in names))

    layers = model.model.layers
    assert size.parameters == {
        "embedding": count(model.model.embed_tokens, getattr(model.model, "predict_embedding", None)),
        "output projections": of_mixers("o_proj", "m_proj"),
        "full-attention mixers": of_mixers("attention", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm"),
        "linear mixers": of_mixers("linear_attention"),
        "neural memories": of_mixers("memory"),
        "MLPs": count(*(layer.mlp for layer in layers)),
        "norms": count(
            model.model.norm,
            getattr(model.model, "pass_norm", None),
            *(norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)),
        )
        + of_mixers("memory_norm", "attention_norm"),
        "head": 0 if tied else count(model.lm_head),
        "other": 0,
    }
    assert size.num_parameters == model.num_parameters()


def test_keys_and_values_cost_the_share_of_the_key_value_heads():
    """5 of the Transformer's 9 KV heads are read by a full-attention head."""
    heads = [[0, 1], [2], [0, 3, 4]]
    config = HwHConfig(**SIZES, full_attention_heads=heads)
    size, transformer = inspect_config(config), inspect_config(config.baseline("transformer"))
    assert size.token_bytes * 9 == transformer.token_bytes * 5
    assert size.token_bytes == cache_bytes_per_token(heads, 6, 3, 8, bytes_per_element=4)
    assert transformer.recurrent_bytes == transformer.conv_bytes == 0


@pytest.mark.parametrize("config_class", [GPTNeoXConfig, Qwen3NextConfig])
def test_an_unknown_cache_is_refused(config_class):
    config = config_class(vocab_size=97, hidden_size=40, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(ValueError, match=rf"layer 0 of this {config.model_type} model caches something other"):
        inspect_config(config)


def test_the_given_configuration_is_left_alone():
    config = configure(next((name, variant) for name, family in FAMILIES.items() for variant in family.variants))
    before = config.to_dict()
    inspect_config(config)
    assert config.to_dict() == before


def run(*args):
    return CliRunner().invoke(app, ["inspect", *map(str, args)], prog_name="hf-hybrid")


def row(output, name):
    line = next(line for line in output.splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).split()


def test_command_on_a_hybrid(tmp_path):
    """From config.json alone."""
    heads = [[0, 1], [2], [0, 3, 4]]
    HwHConfig(**SIZES, full_attention_heads=heads, dtype="bfloat16").save_pretrained(tmp_path)
    output = run(tmp_path).output
    assert "hwh, bfloat16" in output
    assert "0 ##.... 2\n1 ..#... 1\n2 #..##. 3\n" in output
    assert row(output, "bytes per token") == ["160", "288", "55.6%"]
    assert row(output, "embedding") == ["3,880", "3,880", "100.0%"]
    # 12 linear heads, states of 8 x 8 in float32; 3 tokens of 24 channels each in bfloat16.
    assert row(output, "recurrent states, bytes") == [f"{12 * 64 * 4:,}", "0"]
    assert row(output, "convolution states, bytes") == [f"{12 * 24 * 3 * 2:,}", "0"]
    transformer = 288 * 131072 / 2**20
    own = (160 * 131072 + 12 * (256 + 144)) / 2**20
    assert row(output, "at 128k tokens") == [
        f"{own:.1f}",
        "MiB",
        f"{transformer:.1f}",
        "MiB",
        f"{own / transformer:.1%}",
    ]
    assert "mark per token" not in output


def test_command_on_a_transformer(tmp_path):
    STOCK["qwen3"].save_pretrained(tmp_path)
    output = run(tmp_path).output
    assert row(output, "parameters") == ["Transformer"]
    assert row(output, "bytes per token") == ["576"]
    assert "query heads" not in output
    assert "recurrent" not in output


def test_command_on_a_model_without_full_attention(tmp_path):
    HwHConfig(**SIZES, full_attention_heads=[[], [], []]).save_pretrained(tmp_path)
    output = run(tmp_path).output
    assert row(output, "bytes per token")[:2] == ["4", "576"]
    assert "one mark per token is kept" in output


@first_of_each_family
def test_command_runs_on_every_family(case, tmp_path):
    configure(case).save_pretrained(tmp_path)
    done = run(tmp_path)
    assert done.exit_code == 0, done.output
    assert row(done.output, "total")


def test_no_model(tmp_path):
    with pytest.raises(SourceError, match=r"holds neither config\.json"):
        read_config(tmp_path)
    done = run(tmp_path / "absent")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert f"cannot read the configuration of {tmp_path / 'absent'}" in done.stderr

"""What is particular to TLM: gates, the memory in a layer, decoding from the middle of a chunk, presets."""

import pytest
import torch
from families import assert_same, build, configure, random_tokens
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache

from hf_hybrid import TLMConfig, TLMForCausalLM, titans
from hf_hybrid.attention import RMSNorm
from hf_hybrid.neural_memory import recurrent_neural_memory
from hf_hybrid.sequence_layout import SequenceLayout

TITANS = ("mag", "mal", "lmm")


def mixer_arguments(config, hidden):
    positions = torch.arange(hidden.shape[1])[None]
    masks = {"full_attention": None, "sliding_attention": None}
    return {
        "attention_masks": masks,
        "layout": SequenceLayout(),
        "position_embeddings": None,
        "position_ids": positions,
    }


@pytest.mark.parametrize("variant", ["gated", "headwise-window"])
def test_a_zero_gate_halves_the_heads(variant):
    model = build(("tlm", variant))
    gated = model.model.layers[0].token_mixer
    plain = build(("tlm", variant), token_mixer="attention", attention_output_gate="none").model.layers[0].token_mixer
    plain.load_state_dict({name: value for name, value in gated.state_dict().items() if "g_proj" not in name})
    with torch.no_grad():
        gated.attention.g_proj.weight.zero_()
        hidden = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(0))
        arguments = mixer_arguments(model.config, hidden)
        assert gated(hidden, **arguments).equal(plain(hidden, **arguments) / 2)


@pytest.mark.parametrize("variant", TITANS)
def test_a_layer_reads_as_the_recurrence_does(variant, monkeypatch):
    """The whole mixer with the memory read token by token, and joined with attention as its variant is defined."""
    model = build(("tlm", variant))
    mixer, hidden = (
        model.model.layers[0].token_mixer,
        torch.randn(2, 13, 40, generator=torch.Generator().manual_seed(0)),
    )
    arguments = mixer_arguments(model.config, hidden)
    with torch.no_grad():
        actual = mixer(hidden, **arguments)

    def by_token(*inputs):
        *parts, state, chunk_size, residual, lengths = inputs
        assert lengths is None
        double = type(state)(*(part.double() for part in state))
        outputs, _ = recurrent_neural_memory(*(part.double() for part in parts), double, chunk_size, residual)
        return outputs.detach().float(), state

    def normed(rows, norm):
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight

    monkeypatch.setattr(titans, "chunk_neural_memory", by_token)
    with torch.no_grad():
        memory = normed(mixer.memory(hidden, SequenceLayout()), mixer.memory_norm)
        assert isinstance(mixer.memory_norm, RMSNorm)
        if variant == "lmm":
            expected = memory
        else:
            arguments.pop("layout")
            arguments["attention_mask"] = arguments.pop("attention_masks")["full_attention"]
            read = memory @ mixer.m_proj.weight.T if variant == "mal" else hidden
            expected = mixer.attention(read, **arguments)[0].flatten(2)
        if variant == "mag":
            expected = normed(expected, mixer.attention_norm) * memory.sigmoid()
        assert_same(actual, expected @ mixer.o_proj.weight.T)


@pytest.mark.parametrize("variant", TITANS)
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 7, 10, 11])
def test_decoding_from_the_middle_of_a_chunk(variant, prompt):
    model, tokens = build(("tlm", variant)), random_tokens(2, 14)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        pieces = [model(tokens[:, :prompt], cache=cache).logits]
        pieces += [model(tokens[:, t : t + 1], cache=cache).logits for t in range(prompt, 14)]
    assert_same(torch.cat(pieces, dim=1), expected)


@pytest.mark.parametrize("variant", TITANS)
def test_the_memory_reaches_past_the_window_and_never_ahead(variant):
    model, tokens = build(("tlm", variant), num_hidden_layers=1, mlp_taper=None), random_tokens(1, 12)
    other = tokens.clone()
    other[0, 0] = 3 if tokens[0, 0] != 3 else 4
    later = tokens.clone()
    later[0, 9] = 3 if tokens[0, 9] != 3 else 4
    with torch.no_grad():
        first, changed, ahead = (model(rows, use_cache=False).logits[0] for rows in (tokens, other, later))
    assert (first[11] - changed[11]).abs().max() > 1e-4
    assert first[:9].equal(ahead[:9])


def test_the_chunk_size_is_part_of_the_function():
    tokens = random_tokens(1, 12)
    with torch.no_grad():
        short, long = (
            build(("tlm", "lmm"), memory_chunk_size=size, memory_max_rate=0.05)(tokens).logits for size in (2, 8)
        )
    assert not torch.allclose(short, long, atol=1e-4)


@pytest.mark.parametrize(("size", "millions"), [("440m", 441.8), ("760m", 757.0), ("1.3b", 1298.8)])
def test_presets_have_the_papers_sizes(size, millions):
    counts = []
    for taper in ({}, None):
        with torch.device("meta"):
            counts.append(TLMForCausalLM(TLMConfig.from_scratch(size, mlp_taper=taper)).num_parameters())
    assert counts[0] == counts[1]
    assert counts[0] / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"token_mixer": "mamba"}, "token_mixer is 'mamba'"),
        ({"attention_output_gate": "headwise"}, "attention_output_gate is 'headwise', token_mixer 'attention'"),
        ({"memory_variant": "mac"}, "memory_variant is 'mac'"),
        ({"memory_chunk_size": 0}, "memory_chunk_size is 0"),
        ({"memory_expansion": 0}, "memory_expansion is 0"),
        ({"memory_max_rate": 0.0}, "memory_max_rate is 0.0"),
        ({"memory_forgetting": 1.0}, "memory_forgetting is 1.0"),
        ({"memory_momentum": 0.0}, "memory_momentum is 0.0"),
    ],
)
def test_fields_are_refused_by_name(fields, named):
    with pytest.raises((ValueError, StrictDataclassError), match=named):
        configure(("tlm", "attention"), **fields)

"""The cosine of MLP output and residual stream, against each architecture's layers written out."""

import math

import pytest
import torch
from families import build
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GPTNeoXConfig, LlamaConfig

from hf_hybrid.conversion.depth_asymmetry import MLPAlignment, decoder_layers, draw, mlp_alignment
from hf_hybrid.conversion.source_model import SourceError

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3}


def small(config):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens():
    return torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(0))


def from_hidden_states(model, mlp_of):
    """Cosines from the recorded hidden states alone: the stream before the MLP is rebuilt from the layer's input."""
    rows = []
    for window in tokens():
        states = model(input_ids=window[None], output_hidden_states=True, use_cache=False).hidden_states
        rows.append([mlp_of(layer, states[i]) for i, layer in enumerate(decoder_layers(model))])
    return torch.tensor(rows).mean(0)


def cosine(mlp, stream):
    return torch.nn.functional.cosine_similarity(mlp[:, 1:].double(), stream[:, 1:].double(), dim=-1).mean().item()


def test_sequential_layers():
    model = small(LlamaConfig(**SIZES, num_key_value_heads=3))

    def mlp_of(layer, inputs):
        positions = torch.arange(inputs.shape[1])[None]
        angles = model.model.rotary_emb(inputs, positions)
        mask = torch.full((inputs.shape[1],) * 2, -math.inf).triu(1)[None, None]
        attended = layer.self_attn(layer.input_layernorm(inputs), position_embeddings=angles, attention_mask=mask)[0]
        stream = inputs + attended
        return cosine(layer.mlp(layer.post_attention_layernorm(stream)), stream)

    with torch.no_grad():
        torch.testing.assert_close(
            mlp_alignment(model, tokens()).cosine, from_hidden_states(model, mlp_of).double(), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=61, n_embd=24, n_layer=3, n_head=3),
        GPTNeoXConfig(**SIZES),
        Gemma2Config(**SIZES, num_key_value_heads=3, head_dim=8),
    ],
    ids=lambda config: config.model_type,
)
def test_every_layer_of_other_architectures(config):
    """The last layer's output is stream + MLP, so a zeroed MLP (or the norm after it) leaves no cosine there."""
    model = small(config)
    alignment = mlp_alignment(model, tokens())
    assert alignment.cosine.shape == alignment.relative_norm.shape == (3,)
    assert alignment.cosine.abs().max() <= 1
    assert (alignment.relative_norm > 0).all()
    layer = decoder_layers(model)[-1]
    with torch.no_grad():
        if hasattr(layer, "post_feedforward_layernorm"):
            layer.post_feedforward_layernorm.weight.fill_(-1)  # Gemma's norm multiplies by 1 + weight.
        else:
            for parameter in layer.mlp.parameters():
                parameter.zero_()
    zeroed = mlp_alignment(model, tokens())
    assert zeroed.relative_norm[-1] == 0
    torch.testing.assert_close(zeroed.cosine[:-1], alignment.cosine[:-1])


def test_zoo_models_and_the_figure():
    model = build(("hwh", "headwise"))
    alignment = mlp_alignment(model, tokens())
    assert len(alignment.cosine) == 3
    assert "Correlation of the cosine with depth" in draw(alignment, "tiny").caption


def test_depth_correlation():
    rising = MLPAlignment(torch.tensor([0.1, 0.2, 0.3]).double(), torch.ones(3))
    assert rising.depth_correlation == pytest.approx(1)
    assert math.isnan(MLPAlignment(torch.ones(1), torch.ones(1)).depth_correlation)


def test_too_short_windows_are_refused():
    with pytest.raises(SourceError, match="windows of 1 tokens"):
        mlp_alignment(small(LlamaConfig(**SIZES, num_key_value_heads=3)), tokens()[:, :1])

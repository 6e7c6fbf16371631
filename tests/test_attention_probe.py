"""The probe on small random models of every kind of rotary embedding that transformers has for causal models."""

from collections import defaultdict

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_hybrid.conversion.attention_probe import probe_attention
from hf_hybrid.conversion.source_model import SourceError

BATCH, TOKENS, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 2, 23, 6, 3, 16, 4
SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * (LAYERS // 2)

# id: model type, settings, what its layers rotate with (None: not at all).
MODELS = {
    "llama": ("llama", {}, ["half-split"] * LAYERS),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3}, ["half-split"] * LAYERS),
    "llama-yarn": ("llama", {"rope_parameters": YARN}, ["half-split"] * LAYERS),
    "qwen2-bias": ("qwen2", {}, ["half-split"] * LAYERS),
    "qwen3-qk-norm": ("qwen3", {}, ["half-split"] * LAYERS),
    "olmo2-qk-norm-over-heads": ("olmo2", {}, ["half-split"] * LAYERS),
    "mistral-window": ("mistral", {"sliding_window": 5}, ["half-split"] * LAYERS),
    "smollm3-nope": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, ["half-split", None] * (LAYERS // 2)),
    "gpt_neox-partial": (
        "gpt_neox",
        {"hidden_size": HEADS * HEAD_DIM, "rope_parameters": PARTIAL},
        ["half-split"] * LAYERS,
    ),
    "gemma2-softcap": (
        "gemma2",
        {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9, "sliding_window": 5},
        ["half-split"] * LAYERS,
    ),
    "gemma3-local-global": ("gemma3_text", {"sliding_window": 5, "layer_types": LOCAL_GLOBAL}, ["half-split"] * LAYERS),
    "cohere-interleaved": ("cohere", {}, ["interleaved"] * LAYERS),
    "glm-interleaved-partial": ("glm", {}, ["interleaved"] * LAYERS),
}


def make_model(name: str) -> nn.Module:
    model_type, settings, _ = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**SIZES, **settings})).eval()
    # Biases start at 0 and norm weights at 1 (or 0), where a mistake would not be seen.
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.3)
    # So that a difference is a mistake, not the rounding of large random activations.
    return model.double()


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def run_probed(model, input_ids, change=lambda layer: None):
    """The logits of a probed forward pass, and every layer that the probe showed."""
    layers = []

    def on_layer(layer):
        layers.append(layer)
        return change(layer)

    with torch.no_grad(), probe_attention(model, on_layer):
        logits = model(input_ids, use_cache=False).logits
    return logits, layers


def projections(model: nn.Module, input_ids: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Each layer's query and key [B, H, T, D] at the outputs of its modules, before any rotation."""
    found, hooks = defaultdict(list), []

    def keep(name):
        def hook(module, args, output):
            x = output.unflatten(-1, (-1, HEAD_DIM)) if output.ndim == 3 else output
            found[name].append(x.transpose(1, 2) if x.shape[1] == TOKENS else x)

        return hook

    def keep_fused(module, args, output):
        for name, x in zip(("query", "key"), output.unflatten(-1, (HEADS, 3, HEAD_DIM)).unbind(-2), strict=False):
            found[name].append(x.transpose(1, 2))

    for module in model.modules():
        if hasattr(module, "q_proj"):
            for name, letter in (("query", "q"), ("key", "k")):
                last = getattr(module, f"{letter}_norm", None) or getattr(module, f"{letter}_proj")
                hooks.append(last.register_forward_hook(keep(name)))
        elif hasattr(module, "query_key_value"):
            hooks.append(module.query_key_value.register_forward_hook(keep_fused))
    with torch.no_grad():
        model(input_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_unrotated_vectors_are_the_projections(name, input_ids):
    model = make_model(name)
    expected = projections(model, input_ids)
    _, layers = run_probed(model, input_ids)
    assert [layer.layer_idx for layer in layers] == list(range(LAYERS))
    assert [layer.rotary and layer.rotary.layout.name for layer in layers] == MODELS[name][2]
    for layer, query, key in zip(layers, expected["query"], expected["key"], strict=True):
        assert layer.query.shape == query.shape == (BATCH, HEADS, TOKENS, HEAD_DIM)
        for found, right in zip(layer.unrotated(), (query, key), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        if layer.rotary is None:
            assert torch.equal(layer.query, query) and torch.equal(layer.key, key)
        else:
            assert (layer.query - query)[:, :, 1:].abs().max() > 0.1  # the layer does rotate
            for plain, rotated in zip(layer.unrotated(), (layer.query, layer.key), strict=True):
                torch.testing.assert_close(layer.rotary.rotate(plain), rotated, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_pass_is_unchanged(name, input_ids):
    model = make_model(name)
    before = model.config._attn_implementation
    with torch.no_grad():
        own = model(input_ids, use_cache=False).logits
        model.set_attn_implementation("eager")
        eager = model(input_ids, use_cache=False).logits
        model.set_attn_implementation(before)
    probed, _ = run_probed(model, input_ids)
    if before == "sdpa":
        assert torch.equal(probed, own)
    torch.testing.assert_close(probed, eager, rtol=1e-5, atol=1e-5)
    # Replacing query and key by themselves, and keys by one for each query head, changes nothing either.
    same, _ = run_probed(
        model, input_ids, lambda layer: (layer.query, layer.key.repeat_interleave(HEADS // layer.key.shape[1], dim=1))
    )
    torch.testing.assert_close(same, eager, rtol=1e-5, atol=1e-5)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.equal(model(input_ids, use_cache=False).logits, own)


@pytest.mark.parametrize("name", ["llama-yarn", "gpt_neox-partial", "gemma3-local-global"])
def test_replacing_by_unrotated_vectors_is_the_model_without_rotation(name, input_ids):
    model = make_model(name)
    probed, _ = run_probed(model, input_ids, lambda layer: layer.unrotated(keep_amplitude=True))
    rotary = model.base_model.rotary_emb

    def still(module, args, output):
        return tuple((x.square() + y.square()).sqrt() * on for x, y, on in ((*output, 1), (*output, 0)))

    with torch.no_grad(), rotary.register_forward_hook(still):
        expected = model(input_ids, use_cache=False).logits
    torch.testing.assert_close(probed, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert (expected - model(input_ids, use_cache=False).logits).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "llama-3.1", "llama-yarn", "gpt_neox-partial", "cohere-interleaved"])
def test_wavelengths_are_the_models(name, input_ids):
    model = make_model(name)
    _, layers = run_probed(model, input_ids)
    expected = (2 * torch.pi / model.base_model.rotary_emb.inv_freq).float()
    for layer in layers:
        torch.testing.assert_close(layer.rotary.wavelengths, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3-local-global"])
def test_attendable_keys(name, input_ids):
    _, layers = run_probed(make_model(name), input_ids)
    positions = torch.tensor([3, 17, 9])
    i, j = positions[:, None], torch.arange(TOKENS)
    for layer in layers:
        local = name == "mistral-window" or (name == "gemma3-local-global" and layer.layer_idx % 2 == 0)
        expected = (j <= i) & (j > i - 5) if local else j <= i
        assert torch.equal(layer.attendable(positions), expected.expand(layer.attendable(positions).shape[0], -1, -1))


def test_scaling_and_softcap_are_the_models(input_ids):
    _, layers = run_probed(make_model("gemma2-softcap"), input_ids)
    assert [(layer.scaling, layer.softcap) for layer in layers] == [(9**-0.5, 2.0)] * LAYERS


def test_low_precision_models_are_recognised(input_ids):
    for dtype in (torch.bfloat16, torch.float16):
        for name in ("llama-yarn", "smollm3-nope", "glm-interleaved-partial"):
            _, layers = run_probed(make_model(name).to(dtype), input_ids)
            assert [layer.rotary and layer.rotary.layout.name for layer in layers] == MODELS[name][2]


def small(model_type: str, **settings) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings)).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small("gpt2", vocab_size=61, n_embd=24, n_layer=2, n_head=3), "no rotary position embeddings"),
        (
            lambda: small("bloom", vocab_size=61, hidden_size=24, n_layer=2, n_head=3),
            "BloomForCausalLM does not use transformers' attention interface",
        ),
        (lambda: small("gpt_oss", **SIZES, num_local_experts=2, num_experts_per_tok=1), "adds s_aux to its attention"),
    ],
    ids=["gpt2-no-rope", "bloom-no-interface", "gpt_oss-sinks"],
)
def test_what_cannot_be_probed_is_refused(make, message, input_ids):
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(SourceError, match=message):
        run_probed(model, input_ids)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        model(input_ids, use_cache=False)


def test_an_unknown_layout_is_refused(input_ids, monkeypatch):
    def reversed_pairs(q, k, cos, sin, unsqueeze_dim=1):
        """Pair f is dimensions f and D - 1 - f."""

        def turn(x):
            half = x.shape[-1] // 2
            c, s = cos[..., :half].unsqueeze(unsqueeze_dim), sin[..., :half].unsqueeze(unsqueeze_dim)
            first, second = x[..., :half], x[..., half:].flip(-1)
            return torch.cat((first * c - second * s, (second * c + first * s).flip(-1)), dim=-1)

        return turn(q), turn(k)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", reversed_pairs)
    model = make_model("llama")
    with pytest.raises(SourceError, match=r"layer 0 \(LlamaAttention\).*neither half-split nor interleaved"):
        run_probed(model, input_ids)


def test_a_cache_a_second_probe_and_two_way_attention_are_refused(input_ids):
    model = make_model("llama")
    with torch.no_grad():
        cache = model(input_ids, use_cache=True).cache
    with torch.no_grad(), probe_attention(model, lambda layer: None):
        with pytest.raises(SourceError, match="23 queries and 46 keys; run it with use_cache=False"):
            model(input_ids, cache=cache)
        with pytest.raises(SourceError, match="being probed already"), probe_attention(model, lambda layer: None):
            pass
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(SourceError, match="attends in both directions"):
        run_probed(model, input_ids)

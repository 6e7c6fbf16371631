"""Dual-stream models against 2T slots under a dense mask, written from the definition; sizes, costs, prefill."""

import pytest
import torch
from families import alone, assert_same, build, configure, random_tokens
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache

from hf_hybrid import DualStreamConfig, DualStreamForCausalLM, modeling_dual_stream
from hf_hybrid.attention import rotate
from hf_hybrid.configuration_dual_stream import READS_STATES, STREAM_MODES


def dense_mask(mode, window, documents):
    """`[2T, 2T]` for slots 2i (state) and 2i + 1 (prediction), slot by slot."""
    length = len(documents)
    mask = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
    for a in range(2 * length):
        for b in range(a + 1):
            i, j, key_is_state = a // 2, b // 2, b % 2 == 0
            if documents[i] != documents[j]:
                continue
            near = i - j <= window
            mask[a, b] = {
                "dual": key_is_state or near,
                "double_memory": True,
                "delayed_state": near or not key_is_state,
                "reverse": near or not key_is_state,
                "query_only": key_is_state,
                "standard": key_is_state,
            }[mode]
    return mask


def dense_logits(model, tokens, documents=None):
    """The whole model over 2T slots in float64, `[T, vocab]`."""
    config, length = model.config, len(tokens)
    documents = [0] * length if documents is None else documents
    mask = dense_mask(config.stream_mode, config.prediction_window, documents)
    first = [documents.index(document) for document in documents]
    positions = torch.tensor([place - start for place, start in enumerate(first)]).repeat_interleave(2)[None]
    embedding = model.model.embed_tokens.weight
    predict = model.model.predict_embedding
    # Without predictions what stands in their slots is read by nobody.
    predict = embedding[:1] if predict is None else predict.weight
    slots = torch.stack([embedding[tokens], predict.expand(length, -1)], 1).flatten(0, 1)
    hidden = slots[None].double()
    cos, sin = model.model.rotary_emb(hidden, positions)

    def norm(rows, module):
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight.double()

    def linear(rows, module):
        return torch.nn.functional.linear(
            rows, module.weight.double(), None if module.bias is None else module.bias.double()
        )

    groups = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        rows, mixer = norm(hidden, layer.input_layernorm), layer.token_mixer
        heads = [linear(rows, mixer.get_submodule(name)) for name in ("q_proj", "k_proj", "v_proj")]
        query, key, value = (part.view(1, 2 * length, -1, config.head_dim) for part in heads)
        if config.qk_norm:
            query, key = norm(query, mixer.q_norm), norm(key, mixer.k_norm)
        query = rotate(query, cos.double(), sin.double()).transpose(1, 2)
        key = rotate(key, cos.double(), sin.double()).transpose(1, 2).repeat_interleave(groups, dim=1)
        value = value.transpose(1, 2).repeat_interleave(groups, dim=1)
        weights = (query @ key.mT * config.head_dim**-0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        hidden = hidden + linear((weights @ value).transpose(1, 2).flatten(2), mixer.o_proj)
        rows, mlp = norm(hidden, layer.post_attention_layernorm), layer.mlp
        active = torch.nn.functional.silu(linear(rows, mlp.gate_proj)) * linear(rows, mlp.up_proj)
        hidden = hidden + linear(active, mlp.down_proj)
    read = hidden[0, 0 if config.stream_mode in READS_STATES else 1 :: 2]
    return linear(norm(read, model.model.norm), model.lm_head)


def small(mode, window=2, **fields):
    return build(("dual_stream", "dual"), stream_mode=mode, prediction_window=window, mlp_taper=None, **fields)


@pytest.mark.parametrize("mode", STREAM_MODES)
@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("block", [256, 4])
def test_every_mode_equals_the_dense_mask(mode, window, block, monkeypatch):
    monkeypatch.setattr(modeling_dual_stream, "BLOCK", block)
    model, tokens = small(mode, window), random_tokens(11)
    with torch.no_grad():
        assert_same(alone(model, tokens).double(), dense_logits(model, tokens))


@pytest.mark.parametrize("mode", STREAM_MODES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_kernels(mode, attention):
    model, tokens = small(mode, attn_implementation=attention), random_tokens(9)
    with torch.no_grad():
        assert_same(alone(model, tokens).double(), dense_logits(model, tokens))


@pytest.mark.parametrize("mode", STREAM_MODES)
def test_packed_documents_and_padding_equal_the_dense_mask(mode, monkeypatch):
    monkeypatch.setattr(modeling_dual_stream, "BLOCK", 3)
    model, tokens = small(mode), random_tokens(12)
    documents = [0] * 5 + [1] * 4 + [2] * 3
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2])[None]
    with torch.no_grad():
        packed = model(tokens[None], position_ids=positions, use_cache=False).logits[0]
        assert_same(packed.double(), dense_logits(model, tokens, documents))
        mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1]])
        padded = model(tokens[None], attention_mask=mask, use_cache=False).logits[0, mask[0].bool()]
        assert_same(padded.double(), dense_logits(model, tokens[mask[0].bool()]))


def test_standard_is_the_ordinary_decoder():
    """The same weights in a Transformer of the HwH family."""
    model, tokens = small("standard"), random_tokens(10)
    heads = {"full_attention_heads": [list(range(6))] * 3, "full_attention_rope": True, "qk_norm": True}
    other = build(("hwh", "transformer"), **heads)
    moved = {}
    for name, value in model.state_dict().items():
        if "o_proj" not in name:
            name = name.replace("token_mixer.", "token_mixer.attention.")
        moved[name] = value
    other.load_state_dict(moved)
    assert_same(alone(model, tokens), alone(other, tokens), 1e-6)


def test_query_only_is_dual_with_hidden_prediction_keys_and_prefills_states_alone():
    model, tokens = small("query_only"), random_tokens(2, 9)
    rows = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    with torch.no_grad():
        everything = model(tokens, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        last = model(tokens, cache=cache, logits_to_keep=1).logits
    assert rows == [18, 10]
    assert_same(last, everything[:, -1:])
    assert [layer.keys.shape[2] for layer in cache.layers] == [9] * 3


def test_states_of_the_last_layer_are_not_computed():
    model, tokens = small("dual"), random_tokens(2, 9)
    rows = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    model(tokens, use_cache=False)
    assert rows == [18, 18, 9]


@pytest.mark.parametrize(("window", "kept"), [(0, 1), (3, 3), (20, 14)])
def test_the_cache_keeps_all_states_and_a_window_of_predictions(window, kept):
    model, cache = small("dual", window), None
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        for start in range(0, 14, 2):
            model(random_tokens(1, 2, seed=start), cache=cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [14, kept] * 3


@pytest.mark.parametrize(("size", "millions"), [("xs", 53.0), ("s", 130.7), ("m", 378.7), ("l", 831.3), ("xl", 1678.1)])
def test_parameter_counts_of_the_paper(size, millions):
    with torch.device("meta"):
        model = DualStreamForCausalLM(DualStreamConfig.from_scratch(size))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.06)


def test_output_projections_start_smaller():
    torch.manual_seed(0)
    model = DualStreamForCausalLM(DualStreamConfig.from_scratch("tiny"))
    weight = model.model.layers[0].token_mixer.o_proj.weight
    assert weight.std().item() == pytest.approx(0.02 / (2 * 6) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream_mode": "triple"}, "stream_mode is 'triple'"),
        ({"prediction_window": -1}, "prediction_window is -1"),
        ({"sliding_window": 4}, "sliding_window is 4"),
        ({"attention_output_gate": "headwise"}, "attention_output_gate"),
        ({"logit_scaling_base": 8}, "logit_scaling_base is 8"),
    ],
)
def test_fields_are_refused_by_name(fields, named):
    with pytest.raises((ValueError, StrictDataclassError), match=named):
        configure(("dual_stream", "dual"), **fields)

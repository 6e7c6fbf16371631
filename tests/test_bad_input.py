"""What the models refuse: one clear error that names the field or the argument and its value."""

import pytest
import torch
from families import build, configure, first_of_each_family, random_tokens
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache

from hf_hybrid import HwHConfig

NAN = float("nan")
# The second is how the library passes on an error of a class's own validator; the message is in it whole.
REFUSED = (ValueError, StrictDataclassError)


@first_of_each_family
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in ("num_hidden_layers", "num_attention_heads", "hidden_size") for value in (0, -1)),
        *((field, 0) for field in ("vocab_size", "intermediate_size", "num_key_value_heads", "head_dim")),
        ("num_key_value_heads", 4),
        ("hidden_act", "softsign2"),
        ("rms_norm_eps", NAN),
        ("initializer_range", -0.1),
        ("attention_dropout", 1.0),
        ("attention_dropout", 1.5),
        ("logit_scaling_base", 1),
        ("pad_token_id", 97),
        ("pad_token_id", -1),
        ("sliding_window", 1),
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": -1}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "a"}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("per_layer_config", {0: {"head_dim": 4}}),
        ("per_layer_config", {0: {"intermediate_size": 0}}),
        ("per_layer_config", {1: 16}),
        ("per_layer_config", {1: None}),
        ("per_layer_config", [{"intermediate_size": 16}]),
        ("per_layer_config", "x"),
        ("per_layer_config", {"a": {"intermediate_size": 16}}),
        ("per_layer_config", {3: {"intermediate_size": 16}}),
        ("per_layer_config", {1: {"intermediate_size": "x"}}),
        ("max_position_embeddings", 0),
        ("mlp_taper", {"start": "1.5"}),
        ("mlp_taper", {"start": None}),
        ("mlp_taper", {"multiple_of": 8.5}),
        ("mlp_taper", {1: 2, "a": 3}),
        ("mlp_taper", {"schedule": "cosin"}),
        ("mlp_taper", {"width": 3}),
        ("mlp_taper", {"multiple_of": 16}),
    ],
    ids=str,
)
def test_a_configuration_is_refused_by_name(case, field, value):
    with pytest.raises(REFUSED, match=field):
        configure(case, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("preset", "half"),
        ("linear_key_head_dim", 0),
        ("linear_value_head_dim", -4),
        ("linear_conv_kernel_dim", 0),
        ("linear_conv_activation", "none"),
        ("linear_a_min", -1),
        ("linear_a_max", 0),
        ("linear_dt_min", 0),
        ("linear_dt_max", 1e-4),
        ("full_attention_heads", [[0]]),
        ("full_attention_rope", [True]),
    ],
    ids=str,
)
def test_hwh_fields_are_refused_by_name(field, value):
    with pytest.raises(REFUSED, match=field):
        configure(("hwh", "headwise"), **{field: value})


def test_a_baseline_without_a_period_is_refused():
    with pytest.raises(ValueError, match="period is 0"):
        HwHConfig().baseline("layerwise", period=0)


@first_of_each_family
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, "2 rows of 0 tokens"),
        ({"input_ids": torch.ones(0, 5, dtype=torch.long)}, "0 rows of 5 tokens"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask has shape \[2, 4\]"),
        ({"attention_mask": torch.ones(3, 6)}, r"attention_mask has shape \[3, 6\]"),
        ({"attention_mask": torch.ones(2, 9)}, r"attention_mask has shape \[2, 9\]"),
        ({"attention_mask": torch.ones(6)}, r"attention_mask has shape \[6\]"),
        ({"attention_mask": torch.ones(2, 6, 6)}, r"attention_mask has shape \[2, 6, 6\]"),
        ({"attention_mask": [[1] * 6] * 2}, "attention_mask is a list"),
        ({"input_ids": torch.arange(6)}, r"input_ids have shape \[6\]"),
        ({"input_ids": torch.arange(6)[None], "cu_seq_lens_q": [0, 2, 6]}, "cu_seq_lens is a list"),
        ({"position_ids": torch.arange(4)[None]}, r"position_ids have shape \[1, 4\]"),
        ({"position_ids": torch.zeros(3, 6, dtype=torch.long)}, r"position_ids have shape \[3, 6\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_of_other_shapes_are_refused(case, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(case)(**{"input_ids": random_tokens(2, 6), **arguments})


@first_of_each_family
@pytest.mark.parametrize("ends", [[0, 4], [2, 6], [0, 5, 3, 6], [0, 4, 9], []], ids=str)
def test_document_lengths_that_do_not_sum_up_are_refused(case, ends):
    with pytest.raises(ValueError, match="cu_seq_lens"):
        build(case)(random_tokens(1, 6), cu_seq_lens_q=torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("size", [1, 3])
def test_a_first_token_without_an_embedding_is_still_the_first(size):
    """The padding row of an embedding is zero, and so is what every projection makes of it."""
    model = build(("hwh", "upcycling"))
    assert model.config.linear_start_token == "value"
    tokens = random_tokens(2, 9)
    tokens[:, 0] = 0
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
        whole, cache = model(tokens).logits, DynamicCache(config=model.config)
        parts = torch.cat([model(part, cache=cache).logits for part in tokens.split(size, dim=1)], dim=1)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_recurrent_heads_refuse_what_they_cannot_follow():
    model, tokens = build(("hwh", "headwise")), random_tokens(2, 6)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 1, 6, 6\].*position_ids"):
        model(tokens, attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        model(tokens, cache=DynamicCache())


@first_of_each_family
def test_fields_changed_on_loading_are_checked_and_derived_from(case, tmp_path):
    configure(case, mlp_taper={"multiple_of": 4}, per_layer_config=None).save_pretrained(tmp_path)
    config_class = type(configure(case))
    uniform = config_class.from_pretrained(tmp_path, mlp_taper=None)
    assert [layer.intermediate_size for layer in uniform.per_layer_config] == [56, 56, 56]
    wider = config_class.from_pretrained(tmp_path, intermediate_size=80)
    assert [layer.intermediate_size for layer in wider.per_layer_config] == [120, 80, 40]
    with pytest.raises(REFUSED, match="hidden_act"):
        config_class.from_pretrained(tmp_path, hidden_act="softsign2")
    config, unused = config_class.from_pretrained(tmp_path, qk_norm=True, foo=1, return_unused_kwargs=True)
    assert config.qk_norm
    assert unused == {"foo": 1}


def test_a_split_of_another_depth_is_refused_on_loading(tmp_path):
    configure(("hwh", "headwise")).save_pretrained(tmp_path)
    with pytest.raises(REFUSED, match="full_attention_heads has 3 layers, but num_hidden_layers is 2"):
        HwHConfig.from_pretrained(tmp_path, num_hidden_layers=2)

"""The models that the invariant tests run on, and how they compare. A new family joins by one entry in FAMILIES."""

from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_hybrid import DualStreamConfig, HwHConfig, MobiusConfig, TLMConfig

# Every size differs from every other, so that no transposed or broadcast dimension goes unseen.
SIZES = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ALL, SOME = list(range(6)), [0, 3, 4]


@dataclass
class Family:
    """One family: its configuration class, and named variants that together reach every branch of its code."""

    config_class: type
    variants: dict[str, dict] = field(default_factory=dict)


FAMILIES = {
    "hwh": Family(
        HwHConfig,
        {
            "headwise": {"full_attention_heads": [SOME, [1], [2, 3, 4, 5]], "linear_value_head_dim": 10},
            "upcycling": {
                "preset": "upcycling",
                "full_attention_heads": [[0, 1], [], [2, 3, 4, 5]],
                "linear_rope": True,
                "linear_allow_neg_eigval": True,
                "per_layer_config": {1: {"intermediate_size": 24}},
            },
            "gdn": {"full_attention_heads": [[], [], []], "mlp_taper": {"multiple_of": 4}},
            "transformer": {"full_attention_heads": [ALL, ALL, ALL], "full_attention_rope": True, "qk_norm": True},
            "layerwise": {"full_attention_heads": [[], [], ALL], "attention_output_gate": "elementwise"},
            "window": {
                "full_attention_heads": [SOME, ALL, [5]],
                "sliding_window": 4,
                "sliding_window_layers": [0, 1],
                "full_attention_rope": [True, True, False],
                "attention_output_gate": "headwise",
                "attention_output_norm": True,
                "attention_head_scale": True,
                "logit_scaling_base": 64,
                "attention_bias": True,
                "attention_output_bias": True,
                "mlp_bias": True,
            },
            "no-convolution": {
                "full_attention_heads": [SOME, [1], []],
                "linear_conv_kernel_dim": 1,
                "linear_output_gate": "none",
                "linear_output_norm": False,
            },
        },
    ),
    "mobius": Family(
        MobiusConfig,
        {
            "headwise": {
                "num_block_groups": 3,
                "passes": 2,
                "start_group": 1,
                "full_attention_heads": [SOME, [1, 2, 5], [0, 2, 4]],
                "linear_value_head_dim": 10,
            },
            "looped": {
                "num_block_groups": 3,
                "passes": 3,
                "depth_order": "looped",
                "input_injection": True,
                "pass_norm": True,
                "qk_norm": True,
                "mlp_taper": {"multiple_of": 4},
            },
            "layer-loop": {
                "num_block_groups": 1,
                "passes": 2,
                "depth_order": "layer_loop",
                "full_attention_heads": [ALL, [], ALL],
                "sliding_window": 4,
                "sliding_window_layers": [2],
                "mlp_gated": False,
                "hidden_act": "relu2",
                "norm_weights": False,
                "attention_output_norm": True,
            },
            "streams": {
                "num_block_groups": 3,
                "start_group": 2,
                "stream_embeddings": True,
                "sliding_window": 5,
                "per_layer_config": {1: {"intermediate_size": 24}},
            },
            "groups": {
                "num_hidden_layers": 4,
                "num_block_groups": 2,
                "passes": 2,
                "full_attention_heads": [[], [1], [], [4]],
            },
            "gdn": {"num_block_groups": 3, "start_group": 1, "full_attention_heads": [[], [], []]},
        },
    ),
    "dual_stream": Family(
        DualStreamConfig,
        {
            "dual": {"prediction_window": 2, "mlp_taper": {"multiple_of": 4}, "qk_norm": True},
            "dual-0": {"prediction_window": 0, "attention_bias": True, "attention_output_bias": True},
            "delayed": {"stream_mode": "delayed_state", "prediction_window": 3},
            "reverse": {"stream_mode": "reverse", "prediction_window": 1},
            "double": {"stream_mode": "double_memory"},
            "query-only": {"stream_mode": "query_only"},
            "query-only-bias": {"stream_mode": "query_only", "mlp_bias": True},
            "standard": {"stream_mode": "standard"},
        },
    ),
    "tlm": Family(
        TLMConfig,
        {
            "attention": {"mlp_taper": {"multiple_of": 4}, "qk_norm": True},
            "gated": {"mlp_taper": {"multiple_of": 4}, "token_mixer": "gated_attention"},
            "headwise-window": {
                "mlp_taper": None,
                "token_mixer": "gated_attention",
                "attention_output_gate": "headwise",
                "sliding_window": 4,
                "sliding_window_layers": [1],
            },
            "mag": {
                "mlp_taper": {"multiple_of": 4},
                "token_mixer": "titans",
                "memory_chunk_size": 5,
                "sliding_window": 4,
            },
            "mal": {
                "mlp_taper": {"multiple_of": 4},
                "token_mixer": "titans",
                "memory_variant": "mal",
                "memory_chunk_size": 3,
                "memory_residual": False,
                "memory_conv_kernel_dim": 1,
            },
            "lmm": {
                "mlp_taper": {"schedule": "linear", "multiple_of": 4},
                "token_mixer": "titans",
                "memory_variant": "lmm",
                "memory_chunk_size": 4,
                "memory_expansion": 1,
            },
            "hope": {"mlp_taper": {"multiple_of": 4}, "token_mixer": "hope", "cms_periods": [1, 2, 4]},
        },
    ),
}

CASES = [(name, variant) for name, family in FAMILIES.items() for variant in family.variants]
every_model = pytest.mark.parametrize("case", CASES, ids="-".join)
# What does not depend on the mixers' options runs on each family's first variant only.
first_of_each_family = pytest.mark.parametrize(
    "case", [(name, next(iter(family.variants))) for name, family in FAMILIES.items()], ids="-".join
)


def configure(case: tuple[str, str], **overrides):
    """The small configuration of one case."""
    name, variant = case
    family = FAMILIES[name]
    return family.config_class(**{**SIZES, **family.variants[variant], **overrides})


def build(case: tuple[str, str], seed: int = 0, auto_class=AutoModelForCausalLM, **overrides):
    """A small model with weights large enough to matter and decays slow enough for leaks to show."""
    torch.manual_seed(seed)
    model = auto_class.from_config(configure(case, **overrides)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.fill_(-5.0)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.2 if "embed" not in parameter_name else 1.0)
    return model


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids without the special ones."""
    return torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def assert_same(actual, expected, tolerance=1e-5):
    """Equal up to `tolerance` of the largest expected value (at least 1)."""
    error = (actual - expected).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), error


def alone(model, tokens):
    """Logits `[T, vocab]` of one sequence in a batch of its own, without a cache."""
    with torch.no_grad():
        return model(tokens[None], use_cache=False).logits[0]


def place(sequences, total, where, seed=7):
    """Lays sequences into rows of `total` places. Returns tokens, mask and places; padding is random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = random_tokens(len(sequences), total, seed=seed)
    mask = torch.zeros(len(sequences), total, dtype=torch.long)
    places = []
    for row, sequence in enumerate(sequences):
        count = len(sequence)
        index = {
            "left": torch.arange(total - count, total),
            "right": torch.arange(count),
            "both": torch.arange(count) + (total - count) // 2,
            "interior": torch.randperm(total, generator=generator)[:count].sort().values,
        }[where]
        tokens[row, index], mask[row, index] = sequence, 1
        places.append(index)
    return tokens, mask, places

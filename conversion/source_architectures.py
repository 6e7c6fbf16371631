"""The model families that can be converted, one declarative entry each.

An entry says where a family keeps its tensors, which of its configuration fields mean what, and which of its layers
have rotary positions or a sliding window. Nothing outside this file asks for an architecture by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Fields with one name and one meaning in every family below and in HwHConfig.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_dropout",
)

# Endings of tensors that old checkpoints of any family hold and nobody reads, with the reason.
DROPPED = {".rotary_emb.inv_freq": "rotary frequencies follow from rope_parameters"}


def _no_layer(config: Any) -> list[int]:
    return []


def _every_layer(config: Any) -> list[int]:
    return list(range(config.num_hidden_layers))


def _sliding_layers(config: Any) -> list[int]:
    return [layer for layer, kind in enumerate(config.layer_types) if kind == "sliding_attention"]


@dataclass(frozen=True)
class SourceArchitecture:
    """How one family of RoPE decoders is laid out.

    Attributes:
        embedding, final_norm, head: full tensor names.
        layer: prefix of layer `{layer}`'s tensors; the module names below stand behind it.
        copied: layer modules that HwH has under the same name.
        query, key, value, output, query_norm, key_norm: the attention's modules.
        attention_bias, output_bias, mlp_bias: True, False, or the configuration field that says.
        qk_norm: whether every head's query and key are RMS-normalised before rotation.
        rope_layers, window_layers: configuration -> layers that rotate, layers whose attention slides.
    """

    model_type: str
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    copied: tuple[str, ...] = (
        "input_layernorm",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    rope_layers: Callable[[Any], list[int]] = _every_layer
    window_layers: Callable[[Any], list[int]] = _no_layer

    def hwh_fields(self, config: Any) -> dict[str, Any]:
        """The HwHConfig fields that a source configuration settles, apart from positions, windows and heads."""

        def flag(value: bool | str) -> bool:
            return getattr(config, value) if isinstance(value, str) else value

        return {
            **{name: getattr(config, name) for name in SHARED_FIELDS},
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "attention_bias": flag(self.attention_bias),
            "attention_output_bias": flag(self.output_bias),
            "mlp_bias": flag(self.mlp_bias),
            "qk_norm": self.qk_norm,
        }


ARCHITECTURES = {
    entry.model_type: entry
    for entry in (
        SourceArchitecture(
            "llama",
            attention_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        SourceArchitecture(
            "mistral",
            window_layers=lambda config: _every_layer(config) if config.sliding_window is not None else [],
        ),
        SourceArchitecture(
            "qwen2",
            attention_bias=True,
            window_layers=_sliding_layers,
        ),
        SourceArchitecture(
            "qwen3",
            attention_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            window_layers=_sliding_layers,
        ),
        SourceArchitecture(
            "smollm3",
            attention_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            rope_layers=lambda config: [layer for layer in _every_layer(config) if config.no_rope_layers[layer]],
            window_layers=lambda config: _sliding_layers(config) if config.use_sliding_window else [],
        ),
    )
}

# Configuration fields that give a kind of model away, whatever its name is.
_REFUSED = {
    "quantised": ("quantization_config",),
    "multimodal": ("vision_config", "audio_config", "text_config", "vision_tower", "mm_vision_tower"),
    "mixture-of-experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size"),
}
_REMEDY = {
    "quantised": "Convert the unquantised weights it was made from.",
    "multimodal": "Only text decoders can be converted; save its language model alone first.",
    "mixture-of-experts": "Only dense MLPs can be converted.",
}


def source_architecture(config: Mapping[str, Any]) -> SourceArchitecture:
    """The entry for a source's raw config.json.

    Raises:
        ValueError: the source is quantised, multimodal, a mixture of experts, or of a family without an entry.
    """
    model_type = config.get("model_type")
    for kind, names in _REFUSED.items():
        if name := next((name for name in names if config.get(name)), None):
            value = config[name]
            if isinstance(value, Mapping):
                value = value.get("quant_method") or value.get("model_type") or "set"
            raise ValueError(f"model_type {model_type!r} is a {kind} model here ({name}: {value}). {_REMEDY[kind]}")
    if model_type not in ARCHITECTURES:
        raise ValueError(f"model_type {model_type!r} can't be converted; supported are {', '.join(ARCHITECTURES)}.")
    return ARCHITECTURES[model_type]


def rope_parameters(config: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a source, in transformers' `rope_parameters` format.

    Args:
        config: the configuration as transformers loads it, older spellings translated.
        raw: the same configuration's file. transformers fills an absent theta with a default that can be 100 times
            off, so the file itself must state it.

    Raises:
        ValueError: the file states no theta, or only a part of each head is rotated.
    """
    stated = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if stated.get("rope_theta", raw.get("rope_theta")) is None:
        raise ValueError(
            "config.json states no rope_theta, neither in rope_parameters nor by itself, and none is assumed. Write "
            "the theta that the model was trained with into its config.json (Llama-2, for one: 10000.0)."
        )
    if (factor := config.rope_parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"partial_rotary_factor is {factor}; HwH rotates whole heads only.")
    return dict(config.rope_parameters)

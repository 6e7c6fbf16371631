"""What the configurations of all families share: sizes, attention options, windows, MLP widths, and their checks."""

from dataclasses import fields

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from .validators import (
    validate_activation,
    validate_at_least,
    validate_choice,
    validate_range,
    validate_rope_parameters,
)
from .width_taper import tapered_widths

MLP_TAPER_FIELDS = ("schedule", "start", "end", "multiple_of")


def hub_classes(model_type: str, prefix: str) -> dict[str, str]:
    """The `auto_map` of a family: what each Auto class finds in a Hub repository, whichever class saved it."""
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    models = {f"AutoModel{head.removeprefix('Model')}": f"modeling_{model_type}.{prefix}{head}" for head in heads}
    return {"AutoConfig": f"configuration_{model_type}.{prefix}Config", **models}


@strict
class DecoderConfig(PreTrainedConfig):
    r"""
    Sizes and options of the chassis (`decoder.py`). A family derives from it and adds what it opens.

    Everything derives here or in a family's [`DecoderConfig.derive_fields`]; the model only reads.

    Args:
        intermediate_size (`int`): MLP width, the mean where layers differ.
        mlp_taper (`dict`, *optional*): widths that change with depth at the same budget ([`tapered_widths`],
            arXiv 2606.23670): `schedule`, `start`, `end` and `multiple_of`, the ones left out at their defaults. They
            show as `per_layer_config[layer].intermediate_size`, which may also be given itself, for any widths:
            `per_layer_config={3: {"intermediate_size": 512}}`.
        rope_parameters (`dict`, *optional*): transformers' rotary parameters; read only where something is rotated.
        sliding_window (`int`, *optional*): tokens that the softmax heads of `sliding_window_layers` see, at least 2:
            the stock cache has no way to keep none of the tokens before.
        sliding_window_layers (`list[int]`, *optional*): layers with the window; `None` = all when one is set.
        qk_norm (`bool`): RMS norm of the queries and keys of softmax heads, per head.
        attention_output_gate (`str`): `"none"`, `"headwise"` or `"elementwise"` sigmoid gate, from the layer's input
            (arXiv 2505.06708).
        attention_output_norm (`bool`): RMS norm of each softmax head's output.
        attention_head_scale (`bool`): a learnable factor on each softmax head's output.
        logit_scaling_base (`float`, *optional*): a > 1 multiplies the logits by log(t + a) / log(a) at inference, t
            being the number of visible tokens (arXiv 2601.22156).
        mlp_gated (`bool`): down(act(gate x) * up x), three matrices; False: down(act(up x)), two.
        norm_weights (`bool`): whether RMS norms have weights.
        zero_init_outputs (`bool`): new output projections of mixers and MLPs are zero: a new layer is the identity.
        attention_bias (`bool`): biases of the query, key and value projections.
        attention_output_bias (`bool`): bias of the output projection.
    """

    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    # A family's own entries, `hub_classes(model_type, prefix)`.
    family_auto_map = {}
    base_model_tp_plan = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: int | float = 0.02
    rms_norm_eps: int | float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    mlp_gated: bool = True
    norm_weights: bool = True
    zero_init_outputs: bool = False
    attention_dropout: int | float = 0.0
    mlp_taper: dict | None = None
    layer_types: list[str] | None = None
    rope_parameters: RopeParameters | dict | None = None
    sliding_window: int | None = None
    sliding_window_layers: list[int] | None = None
    qk_norm: bool = False
    attention_output_gate: str = "none"
    attention_output_norm: bool = False
    attention_head_scale: bool = False
    logit_scaling_base: int | float | None = None

    def __post_init__(self, **kwargs):
        # Everything below derives from these.
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            validate_at_least(field, getattr(self, field), 1)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        for field in ("num_key_value_heads", "head_dim"):
            validate_at_least(field, getattr(self, field), 1)
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, num_key_value_heads {self.num_key_value_heads}: "
                "the first must be a multiple of the second"
            )
        if self.sliding_window is not None and self.sliding_window_layers is None:
            self.sliding_window_layers = list(range(self.num_hidden_layers))
        self.derive_fields()
        derived = [self.layer_type(layer) for layer in range(self.num_hidden_layers)]
        if self.layer_types is not None and self.layer_types != derived:
            raise ValueError(
                f"layer_types is {self.layer_types}, but the other fields give {derived}: leave layer_types out, it is "
                "derived"
            )
        self.layer_types = derived
        self.allow_global_per_layer_attribute_access = True
        self.auto_map = {**self.family_auto_map, **(kwargs.pop("auto_map", None) or {})}
        if widths := self._per_layer_widths(kwargs.pop("per_layer_config", None) or {}):
            kwargs["per_layer_config"] = {layer: {"intermediate_size": width} for layer, width in widths.items()}
        super().__post_init__(**kwargs)

    def __getattribute__(self, name: str):
        # Where layers differ in MLP width, readers outside of the zoo get the mean, without an error or a warning.
        return object.__getattribute__(self, name) if name == "intermediate_size" else super().__getattribute__(name)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """Like the parent's, with fields in `kwargs` checked and derived from like any others, not set afterwards."""
        own = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        changed = {name: kwargs.pop(name) for name in list(kwargs) if name in own or name == "per_layer_config"}
        merged = {**config_dict, **changed}
        if changed and "layer_types" not in changed:
            merged.pop("layer_types", None)
        # Widths that a taper gave follow the fields that it is made of.
        derived = config_dict.get("mlp_taper") is not None or changed.get("mlp_taper") is not None
        if derived and {"mlp_taper", "intermediate_size", "num_hidden_layers"} & changed.keys():
            merged["per_layer_config"] = changed.get("per_layer_config")
        return super().from_dict(merged, **kwargs)

    def to_dict(self) -> dict:
        """Like the parent's; widths that a taper gives are left out, they derive from it."""
        return self._without_derived_widths(super().to_dict())

    def to_diff_dict(self) -> dict:
        """As [`DecoderConfig.to_dict`], of what differs from the defaults."""
        return self._without_derived_widths(super().to_diff_dict())

    def _without_derived_widths(self, content: dict) -> dict:
        if self.mlp_taper is not None:
            content.pop("per_layer_config", None)
        return content

    def derive_fields(self):
        """A family's own derivations: after the sizes are known, before `layer_types` is."""

    def layer_type(self, layer: int) -> str:
        """The kind of cache layer that a layer needs, one of transformers' `layer_types`."""
        return "full_attention" if self.layer_sliding_window(layer) is None else "sliding_attention"

    def _per_layer_widths(self, given: dict) -> dict[int, int]:
        """MLP widths by layer, from `per_layer_config` or `mlp_taper`; none when every layer has the mean."""
        widths = {}
        if not isinstance(given, dict) or not all(isinstance(changed, dict) for changed in given.values()):
            raise ValueError(
                f"per_layer_config is {given!r}: give the layers that differ, as {{3: {{'intermediate_size': 512}}}}"
            )
        for layer, changed in given.items():
            if not str(layer).isdecimal() or int(layer) >= self.num_hidden_layers:
                raise ValueError(
                    f"per_layer_config names layer {layer!r}: give layers from 0 to {self.num_hidden_layers - 1}"
                )
            if others := sorted(set(changed) - {"intermediate_size"}):
                raise ValueError(
                    f"per_layer_config[{layer}] sets {others[0]!r}: layers may differ in intermediate_size only"
                )
            widths[int(layer)] = changed.get("intermediate_size", self.intermediate_size)
            validate_at_least(f"per_layer_config[{layer}]['intermediate_size']", widths[int(layer)], 1)
        if self.mlp_taper is None:
            return widths
        if wrong := [name for name in self.mlp_taper if name not in MLP_TAPER_FIELDS]:
            raise ValueError(f"mlp_taper has {wrong[0]!r}: give {', '.join(MLP_TAPER_FIELDS)}")
        try:
            tapered = dict(enumerate(tapered_widths(self.num_hidden_layers, self.intermediate_size, **self.mlp_taper)))
        except ValueError as error:
            raise ValueError(f"mlp_taper {self.mlp_taper}: {error}") from error
        if wrong := [layer for layer, width in widths.items() if tapered.get(layer) != width]:
            raise ValueError(
                f"per_layer_config[{wrong[0]}]['intermediate_size'] is {widths[wrong[0]]}, but mlp_taper gives "
                f"{tapered.get(wrong[0])}: give one of the two"
            )
        return tapered

    def validate_architecture(self):
        """Checks the fields against each other. Raises `ValueError` naming field and value."""
        layers = self.num_hidden_layers
        validate_choice("attention_output_gate", self.attention_output_gate, ("none", "headwise", "elementwise"))
        if self.uses_rotary_positions and self.head_dim % 2 != 0:
            raise ValueError(f"head_dim is {self.head_dim}: rotary positions turn pairs, give an even number")
        validate_activation("hidden_act", self.hidden_act)
        validate_rope_parameters(self.rope_parameters)
        validate_at_least("max_position_embeddings", self.max_position_embeddings, 1)
        validate_range("rms_norm_eps", self.rms_norm_eps, 0)
        validate_range("initializer_range", self.initializer_range, 0)
        validate_range("attention_dropout", self.attention_dropout, 0, 1, below=True)
        if self.logit_scaling_base is not None:
            validate_range("logit_scaling_base", self.logit_scaling_base, 1, above=True)
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id is {self.pad_token_id}, vocab_size {self.vocab_size}: give a token of the vocabulary, "
                "or None"
            )
        if self.sliding_window is not None:
            validate_at_least("sliding_window", self.sliding_window, 2, " tokens, or None")
        if self.sliding_window is None and self.sliding_window_layers:
            raise ValueError(
                f"sliding_window_layers is {self.sliding_window_layers}, but sliding_window is None: give both"
            )
        wrong = [layer for layer in self.sliding_window_layers or [] if not 0 <= layer < layers]
        if wrong:
            raise ValueError(f"sliding_window_layers names layer {wrong[0]}, but there are {layers} layers")

    def layer_sliding_window(self, layer: int) -> int | None:
        """Tokens that the softmax heads of a layer see, itself included; None = all."""
        return self.sliding_window if layer in (self.sliding_window_layers or []) else None

    def has_softmax_heads(self, layer: int) -> bool:
        """Whether a layer has softmax attention at all, for which a mask must be made."""
        return True

    @property
    def embedding_width(self) -> int:
        """Columns of the embedding and of the language-model head."""
        return self.hidden_size

    @property
    def has_global_attention(self) -> bool:
        """Whether some softmax head sees the whole sequence."""
        return any(
            self.has_softmax_heads(layer) and self.layer_sliding_window(layer) is None
            for layer in range(self.num_hidden_layers)
        )

    @property
    def has_sliding_attention(self) -> bool:
        """Whether some softmax head sees a window."""
        return any(
            self.has_softmax_heads(layer) and self.layer_sliding_window(layer) is not None
            for layer in range(self.num_hidden_layers)
        )

    @property
    def uses_rotary_positions(self) -> bool:
        """Whether any head is rotated."""
        return True

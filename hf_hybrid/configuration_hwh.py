"""Configuration of the head-wise hybrid family (HwH)."""

from huggingface_hub.dataclasses import strict

from .configuration_decoder import DecoderConfig, hub_classes
from .validators import validate_activation, validate_at_least, validate_choice, validate_range

# What the `linear_*` fields left at None become. Measured reasons for the upcycling column: README, "From a RoPE
# checkpoint to a healed hybrid".
LINEAR_PRESETS = {
    "from_scratch": {
        "linear_conv_activation": "silu",
        "linear_output_norm": True,
        "linear_output_gate": "elementwise",
        "linear_head_scale": False,
        "linear_rope": False,
        "linear_start_token": "recurrent",
    },
    "upcycling": {
        "linear_conv_activation": "linear",
        "linear_output_norm": False,
        "linear_output_gate": "headwise",
        "linear_head_scale": True,
        "linear_rope": False,
        "linear_start_token": "value",
    },
}

# From-scratch sizes. 1.4b is the scale of the paper (arXiv 2609.02986), whose widths are not public: these are ours.
FROM_SCRATCH_SIZES = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "140m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "400m": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "1.4b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
}


def default_full_attention_heads(num_layers: int, num_heads: int, num_key_value_heads: int) -> list[list[int]]:
    """A depth-dependent split with fewer than one full-attention head per three linear ones.

    Our definition; the paper says that the ratio is below 1:3 and depends on depth, its schedule is not public. The
    share grows linearly with depth, the last layer having three times the first one's: positions are worked out early,
    retrieval comes late. Heads are taken in whole key-value groups, since half a group saves no cache.

    Returns:
        Query heads per layer, ascending: the first groups of each layer.
    """
    group_size = num_heads // num_key_value_heads
    groups = num_layers * num_key_value_heads
    budget = max(1, (groups - 1) // 4)
    weights = [1 + 2 * layer / max(num_layers - 1, 1) for layer in range(num_layers)]
    shares = [budget * weight / sum(weights) for weight in weights]
    counts = [min(int(share), num_key_value_heads) for share in shares]
    # Largest remainders get what rounding left over, later layers first among equals.
    order = sorted(range(num_layers), key=lambda layer: (shares[layer] - counts[layer], layer), reverse=True)
    while sum(counts) < budget:
        for layer in order:
            if sum(counts) < budget and counts[layer] < num_key_value_heads:
                counts[layer] += 1
    return [list(range(count * group_size)) for count in counts]


def validate_full_attention_heads(heads: list[list[int]], num_layers: int, num_heads: int):
    """Raises `ValueError` naming layer, field and value unless `heads` lists query heads for every layer."""
    if len(heads) != num_layers:
        raise ValueError(
            f"full_attention_heads has {len(heads)} layers, but num_hidden_layers is {num_layers}: give one a layer"
        )
    for layer, layer_heads in enumerate(heads):
        if sorted(set(layer_heads)) != list(layer_heads):
            raise ValueError(
                f"full_attention_heads[{layer}] is {layer_heads}: give each query head once, in ascending order"
            )
        wrong = [head for head in layer_heads if not 0 <= head < num_heads]
        if wrong:
            raise ValueError(
                f"full_attention_heads[{layer}] names query head {wrong[0]}, but num_attention_heads is {num_heads}: "
                f"heads go from 0 to {num_heads - 1}"
            )


@strict
class HwHConfig(DecoderConfig):
    r"""
    Head-wise hybrid (HwH, arXiv 2609.02986): in each layer some query heads are full attention without rotary positions
    (global retrieval), the others Gated DeltaNet linear attention (local positions).

    The same class is its own baselines: every head full with `full_attention_rope=True` is a Transformer, no full head
    is a pure Gated DeltaNet, whole layers full or linear are a layer-wise hybrid; see [`HwHConfig.baseline`].

    Args:
        full_attention_heads (`list[list[int]]`, *optional*): the full-attention query heads of each layer, ascending.
            `None`: a depth-dependent split below 1:3 ([`default_full_attention_heads`]).
        preset (`str`): `"from_scratch"` or `"upcycling"`: what the `linear_*` fields left at `None` become.
        full_attention_rope (`bool` or `list[bool]`): rotary positions on the full-attention heads, per layer.
        linear_key_head_dim, linear_value_head_dim (`int`, *optional*): widths of the linear heads; `None` = `head_dim`.
        linear_conv_kernel_dim (`int`): taps of the short convolution; 1 = none to speak of.
        linear_conv_activation (`str`, *optional*): activation after the convolution; `"linear"` = none.
        linear_allow_neg_eigval (`bool`): beta in [0, 2] (arXiv 2411.12537).
        linear_output_norm (`bool`, *optional*): RMS norm of each linear head's output.
        linear_output_gate (`str`, *optional*): `"elementwise"` (SiLU), `"headwise"` (sigmoid) or `"none"`.
        linear_head_scale (`bool`, *optional*): a learnable factor on each linear head's output.
        linear_rope (`bool`, *optional*): rotary positions on the linear queries and keys.
        linear_start_token (`str`, *optional*): what a linear head returns for the first token of a sequence: the
            `"recurrent"` read-out, or the token's `"value"`, which is what softmax attention returns there. The
            attention sink of a converted model lives on it.
        linear_a_min, linear_a_max, linear_dt_min, linear_dt_max (`float`): ranges of the initial decay.
        kwargs: sizes and options of the chassis and of the full-attention heads, see [`DecoderConfig`];
            `attention_bias` reaches the linear heads too.
    """

    model_type = "hwh"
    family_auto_map = hub_classes("hwh", "HwH")
    base_model_tp_plan = {
        **DecoderConfig.base_model_tp_plan,
        "layers.*.token_mixer.attention.q_proj": "colwise_gather_output",
        "layers.*.token_mixer.attention.k_proj": "colwise_gather_output",
        "layers.*.token_mixer.attention.v_proj": "colwise_gather_output",
        "layers.*.token_mixer.linear_attention.q_proj": "colwise_gather_output",
        "layers.*.token_mixer.linear_attention.k_proj": "colwise_gather_output",
        "layers.*.token_mixer.linear_attention.v_proj": "colwise_gather_output",
        "layers.*.token_mixer.o_proj": "rowwise_split_input",
    }
    # For peft: `LoraConfig(target_modules=config.lora_target_modules)` reaches every linear map of every layer.
    lora_target_modules = [
        *["q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "o_proj"],
        *["gate_proj", "up_proj", "down_proj"],
    ]

    preset: str = "from_scratch"
    full_attention_heads: list[list[int]] | None = None
    full_attention_rope: bool | list[bool] = False

    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_conv_activation: str | None = None
    linear_allow_neg_eigval: bool = False
    linear_output_norm: bool | None = None
    linear_output_gate: str | None = None
    linear_head_scale: bool | None = None
    linear_rope: bool | None = None
    linear_start_token: str | None = None
    linear_a_min: int | float = 0.0
    linear_a_max: int | float = 16.0
    linear_dt_min: int | float = 0.001
    linear_dt_max: int | float = 0.1

    def derive_fields(self):
        """Resolves the preset, the split of heads and the widths of the linear heads."""
        validate_choice("preset", self.preset, LINEAR_PRESETS)
        for field, value in LINEAR_PRESETS[self.preset].items():
            if getattr(self, field) is None:
                setattr(self, field, value)
        for field in ("linear_key_head_dim", "linear_value_head_dim"):
            if getattr(self, field) is None:
                setattr(self, field, self.head_dim)

        if self.full_attention_heads is None:
            self.full_attention_heads = default_full_attention_heads(
                self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads
            )
        validate_full_attention_heads(self.full_attention_heads, self.num_hidden_layers, self.num_attention_heads)
        if isinstance(self.full_attention_rope, bool):
            self.full_attention_rope = [self.full_attention_rope] * self.num_hidden_layers

    def layer_type(self, layer: int) -> str:
        """The kind of cache layer that a layer needs, one of transformers' `layer_types`."""
        heads = len(self.full_attention_heads[layer])
        window = "_sliding" if self.layer_sliding_window(layer) is not None else ""
        if heads == 0:
            return "hybrid" if self.marks_positions(layer) else "linear_attention"
        if heads < self.num_attention_heads:
            return "hybrid" + window
        return "sliding_attention" if window else "full_attention"

    def marks_positions(self, layer: int) -> bool:
        """Whether a layer without keys caches one number a token.

        Stock caches count tokens by their keys. A model without any full-attention head marks each position in its
        first layer, so that `generate` can continue a cache.
        """
        return layer == 0 and not self.counts_positions_by_keys

    def validate_architecture(self):
        """Checks the fields against each other. Raises `ValueError` naming field and value."""
        layers = self.num_hidden_layers
        if len(self.full_attention_rope) != layers:
            raise ValueError(
                f"full_attention_rope has {len(self.full_attention_rope)} entries, but num_hidden_layers is {layers}: "
                "give one per layer, or one bool for all"
            )
        super().validate_architecture()
        validate_choice("linear_output_gate", self.linear_output_gate, ("none", "headwise", "elementwise"))
        validate_choice("linear_start_token", self.linear_start_token, ("recurrent", "value"))
        if self.linear_rope and self.linear_key_head_dim != self.head_dim:
            raise ValueError(
                f"linear_rope is True, linear_key_head_dim {self.linear_key_head_dim}, head_dim {self.head_dim}: "
                "rotated linear heads share the angles of the layer, so the two must be equal"
            )
        validate_activation("linear_conv_activation", self.linear_conv_activation)
        for field in ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):
            validate_at_least(field, getattr(self, field), 1)
        validate_range("linear_a_min", self.linear_a_min, 0)
        validate_range("linear_a_max", self.linear_a_max, max(self.linear_a_min, 1e-4))
        validate_range("linear_dt_min", self.linear_dt_min, 0, above=True)
        validate_range("linear_dt_max", self.linear_dt_max, self.linear_dt_min)

    def has_softmax_heads(self, layer: int) -> bool:
        """Whether a layer has full-attention heads, for which a mask must be made."""
        return bool(self.full_attention_heads[layer])

    @property
    def counts_positions_by_keys(self) -> bool:
        """Whether some layer has full-attention heads, whose cached keys say how long a sequence is."""
        return any(self.full_attention_heads)

    @property
    def uses_rotary_positions(self) -> bool:
        """Whether any head is rotated."""
        full = any(
            rope and heads for rope, heads in zip(self.full_attention_rope, self.full_attention_heads, strict=True)
        )
        linear = self.linear_rope and any(len(heads) < self.num_attention_heads for heads in self.full_attention_heads)
        return bool(full or linear)

    @classmethod
    def from_scratch(cls, size: str, **overrides) -> "HwHConfig":
        """A from-scratch model of one of the sizes `tiny`, `140m`, `400m`, `1.4b`; `overrides` are fields."""
        validate_choice("size", size, FROM_SCRATCH_SIZES)
        return cls(preset="from_scratch", **{**FROM_SCRATCH_SIZES[size], **overrides})

    def baseline(self, kind: str, period: int = 4) -> "HwHConfig":
        """The same model with another split of heads, for controlled comparisons.

        Args:
            kind: `"transformer"` (every head full, rotated), `"gdn"` (every head linear), or `"layerwise"` (every
                `period`-th layer full without rotary, the others linear).
            period: layers per full-attention layer of the layer-wise hybrid.
        """
        validate_choice("kind", kind, ("transformer", "gdn", "layerwise"))
        validate_at_least("period", period, 1)
        every, none = list(range(self.num_attention_heads)), []
        full_layers = {
            "transformer": lambda layer: True,
            "gdn": lambda layer: False,
            "layerwise": lambda layer: layer % period == period - 1,
        }[kind]
        fields = self.to_dict()
        fields.update(
            layer_types=None,
            full_attention_heads=[every if full_layers(layer) else none for layer in range(self.num_hidden_layers)],
            full_attention_rope=kind == "transformer",
        )
        return type(self).from_dict(fields)


# Makes `save_pretrained` and `push_to_hub` copy the code.
HwHConfig.register_for_auto_class()

__all__ = ["HwHConfig"]

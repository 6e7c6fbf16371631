"""Configuration of the tapered family (TLM): MLP widths that narrow with depth, under any of four token mixers."""

from dataclasses import field

from huggingface_hub.dataclasses import strict

from .configuration_decoder import DecoderConfig, hub_classes
from .validators import validate_at_least, validate_choice, validate_range

TOKEN_MIXERS = ("attention", "gated_attention", "titans", "hope")
MEMORY_VARIANTS = ("mag", "mal", "lmm")

# The paper's scales by parameters (arXiv 2606.23670). Its layer counts and widths are not public: these are ours, with
# a vocabulary of 32,000 and tied embeddings.
TLM_SIZES = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    },
    "440m": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
    },
    "760m": {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 25,
        "num_attention_heads": 16,
    },
    "1.3b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
}


@strict
class TLMConfig(DecoderConfig):
    r"""
    Tapered language model (TLM, arXiv 2606.23670): MLPs are wide in early layers and narrow in late ones, at the same
    number of parameters and FLOPs as the uniform model, under one of several token mixers.

    Args:
        mlp_taper (`dict`, *optional*): see [`DecoderConfig`]; a cosine from 1.5 to 0.5 of `intermediate_size` unless
            told otherwise. `None` = every layer has `intermediate_size`.
        token_mixer (`str`): `"attention"`, `"gated_attention"` (arXiv 2505.06708; elementwise unless
            `attention_output_gate` says `"headwise"`), `"titans"` (arXiv 2501.00663) or `"hope"` (arXiv 2512.24695):
            attention, and a continuum memory in place of each MLP.
        memory_variant (`str`): how Titans joins memory and attention. `"mag"`: sliding-window attention, gated by the
            memory; `"mal"`: sliding-window attention over what the memory returns; `"lmm"`: the memory alone. The
            window of the first two is `sliding_window`, 1,024 tokens unless told otherwise.
        memory_chunk_size (`int`): tokens that share one state of the memory for their gradients. It is part of the
            function: a model trained with one size is another model with another.
        memory_expansion (`int`): hidden width of a head's memory, over `head_dim`.
        memory_conv_kernel_dim (`int`): taps of the short convolution on the memory's queries, keys and values.
        memory_residual (`bool`): the memory returns x + MLP(x) instead of MLP(x).
        memory_max_rate (`float`, *optional*): the largest inner learning rate; `None` = 0.1 / `memory_chunk_size`. All
            tokens of a chunk step from one state: with repeated keys and momentum 0.9 a chunk of 64 diverges from
            about 0.0024 on.
        memory_forgetting (`float`): initial share of the memory that a token erases.
        memory_momentum (`float`): initial momentum of the inner gradient descent.
        cms_periods (`list[int]`): levels of Hope's continuum memory, fastest first: how many optimizer steps each waits
            for the next of its own. The levels share a layer's MLP width. Training follows them with
            `hf_hybrid.training.cadence.CadenceCallback`; the function itself does not depend on them.
        kwargs: sizes and attention options of the chassis, see [`DecoderConfig`].
    """

    model_type = "tlm"
    family_auto_map = hub_classes("tlm", "TLM")
    base_model_tp_plan = {
        **DecoderConfig.base_model_tp_plan,
        "layers.*.token_mixer.attention.q_proj": "colwise_gather_output",
        "layers.*.token_mixer.attention.k_proj": "colwise_gather_output",
        "layers.*.token_mixer.attention.v_proj": "colwise_gather_output",
        "layers.*.token_mixer.o_proj": "rowwise_split_input",
    }
    mlp_taper: dict | None = field(default_factory=dict)
    token_mixer: str = "attention"
    memory_variant: str = "mag"
    memory_chunk_size: int = 64
    memory_expansion: int = 2
    memory_conv_kernel_dim: int = 4
    memory_residual: bool = True
    memory_max_rate: int | float | None = None
    memory_forgetting: int | float = 1e-3
    memory_momentum: int | float = 0.9
    cms_periods: list[int] = field(default_factory=lambda: [1, 4, 16])

    def derive_fields(self):
        """Resolves the gate of gated attention, and window and inner learning rate of Titans."""
        validate_choice("token_mixer", self.token_mixer, TOKEN_MIXERS)
        validate_choice("memory_variant", self.memory_variant, MEMORY_VARIANTS)
        validate_at_least("memory_chunk_size", self.memory_chunk_size, 1)
        if self.token_mixer == "gated_attention" and self.attention_output_gate == "none":
            self.attention_output_gate = "elementwise"
        if self.memory_max_rate is None:
            self.memory_max_rate = 0.1 / self.memory_chunk_size
        if self.token_mixer == "titans" and self.memory_variant != "lmm" and self.sliding_window is None:
            self.sliding_window, self.sliding_window_layers = 1024, list(range(self.num_hidden_layers))

    def validate_architecture(self):
        """Checks the fields against each other. Raises `ValueError` naming field and value."""
        super().validate_architecture()
        if self.attention_output_gate != "none" and self.token_mixer != "gated_attention":
            raise ValueError(
                f"attention_output_gate is {self.attention_output_gate!r}, token_mixer {self.token_mixer!r}: give "
                "token_mixer='gated_attention', or no gate"
            )
        validate_at_least("memory_expansion", self.memory_expansion, 1)
        validate_at_least("memory_conv_kernel_dim", self.memory_conv_kernel_dim, 1)
        for level, period in enumerate(self.cms_periods):
            validate_at_least(f"cms_periods[{level}]", period, 1, " optimizer step")
        if self.cms_periods != sorted(self.cms_periods) or not self.cms_periods:
            raise ValueError(f"cms_periods is {self.cms_periods}: give one period a level, the fastest first")
        narrowest = min(layer.intermediate_size for layer in self.per_layer_config)
        if self.token_mixer == "hope" and narrowest < len(self.cms_periods):
            raise ValueError(
                f"cms_periods has {len(self.cms_periods)} levels, but the narrowest MLP has {narrowest} neurons: give "
                "each level at least one"
            )
        validate_range("memory_max_rate", self.memory_max_rate, 0, above=True)
        validate_range("memory_forgetting", self.memory_forgetting, 0, 1, above=True, below=True)
        validate_range("memory_momentum", self.memory_momentum, 0, 1, above=True, below=True)

    def has_softmax_heads(self, layer: int) -> bool:
        """Whether a layer has attention, for which a mask must be made."""
        return self.token_mixer != "titans" or self.memory_variant != "lmm"

    @property
    def uses_rotary_positions(self) -> bool:
        """Whether any head is rotated: wherever there is attention."""
        return self.has_softmax_heads(0)

    def layer_type(self, layer: int) -> str:
        """The kind of cache layer that a layer needs, one of transformers' `layer_types`."""
        window = self.layer_sliding_window(layer) is not None
        if self.token_mixer != "titans":
            return "sliding_attention" if window else "full_attention"
        if self.memory_variant == "lmm":
            return "hybrid" if self.marks_positions(layer) else "linear_attention"
        return "hybrid_sliding" if window else "hybrid"

    @property
    def lora_target_modules(self) -> list[str]:
        """For peft: `LoraConfig(target_modules=config.lora_target_modules)` reaches every linear map of every layer."""
        gates = {"hope": [], "attention": [], "gated_attention": ["g_proj"], "titans": ["a_proj", "e_proj", "t_proj"]}
        before_attention = ["m_proj"] if self.token_mixer == "titans" and self.memory_variant == "mal" else []
        mixer = ["q_proj", "k_proj", "v_proj", *gates[self.token_mixer], *before_attention, "o_proj"]
        return [*mixer, "gate_proj", "up_proj", "down_proj"]

    def marks_positions(self, layer: int) -> bool:
        """Whether a layer without keys caches one number a token, since stock caches count tokens by their keys."""
        return layer == 0 and not self.has_softmax_heads(layer)

    @classmethod
    def from_scratch(cls, size: str, **overrides) -> "TLMConfig":
        """A model of one of the sizes `tiny`, `440m`, `760m`, `1.3b`, with tied embeddings; `overrides` are fields."""
        validate_choice("size", size, TLM_SIZES)
        return cls(**{"tie_word_embeddings": True, **TLM_SIZES[size], **overrides})


# Makes `save_pretrained` and `push_to_hub` copy the code.
TLMConfig.register_for_auto_class()

__all__ = ["TLMConfig"]

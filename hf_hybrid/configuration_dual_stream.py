"""Configuration of the dual-stream family: a state stream that stores, a prediction stream that predicts."""

import copy

from huggingface_hub.dataclasses import strict

from .configuration_decoder import DecoderConfig, hub_classes
from .validators import validate_at_least, validate_choice

STREAM_MODES = ("dual", "standard", "double_memory", "delayed_state", "reverse", "query_only")
# The modes whose logits come from the states.
READS_STATES = ("standard", "reverse")

# The paper's sizes: width, layers, heads.
DUAL_STREAM_SIZES = {
    "tiny": (96, 6, 4),
    "xs": (512, 8, 8),
    "s": (768, 12, 12),
    "m": (1024, 24, 16),
    "l": (1280, 36, 20),
    "xl": (1600, 48, 25),
}


@strict
class DualStreamConfig(DecoderConfig):
    r"""
    State-prediction separation (arXiv 2607.01218): every token has a state slot, whose keys and values later tokens
    read, and a prediction slot, which starts from one learned vector and gives the logits. The two streams share all
    weights. Users pass T tokens and get T logits, as from any causal language model.

    Args:
        stream_mode (`str`): `"dual"`; its controls `"standard"` (an ordinary decoder), `"double_memory"` (predictions
            stay visible), `"delayed_state"` (predictions stay visible, states for a window), `"reverse"` (the same,
            logits from the states); or `"query_only"` (arXiv 2609.03807): predictions only query the states, so a
            prompt costs what it costs an ordinary decoder.
        prediction_window (`int`): w, pairs back that the windowed stream is visible for; 0 = its own pair only.
        kwargs: sizes and attention options of the chassis, see [`DecoderConfig`].
    """

    model_type = "dual_stream"
    family_auto_map = hub_classes("dual_stream", "DualStream")
    base_model_tp_plan = {
        **DecoderConfig.base_model_tp_plan,
        "layers.*.token_mixer.q_proj": "colwise_gather_output",
        "layers.*.token_mixer.k_proj": "colwise_gather_output",
        "layers.*.token_mixer.v_proj": "colwise_gather_output",
        "layers.*.token_mixer.o_proj": "rowwise_split_input",
    }

    stream_mode: str = "dual"
    prediction_window: int = 64

    def validate_architecture(self):
        """Checks the fields against each other. Raises `ValueError` naming field and value."""
        super().validate_architecture()
        validate_choice("stream_mode", self.stream_mode, STREAM_MODES)
        validate_at_least("prediction_window", self.prediction_window, 0)
        if self.sliding_window is not None and not self._is_unrolled:
            raise ValueError(
                f"sliding_window is {self.sliding_window}: states stay visible for good here, and predictions for "
                "prediction_window pairs; leave it out"
            )
        if self.attention_output_gate != "none" or self.attention_output_norm or self.attention_head_scale:
            raise ValueError(
                "attention_output_gate, attention_output_norm and attention_head_scale are not part of dual-stream "
                "attention: leave them out"
            )
        if self.logit_scaling_base is not None:
            raise ValueError(f"logit_scaling_base is {self.logit_scaling_base}: not part of dual-stream attention")

    @property
    def _is_unrolled(self) -> bool:
        return vars(self).get("is_cache_layout", False)

    def has_softmax_heads(self, layer: int) -> bool:
        """The family makes its own masks, none of the chassis' kinds."""
        return False

    @property
    def lora_target_modules(self) -> list[str]:
        """For peft: `LoraConfig(target_modules=config.lora_target_modules)` reaches every linear map of every layer."""
        gate = ["gate_proj"] if self.mlp_gated else []
        return ["q_proj", "k_proj", "v_proj", "o_proj", *gate, "up_proj", "down_proj"]

    @property
    def caches_predictions(self) -> bool:
        """Whether predictions have keys and values, so that a layer needs a second slot of the cache."""
        return self.stream_mode not in ("standard", "query_only")

    @property
    def has_windowed_stream(self) -> bool:
        """Whether one of the streams is visible for a window only."""
        return self.caches_predictions and self.stream_mode != "double_memory"

    @property
    def keeps_states(self) -> bool:
        """Whether it is the states that stay visible for good, and the predictions that are windowed."""
        return self.stream_mode not in ("delayed_state", "reverse")

    def layer_order(self) -> list[tuple[int, int]]:
        """(layer, which of its streams) for each slot of the cache."""
        return [(layer, slot) for layer in range(self.num_hidden_layers) for slot in range(1 + self.caches_predictions)]

    def get_text_config(self, decoder=None, encoder=None):
        """With `decoder=True`, as caches ask for it: two slots a layer, the stream that stays and the windowed one."""
        if not decoder or encoder or not self.caches_predictions:
            return self
        unrolled = copy.copy(self)
        fields = vars(unrolled)
        windowed = "full_attention" if self.stream_mode == "double_memory" else "sliding_attention"
        fields["layer_types"] = ["full_attention", windowed] * self.num_hidden_layers
        fields["num_hidden_layers"] = 2 * self.num_hidden_layers
        # The token that looks counts; and the stock cache has no way to keep none of the tokens before.
        fields["sliding_window"] = max(self.prediction_window + 1, 2)
        fields["is_cache_layout"] = True
        fields.pop("_heterogeneity_spec", None)
        return unrolled

    @classmethod
    def from_scratch(cls, size: str, **overrides) -> "DualStreamConfig":
        """One of the paper's sizes `xs`, `s`, `m`, `l`, `xl`, or `tiny`; `overrides` are fields."""
        validate_choice("size", size, DUAL_STREAM_SIZES)
        width, layers, heads = DUAL_STREAM_SIZES[size]
        fields = {
            # The paper counts a table of 50,304 rows whose last one the predictions start from; here it stands apart.
            "vocab_size": 1024 if size == "tiny" else 50303,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return cls(**{**fields, **overrides})


# Makes `save_pretrained` and `push_to_hub` copy the code.
DualStreamConfig.register_for_auto_class()

__all__ = ["DualStreamConfig"]

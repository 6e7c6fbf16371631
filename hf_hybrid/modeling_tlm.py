"""Tapered language models (TLM, arXiv 2606.23670): the chassis with widths that fall with depth, and its mixers."""

import torch
from torch import nn

from .attention import SoftmaxAttention
from .configuration_tlm import TLMConfig
from .continuum_memory import ContinuumMemory, level_widths
from .decoder import (
    DecoderForCausalLM,
    DecoderForSequenceClassification,
    DecoderForTokenClassification,
    DecoderModel,
    DecoderPreTrainedModel,
    build_mlp,
)
from .titans import MemoryGates, NeuralMemory, Titans


class AttentionMixer(nn.Module):
    """Rotary softmax attention over all heads of a layer, gated where the configuration says so, and its read-out."""

    def __init__(self, config: TLMConfig, layer_idx: int):
        super().__init__()
        self.mask_kind = "full_attention" if config.layer_sliding_window(layer_idx) is None else "sliding_attention"
        self.attention = SoftmaxAttention(config, layer_idx, list(range(config.num_attention_heads)))
        width = config.num_attention_heads * config.head_dim
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_masks: dict[str, torch.Tensor | None],
        layout=None,
        **kwargs,
    ) -> torch.Tensor:
        """`[B, T, hidden]` -> `[B, T, hidden]`; the arguments are those of every mixer of the zoo."""
        heads, _ = self.attention(hidden_states, attention_mask=attention_masks[self.mask_kind], **kwargs)
        return self.o_proj(heads.flatten(2))


class TLMPreTrainedModel(DecoderPreTrainedModel):
    """Ties the family's configuration to the chassis."""

    config_class = TLMConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, (MemoryGates, NeuralMemory)):
            module.reset_parameters()


class TLMModel(TLMPreTrainedModel, DecoderModel):
    """The TLM decoder without a head."""

    def build_token_mixer(self, config: TLMConfig, layer_idx: int) -> nn.Module:
        """Titans, or attention with or without a gate."""
        return (Titans if config.token_mixer == "titans" else AttentionMixer)(config, layer_idx)

    def build_mlp(self, config: TLMConfig, layer_idx: int) -> nn.Module | None:
        """Hope's continuum memory, at the layer's width."""
        if config.token_mixer != "hope":
            return None
        widths = level_widths(config.per_layer_config[layer_idx].intermediate_size, len(config.cms_periods))
        return ContinuumMemory([build_mlp(config, width) for width in widths])


class TLMForCausalLM(TLMPreTrainedModel, DecoderForCausalLM):
    """TLM with a language-model head."""

    decoder_class = TLMModel


class TLMForSequenceClassification(TLMPreTrainedModel, DecoderForSequenceClassification):
    """TLM with a classification head on the last token."""

    decoder_class = TLMModel


class TLMForTokenClassification(TLMPreTrainedModel, DecoderForTokenClassification):
    """TLM with a classification head on every token."""

    decoder_class = TLMModel


# Makes `save_pretrained` and `push_to_hub` copy the code and name the classes in `auto_map`.
TLMModel.register_for_auto_class("AutoModel")
TLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
TLMForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
TLMForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = [
    "TLMForCausalLM",
    "TLMForSequenceClassification",
    "TLMForTokenClassification",
    "TLMModel",
    "TLMPreTrainedModel",
]

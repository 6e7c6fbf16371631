"""Head-wise hybrid models (HwH, arXiv 2609.02986): full-attention and linear heads side by side in one layer."""

import torch
from torch import nn
from transformers.cache_utils import Cache

from .attention import SoftmaxAttention
from .configuration_hwh import HwHConfig
from .decoder import (
    DecoderForCausalLM,
    DecoderForSequenceClassification,
    DecoderForTokenClassification,
    DecoderModel,
    DecoderPreTrainedModel,
)
from .gated_delta_net import GatedDeltaNet
from .sequence_layout import SequenceLayout


def interleave_heads(
    full: torch.Tensor | None, linear: torch.Tensor | None, full_heads: list[int], num_heads: int
) -> torch.Tensor:
    """Puts the heads of both branches back in their original order.

    Args:
        full: `[B, T, len(full_heads), D]`, or None.
        linear: `[B, T, num_heads - len(full_heads), D_v]`, or None.
        full_heads: which heads, ascending, `full` holds.
        num_heads: how many heads the layer has.

    Returns:
        `[B, T, sum of the heads' widths]`.
    """
    if linear is None:
        return full.flatten(2)
    if full is None:
        return linear.flatten(2)
    is_full = [head in set(full_heads) for head in range(num_heads)]
    taken, pieces, start = {True: 0, False: 0}, [], 0
    # Runs of heads of one kind are slices: no index tensor to build, move or trace.
    for head in range(1, num_heads + 1):
        if head == num_heads or is_full[head] != is_full[start]:
            kind, count = is_full[start], head - start
            branch = full if kind else linear
            pieces.append(branch[:, :, taken[kind] : taken[kind] + count].flatten(2))
            taken[kind] += count
            start = head
    return torch.cat(pieces, dim=-1)


class HeadwiseHybrid(nn.Module):
    """The mixer of one HwH layer: softmax attention on some heads, Gated DeltaNet on the others, one read-out."""

    def __init__(self, config: HwHConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.full_heads = config.full_attention_heads[layer_idx]
        self.mask_kind = "full_attention" if config.layer_sliding_window(layer_idx) is None else "sliding_attention"
        self.rotates_full = config.full_attention_rope[layer_idx]
        self.rotates_linear = config.linear_rope
        self.marks_positions = config.marks_positions(layer_idx)
        num_full, num_linear = len(self.full_heads), config.num_attention_heads - len(self.full_heads)
        self.attention = SoftmaxAttention(config, layer_idx, self.full_heads) if num_full else None
        self.linear_attention = GatedDeltaNet(config, layer_idx, num_linear) if num_linear else None
        width = num_full * config.head_dim + num_linear * config.linear_value_head_dim
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)

    def mix_heads(
        self,
        hidden_states: torch.Tensor,
        attention_masks: dict[str, torch.Tensor | None],
        layout: SequenceLayout,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        position_ids: torch.Tensor,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Everything before the output projection: `[B, T, hidden]` -> `[B, T, sum of the heads' widths]`."""
        full = linear = None
        if self.attention is not None:
            full, _ = self.attention(
                hidden_states,
                position_embeddings=position_embeddings if self.rotates_full else None,
                attention_mask=attention_masks[self.mask_kind],
                position_ids=position_ids,
                cache=cache,
                **kwargs,
            )
        if self.linear_attention is not None:
            linear = self.linear_attention(
                hidden_states,
                layout=layout,
                position_embeddings=position_embeddings if self.rotates_linear else None,
                cache=cache,
            )
        if self.marks_positions and cache is not None:
            marks = hidden_states.new_zeros(*hidden_states.shape[:2], 1).unsqueeze(1)
            cache.update(marks, marks[..., :0], self.layer_idx)
        return interleave_heads(full, linear, self.full_heads, self.num_heads)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """`[B, T, hidden]` -> `[B, T, hidden]`; `kwargs` are those of [`HeadwiseHybrid.mix_heads`]."""
        return self.o_proj(self.mix_heads(hidden_states, **kwargs))


class HwHPreTrainedModel(DecoderPreTrainedModel):
    """Ties the family's configuration to the chassis."""

    config_class = HwHConfig


class HwHModel(HwHPreTrainedModel, DecoderModel):
    """The HwH decoder without a head."""

    def build_token_mixer(self, config: HwHConfig, layer_idx: int) -> HeadwiseHybrid:
        return HeadwiseHybrid(config, layer_idx)


class HwHForCausalLM(HwHPreTrainedModel, DecoderForCausalLM):
    """HwH with a language-model head."""

    decoder_class = HwHModel


class HwHForSequenceClassification(HwHPreTrainedModel, DecoderForSequenceClassification):
    """HwH with a classification head on the last token."""

    decoder_class = HwHModel


class HwHForTokenClassification(HwHPreTrainedModel, DecoderForTokenClassification):
    """HwH with a classification head on every token."""

    decoder_class = HwHModel


# Makes `save_pretrained` and `push_to_hub` copy the code and name the classes in `auto_map`.
HwHModel.register_for_auto_class("AutoModel")
HwHForCausalLM.register_for_auto_class("AutoModelForCausalLM")
HwHForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
HwHForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = [
    "HwHForCausalLM",
    "HwHForSequenceClassification",
    "HwHForTokenClassification",
    "HwHModel",
    "HwHPreTrainedModel",
]

"""Softmax mixers: full attention over any subset of a layer's heads, with rotary positions or without (NoPE).

A mixer returns its heads' outputs `[B, T, heads, D]`, before the output projection, so that other mixers' heads
can stand beside them in the same layer.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float = 1e-6, has_weight: bool = True):
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.ones(size)) if has_weight else None
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., size]` -> `[..., size]`, in the input's dtype."""
        wide = hidden_states.float() if hidden_states.dtype in (torch.float16, torch.bfloat16) else hidden_states
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        normed = wide.to(hidden_states.dtype)
        return normed if self.weight is None else self.weight * normed

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary positions (arXiv 2104.09864), with transformers' scaled variants."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        init_function = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = init_function(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config, **kwargs) -> tuple[torch.Tensor, float]:
        """Angular frequencies `[D / 2]` in radians per token, and the factor on cosine and sine (1)."""
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float)
        # Written as transformers writes it, so that a converted model's angles are the source's to the bit.
        return 1.0 / (config.rope_parameters["rope_theta"] ** (pairs / config.head_dim)), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`position_ids` `[B or 1, T]` -> cos and sin, each `[B or 1, T, D]`, in the dtype of `x`."""
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device)
        angles = torch.cat([angles, angles], dim=-1)
        return (
            (angles.cos() * self.attention_scaling).to(x.dtype),
            (angles.sin() * self.attention_scaling).to(x.dtype),
        )


def rotate(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns `vectors` `[B, T, H, D]` by the angles of `cos`, `sin` `[B or 1, T, D]` (half-split pairs)."""
    first, second = vectors.chunk(2, dim=-1)
    quarter_turn = torch.cat([-second, first], dim=-1)
    return vectors * cos.unsqueeze(2) + quarter_turn * sin.unsqueeze(2)


def repeat_heads(states: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Repeats head i of `states` `[B, heads, T, D]` `counts[i]` times, in order."""
    if all(count == 1 for count in counts):
        return states
    heads = [states[:, i : i + 1].expand(-1, count, -1, -1) for i, count in enumerate(counts)]
    return torch.cat(heads, dim=1)


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention written out, for callers that want the probabilities.

    Args:
        module: the mixer, for `num_key_value_groups` and `training`.
        query: `[B, H, T, D]`.
        key: `[B, H / groups, S, D]`; `value` alike.
        attention_mask: `[B, 1, T, S]`, added to the logits, or None.
        scaling: factor on the logits.
        dropout: share of the probabilities that is dropped.

    Returns:
        Head outputs `[B, T, H, D]` and probabilities `[B, H, T, S]`.
    """
    groups = [module.num_key_value_groups] * key.shape[1]
    key, value = repeat_heads(key, groups), repeat_heads(value, groups)
    logits = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    probabilities = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(query.dtype)
    probabilities = nn.functional.dropout(probabilities, p=dropout, training=module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


def apply_output_gate(heads: torch.Tensor, gate: torch.Tensor, kind: str, activation: Callable) -> torch.Tensor:
    """Multiplies `heads` `[B, T, H, D]` by `activation(gate)`, the gate being `[B, T, H]` or `[B, T, H * D]`."""
    gate = gate.unsqueeze(-1) if kind == "headwise" else gate.view(heads.shape)
    return heads * activation(gate)


class SoftmaxAttention(nn.Module):
    """Full attention over the query heads `heads` of one layer.

    Only the key-value heads that these query heads read are projected and cached.

    Args:
        config: a configuration of the zoo; `qk_norm`, `attention_output_norm`, `attention_output_gate`,
            `attention_head_scale` and `logit_scaling_base` choose the options.
        layer_idx: index of the layer's cache slot.
        heads: the query heads, ascending, out of `num_attention_heads`.
    """

    def __init__(self, config, layer_idx: int, heads: list[int]):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.is_causal = True
        self.sliding_window = config.layer_sliding_window(layer_idx)

        group_size = config.num_attention_heads // config.num_key_value_heads
        readers = [head // group_size for head in heads]
        self.key_value_heads = sorted(set(readers))
        # Query heads per kept key-value head. When they are all equal the attention kernels share keys themselves.
        counts = [readers.count(kv_head) for kv_head in self.key_value_heads]
        self.is_grouped = len(set(counts)) == 1
        self.repeats = [1] * len(counts) if self.is_grouped else counts
        self.num_key_value_groups = counts[0] if self.is_grouped else 1

        width, kv_width = len(heads) * self.head_dim, len(self.key_value_heads) * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        norm = (self.head_dim, config.rms_norm_eps, config.norm_weights)
        self.q_norm = RMSNorm(*norm) if config.qk_norm else None
        self.k_norm = RMSNorm(*norm) if config.qk_norm else None
        self.o_norm = RMSNorm(*norm) if config.attention_output_norm else None
        gate_width = {"none": 0, "headwise": len(heads), "elementwise": width}[config.attention_output_gate]
        self.g_proj = nn.Linear(config.hidden_size, gate_width, bias=False) if gate_width else None
        self.head_scale = nn.Parameter(torch.ones(len(heads))) if config.attention_head_scale else None

    def _length_factor(self, position_ids: torch.Tensor) -> torch.Tensor:
        """log(t + a) / log(a) for t visible tokens, `[B or 1, 1, T, 1]` (arXiv 2601.22156)."""
        base = self.config.logit_scaling_base
        return ((position_ids + 1 + base).float().log() / math.log(base))[:, None, :, None]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Head outputs `[B, T, heads, D]`, and probabilities where the attention function gives them.

        Args:
            hidden_states: `[B, T, hidden]`, normed.
            position_embeddings: cos and sin for rotary heads, None for NoPE heads.
            attention_mask: what transformers' mask functions made for the attention implementation.
            position_ids: `[B or 1, T]`.
            cache: the model's cache, or None.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if position_embeddings is not None:
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if self.config.logit_scaling_base is not None and not self.training:
            query = query * self._length_factor(position_ids).to(query.dtype)

        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value = repeat_heads(key, self.repeats), repeat_heads(value, self.repeats)

        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        heads, probabilities = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            position_ids=position_ids,
            **kwargs,
        )
        if self.o_norm is not None:
            heads = self.o_norm(heads)
        if self.g_proj is not None:
            kind = self.config.attention_output_gate
            heads = apply_output_gate(heads, self.g_proj(hidden_states), kind, torch.sigmoid)
        if self.head_scale is not None:
            heads = heads * self.head_scale[:, None]
        return heads, probabilities

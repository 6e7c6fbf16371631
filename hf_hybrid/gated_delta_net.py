"""The linear mixer: Gated DeltaNet (arXiv 2412.06464) over any subset of a layer's heads.

Per head, with a short causal convolution and unit-length queries and keys:

    q, k, v = act(conv(W x)),   beta = sigmoid(W_b x),   g = -exp(A_log) * softplus(W_a x + dt_bias)
    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t = S_t^T q_t / sqrt(d_k)

The heads share nothing: no grouped keys, since a state is as large as its own head and saves nothing by sharing.
"""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from .attention import RMSNorm, apply_output_gate, rotate
from .delta_rule import gated_delta_rule
from .sequence_layout import SequenceLayout


def unit_length(vectors: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """L2-normalises the last dimension; a zero vector stays zero and has a finite gradient."""
    return vectors * torch.rsqrt(vectors.pow(2).sum(dim=-1, keepdim=True) + eps)


class Float32Parameters(nn.Module):
    """Keeps its parameters in float32 when the model is cast: `half()` and `to(dtype)` only move them."""

    def _apply(self, fn, recurse: bool = True):
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


class LogDecay(Float32Parameters):
    """Log-decay per token and head; its parameters stay float32 whatever the model's dtype.

    They live in a module of their own so that sharded training can wrap them apart from half-precision weights.
    """

    def __init__(self, config, num_heads: int):
        super().__init__()
        self.config = config
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self):
        """exp(A_log) uniform and softplus(dt_bias) log-uniform, in the ranges of the configuration (Mamba-2's)."""
        config = self.config
        rate = torch.empty_like(self.A_log).uniform_(max(config.linear_a_min, 1e-4), config.linear_a_max)
        init.copy_(self.A_log, rate.log())
        low, high = math.log(config.linear_dt_min), math.log(config.linear_dt_max)
        step = torch.empty_like(self.dt_bias).uniform_(low, high).exp()
        init.copy_(self.dt_bias, step + torch.log(-torch.expm1(-step)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, T, H]` -> log-decay `[B, T, H]`, at most 0, float32."""
        return -self.A_log.float().exp() * nn.functional.softplus(inputs.float() + self.dt_bias.float())


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution over a few tokens, with the tokens before the row given as history."""

    def __init__(self, channels: int, kernel_size: int):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=False)

    def forward(self, extended: torch.Tensor, length: int, segment_ids: torch.Tensor | None) -> torch.Tensor:
        """`extended` `[B, P + T, C]`: P >= kernel - 1 older tokens, then the row itself -> `[B, T, C]`.

        `segment_ids` `[B, T]` keeps documents of a packed row apart; the older tokens belong to the first one.
        """
        past = extended.shape[1] - length
        # A sum of shifted rows: a few taps cost less this way than a transposed convolution, forward and backward.
        output = extended[:, past:] * self.weight[:, 0, -1]
        for lag in range(1, self.kernel_size[0]):
            shifted = extended[:, past - lag : past - lag + length]
            if segment_ids is not None:
                earlier = nn.functional.pad(segment_ids, (lag, 0), mode="replicate")[:, :length]
                shifted = shifted * (earlier == segment_ids).unsqueeze(-1)
            output = output + shifted * self.weight[:, 0, -1 - lag]
        return output


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet over `num_heads` heads of one layer.

    Args:
        config: a configuration of the zoo; its `linear_*` fields choose the options.
        layer_idx: index of the layer's cache slot.
        num_heads: how many heads of the layer are linear.
    """

    def __init__(self, config, layer_idx: int, num_heads: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = num_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = num_heads * self.key_dim, num_heads * self.value_dim

        self.q_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, values, bias=config.attention_bias)
        self.a_proj = nn.Linear(config.hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, num_heads, bias=False)
        self.decay = LogDecay(config, num_heads)
        self.conv1d = ShortConvolution(2 * keys + values, config.linear_conv_kernel_dim)
        # A row that has read nothing is told by one more channel of the history, 1 where it holds a token: what the
        # projections make of a token may be zero. It takes one past token, even without a convolution.
        self.marks_tokens = config.linear_start_token == "value"
        self.history_length = max(config.linear_conv_kernel_dim - 1, 1)
        self.activation = ACT2FN[config.linear_conv_activation]
        norm = (self.value_dim, config.rms_norm_eps, config.norm_weights)
        self.o_norm = RMSNorm(*norm) if config.linear_output_norm else None
        gate_width = {"none": 0, "headwise": num_heads, "elementwise": values}[config.linear_output_gate]
        self.g_proj = nn.Linear(config.hidden_size, gate_width, bias=False) if gate_width else None
        self.head_scale = nn.Parameter(torch.ones(num_heads)) if config.linear_head_scale else None

    @property
    def history_channels(self) -> int:
        """Numbers that the cache keeps of each past token for the convolution."""
        return self.conv1d.in_channels + self.marks_tokens

    @property
    def recurrent_numbers(self) -> int:
        """Numbers that the cache keeps of the recurrence for each sequence, in float32."""
        return self.num_heads * self.key_dim * self.value_dim

    def _with_history(self, mixed: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """`[B, T, C]` -> `[B, P + T, C]`: the row behind the last tokens that the cache kept, or behind zeros."""
        state = None if cache is None else cache.get_conv_state(self.layer_idx)
        if state is None:
            return nn.functional.pad(mixed, (0, 0, self.history_length, 0))
        return torch.cat([state.transpose(1, 2).to(mixed.dtype), mixed], dim=1)

    def _remember(self, extended: torch.Tensor, layout: SequenceLayout, cache: Cache):
        """Keeps each row's last real tokens; the stock cache would keep the last places, padding included."""
        length = extended.shape[1] - self.history_length
        places = layout.last_places(self.history_length, self.history_length, length)
        if isinstance(places, slice):
            latest = extended[:, places]
        else:
            latest = extended.gather(1, places.unsqueeze(-1).expand(-1, -1, extended.shape[2]))
        cache.update_conv_state(latest.transpose(1, 2), self.layer_idx)

    def _start_tokens(self, extended: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """`[B, T]`: the first token of each document. A row whose history is empty has read nothing yet."""
        is_fresh = (extended[:, : self.history_length, -1] == 0).all(dim=1)
        length = extended.shape[1] - self.history_length
        row_start = nn.functional.pad(is_fresh[:, None], (0, length - 1), value=False)
        later_starts = layout.first_tokens()
        return row_start if later_starts is None else row_start | later_starts

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: SequenceLayout,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Head outputs `[B, T, num_heads, D_v]`.

        Args:
            hidden_states: `[B, T, hidden]`, normed, in original order.
            layout: where the real tokens and documents are.
            position_embeddings: cos and sin `[B or 1, T, D_k]` when the queries and keys are rotated, else None.
            cache: the model's cache, or None.
        """
        batch_size, length = hidden_states.shape[:2]
        hidden_states = layout.blank_padding(layout.compact(hidden_states))
        mixed = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)], dim=-1)
        if self.marks_tokens:
            mixed = torch.cat([mixed, layout.blank_padding(mixed.new_ones(batch_size, length, 1))], dim=-1)
        extended = self._with_history(mixed, cache)
        channels = self.conv1d.in_channels
        mixed = self.activation(self.conv1d(extended[..., :channels], length, layout.segment_ids))
        if cache is not None:
            self._remember(extended, layout, cache)
        keys = self.num_heads * self.key_dim
        query, key, value = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], dim=-1)
        query = query.view(batch_size, length, self.num_heads, self.key_dim)
        key = key.view(batch_size, length, self.num_heads, self.key_dim)
        value = value.view(batch_size, length, self.num_heads, self.value_dim)
        if position_embeddings is not None:
            cos, sin = (layout.compact(part.expand(batch_size, -1, -1)) for part in position_embeddings)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)

        beta = self.b_proj(hidden_states).sigmoid() * (2 if self.config.linear_allow_neg_eigval else 1)
        heads, state = gated_delta_rule(
            unit_length(query),
            unit_length(key),
            value,
            # Padding leaves the state alone: it neither writes nor decays.
            layout.blank_padding(self.decay(self.a_proj(hidden_states))),
            layout.blank_padding(beta),
            initial_state=None if cache is None else cache.get_recurrent_state(self.layer_idx),
            segment_ids=layout.segment_ids,
        )
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)

        if self.o_norm is not None:
            heads = self.o_norm(heads)
        if self.g_proj is not None:
            kind = self.config.linear_output_gate
            activation = nn.functional.silu if kind == "elementwise" else torch.sigmoid
            heads = apply_output_gate(heads, self.g_proj(hidden_states), kind, activation)
        if self.head_scale is not None:
            heads = heads * self.head_scale[:, None]
        if self.config.linear_start_token == "value":
            # Softmax attention over one token returns its value, whatever the logits: the attention sink lives on it.
            starts = self._start_tokens(extended, layout)
            heads = torch.where(starts[:, :, None, None], value, heads)
        return layout.restore(heads)

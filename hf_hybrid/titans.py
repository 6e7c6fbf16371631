"""Titans (arXiv 2501.00663): a neural memory as a layer's token mixer, alone or with sliding-window attention.

The memory reads compacted rows, see `sequence_layout.py`. Its cache is an ordinary recurrent state: the memory at the
start of the chunk that a row is in, and the tokens of that chunk so far, which are read again with the next ones. So
rows may be anywhere in their chunks, whatever stood beside them, and decoding equals one full run.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, silu
from transformers import initialization as init
from transformers.cache_utils import Cache

from .attention import RMSNorm, SoftmaxAttention
from .gated_delta_net import Float32Parameters, ShortConvolution, unit_length
from .neural_memory import MemoryState, chunk_neural_memory
from .sequence_layout import SequenceLayout


class MemoryGates(Float32Parameters):
    """Forgetting, momentum and inner learning rate per token and head; biases stay float32 whatever the model's dtype.

    They live in a module of their own so that sharded training can wrap them apart from half-precision weights.
    """

    def __init__(self, config, num_heads: int):
        super().__init__()
        self.config = config
        self.forgetting_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.momentum_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.rate_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self):
        """The configuration's forgetting and momentum, and half of the largest rate, where the inputs say nothing."""
        config = self.config
        init.constant_(self.forgetting_bias, math.log(config.memory_forgetting / (1 - config.memory_forgetting)))
        init.constant_(self.momentum_bias, math.log(config.memory_momentum / (1 - config.memory_momentum)))
        init.zeros_(self.rate_bias)

    def forward(self, forgetting: Tensor, momentum: Tensor, rate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each `[B, T, H]` -> log(1 - alpha), log(eta) and theta, float32."""
        return (
            # log(1 - sigmoid(x)), without rounding 1 - alpha to 1.
            logsigmoid(-(forgetting.float() + self.forgetting_bias.float())),
            logsigmoid(momentum.float() + self.momentum_bias.float()),
            (rate.float() + self.rate_bias.float()).sigmoid() * self.config.memory_max_rate,
        )


class NeuralMemory(nn.Module):
    """The memory with its projections, over all heads of a layer: `[B, T, hidden]` -> `[B, T, H * D]`.

    Args:
        config: a configuration of the zoo with the `memory_*` fields of [`TLMConfig`].
        layer_idx: index of the layer's cache slot.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.hidden_dim = config.memory_expansion * config.head_dim
        self.chunk_size, self.residual = config.memory_chunk_size, config.memory_residual
        width = self.num_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.a_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.e_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.t_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.decay = MemoryGates(config, self.num_heads)
        self.conv1d = ShortConvolution(3 * width, config.memory_conv_kernel_dim)
        self.history_length = max(config.memory_conv_kernel_dim - 1, 1)
        # What every sequence's memory starts from.
        self.initial_w1 = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.hidden_dim))
        self.initial_w2 = nn.Parameter(torch.empty(self.num_heads, self.hidden_dim, self.head_dim))

    @torch.no_grad()
    def reset_parameters(self):
        """Weights of the memory that keep the size of what they read."""
        init.normal_(self.initial_w1, std=self.head_dim**-0.5)
        init.normal_(self.initial_w2, std=self.hidden_dim**-0.5)

    @property
    def _state_shapes(self) -> list[tuple[int, ...]]:
        """What the cache keeps of a row: the memory at the start of its chunk, and the chunk's tokens so far."""
        heads, dim, hidden = self.num_heads, self.head_dim, self.hidden_dim
        matrices = [(heads, dim, hidden), (heads, hidden, dim)] * 2
        # Of each token: key and value of every head, and three gates; of the row: how many there are.
        return [*matrices, (self.chunk_size - 1, heads * (2 * dim + 3)), (1,)]

    @property
    def recurrent_numbers(self) -> int:
        """Numbers that the cache keeps of the memory for each sequence, in float32."""
        return sum(math.prod(shape) for shape in self._state_shapes)

    @property
    def history_channels(self) -> int:
        """Numbers that the cache keeps of each past token for the convolution."""
        return self.conv1d.in_channels

    def _initial_state(self, batch_size: int) -> MemoryState:
        weights = (self.initial_w1.float(), self.initial_w2.float())
        w1, w2 = (weight.expand(batch_size, *weight.shape) for weight in weights)
        return MemoryState(w1, w2, torch.zeros_like(w1), torch.zeros_like(w2))

    def _read_cache(self, cache: Cache) -> tuple[MemoryState, Tensor, Tensor] | None:
        """The memory, the tokens of the current chunk `[B, C - 1, ...]`, and their number `[B]`; None at the start."""
        flat = cache.get_recurrent_state(self.layer_idx)
        if flat is None:
            return None
        pieces = flat.split([math.prod(shape) for shape in self._state_shapes], dim=-1)
        *matrices, tokens, count = (
            piece.view(-1, *shape) for piece, shape in zip(pieces, self._state_shapes, strict=True)
        )
        return MemoryState(*matrices), tokens, count[:, 0].long()

    def _with_history(self, mixed: Tensor, layout: SequenceLayout, cache: Cache | None) -> Tensor:
        """`[B, T, C]` -> `[B, P + T, C]`: behind the cached last tokens, which are then replaced."""
        state = None if cache is None else cache.get_conv_state(self.layer_idx)
        if state is None:
            extended = pad(mixed, (0, 0, self.history_length, 0))
        else:
            extended = torch.cat([state.transpose(1, 2).to(mixed.dtype), mixed], dim=1)
        if cache is not None:
            places = layout.last_places(self.history_length, self.history_length, mixed.shape[1])
            if isinstance(places, slice):
                latest = extended[:, places]
            else:
                latest = extended.gather(1, places.unsqueeze(-1).expand(-1, -1, extended.shape[2]))
            cache.update_conv_state(latest.transpose(1, 2), self.layer_idx)
        return extended

    def forward(self, hidden_states: Tensor, layout: SequenceLayout, cache: Cache | None = None) -> Tensor:
        """What the memory returns to each token, in original order.

        Args:
            hidden_states: `[B, T, hidden]`, normed, in original order.
            layout: where the real tokens and documents are.
            cache: the model's cache, or None.
        """
        batch_size, length = hidden_states.shape[:2]
        hidden_states = layout.blank_padding(layout.compact(hidden_states))
        mixed = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)], dim=-1)
        extended = self._with_history(mixed, layout, cache)
        query, key, value = silu(self.conv1d(extended, length, layout.segment_ids)).float().chunk(3, dim=-1)
        heads = (batch_size, length, self.num_heads, self.head_dim)
        query, key = unit_length(query.view(heads)).flatten(2), unit_length(key.view(heads)).flatten(2)
        gates = self.decay(self.a_proj(hidden_states), self.e_proj(hidden_states), self.t_proj(hidden_states))
        # One row of numbers a token, so that all of it is laid out at once.
        tokens = torch.cat([query, key, value, *gates], dim=-1)
        if layout.segment_ids is not None:
            outputs = self._read_documents(tokens, layout)
        elif cache is None:
            outputs, _ = self._read(tokens, self._initial_state(batch_size))
        else:
            outputs = self._read_on(tokens, layout, cache)
        return layout.restore(outputs.to(hidden_states.dtype))

    def _read(self, tokens: Tensor, state: MemoryState, lengths: Tensor | None = None) -> tuple[Tensor, MemoryState]:
        """Rows that begin a chunk: `[B, T, H * (3 D + 3)]` -> `[B, T, H * D]`, and the memory after full chunks."""
        width = self.num_heads * self.head_dim
        query, key, value, *gates = tokens.split([width] * 3 + [self.num_heads] * 3, dim=-1)
        vectors = [
            part.view(*part.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for part in (query, key, value)
        ]
        gates = [gate.transpose(1, 2) for gate in gates]
        outputs, state = chunk_neural_memory(*vectors, *gates, state, self.chunk_size, self.residual, lengths)
        return outputs.transpose(1, 2).flatten(2), state

    def _read_documents(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Packed rows: each document is a row of its own, so that its chunks begin where it does."""
        batch_size, length = tokens.shape[:2]
        segments = layout.segment_ids + (layout.segment_ids.max() + 1) * torch.arange(
            batch_size, device=tokens.device
        ).unsqueeze(1)
        _, document, counts = segments.flatten().unique_consecutive(return_inverse=True, return_counts=True)
        begins = counts.cumsum(0) - counts
        place = torch.arange(batch_size * length, device=tokens.device) - begins[document]
        rows = tokens.new_zeros(len(counts), int(counts.max()), tokens.shape[-1])
        rows[document, place] = tokens.flatten(0, 1)
        outputs, _ = self._read(rows, self._initial_state(len(counts)))
        return outputs[document, place].view(batch_size, length, -1)

    def _read_on(self, tokens: Tensor, layout: SequenceLayout, cache: Cache) -> Tensor:
        """Rows that go on from a cache: behind the tokens of the chunk that each row is in, then written back."""
        batch_size, length, width = tokens.shape
        queries, waiting = self.num_heads * self.head_dim, self.chunk_size - 1
        kept = self._read_cache(cache)
        if kept is None:
            state, count = self._initial_state(batch_size), tokens.new_zeros(batch_size, dtype=torch.long)
            older = tokens.new_zeros(batch_size, waiting, width)
        else:
            state, older, count = kept
            # What they return was given when they came: nobody asks again.
            older = pad(older, (queries, 0))
        # Row r holds its `count[r]` waiting tokens, then its new ones, whatever the other rows hold.
        places = torch.arange(waiting + length, device=tokens.device).expand(batch_size, -1)
        behind = (places - count.unsqueeze(1) + waiting).clamp(max=waiting + length - 1)
        source = torch.where(places < count.unsqueeze(1), places, behind)
        joined = torch.cat([older, tokens], dim=1).gather(1, source.unsqueeze(-1).expand(-1, -1, width))
        new = length if layout.is_real is None else layout.is_real.sum(dim=1)
        total = count + new
        outputs, state = self._read(joined, state, total)
        self._write_cache(cache, state, joined[..., queries:], total)
        own = count.unsqueeze(1) + torch.arange(length, device=tokens.device)
        return outputs.gather(1, own.unsqueeze(-1).expand(-1, -1, outputs.shape[-1]))

    def _write_cache(self, cache: Cache, state: MemoryState, joined: Tensor, total: Tensor) -> None:
        count = total % self.chunk_size
        places = (total - count).unsqueeze(1) + torch.arange(self.chunk_size - 1, device=joined.device)
        index = places.clamp(max=joined.shape[1] - 1).unsqueeze(-1).expand(-1, -1, joined.shape[-1])
        waiting = joined.gather(1, index) * (places < total.unsqueeze(1)).unsqueeze(-1)
        pieces = (*state, waiting, count.float().unsqueeze(1))
        cache.update_recurrent_state(torch.cat([piece.flatten(1) for piece in pieces], dim=1), self.layer_idx)


class Titans(nn.Module):
    """The mixer of one Titans layer, in one of its variants (`memory_variant` of [`TLMConfig`])."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx, self.variant = layer_idx, config.memory_variant
        self.marks_positions = config.marks_positions(layer_idx)
        width = config.num_attention_heads * config.head_dim
        self.mask_kind = "full_attention" if config.layer_sliding_window(layer_idx) is None else "sliding_attention"
        self.memory = NeuralMemory(config, layer_idx)
        heads = list(range(config.num_attention_heads))
        self.attention = None if self.variant == "lmm" else SoftmaxAttention(config, layer_idx, heads)
        self.memory_norm = RMSNorm(width, config.rms_norm_eps, config.norm_weights)
        self.attention_norm = (
            RMSNorm(width, config.rms_norm_eps, config.norm_weights) if self.variant == "mag" else None
        )
        # The memory as a layer before attention gives back what attention reads.
        self.m_proj = nn.Linear(width, config.hidden_size, bias=False) if self.variant == "mal" else None
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_masks: dict[str, Tensor | None],
        layout: SequenceLayout,
        position_embeddings: tuple[Tensor, Tensor] | None,
        position_ids: Tensor,
        cache: Cache | None = None,
        **kwargs,
    ) -> Tensor:
        """`[B, T, hidden]` -> `[B, T, hidden]`; the arguments are those of every mixer of the zoo."""
        recalled = self.memory_norm(self.memory(hidden_states, layout, cache))
        if self.marks_positions and cache is not None:
            marks = hidden_states.new_zeros(*hidden_states.shape[:2], 1).unsqueeze(1)
            cache.update(marks, marks[..., :0], self.layer_idx)
        if self.attention is None:
            return self.o_proj(recalled)
        if self.m_proj is not None:
            hidden_states = self.m_proj(recalled)
        attended, _ = self.attention(
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_masks[self.mask_kind],
            position_ids=position_ids,
            cache=cache,
            **kwargs,
        )
        attended = attended.flatten(2)
        if self.attention_norm is not None:
            attended = self.attention_norm(attended) * recalled.sigmoid()
        return self.o_proj(attended)

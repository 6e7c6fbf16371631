"""The gated delta rule, the recurrence of Gated DeltaNet (arXiv 2412.06464):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t / sqrt(Dk)

Three forms with one signature: `recurrent_gated_delta_rule` (token by token, the reference and the decoding step),
`chunk_gated_delta_rule` (matrix products over chunks of tokens) and `fla_gated_delta_rule` (flash-linear-attention's
kernels). `gated_delta_rule` chooses.

Arguments of all of them (T tokens, H heads):
    query, key: [B, T, H, Dk], L2-normalised by the caller
    value: [B, T, H, Dv]
    log_decay: [B, T, H], g above, natural logarithm, <= 0
    beta: [B, T, H], the share of the old value that is overwritten; 0 to 2
    initial_state: [B, H, Dk, Dv] or None for zeros
    segment_ids: [B, T] integers that do not decrease along a row, or None. The state is emptied where the id changes;
        `initial_state` belongs to the row's first segment and the final state is that of its last one.
Returns the output [B, T, H, Dv] in the dtype of `value` and the final state [B, H, Dk, Dv] in float32 (float64 for
float64 inputs). A token with key = 0, beta = 0 and log_decay = 0 leaves the state as it is, so padding goes last with
the id of the row's last segment.

A CPU computes with denormal numbers about a hundred times slower, and decays make them in plenty. Numbers below
`_tiny` therefore count as zero, in the state and wherever they would enter a matrix product.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_kernel
except (ImportError, RuntimeError):  # a GPU stack that is absent or broken leaves the torch forms
    fla_kernel = None


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule by the form that suits length, device and dtype. Arguments and results: see the module.

    Raises:
        ValueError: an argument's shape does not fit `key` and `value`.
    """
    _check_shapes(query, key, value, log_decay, beta, initial_state, segment_ids)
    if key.shape[1] == 1:
        form = recurrent_gated_delta_rule
    elif key.is_cuda and fla_kernel is not None and key.dtype != torch.float64:
        form = fla_gated_delta_rule
    else:
        form = chunk_gated_delta_rule
    return form(query, key, value, log_decay, beta, initial_state=initial_state, segment_ids=segment_ids)


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token: the reference, and the step of decoding. Arguments: see the module."""
    dtype = _state_dtype(query)
    state = _state(initial_state, key, value, dtype)
    decay = _flush(_reset_decay(log_decay, segment_ids).to(dtype).exp())[..., None, None]
    scaled_query, new_key, new_value, rate = (_flush(x.to(dtype)) for x in (query, key, value, beta.unsqueeze(-1)))
    scaled_query = scaled_query * key.shape[-1] ** -0.5
    outputs = []
    for t in range(key.shape[1]):
        state = _flush(state * decay[:, t])
        correction = rate[:, t] * (new_value[:, t] - _read(state, new_key[:, t]))
        state = torch.addcmul(state, new_key[:, t].unsqueeze(-1), correction.unsqueeze(-2))
        outputs.append(_read(state, scaled_query[:, t]))
    return torch.stack(outputs, dim=1).to(value.dtype), state


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over chunks of `chunk_size` tokens. Arguments: see the module.

    Saves for the backward pass its arguments and one state per chunk, and recomputes the rest. Gradients can be taken
    once, not twice.
    """
    state = _state(initial_state, key, value, _state_dtype(query))
    log_decay = _reset_decay(log_decay, segment_ids)
    return _ChunkGatedDeltaRule.apply(query, key, value, log_decay, beta, state, chunk_size)


def fla_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule by flash-linear-attention's Triton kernels, on a GPU. Arguments: see the module.

    Raises:
        ImportError: flash-linear-attention is not installed.
    """
    if fla_kernel is None:
        raise ImportError("fla_gated_delta_rule needs flash-linear-attention: pip install 'hf-hybrid[gpu]'")
    inputs = (query, key, value, log_decay.float(), beta)
    initial_state = _state(initial_state, key, value, torch.float32)
    if segment_ids is None:
        return fla_kernel(*inputs, initial_state=initial_state, output_final_state=True)

    # The kernel takes segments of any length as one long row, with a state for each of them.
    starts = _segment_starts(segment_ids)
    starts[:, 0] = True
    starts = starts.flatten()
    offsets = F.pad(starts.nonzero().squeeze(-1), (0, 1), value=len(starts))
    segment = (starts.cumsum(0) - 1).view(segment_ids.shape)
    segment_states = initial_state.new_zeros(len(offsets) - 1, *initial_state.shape[1:])
    output, final_states = fla_kernel(
        *(x.flatten(0, 1).unsqueeze(0) for x in inputs),
        initial_state=segment_states.index_copy(0, segment[:, 0], initial_state),
        output_final_state=True,
        cu_seqlens=offsets,
    )
    return output.view(value.shape), final_states[segment[:, -1]]


def _check_shapes(query, key, value, log_decay, beta, initial_state, segment_ids):
    batch, length, heads, key_dim = key.shape
    expected = {
        "query": (query, (batch, length, heads, key_dim)),
        "value": (value, (batch, length, heads, value.shape[-1])),
        "log_decay": (log_decay, (batch, length, heads)),
        "beta": (beta, (batch, length, heads)),
        "initial_state": (initial_state, (batch, heads, key_dim, value.shape[-1])),
        "segment_ids": (segment_ids, (batch, length)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but key {tuple(key.shape)} and value {tuple(value.shape)} "
                f"ask for {shape}"
            )


def _state_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _state(initial_state: Tensor | None, key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    if initial_state is None:
        return torch.zeros(key.shape[0], *key.shape[2:], value.shape[-1], dtype=dtype, device=key.device)
    return initial_state.to(dtype)


def _segment_starts(segment_ids: Tensor) -> Tensor:
    """[B, T], True where the state is emptied; never at the first token, which continues the initial state."""
    return F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))


def _reset_decay(log_decay: Tensor, segment_ids: Tensor | None) -> Tensor:
    if segment_ids is None:
        return log_decay
    return log_decay.masked_fill(_segment_starts(segment_ids).unsqueeze(-1), -math.inf)


def _read(state: Tensor, query: Tensor) -> Tensor:
    """S^T q over [B, H, Dk, Dv] and [B, H, Dk], as a sum, which autocast leaves in full precision."""
    return (state * query.unsqueeze(-1)).sum(-2)


def _tiny(dtype: torch.dtype) -> float:
    """The smallest magnitude that counts. Its square is still far above the denormal numbers, so that neither a product
    of two numbers nor what is left when such products cancel can be denormal."""
    return torch.finfo(dtype).tiny ** 0.4


def _flush(x: Tensor) -> Tensor:
    """Zero what is tiny. The gradient passes through: an entry that is zero now may still have to grow."""
    flushed = F.hardshrink(x, _tiny(x.dtype))
    return x + (flushed - x).detach() if x.requires_grad else flushed


def _flush_(x: Tensor) -> Tensor:
    """Zero what is tiny, in place where that can be, and outside autograd: use what it returns."""
    if torch.compiler.is_compiling():
        return F.hardshrink(x, _tiny(x.dtype))  # torch.compile can't trace a column-major `out`
    return torch.hardshrink(x, _tiny(x.dtype), out=x)


class _Chunk(NamedTuple):
    """What the forward and the backward pass of a chunk share; N = B*H, C tokens.

    With cumulative decay a_i = exp(g_1 + .. + g_i) and pairwise decay G_ij = exp(g_{j+1} + .. + g_i), j <= i:
    the corrections u_i that are written into the state S solve (I + A) U = beta (V - a K S), A_ij = beta_i G_ij k_i k_j
    for j < i; the outputs are a Q S + P U, P_ij = G_ij q_i k_j; the next state is a_C S + K^T (G_C U).
    """

    query: Tensor  # [N, C, Dk]
    key: Tensor  # [N, C, Dk]
    beta: Tensor  # [N, C, 1]
    decay: Tensor  # [N, C, C], G
    start_decay: Tensor  # [N, C, 1], a: from the state before the chunk to each token
    end_decay: Tensor  # [N, C, 1], G_C: from each token to the last one
    start_query: Tensor  # [N, C, Dk], a Q
    start_key: Tensor  # [N, C, Dk], a K
    end_key: Tensor  # [N, C, Dk], G_C K
    query_scores: Tensor  # [N, C, C], P
    key_scores: Tensor  # [N, C, C], A without beta
    system: Tensor  # [N, C, C], A
    error: Tensor  # [N, C, Dv], V - a K S
    correction: Tensor  # [N, C, Dv], U


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, C, H, ...] -> [B*H, C, ...]"""
    return F.hardshrink(x.transpose(1, 2).to(dtype), _tiny(dtype)).flatten(0, 1)


def _heads_last(x: Tensor, batch: int) -> Tensor:
    """[B*H, C, ...] -> [B, C, H, ...]"""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _lowest_log_decay(dtype: torch.dtype) -> float:
    """Decays below its exponential are zero; exp itself would be slow where its result is denormal."""
    return math.log(_tiny(dtype)) - 1


def _rates(log_decay: Tensor, beta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """log_decay and beta as [B*H, T]."""
    return _heads_first(log_decay, dtype).clamp_(min=_lowest_log_decay(dtype)), _heads_first(beta, dtype)


def _chunk(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> _Chunk:
    query, key, value = (_heads_first(x, state.dtype) for x in (query, key, value))
    beta = beta.unsqueeze(-1)
    lowest = _lowest_log_decay(state.dtype)
    lower = log_decay.new_ones(log_decay.shape[-1], log_decay.shape[-1]).tril_()
    # Sums over the tokens after j up to i: differences of cumulative sums would lose mild decays behind a strong one.
    decay = torch.matmul(log_decay.unsqueeze(-2) * lower, lower.tril(-1))
    decay = _flush_(decay.clamp_(min=lowest).exp_().tril_())
    start_decay = _flush_(log_decay.cumsum(-1).clamp_(min=lowest).exp_()).unsqueeze(-1)
    end_decay = decay[:, -1].unsqueeze(-1)

    start_query, start_key, end_key = (_flush_(x) for x in (query * start_decay, key * start_decay, key * end_decay))
    query_scores = _flush_(torch.bmm(query, key.mT).mul_(decay))
    key_scores = torch.bmm(key, key.mT).mul_(decay).tril_(-1)
    system = _flush_(key_scores * beta)

    error = torch.baddbmm(value, start_key, state, alpha=-1)
    correction = _solve(system, error * beta)
    return _Chunk(
        *(query, key, beta, decay, start_decay, end_decay, start_query, start_key, end_key),
        *(query_scores, key_scores, system, error, correction),
    )


def _solve(system: Tensor, right_side: Tensor, transpose: bool = False) -> Tensor:
    """X in (I + A) X = B, or (I + A)^T X = B, for A below the diagonal."""
    # X may fade through the denormal range from row to row. A constant keeps it above, so small that it is flushed from
    # the result: the inverse of I + A has no entry above 2 for keys of unit length and beta <= 2.
    right_side = _flush_(right_side).add_(_tiny(right_side.dtype) / (2 * right_side.shape[1]))
    system = system.mT if transpose else system
    return _flush_(torch.linalg.solve_triangular(system, right_side, upper=transpose, unitriangular=True))


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """Chunk after chunk, so that the intermediate results stay in the cache. The gradient is written by hand: autograd
    would keep every intermediate result, and could neither pass through `_flush_` nor keep itself off denormals."""

    @staticmethod
    def forward(ctx, query, key, value, log_decay, beta, initial_state, chunk_size):
        batch, length = key.shape[:2]
        scale = key.shape[-1] ** -0.5
        state = F.hardshrink(initial_state, _tiny(initial_state.dtype)).flatten(0, 1)
        rates = _rates(log_decay, beta, state.dtype)
        states = []
        output = torch.empty_like(value)
        with torch.autocast(key.device.type, enabled=False):
            for start in range(0, length, chunk_size):
                states.append(state)
                chunk = slice(start, start + chunk_size)
                c = _chunk(*(x[:, chunk] for x in (query, key, value, *rates)), state)
                reads = torch.bmm(c.start_query, state)
                reads = torch.baddbmm(reads, c.query_scores, c.correction, beta=scale, alpha=scale)
                output[:, chunk] = _heads_last(reads, batch)
                state = _flush_(torch.baddbmm(state * c.start_decay[:, -1:], c.end_key.mT, c.correction))
        ctx.save_for_backward(query, key, value, log_decay, beta, *states)
        ctx.chunk_size = chunk_size
        return output, state.view_as(initial_state)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_state):
        query, key, value, log_decay, beta, *states = ctx.saved_tensors
        batch, size = key.shape[0], ctx.chunk_size
        scale = key.shape[-1] ** -0.5
        dtype = states[0].dtype
        # Gradients may be of any magnitude: in units of the largest one, what is tiny does not count here either.
        grad_output, grad_state = (
            F.hardshrink(x.to(dtype), torch.finfo(dtype).tiny / _tiny(dtype)) for x in (grad_output, grad_state)
        )
        unit = torch.maximum(grad_output.abs().amax(), grad_state.abs().amax())
        unit = torch.where(unit > 0, unit, 1.0)
        grad_state = F.hardshrink(grad_state / unit, _tiny(dtype)).flatten(0, 1)
        grad_output = grad_output * (scale / unit)
        inputs = (query, key, value, log_decay, beta)
        rates = _rates(log_decay, beta, dtype)
        grads = [torch.empty_like(x) for x in inputs]
        with torch.autocast(key.device.type, enabled=False):
            for index in reversed(range(len(states))):
                chunk = slice(index * size, (index + 1) * size)
                c = _chunk(*(x[:, chunk] for x in (query, key, value, *rates)), states[index])
                chunk_grad_output = _heads_first(grad_output[:, chunk], dtype)
                *chunk_grads, grad_state = _chunk_backward(c, states[index], chunk_grad_output, grad_state)
                for grad, chunk_grad in zip(grads, chunk_grads, strict=True):
                    grad[:, chunk] = _heads_last(chunk_grad.mul_(unit), batch)
        return *grads, (grad_state * unit).unflatten(0, (batch, -1)), None


def _chunk_backward(c: _Chunk, state: Tensor, grad_output: Tensor, grad_next_state: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a chunk's query, key, value, log_decay, beta and of the state before it."""
    last_decay = c.start_decay[:, -1:]

    # U feeds the outputs and the next state; R = beta E is the right-hand side that it was solved from.
    grad_correction = torch.baddbmm(torch.bmm(c.query_scores.mT, grad_output), c.end_key, grad_next_state)
    grad_right_side = _solve(c.system, grad_correction, transpose=True)
    grad_value = _flush_(grad_right_side * c.beta)
    grad_query_scores = torch.bmm(grad_output, c.correction.mT)
    grad_system = torch.bmm(grad_right_side, c.correction.mT).neg_().tril_(-1)
    grad_beta = (grad_right_side * torch.baddbmm(c.error, c.key_scores, c.correction, alpha=-1)).sum(-1)

    grad_start_query = torch.bmm(grad_output, state.mT)
    grad_start_key = torch.bmm(grad_value, state.mT).neg_()
    grad_end_key = torch.bmm(c.correction, grad_next_state.mT)
    grad_state = torch.baddbmm(grad_next_state * last_decay, c.start_query.mT, grad_output)
    grad_state = _flush_(torch.baddbmm(grad_state, c.start_key.mT, grad_value, alpha=-1))

    # Every decay is exp of a difference of cumulative log decays: its gradient adds to the upper end of the sum and
    # subtracts from the lower.
    grad_pairs = grad_query_scores * c.query_scores + grad_system * c.system
    grad_end = (grad_end_key * c.end_key).sum(-1)
    grad_cumulative = (grad_start_query * c.start_query).sum(-1) + (grad_start_key * c.start_key).sum(-1)
    grad_cumulative += grad_pairs.sum(-1) - grad_pairs.sum(-2) - grad_end
    grad_cumulative[:, -1] += grad_end.sum(-1) + (grad_next_state * state * last_decay).sum((-1, -2))
    grad_log_decay = grad_cumulative.flip(-1).cumsum(-1).flip(-1)

    grad_query_key = _flush_(grad_query_scores.mul_(c.decay))
    grad_key_key = _flush_(grad_system.mul_(c.decay).mul_(c.beta))
    grad_query = torch.baddbmm(grad_start_query * c.start_decay, grad_query_key, c.key)
    grad_key = grad_start_key * c.start_decay + grad_end_key * c.end_decay
    grad_key = torch.baddbmm(grad_key, grad_query_key.mT, c.query)
    grad_key = torch.baddbmm(grad_key, grad_key_key + grad_key_key.mT, c.key)
    return grad_query, grad_key, grad_value, grad_log_decay, grad_beta, grad_state

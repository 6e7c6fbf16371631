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
import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_kernel
except (ImportError, RuntimeError):  # a GPU stack that is absent or broken leaves the torch forms
    fla_kernel = None


# Chunks are computed in blocks of so many tokens: enough work for several threads, little enough for the cache.
_BLOCK_LENGTH = 256


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
    chunk_size: int = 32,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over chunks of `chunk_size` tokens. Arguments: see the module.

    Longer chunks round more in float32 where keys are correlated, and are no faster. The backward pass keeps the
    arguments and one state per 256 tokens, and recomputes the rest; it cannot be differentiated again.

    Raises:
        ValueError: `chunk_size` is smaller than 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: give at least 1 token")
    length = key.shape[1]
    inputs = (query, key, value, _reset_decay(log_decay, segment_ids), beta)
    if length % chunk_size:
        inputs = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, -length % chunk_size)) for x in inputs)
    state = _state(initial_state, key, value, _state_dtype(query))
    output, state, _ = _chunked_forward(*inputs, state, chunk_size)
    return output[:, :length], state


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
    if length == 0:
        raise ValueError(f"key has shape {tuple(key.shape)}: give at least one token")
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
    """Zero what is tiny, in place and outside autograd."""
    return torch.hardshrink(x, _tiny(x.dtype), out=x)


class _Block(NamedTuple):
    """What is known of a block of G chunks before its states are; N = G*B*H, C tokens to a chunk.

    With a_i = exp(g_1 + .. + g_i) from a chunk's start to token i and G_ij = exp(g_{j+1} + .. + g_i), j <= i, the
    corrections U that a chunk writes into the state S before it solve (I + A) U = beta (V - a K S), where
    A_ij = beta_i G_ij k_i k_j for j < i. Its outputs are a Q S + P U with P_ij = G_ij q_i k_j, and the state after
    it is a_C S + K^T (G_C U).
    """

    query: Tensor  # [N, C, Dk]
    key: Tensor  # [N, C, Dk]
    value: Tensor  # [N, C, Dv]
    beta: Tensor  # [N, C, 1]
    decay: Tensor  # [N, C, C], G
    start_decay: Tensor  # [N, C, 1], a: from the state before the chunk to each token
    end_decay: Tensor  # [N, C, 1], G_C: from each token to the chunk's last one
    start_query: Tensor  # [N, C, Dk], a Q
    start_key: Tensor  # [N, C, Dk], a K
    end_key: Tensor  # [N, C, Dk], G_C K
    query_scores: Tensor  # [N, C, C], P
    key_scores: Tensor  # [N, C, C], A without beta
    system: Tensor  # [N, C, C], A
    state_correction: Tensor  # [N, C, Dk], (I + A)^-1 beta a K
    value_correction: Tensor  # [N, C, Dv], (I + A)^-1 beta V


def _block_length(chunk_size: int) -> int:
    return max(_BLOCK_LENGTH // chunk_size, 1) * chunk_size


def _to_chunks(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[B, G*C, H, ...] -> [G*B*H, C, ...], with zero for what is tiny"""
    x = x.unflatten(1, (-1, size)).movedim(1, 0).transpose(2, 3)
    return F.hardshrink(x.to(dtype).contiguous(), _tiny(dtype)).flatten(0, 2)


def _from_chunks(x: Tensor, rows: Tensor) -> None:
    """[G*B*H, C, ...] into the tokens `rows`, [B, G*C, H, ...]"""
    rows = rows.unflatten(1, (-1, x.shape[1])).movedim(1, 0).transpose(2, 3)
    rows.copy_(x.view(rows.shape))


def _solve(system: Tensor, right_side: Tensor, transpose: bool = False) -> Tensor:
    """X in (I + A) X = B, or (I + A)^T X = B, for A below the diagonal. Overwrites B."""
    # X may fade through the denormal range from row to row. A constant keeps it above, so small that it is flushed from
    # the result: the inverse of I + A has no entry above 2 for keys of unit length and beta <= 2.
    right_side = _flush_(right_side).add_(_tiny(right_side.dtype) / (2 * right_side.shape[1]))
    system = system.mT if transpose else system
    return _flush_(torch.linalg.solve_triangular(system, right_side, upper=transpose, unitriangular=True))


def _block(query, key, value, log_decay, beta, size: int, dtype: torch.dtype) -> _Block:
    query, key, value, log_decay, beta = (_to_chunks(x, size, dtype) for x in (query, key, value, log_decay, beta))
    beta = beta.unsqueeze(-1)

    # exp is slow where its result is denormal; what lies below the bound is flushed to zero anyway.
    lowest = math.log(_tiny(dtype)) - 1
    log_decay = log_decay.clamp_(min=lowest)
    lower = log_decay.new_ones(size, size).tril_()
    # Sums over the tokens after j up to i: differences of cumulative sums would lose mild decays behind a strong one.
    decay = torch.matmul(log_decay.unsqueeze(-2) * lower, lower.tril(-1))
    decay = _flush_(decay.clamp_(min=lowest).exp_().tril_())
    start_decay = _flush_(log_decay.cumsum(-1).clamp_(min=lowest).exp_()).unsqueeze(-1)
    end_decay = decay[:, -1].unsqueeze(-1)

    start_query, start_key, end_key = (_flush_(x) for x in (query * start_decay, key * start_decay, key * end_decay))
    query_scores = _flush_(torch.bmm(query, key.mT).mul_(decay))
    key_scores = torch.bmm(key, key.mT).mul_(decay).tril_(-1)
    system = _flush_(key_scores * beta)
    corrections = _solve(system, torch.cat([start_key, value], dim=-1).mul_(beta))
    return _Block(
        *(query, key, value, beta, decay, start_decay, end_decay, start_query, start_key, end_key),
        *(query_scores, key_scores, system, *corrections.split([key.shape[-1], value.shape[-1]], dim=-1)),
    )


def _scan(b: _Block, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From chunk to chunk: the states before each [N, Dk, Dv], the corrections U [N, C, Dv], and the last state."""
    states, corrections = [], []
    chunks = (b.state_correction, b.value_correction, b.end_key.mT, b.start_decay[:, -1:])
    for state_correction, value_correction, end_key, decay in zip(*(x.split(len(state)) for x in chunks), strict=True):
        states.append(state)
        corrections.append(_flush_(torch.baddbmm(value_correction, state_correction, state, alpha=-1)))
        state = _flush_(torch.baddbmm(state * decay, end_key, corrections[-1]))
    return torch.cat(states), torch.cat(corrections), state


def _scan_backward(b: _Block, grad_output: Tensor, grad_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the states after each chunk, of the corrections, and of the state before the block."""
    grad_next_states, grad_corrections = [], []
    chunks = (
        torch.bmm(b.query_scores.mT, grad_output),
        torch.bmm(b.start_query.mT, grad_output),
        b.end_key,
        b.state_correction.mT,
        b.start_decay[:, -1:],
    )
    chunks = zip(*(x.split(len(grad_state)) for x in chunks), strict=True)
    for from_outputs, from_reads, end_key, state_correction, decay in reversed(list(chunks)):
        grad_next_states.append(grad_state)
        grad_corrections.append(_flush_(torch.baddbmm(from_outputs, end_key, grad_state)))
        grad_state = torch.addcmul(from_reads, grad_state, decay)
        grad_state = _flush_(torch.baddbmm(grad_state, state_correction, grad_corrections[-1], alpha=-1))
    return torch.cat(grad_next_states[::-1]), torch.cat(grad_corrections[::-1]), grad_state


def _block_backward(b: _Block, state: Tensor, grad_output: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a block's query, key, value, log_decay, beta and of the state before it."""
    states, correction, _ = _scan(b, state)
    grad_next_states, grad_correction, grad_state = _scan_backward(b, grad_output, grad_state)

    grad_right_side = _solve(b.system, grad_correction, transpose=True)
    grad_value = _flush_(grad_right_side * b.beta)
    error = torch.baddbmm(b.value, b.start_key, states, alpha=-1)
    error = error.baddbmm_(b.key_scores, correction, alpha=-1)
    grad_beta = (grad_right_side * error).sum(-1)
    grad_query_scores = torch.bmm(grad_output, correction.mT)
    grad_system = torch.bmm(grad_right_side, correction.mT).neg_().tril_(-1)

    grad_start_query = torch.bmm(grad_output, states.mT)
    grad_start_key = torch.bmm(grad_value, states.mT).neg_()
    grad_end_key = torch.bmm(correction, grad_next_states.mT)

    # Every decay is exp of a difference of cumulative log decays: its gradient adds to the upper end of the sum and
    # subtracts from the lower.
    grad_pairs = (grad_query_scores * b.query_scores).add_(grad_system * b.system)
    grad_end = (grad_end_key * b.end_key).sum(-1)
    grad_cumulative = (grad_start_query * b.start_query).sum(-1) + (grad_start_key * b.start_key).sum(-1)
    grad_cumulative += grad_pairs.sum(-1) - grad_pairs.sum(-2) - grad_end
    grad_cumulative[:, -1] += grad_end.sum(-1) + (grad_next_states * states * b.start_decay[:, -1:]).sum((-1, -2))
    grad_log_decay = grad_cumulative.flip(-1).cumsum(-1).flip(-1)

    grad_query_key = _flush_(grad_query_scores.mul_(b.decay))
    grad_key_key = _flush_(_flush_(grad_system.mul_(b.decay)).mul_(b.beta))
    grad_query = grad_start_query.mul_(b.start_decay).baddbmm_(grad_query_key, b.key)
    grad_key = grad_start_key.mul_(b.start_decay).add_(grad_end_key.mul_(b.end_decay))
    grad_key = grad_key.baddbmm_(grad_query_key.mT, b.query).baddbmm_(grad_key_key + grad_key_key.mT, b.key)
    return grad_query, grad_key, grad_value, grad_log_decay, grad_beta, grad_state


def _forward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the final state and the states before each block, [blocks, B*H, Dk, Dv]. T is whole chunks."""
    length, step, scale = key.shape[1], _block_length(chunk_size), key.shape[-1] ** -0.5
    state = F.hardshrink(initial_state, _tiny(initial_state.dtype)).flatten(0, 1)
    output, block_states = value.new_empty(value.shape), []
    with torch.autocast(key.device.type, enabled=False):
        for start in range(0, length, step):
            block_states.append(state)
            tokens = slice(start, start + step)
            b = _block(*(x[:, tokens] for x in (query, key, value, log_decay, beta)), chunk_size, state.dtype)
            states, corrections, state = _scan(b, state)
            reads = torch.bmm(b.start_query, states)
            reads = torch.baddbmm(reads, b.query_scores, corrections, beta=scale, alpha=scale)
            _from_chunks(reads, output[:, tokens])
    return output, state.view(initial_state.shape), torch.stack(block_states)


def _backward(
    grad_output: Tensor,
    grad_state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    block_states: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, log_decay, beta and the initial state."""
    inputs = (query, key, value, log_decay, beta)
    step, scale, state_shape = _block_length(chunk_size), key.shape[-1] ** -0.5, grad_state.shape
    dtype, tiny = grad_state.dtype, _tiny(grad_state.dtype)
    # Gradients may be of any magnitude: in units of the largest one, what is tiny does not count here either.
    grad_output, grad_state = (
        F.hardshrink(x.to(dtype), torch.finfo(dtype).tiny / tiny) for x in (grad_output, grad_state)
    )
    unit = torch.maximum(grad_output.abs().amax(), grad_state.abs().amax())
    unit = torch.where(unit > 0, unit, 1.0)
    grad_output = grad_output * (scale / unit)
    grad_state = F.hardshrink(grad_state / unit, tiny).flatten(0, 1)
    grads = tuple(x.new_empty(x.shape) for x in inputs)
    with torch.autocast(key.device.type, enabled=False):
        for index in reversed(range(len(block_states))):
            tokens = slice(index * step, (index + 1) * step)
            b = _block(*(x[:, tokens] for x in inputs), chunk_size, dtype)
            block_grad_output = _to_chunks(grad_output[:, tokens], chunk_size, dtype)
            *block_grads, grad_state = _block_backward(b, block_states[index], block_grad_output, grad_state)
            for grad, block_grad in zip(grads, block_grads, strict=True):
                _from_chunks(block_grad.mul_(unit), grad[:, tokens])
    return *grads, (grad_state * unit).view(state_shape)


def _fake_forward(query, key, value, log_decay, beta, initial_state, chunk_size):
    blocks = -(-key.shape[1] // _block_length(chunk_size))
    batch, heads, *dims = initial_state.shape
    return (
        value.new_empty(value.shape),
        initial_state.new_empty(initial_state.shape),
        initial_state.new_empty(blocks, batch * heads, *dims),
    )


def _fake_backward(grad_output, grad_state, query, key, value, log_decay, beta, block_states, chunk_size):
    return tuple(x.new_empty(x.shape) for x in (query, key, value, log_decay, beta, grad_state))


def _keep_for_backward(ctx, inputs, output):
    *tensors, _, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors, output[-1])


def _differentiate(ctx, grad_output, grad_state, _):
    return *_chunked_backward(grad_output, grad_state, *ctx.saved_tensors, ctx.chunk_size), None


# The loops over blocks are operators, so that a compiler does not unroll them. The gradient is written by hand:
# autograd would keep every intermediate result, and could neither pass through `_flush_` nor keep itself off denormals.
# Every copy of this file, such as one from the Hub, registers operators of its own.
_NAMESPACE = re.sub(r"\W", "_", __name__)
_chunked_forward = torch.library.custom_op(f"{_NAMESPACE}::chunked_forward", _forward, mutates_args=())
_chunked_backward = torch.library.custom_op(f"{_NAMESPACE}::chunked_backward", _backward, mutates_args=())
_chunked_forward.register_fake(_fake_forward)
_chunked_backward.register_fake(_fake_backward)
_chunked_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)

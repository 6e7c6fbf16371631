"""The memory of Titans (arXiv 2501.00663): a small MLP whose weights are trained while it reads.

Per head, with W = (W1, W2), M(x) = silu(x W1) W2, or x + that, and gates per token:

    S_t = eta_t S_{t-1} - theta_t grad_W ||M(k_t) - v_t||^2 at the weights of the chunk's start
    W_t = (1 - alpha_t) W_{t-1} + S_t
    y_t = M(q_t) at W_t

Within a chunk all gradients are taken at one state, so they need no loop: what each token sees of the others is a
lower-triangular matrix, as in linear attention, for each of the two weight matrices.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu


class MemoryState(NamedTuple):
    """Weights and momenta of the memories of a batch, float32 `[B, H, D, E]` and `[B, H, E, D]`."""

    w1: Tensor
    w2: Tensor
    s1: Tensor
    s2: Tensor


def recall(w1: Tensor, w2: Tensor, inputs: Tensor, residual: bool) -> Tensor:
    """M(x): `inputs` `[..., T, D]` -> `[..., T, D]`."""
    outputs = silu(inputs @ w1) @ w2
    return inputs + outputs if residual else outputs


def recurrent_neural_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor,
    log_momentum: Tensor,
    rate: Tensor,
    state: MemoryState,
    chunk_size: int,
    residual: bool = True,
) -> tuple[Tensor, MemoryState]:
    """Token by token, with autograd's own inner gradients: what the chunked form is tested against.

    Args and returns: those of [`chunk_neural_memory`], but the state is the one after the last token.
    """
    outputs, start = [], state
    for t in range(query.shape[2]):
        if t % chunk_size == 0:
            start = state
        with torch.enable_grad():
            w1, w2 = (w if w.requires_grad else w.detach().requires_grad_() for w in (start.w1, start.w2))
            error = recall(w1, w2, key[:, :, t : t + 1], residual) - value[:, :, t : t + 1]
            gradients = torch.autograd.grad(error.pow(2).sum(), (w1, w2), create_graph=True)
        keep, momentum = (log[:, :, t, None, None].exp() for log in (log_keep, log_momentum))
        step = rate[:, :, t, None, None]
        s1, s2 = (momentum * s - step * g for s, g in zip((state.s1, state.s2), gradients, strict=True))
        state = MemoryState(keep * state.w1 + s1, keep * state.w2 + s2, s1, s2)
        outputs.append(recall(state.w1, state.w2, query[:, :, t : t + 1], residual))
    return torch.cat(outputs, dim=2), state


def chunk_neural_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor,
    log_momentum: Tensor,
    rate: Tensor,
    state: MemoryState,
    chunk_size: int,
    residual: bool = True,
    lengths: Tensor | None = None,
) -> tuple[Tensor, MemoryState]:
    """Chunk by chunk, exactly the recurrence.

    Args:
        query, key, value: `[B, H, T, D]`.
        log_keep: log(1 - alpha), `[B, H, T]`, at most 0.
        log_momentum: log(eta), `[B, H, T]`, at most 0.
        rate: theta, `[B, H, T]`.
        state: at the start, which is the start of a chunk.
        chunk_size: C, tokens that share one state for their gradients.
        residual: whether the memory returns its input plus what the MLP makes of it.
        lengths: `[B]` tokens of each row, where rows end in padding; None = T.

    Returns:
        Outputs `[B, H, T, D]`, and the state at the end of each row's last *full* chunk, from which the row goes on.
    """
    outputs = []
    inputs = (query, key, value, log_keep, log_momentum, rate)
    for first in range(0, query.shape[2], chunk_size):
        chunk = [part[:, :, first : first + chunk_size] for part in inputs]
        read, after = _one_chunk(*chunk, state, residual)
        outputs.append(read)
        if first + chunk_size > query.shape[2]:
            continue
        if lengths is not None:
            full = (lengths >= first + chunk_size)[:, None, None, None]
            after = MemoryState(*(torch.where(full, new, old) for new, old in zip(after, state, strict=True)))
        state = after
    return torch.cat(outputs, dim=2), state


def _one_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor,
    log_momentum: Tensor,
    rate: Tensor,
    state: MemoryState,
    residual: bool,
) -> tuple[Tensor, MemoryState]:
    w1, w2, s1, s2 = state
    # Gradients of ||M(k) - v||^2 at the start of the chunk: of w1, key^T hidden_error; of w2, hidden^T error.
    before = key @ w1
    gate = before.sigmoid()
    hidden = before * gate
    error = 2 * (recall(w1, w2, key, residual) - value)
    hidden_error = (error @ w2.transpose(-1, -2)) * gate * (1 + before * (1 - gate))

    # What is left at t of a gradient that came at j: it decays as momentum until l, and from there on as weight.
    kept, moved = log_keep.cumsum(-1), log_momentum.cumsum(-1)
    as_weight, as_momentum = _decay_between(kept), _decay_between(moved)
    influence = (as_weight @ as_momentum) * rate.unsqueeze(-2)
    weight_left, momentum_left = kept.exp().unsqueeze(-1), moved.exp().unsqueeze(-1)
    momentum_added = as_weight @ momentum_left

    at_w1 = weight_left * (query @ w1) + momentum_added * (query @ s1)
    at_w1 = at_w1 - ((query @ key.transpose(-1, -2)) * influence) @ hidden_error
    read = silu(at_w1)
    output = weight_left * (read @ w2) + momentum_added * (read @ s2)
    output = output - ((read @ hidden.transpose(-1, -2)) * influence) @ error
    if residual:
        output = output + query

    last_influence = influence[..., -1, :].unsqueeze(-1)
    last_momentum = (as_momentum[..., -1, :] * rate).unsqueeze(-1)
    ends = (weight_left[..., -1:, :], momentum_added[..., -1:, :], momentum_left[..., -1:, :])
    w1, s1 = _advance(w1, s1, key, hidden_error, ends, last_influence, last_momentum)
    w2, s2 = _advance(w2, s2, hidden, error, ends, last_influence, last_momentum)
    return output, MemoryState(w1, w2, s1, s2)


def _decay_between(log_total: Tensor) -> Tensor:
    """exp(sum of logs over j < l <= t) at [t, j], lower triangular, from the logs' running sums `[..., C]`."""
    size = log_total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log_total.device).triu(1)
    differences = log_total.unsqueeze(-1) - log_total.unsqueeze(-2)
    return differences.masked_fill(later, float("-inf")).exp()


def _advance(
    weight: Tensor,
    momentum: Tensor,
    left: Tensor,
    right: Tensor,
    ends: tuple[Tensor, Tensor, Tensor],
    influence: Tensor,
    momentum_influence: Tensor,
) -> tuple[Tensor, Tensor]:
    """One matrix and its momentum after a chunk whose gradients are left^T right, token by token."""
    weight_left, momentum_added, momentum_left = ends
    left = left.transpose(-1, -2)
    return (
        weight_left * weight + momentum_added * momentum - left @ (influence * right),
        momentum_left * momentum - left @ (momentum_influence * right),
    )

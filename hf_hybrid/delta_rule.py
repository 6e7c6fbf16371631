"""The gated delta rule (arXiv 2412.06464): readable recurrence, chunked form, fla kernels."""

import torch
from torch import Tensor


def gated_delta_rule(query, key, value, log_decay, beta, *, initial_state=None, segment_ids=None):
    return recurrent_gated_delta_rule(
        query, key, value, log_decay, beta, initial_state=initial_state, segment_ids=segment_ids
    )


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
    dtype = torch.promote_types(query.dtype, torch.float32)
    out_dtype = value.dtype
    query, key, value, log_decay, beta = (x.to(dtype) for x in (query, key, value, log_decay, beta))
    decay = log_decay.exp()
    if segment_ids is not None:
        starts = torch.zeros_like(segment_ids, dtype=torch.bool)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
        decay = decay.masked_fill(starts[..., None], 0.0)
    batch, length, heads, key_dim = key.shape
    if initial_state is None:
        state = value.new_zeros(batch, heads, key_dim, value.shape[-1])
    else:
        state = initial_state.to(dtype)
    query = query * key_dim**-0.5
    outputs = []
    for t in range(length):
        state = state * decay[:, t, :, None, None]
        error = value[:, t] - (key[:, t, :, None] @ state).squeeze(-2)
        state = state + key[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None]
        outputs.append((query[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, dim=1).to(out_dtype), state

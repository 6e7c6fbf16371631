"""RFIS, RPD and the Global Positional Band (GPBand): what rotary positions mean to each attention head.

The names and the idea are those of "Modern Transformers Are Implicit Hybrids" (arXiv 2609.02986). The paper's formulas
are not public here, so the definitions are ours. With pre-rotation queries q_i and keys k_j, rotary pairs f of angular
frequency w_f, a logit scale s and a divergence D:

    S_ij = s * sum_f q_if^T R((j - i) w_f) k_jf          A_i = softmax of S_i over the keys that query i may attend
    RFIS(f) = mean over i of D(A_i, A_i without pair f)      RPD = mean over i of D(A_i, A_i without any rotation)

Attention is always that of the unchanged forward pass; only its distribution is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Stands for -inf in masked logits: its probability is 0 as well, and differences of two of them are not NaN.
MASKED = -1e30


def jensen_shannon(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Jensen-Shannon divergence in bits, 0..1, over the last dimension of two log-probabilities."""
    a, b = log_a.exp(), log_b.exp()
    log_mean = ((a + b) / 2).clamp_min(torch.finfo(a.dtype).tiny).log()
    return ((a * (log_a - log_mean)).sum(-1) + (b * (log_b - log_mean)).sum(-1)) / (2 * math.log(2))


def kullback_leibler(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(A || B) in nats over the last dimension of two log-probabilities."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def total_variation(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Half the L1 distance, 0..1, over the last dimension of two log-probabilities."""
    return (log_a.exp() - log_b.exp()).abs().sum(-1) / 2


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "js": jensen_shannon,
    "kl": kullback_leibler,
    "tv": total_variation,
}
ABLATIONS = ("drop", "unrotate")


class HeadScores(NamedTuple):
    """Means over queries. rfis [H, F]; rpd, mean_distance (tokens), mean_log_distance (of 1 + tokens), entropy (nats)
    [H]."""

    rfis: Tensor
    rpd: Tensor
    mean_distance: Tensor
    mean_log_distance: Tensor
    entropy: Tensor


def score_heads(
    query: Tensor,
    key: Tensor,
    plain_query: Tensor | None,
    plain_key: Tensor | None,
    *,
    pairs: Tensor,
    positions: Tensor,
    attendable: Tensor,
    scaling: float,
    softcap: float | None = None,
    divergence: str = "kl",
    ablation: str = "drop",
    max_elements: int = 2**19,
) -> HeadScores:
    """Scores of the heads of one layer on one sequence, from Q sampled queries and all T keys.

    Args:
        query: [H, Q, D] rotated. key: [K, T, D] rotated; query head h reads KV head h // (H // K).
        plain_query, plain_key: the same without rotation; None in a layer without RoPE, whose RPD is then 0.
        pairs: [F, 2] head dimensions of each rotary pair; F = 0 in a layer without RoPE.
        positions: [Q] of the queries. attendable: [Q, T] bool, the keys that each query may attend.
        scaling, softcap: the logits are scaling * q.k, then softcap * tanh(logit / softcap).
        divergence: "js" (bits), "kl" (nats) or "tv".
        ablation: of a pair in RFIS: "drop" its logit term, or "unrotate" it.
        max_elements: logits that are held at once, about; small enough for the processor's cache is fastest.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence is {divergence!r}, must be one of {', '.join(DIVERGENCES)}")
    if ablation not in ABLATIONS:
        raise ValueError(f"ablation is {ablation!r}, must be one of {', '.join(ABLATIONS)}")
    diverge = DIVERGENCES[divergence]
    dtype = torch.promote_types(query.dtype, torch.float32)
    kv_heads, tokens, _ = key.shape
    heads, queries, _ = query.shape
    group = heads // kv_heads
    query, key = query.to(dtype).unflatten(0, (kv_heads, group)), key.to(dtype)
    if plain_query is not None:
        plain_query, plain_key = plain_query.to(dtype).unflatten(0, (kv_heads, group)), plain_key.to(dtype)

    # What an ablation takes from the logits is left @ right: [K, F, G, Q, P] and [K, F, P, T], P = 2 or 4.
    left, right = query[..., pairs].movedim(-2, 1), key[..., pairs].permute(0, 2, 3, 1)
    if ablation == "unrotate" and len(pairs):
        left = torch.cat((left, -plain_query[..., pairs].movedim(-2, 1)), dim=-1)
        right = torch.cat((right, plain_key[..., pairs].permute(0, 2, 3, 1)), dim=-2)

    totals = HeadScores(query.new_zeros(kv_heads, group, len(pairs)), *query.new_zeros(4, kv_heads, group))
    # Neighbouring queries in one block: the keys that none of them may attend are left out.
    rows = max(1, min(16, max_elements // (group * tokens)))
    for block in positions.argsort().split(rows):
        low, high = span(attendable[block].any(dim=0))
        bias = torch.where(attendable[block, low:high], 0.0, MASKED).to(dtype)
        distance = (positions[block, None] - torch.arange(low, high, device=positions.device)).clamp_min(0).to(dtype)
        logged = distance.log1p()

        def log_attention(logits: Tensor, bias: Tensor = bias) -> Tensor:
            """[..., G * q, W] logits to log-probabilities [..., G, q, W]."""
            logits = logits.unflatten(-2, (group, -1))
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            return torch.log_softmax(logits + bias, dim=-1)

        chunk = max(1, max_elements // (group * bias.numel()))
        for kv in range(kv_heads):
            logits = scaling * (query[kv, :, block].flatten(0, 1) @ key[kv, low:high].T)
            log_a = log_attention(logits)
            a = log_a.exp()
            if plain_query is not None:
                plain = scaling * (plain_query[kv, :, block].flatten(0, 1) @ plain_key[kv, low:high].T)
                totals.rpd[kv] += diverge(log_a, log_attention(plain)).sum(-1)
            totals.mean_distance[kv] += (a * distance).sum((-2, -1))
            totals.mean_log_distance[kv] += (a * logged).sum((-2, -1))
            totals.entropy[kv] -= (a * log_a).sum((-2, -1))
            for ablated in torch.arange(len(pairs), device=key.device).split(chunk):
                terms = left[kv, ablated][:, :, block].flatten(1, 2), right[kv, ablated][:, :, low:high]
                without = torch.baddbmm(logits.expand(len(ablated), -1, -1), *terms, alpha=-scaling)
                totals.rfis[kv, :, ablated] += diverge(log_a, log_attention(without)).sum(-1).T
    return HeadScores(*(total.flatten(0, 1).clamp_min(0) / queries for total in totals))


def span(present: Tensor) -> tuple[int, int]:
    """The smallest range [low, high) that holds every True of a 1-D bool tensor."""
    indices = present.nonzero()
    return int(indices[0]), int(indices[-1]) + 1


def sample_queries(length: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` sorted positions of a window of `length` tokens, without replacement (all where there are fewer).

    Its first eighth is left out: queries there see too few keys for their attention to say much about positions.
    """
    skipped = length // 8
    return (torch.randperm(length - skipped, generator=generator)[:count] + skipped).sort().values


@dataclass(frozen=True)
class GPBand:
    """The contiguous band of rotary pairs that carries the global positions.

    Attributes:
        first, last: the pairs at its ends, both inside. peak: the pair with the greatest mass.
        mass: [F] the mean over all heads of each head's RFIS as shares of its sum, so that every head counts the same.
        wavelengths: of the pairs first..last, in tokens.
        ratios: wavelength / training length of those pairs, or None where the length is unknown.
    """

    first: int
    last: int
    peak: int
    mass: Tensor
    wavelengths: list[float]
    ratios: list[float] | None


def gpband(rfis: Tensor, wavelengths: Tensor, training_length: int | None, *, fraction: float = 1 / 3) -> GPBand:
    """The peak of the RFIS mass of all heads, with its neighbours that have at least `fraction` of the peak's mass.

    Args:
        rfis: [L, H, F]; heads whose RFIS is 0 (layers without RoPE) do not count.
        wavelengths: [F] in tokens. training_length: in tokens.
    """
    heads = rfis.double().flatten(0, 1)
    heads = heads[heads.sum(-1) > 0]
    mass = (heads / heads.sum(-1, keepdim=True)).mean(0)
    peak = int(mass.argmax())
    salient = (mass >= fraction * mass[peak]).tolist()
    first = last = peak
    while first > 0 and salient[first - 1]:
        first -= 1
    while last + 1 < len(salient) and salient[last + 1]:
        last += 1
    lengths = wavelengths[first : last + 1].tolist()
    ratios = None if training_length is None else [length / training_length for length in lengths]
    return GPBand(first, last, peak, mass, lengths, ratios)


def natural_classes(values: np.ndarray) -> tuple[float, float] | None:
    """The two cuts that split `values` into three classes of least total squared deviation (Fisher, 1958), exactly.

    Of RPD: retrieval heads below the first cut, positional heads from the second on. None if there are fewer than
    three distinct values.
    """
    ordered = np.sort(values, axis=None).astype(np.float64)
    n = len(ordered)
    if len(np.unique(ordered)) < 3:
        return None
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    # Least squared deviation within classes is most squared sum over size: one term for each class.
    best, cuts = -np.inf, (1, 2)
    for first in range(1, n - 1):
        second = np.arange(first + 1, n)
        gain = sums[first] ** 2 / first
        gains = (sums[second] - sums[first]) ** 2 / (second - first) + (sums[n] - sums[second]) ** 2 / (n - second)
        if gain + gains.max() > best:
            best, cuts = gain + gains.max(), (first, int(second[gains.argmax()]))
    low, high = ((ordered[cut - 1] + ordered[cut]) / 2 for cut in cuts)
    return float(low), float(high)

"""RFIS, RPD and the other scores against a dense float64 evaluation of their definitions; the GPBand."""

import math

import pytest
import torch

from hf_hybrid.conversion.head_scores import (
    DIVERGENCES,
    HeadScores,
    gpband,
    sample_queries,
    score_heads,
)

HEADS, KV_HEADS, TOKENS, HEAD_DIM = 6, 3, 33, 14
FREQUENCIES = torch.tensor([1.0, 0.31, 0.07, 0.02, 0.003], dtype=torch.float64)  # 5 pairs: 4 dimensions do not rotate
PAIRS = torch.tensor([[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]])


def plain_vectors(seed: int, scale: float = 1.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(HEADS, TOKENS, HEAD_DIM, generator=generator, dtype=torch.float64)
    key = torch.randn(KV_HEADS, TOKENS, HEAD_DIM, generator=generator, dtype=torch.float64)
    return scale * query, scale * key


def rotate(x: torch.Tensor, amplitude: float = 1.0) -> torch.Tensor:
    """By complex multiplication."""
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * FREQUENCIES
    turned = torch.complex(x[..., PAIRS[:, 0]], x[..., PAIRS[:, 1]]) * torch.polar(
        torch.full_like(angles, amplitude), angles
    )
    x = x.clone()
    x[..., PAIRS[:, 0]], x[..., PAIRS[:, 1]] = turned.real, turned.imag
    return x


def reference(query, key, positions, attendable, *, scaling, softcap, divergence, ablation, amplitude=1.0):
    """The definitions, one head and one query at a time, from unrotated vectors and relative positions."""

    def distribution(logits):
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits.softmax(-1)

    def diverge(a, b):
        def kl(x, y):
            return torch.where(x > 0, x * (x / y).log(), 0).sum(-1)

        if divergence == "kl":
            return kl(a, b)
        if divergence == "tv":
            return (a - b).abs().sum(-1) / 2
        return (kl(a, (a + b) / 2) + kl(b, (a + b) / 2)) / 2 / math.log(2)

    zeros = torch.zeros(4, HEADS, dtype=torch.float64)
    scores = HeadScores(torch.zeros(HEADS, len(PAIRS), dtype=torch.float64), *zeros)
    rest = [d for d in range(HEAD_DIM) if d not in PAIRS]
    for head in range(HEADS):
        for row, i in enumerate(positions.tolist()):
            j = attendable[row].nonzero()[:, 0]
            q, k = query[head, i], key[head * KV_HEADS // HEADS, j]
            x, y = (torch.complex(v[..., PAIRS[:, 0]], v[..., PAIRS[:, 1]]) for v in (q, k))
            distance = (i - j).double()
            turn = torch.polar(torch.ones(len(PAIRS), len(j), dtype=torch.float64), FREQUENCIES[:, None] * distance)
            still = scaling * amplitude**2 * (x * y.conj()).real.T  # [F, j] each pair's term without rotation
            turned = scaling * amplitude**2 * (x[:, None] * y.conj().T * turn).real  # and with it
            constant = scaling * (k[:, rest] @ q[rest])
            a = distribution(turned.sum(0) + constant)
            scores.rpd[head] += diverge(a, distribution(still.sum(0) + constant))
            changed = turned.expand(len(PAIRS), -1, -1).clone()  # [F ablated, F, j]
            changed[range(len(PAIRS)), range(len(PAIRS))] = still if ablation == "unrotate" else 0
            scores.rfis[head] += diverge(a, distribution(changed.sum(1) + constant))
            scores.mean_distance[head] += (a * distance).sum()
            scores.mean_log_distance[head] += (a * (1 + distance).log()).sum()
            scores.entropy[head] += torch.special.entr(a).sum()
    return [total / len(positions) for total in scores]


def masks() -> dict[str, torch.Tensor]:
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    return {"causal": j <= i, "window-7": (j <= i) & (j > i - 7), "chunked-16": (j <= i) & (j // 16 == i // 16)}


def scores_of(query, key, positions, attendable, *, dtype=torch.float32, amplitude=1.0, **options) -> HeadScores:
    rotated = (rotate(query, amplitude)[:, positions].to(dtype), rotate(key, amplitude).to(dtype))
    query, key = query.clone(), key.clone()
    for x in (query, key):
        x[..., PAIRS.flatten()] *= amplitude
    plain = query[:, positions].to(dtype), key.to(dtype)
    return score_heads(*rotated, *plain, pairs=PAIRS, positions=positions, attendable=attendable, **options)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "softcap"])
@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("ablation", ["drop", "unrotate"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_all_queries_equal_the_dense_reference(divergence, ablation, mask, softcap):
    query, key = plain_vectors(seed=0)
    positions, attendable = torch.arange(TOKENS), masks()[mask]
    options = {"scaling": 0.4, "softcap": softcap, "divergence": divergence, "ablation": ablation}
    expected = reference(query, key, positions, attendable, **options)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        scores = scores_of(query, key, positions, attendable, dtype=dtype, **options)
        for name, found, right in zip(HeadScores._fields, scores, expected, strict=True):
            assert (found.double() - right).abs().max() <= tolerance * max(1, right.abs().max()), name


@pytest.mark.parametrize("max_elements", [1, 300, 2**19])
def test_sampled_queries_in_any_order_and_chunks(max_elements):
    query, key = plain_vectors(seed=1)
    positions = torch.tensor([32, 7, 30, 8, 21])
    attendable = masks()["window-7"][positions]
    options = {"scaling": 0.3, "softcap": None, "divergence": "js", "ablation": "drop"}
    expected = reference(query, key, positions, attendable, **options)
    scores = scores_of(query, key, positions, attendable, max_elements=max_elements, **options)
    for found, right in zip(scores, expected, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


def test_an_amplitude_is_a_temperature_of_the_rotated_part():
    """YaRN multiplies rotated vectors by a constant; a head without its rotation keeps that."""
    query, key = plain_vectors(seed=2)
    positions, attendable = torch.arange(TOKENS), masks()["causal"]
    options = {"scaling": 0.3, "softcap": None, "divergence": "js", "ablation": "unrotate", "amplitude": 1.3}
    expected = reference(query, key, positions, attendable, **options)
    for found, right in zip(scores_of(query, key, positions, attendable, **options), expected, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_extreme_logits_stay_finite_and_bounded(divergence):
    """Attention on one key with all others underflown, and pairs that move it to another one."""
    query, key = plain_vectors(seed=3, scale=60.0)
    options = {"scaling": 1.0, "divergence": divergence}
    scores = scores_of(query, key, torch.arange(TOKENS), masks()["causal"], **options)
    for score in scores:
        assert score.isfinite().all() and (score >= 0).all()
    if divergence != "kl":
        assert 0.5 < scores.rpd.max() <= 1 + 1e-6 and scores.rfis.max() <= 1 + 1e-6


@pytest.mark.parametrize("ablation", ["drop", "unrotate"])
def test_a_layer_without_rope_has_no_rpd_and_no_pairs(ablation):
    query, key = (x.float() for x in plain_vectors(seed=4))
    scores = score_heads(
        query,
        key,
        None,
        None,
        pairs=torch.empty(0, 2, dtype=torch.long),
        positions=torch.arange(TOKENS),
        attendable=masks()["causal"],
        scaling=0.3,
        ablation=ablation,
    )
    assert torch.equal(scores.rpd, torch.zeros(HEADS)) and scores.rfis.shape == (HEADS, 0)
    assert (scores.entropy > 0).all() and (scores.mean_distance > 0).all()


@pytest.mark.parametrize(("option", "value"), [("divergence", "l2"), ("ablation", "zero")])
def test_unknown_options_are_named(option, value):
    query, key = plain_vectors(seed=5)
    with pytest.raises(ValueError, match=f"{option} is '{value}'"):
        scores_of(query, key, torch.arange(TOKENS), masks()["causal"], scaling=1.0, **{option: value})


def test_sampled_queries_skip_the_first_eighth_and_repeat_with_the_seed():
    draws = [sample_queries(80, 9, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert len(draws[0].unique()) == 9 and torch.equal(draws[0], draws[0].sort().values)
    assert sample_queries(80, 999, torch.Generator()).tolist() == list(range(10, 80))


def test_gpband_is_the_salient_neighbourhood_of_the_peak():
    profile = torch.tensor([0.3, 0.01, 0.2, 0.5, 1.0, 0.4, 0.1, 0.6])
    # Every head counts the same, whatever its size; one without RoPE does not count.
    rfis = torch.stack([profile * 1e-4, profile * 10, torch.zeros(8), profile])[None]
    wavelengths = 2 * math.pi * 4.0 ** torch.arange(8)
    band = gpband(rfis, wavelengths, 512)
    assert (band.first, band.peak, band.last) == (3, 4, 5)
    torch.testing.assert_close(band.mass, (profile / profile.sum()).double())
    assert band.wavelengths == wavelengths[3:6].tolist()
    assert band.ratios == [length / 512 for length in band.wavelengths]
    assert gpband(rfis, wavelengths, None, fraction=0.1).first == 2
    assert gpband(rfis, wavelengths, None, fraction=0.1).last == 7
    assert gpband(rfis, wavelengths, None).ratios is None

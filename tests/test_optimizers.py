"""Muon in float32 against torch's, and the pair of Muon and AdamW against each alone."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from hf_hybrid.training.optimizers import (
    Float32Muon,
    MuonAdamW,
    build_optimizer,
    learning_rate_share,
    orthogonalized,
)


def matrices(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def with_gradients(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("shape", [(7, 7), (5, 12), (12, 5)])
def test_singular_vectors_stay_and_values_come_near_one(shape):
    matrix = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    rotated = left.transpose(1, 2) @ orthogonalized(matrix) @ right.transpose(1, 2)
    values = rotated.diagonal(dim1=1, dim2=2)
    assert ((values > 0.5) & (values < 1.3)).all()
    torch.testing.assert_close(rotated - torch.diag_embed(values), torch.zeros_like(rotated), atol=1e-4, rtol=0)


def test_float32_muon_follows_torchs():
    """torch's makes its products in bfloat16, hence the tolerance: a hundredth of a step."""
    ours, theirs = matrices((6, 9), (9, 6), (6, 9)), matrices((6, 9), (9, 6), (6, 9))
    first = Float32Muon(ours, lr=0.1, weight_decay=0.2)
    second = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.2, momentum=0.95)
    for step in range(5):
        with_gradients(ours, step)
        with_gradients(theirs, step)
        first.step()
        second.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=5e-3, rtol=0)


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"shape \[4\]"):
        Float32Muon(matrices((4,)))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        self.norm = nn.LayerNorm(6)


def test_matrices_of_layers_go_to_muon_and_the_rest_to_adamw():
    model = Small()
    optimizer = build_optimizer(model.named_parameters())
    assert isinstance(optimizer, MuonAdamW)
    muon, adamw = optimizer.parts
    assert [weight.shape for group in muon.param_groups for weight in group["params"]] == [(6, 6)]
    decays = {len(group["params"]): group["weight_decay"] for group in adamw.param_groups}
    assert decays == {1: 0.1, 3: 0.0}
    assert isinstance(build_optimizer(model.named_parameters(), "adamw"), torch.optim.AdamW)
    with pytest.raises(ValueError, match="optimizer is 'sgd'"):
        build_optimizer(model.named_parameters(), "sgd")


def test_the_pair_steps_as_each_alone_and_resumes():
    paired, alone, resumed = Small(), Small(), Small()
    pair = build_optimizer(paired.named_parameters())
    muon = Float32Muon([alone.layers[0].weight], lr=0.02, weight_decay=0.1)
    adamw = build_optimizer([(n, p) for n, p in alone.named_parameters() if n != "layers.0.weight"], "adamw", 4e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(pair, lambda step: 0.5**step)
    for step in range(4):
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = (0.02 if group in muon.param_groups else 4e-3) * 0.5**step
        if step == 2:
            resumed.load_state_dict(paired.state_dict())
            second = build_optimizer(resumed.named_parameters())
            second.load_state_dict(copy.deepcopy(pair.state_dict()))
        for model in (paired, alone, *([resumed] if step >= 2 else [])):
            with_gradients(model.parameters(), step)
        pair.step()
        muon.step()
        adamw.step()
        scheduler.step()
        if step == 2:
            second.step()
            for mine, other in zip(resumed.parameters(), paired.parameters(), strict=True):
                torch.testing.assert_close(mine, other)
    for mine, other in zip(paired.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_learning_rate_rises_then_falls_to_zero():
    shares = [learning_rate_share(step, 20, 4) for step in range(21)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[20] == pytest.approx(0)
    assert all(later <= earlier for earlier, later in pairwise(shares[4:]))

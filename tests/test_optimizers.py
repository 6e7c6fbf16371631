"""Muon in float32: against torch's, against singular values, and as one optimizer with AdamW under the Trainer."""

import copy

import pytest
import torch
from families import build, random_tokens
from torch import nn
from torch.optim import AdamW, Muon
from transformers import Trainer, TrainingArguments

from hf_hybrid.training.optimizers import BatchedMuon, ChainedOptimizer, build_optimizer, orthogonalize

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize(("rows", "columns"), [(5, 9), (9, 5), (6, 6), (1, 4)])
def test_orthogonalize_maps_singular_values_by_the_quintic(rows, columns):
    """U S V^T becomes U p(S) V^T, p being the scalar iteration; each matrix of the batch by itself."""
    matrices = torch.randn(3, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrices, COEFFICIENTS, 5, 1e-7)
    for matrix, result in zip(matrices, found, strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values / matrix.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(result, left * values @ right, atol=1e-10, rtol=0)


def test_a_zero_gradient_is_a_zero_step():
    assert not orthogonalize(torch.zeros(2, 3, 4), COEFFICIENTS, 5, 1e-7).any()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", [None, "match_rms_adamw"])
def test_steps_are_those_of_torch(nesterov, scale):
    """Up to the rounding of torch's bfloat16 products; parameters of three shapes, one of them twice."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(6, 10), (10, 6), (6, 10), (7, 7)]]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    options = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": scale}
    mine, torchs = BatchedMuon(ours, **options), Muon(theirs, **options)
    start = [parameter.detach().clone() for parameter in ours]
    for _ in range(4):
        for first, second in zip(ours, theirs, strict=True):
            first.grad = torch.randn_like(first)
            second.grad = first.grad.clone()
        mine.step()
        torchs.step()
    for first, second, before in zip(ours, theirs, start, strict=True):
        assert (first - second).norm() < 0.03 * (second - before).norm()
        torch.testing.assert_close(mine.state[first]["momentum_buffer"], torchs.state[second]["momentum_buffer"])


def test_matrices_of_the_blocks_get_muon_and_the_rest_adamw():
    model = build(("hwh", "headwise"))
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    muon, adamw = build_optimizer(model, weight_decay=0.1).optimizers
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    by_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert by_muon == {
        name
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.dim() == 2 and parameter.requires_grad
    }
    assert by_muon | by_adamw == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not by_muon & by_adamw
    decayed = {names[id(p)] for group in adamw.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {"model.embed_tokens.weight", "lm_head.weight"}
    assert type(muon) is BatchedMuon
    assert type(build_optimizer(model, muon="torch").optimizers[0]) is Muon
    with pytest.raises(ValueError, match="muon is 'fast'"):
        build_optimizer(model, muon="fast")
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        build_optimizer(model.requires_grad_(False))


def train(model, optimizer, steps, scheduler=None):
    tokens = random_tokens(3, 9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return loss.item()


def test_a_schedule_and_a_loaded_state_reach_every_optimizer():
    torch.manual_seed(0)
    model = build(("hwh", "transformer"))
    optimizer = build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    train(model, optimizer, 3, scheduler)
    muon, adamw = optimizer.optimizers
    assert [group["lr"] for group in muon.param_groups + adamw.param_groups] == [0.02 / 4, 3e-4 / 4, 3e-4 / 4]

    other = copy.deepcopy(model)
    continued = build_optimizer(other)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    # Groups are loaded anew: what the chain shows and what its optimizers use must still be the same.
    for group in continued.param_groups:
        group["lr"] *= 2
    for group in optimizer.param_groups:
        group["lr"] *= 2
    assert train(other, continued, 3) == train(model, optimizer, 3)
    with pytest.raises(ValueError, match="the state is of 1 optimizers, but these are 2"):
        optimizer.load_state_dict({"optimizers": [muon.state_dict()]})


def test_under_the_trainer_with_a_resumed_run(tmp_path):
    data = [{"input_ids": row, "labels": row} for row in random_tokens(8, 9)]

    def trainer(folder, steps, model):
        arguments = TrainingArguments(
            str(folder),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            max_steps=steps,
            per_device_train_batch_size=4,
            save_steps=3,
            learning_rate=1.0,
            lr_scheduler_type="constant",
        )
        return Trainer(model, arguments, train_dataset=data, optimizers=(build_optimizer(model), None))

    whole, parts = build(("hwh", "transformer")), build(("hwh", "transformer"))
    first = trainer(tmp_path / "whole", 6, whole)
    first.train()
    trainer(tmp_path / "parts", 3, parts).train()
    again = build(("hwh", "transformer"), seed=5)
    trainer(tmp_path / "parts", 6, again).train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_closures_return_their_loss():
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = ChainedOptimizer([BatchedMuon([parameter], lr=0.1), AdamW([nn.Parameter(torch.ones(1))])])

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4
    assert parameter.grad is not None

"""Optimizers: Muon for the matrices of blocks, AdamW for everything else."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_hybrid.validators import validate_choice

# Newton-Schulz of the fifth degree, coefficients of Muon (Keller Jordan, 2024): fast towards, not exactly to, 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrices: Tensor, steps: int = 5) -> Tensor:
    """`[N, rows, columns]` with the singular vectors of `matrices` and singular values near 1, in float32.

    Half-precision products, which torch.optim.Muon uses, are the slower ones on many CPUs.
    """
    a, b, c = COEFFICIENTS
    wide = matrices.float()
    tall = wide.shape[1] > wide.shape[2]
    wide = wide.transpose(1, 2) if tall else wide
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.transpose(1, 2)
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.transpose(1, 2) if tall else wide


class Float32Muon(torch.optim.Optimizer):
    """Muon with float32 Newton-Schulz steps, matrices of one shape at a time; the update rule of `torch.optim.Muon`.

    Args:
        params: matrices, or parameter groups.
        lr: step length; multiplied by sqrt(max(1, rows / columns)).
        momentum: of the Nesterov momentum.
        weight_decay: decoupled.
    """

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.dim() != 2:
                    raise ValueError(f"Muon got a parameter of shape {list(weight.shape)}: give matrices only")

    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns what `closure` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[tuple, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape.setdefault(tuple(weight.shape), []).append(weight)
            for (rows, columns), weights in by_shape.items():
                updates = []
                for weight in weights:
                    buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight.grad))
                    buffer.lerp_(weight.grad, 1 - group["momentum"])
                    updates.append(weight.grad.lerp(buffer, group["momentum"]))
                length = group["lr"] * math.sqrt(max(1, rows / columns))
                for weight, update in zip(weights, orthogonalized(torch.stack(updates)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(weight.dtype), alpha=-length)
        return loss


class MuonAdamW(torch.optim.Optimizer):
    """Two optimizers as one, for a Trainer and its scheduler: Muon on some parameters, AdamW on the others.

    Args:
        muon: of the matrices.
        adamw: of the rest.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer):
        self.parts = (muon, adamw)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._link()

    def _link(self):
        """The parts read their groups and keep their state where this optimizer's are."""
        first = len(self.parts[0].param_groups)
        self.parts[0].param_groups, self.parts[1].param_groups = self.param_groups[:first], self.param_groups[first:]
        for part in self.parts:
            part.state = self.state

    def load_state_dict(self, state_dict):
        """Like the parent's."""
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both; returns what `closure` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    kind: str = "muon",
    learning_rate: float = 0.02,
    *,
    adamw_learning_rate: float = 4e-3,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """An optimizer of a model of the zoo.

    Args:
        named_parameters: of the model; those without a gradient are left out.
        kind: `"muon"`: matrices of the layers by Muon, embeddings, heads, norms and biases by AdamW; `"adamw"`: all by
            AdamW. Muon is torch's on CUDA, and its float32 form elsewhere.
        learning_rate: of Muon, or of everything with `"adamw"`.
        adamw_learning_rate: of what Muon leaves to AdamW.
        weight_decay: of matrices; vectors have none.
    """
    validate_choice("optimizer", kind, ("muon", "adamw"))
    named = [(name, weight) for name, weight in named_parameters if weight.requires_grad]
    by_muon = [weight for name, weight in named if kind == "muon" and weight.dim() == 2 and "layers." in name]
    taken = {id(weight) for weight in by_muon}
    rest = [weight for _, weight in named if id(weight) not in taken]
    groups = [
        {"params": [weight for weight in rest if weight.dim() > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in rest if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    rate = learning_rate if kind == "adamw" else adamw_learning_rate
    adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, betas=(0.9, 0.95))
    if not by_muon:
        return adamw
    muon_class = torch.optim.Muon if by_muon[0].is_cuda else Float32Muon
    return MuonAdamW(muon_class(by_muon, lr=learning_rate, weight_decay=weight_decay), adamw)


def learning_rate_share(step: int, steps: int, warmup: int) -> float:
    """The share of the peak rate at `step` of `steps`: a linear warm-up, then a cosine to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

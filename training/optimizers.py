"""Muon for the matrices of a decoder's blocks, AdamW for everything else, as one optimizer.

torch's own Muon multiplies in bfloat16, matrix by matrix. Where that is slow, as on CPUs without bfloat16 units,
[`BatchedMuon`] takes the same step in float32, all matrices of one shape at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from hf_hybrid.conversion.depth_asymmetry import decoder_layers
from hf_hybrid.validators import validate_choice

MUONS = ("auto", "torch", "batched", "none")


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix (https://kellerjordan.github.io/posts/muon).

        X <- X / max(|X|_F, eps),   then `steps` times   X <- a X + (b X X^T + c (X X^T)^2) X

    Singular values end between about 0.7 and 1.2 and not at 1, for fewer steps.

    Args:
        matrices: `[N, R, C]`.
        coefficients: (a, b, c).
        steps: iterations.
        eps: smallest norm that is divided by.

    Returns:
        `[N, R, C]` in the dtype of `matrices`.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    a, b, c = coefficients
    result = matrices.mT if is_tall else matrices
    result = result / result.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = result @ result.mT
        result = a * result + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ result
    return result.mT if is_tall else result


class BatchedMuon(Muon):
    """`torch.optim.Muon` with the products in float32 and matrices of one shape together; the arguments are its."""

    @torch.no_grad()
    def step(self, closure=None):
        """One step of descent. Returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape, parameter.device].append(parameter)
            for (shape, _), parameters in by_shape.items():
                self._step_together(parameters, shape, group)
        return loss

    def _step_together(self, parameters: list[nn.Parameter], shape: torch.Size, group: dict) -> None:
        momentum, rate = group["momentum"], float(group["lr"])
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
            updates.append((parameter.grad.lerp(buffer, momentum) if group["nesterov"] else buffer).float())
        steps = orthogonalize(torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"])
        scale = 0.2 * math.sqrt(max(shape)) if group["adjust_lr_fn"] == "match_rms_adamw" else _original_scale(shape)
        for parameter, step in zip(parameters, steps, strict=True):
            parameter.mul_(1 - rate * group["weight_decay"])
            parameter.add_(step.to(parameter.dtype), alpha=-rate * scale)


class ChainedOptimizer(Optimizer):
    """Several optimizers as one, for whatever wants a single optimizer: the Trainer, accelerate, schedules."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self.optimizers = list(optimizers)
        # The groups themselves and no copies: a schedule that changes a rate here changes it there.
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})

    @torch.no_grad()
    def step(self, closure=None):
        """One step of each. Returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict:
        """The optimizers' own states, in their order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict) -> None:
        """Undoes [`ChainedOptimizer.state_dict`]. Raises `ValueError` for a state of other optimizers."""
        states = state_dict.get("optimizers", [])
        if len(states) != len(self.optimizers):
            raise ValueError(f"the state is of {len(states)} optimizers, but these are {len(self.optimizers)}")
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]


def build_optimizer(
    model: nn.Module,
    *,
    layers: Sequence[nn.Module] | None = None,
    learning_rate: float = 3e-4,
    muon_learning_rate: float = 0.02,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    muon: str = "auto",
) -> ChainedOptimizer:
    """Muon for every 2-D weight inside a decoder's layers, AdamW for the rest (embeddings, heads, norms, decays).

    Args:
        model: a decoder of the zoo or of transformers; frozen parameters are left out.
        layers: whose matrices Muon gets; default: the decoder's.
        learning_rate: of AdamW.
        muon_learning_rate: of Muon, with the scale of its first publication: sqrt(max(1, rows / columns)).
        weight_decay: of 2-D weights, decoupled.
        betas: of AdamW.
        muon: `"torch"`, `"batched"`, or `"auto"`: torch's where all of Muon's parameters are on a CUDA device;
            `"none"`: everything by AdamW.

    Raises:
        ValueError: for a model without decoder layers, or without anything to train.
    """
    validate_choice("muon", muon, MUONS)
    layers = [] if muon == "none" else decoder_layers(model) if layers is None else layers
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if id(parameter) in in_layers and parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in trained if id(parameter) not in chosen]
    groups = [
        {"params": [parameter for parameter in others if parameter.ndim == 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in others if parameter.ndim != 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")
    is_fast = all(parameter.is_cuda for parameter in matrices)
    muon_class = Muon if muon == "torch" or (muon == "auto" and is_fast) else BatchedMuon
    optimizers = []
    if matrices:
        optimizers.append(muon_class(matrices, lr=muon_learning_rate, weight_decay=weight_decay))
    if groups:
        optimizers.append(AdamW(groups, lr=learning_rate, betas=betas))
    return ChainedOptimizer(optimizers)


def _original_scale(shape: torch.Size) -> float:
    return math.sqrt(max(1.0, shape[0] / shape[1]))

"""Closed-form healing: a ridge regression of every layer's output projection, without gradient descent.

Per layer, the heads' outputs F `[N, width]` are known for given text, and the source's attention gave Y `[N, hidden]`.
The projection that is nearest to the converted one and brings F to Y is the minimiser of

    sum_n w_n |W f_n - y_n|^2 + lambda |W - W_0|^2

and needs only F^T F and F^T Y. The first token of a sequence carries the attention sink, an activation thousands of
times larger than others', and is one token in hundreds: w_n weighs it, and extra rows of one token each show it many
different first tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_hybrid import HwHForCausalLM
from hf_hybrid.conversion.layerwise import LayerRunner, Rows, walk_layers
from hf_hybrid.validators import validate_range


@dataclass(frozen=True)
class CalibrateSettings:
    """How a layer is fitted.

    Attributes:
        start_weight: weight of a first token's squared error against another token's.
        ridge: strength of the ridge regression, relative to the features' mean energy.

    Raises:
        ValueError: a number is out of its range.
    """

    start_weight: float = 20.0
    ridge: float = 1e-2

    def __post_init__(self):
        validate_range("start_weight", self.start_weight, 0)
        validate_range("ridge", self.ridge, 0, above=True)


@dataclass
class Moments:
    """Weighted second moments of features and targets: F^T F, F^T Y, and sum of |y|^2 (float64)."""

    features: Tensor
    cross: Tensor
    energy: float = 0.0

    @classmethod
    def empty(cls, width: int, hidden: int) -> "Moments":
        """Moments of nothing yet: `width` features, `hidden` targets."""
        return cls(torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, hidden, dtype=torch.float64))

    def add(self, features: Tensor, targets: Tensor, weight: float = 1.0):
        """Adds rows: `features` `[..., width]`, `targets` `[..., hidden]`."""
        features, targets = features.flatten(0, -2), targets.flatten(0, -2)
        self.features += weight * (features.T @ features).double()
        self.cross += weight * (features.T @ targets).double()
        self.energy += weight * targets.double().pow(2).sum().item()

    def scaled(self, factors: Tensor) -> "Moments":
        """The moments of features multiplied by `factors` `[width]`."""
        return Moments(self.features * factors[:, None] * factors, self.cross * factors[:, None], self.energy)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.features + other.features, self.cross + other.cross, self.energy + other.energy)

    def error(self, weight: Tensor) -> float:
        """Sum of |W f - y|^2 over the sum of |y|^2, for W `[hidden, width]`."""
        weight = weight.double()
        explained = 2 * (weight * self.cross.T).sum() - (weight @ self.features * weight).sum()
        return 1.0 - explained.item() / max(self.energy, 1e-30)


def fit_head_gains(moments: Moments, weight: Tensor, blocks: list[slice], free: list[int]) -> Tensor:
    """One factor per head that brings the projected heads nearest to the target, the other heads' being 1.

    Args:
        moments: of the heads' outputs as they are.
        weight: output projection `[hidden, width]`.
        blocks: the columns of each head.
        free: the heads whose factor is fitted.

    Returns:
        Factors `[heads]`.
    """
    weight = weight.double()
    gram, pull = (
        torch.empty(len(blocks), len(blocks), dtype=torch.float64),
        torch.empty(len(blocks), dtype=torch.float64),
    )
    for i, rows in enumerate(blocks):
        pull[i] = (weight[:, rows].T * moments.cross[rows]).sum()
        for j, columns in enumerate(blocks):
            gram[i, j] = (weight[:, rows].T @ weight[:, columns] * moments.features[rows, columns]).sum()
    gains = torch.ones(len(blocks), dtype=torch.float64)
    held = [head for head in range(len(blocks)) if head not in free]
    system = gram[free][:, free]
    # A head that says nothing keeps its factor: a little of the diagonal decides for 1.
    damping = 1e-4 * system.diagonal().mean()
    system = system + damping * torch.eye(len(free), dtype=torch.float64)
    gains[free] = torch.linalg.solve(system, pull[free] - gram[free][:, held].sum(1) + damping)
    return gains


def ridge(moments: Moments, start: Tensor, strength: float) -> Tensor:
    """The minimiser of the weighted squared error plus `strength` times the mean feature energy times |W - W_0|^2."""
    width = moments.features.shape[0]
    penalty = strength * moments.features.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    right = moments.cross - moments.features @ start.double().T
    return start.double() + torch.linalg.solve(moments.features + penalty, right).T


@torch.no_grad()
def calibrate_layer(
    hybrid: HwHForCausalLM,
    layer: int,
    groups: list[Rows],
    settings: CalibrateSettings,
    *,
    fit_gains: bool = True,
) -> tuple[float, float]:
    """Fits one layer's output projection in place, and with `fit_gains` one scale per linear head before it.

    Returns:
        The share of the target's energy that is missed before and after, first tokens left out.
    """
    runner, mixer = LayerRunner(hybrid), hybrid.model.layers[layer].token_mixer
    width, hidden = mixer.o_proj.in_features, mixer.o_proj.out_features
    starts, rest = Moments.empty(width, hidden), Moments.empty(width, hidden)
    bias = 0 if mixer.o_proj.bias is None else mixer.o_proj.bias
    for group in groups:
        size = max(1, 4096 // group.tokens.shape[1])
        for inputs, targets in zip(group.inputs.split(size), group.targets.split(size), strict=True):
            features, targets = runner.heads(layer, inputs), targets - bias
            starts.add(features[:, :1], targets[:, :1], settings.start_weight)
            if features.shape[1] > 1:
                rest.add(features[:, 1:], targets[:, 1:])
    weight = mixer.o_proj.weight
    before = rest.error(weight)
    linear = mixer.linear_attention
    if fit_gains and linear is not None and linear.head_scale is not None:
        config = hybrid.config
        widths = [
            config.head_dim if head in mixer.full_heads else config.linear_value_head_dim
            for head in range(config.num_attention_heads)
        ]
        ends = torch.tensor(widths).cumsum(0).tolist()
        blocks = [slice(end - size, end) for end, size in zip(ends, widths, strict=True)]
        free = [head for head in range(config.num_attention_heads) if head not in mixer.full_heads]
        gains = fit_head_gains(rest, weight, blocks, free)
        factors = torch.cat([gains[head].expand(size) for head, size in enumerate(widths)])
        linear.head_scale.mul_(gains[free].to(linear.head_scale))
        rest = rest.scaled(factors)
        if config.linear_start_token != "value":
            starts = starts.scaled(factors)
    fitted = ridge(rest + starts, weight, settings.ridge)
    weight.copy_(fitted)
    return max(before, 0.0), max(rest.error(weight), 0.0)


def calibrate(
    source: HwHForCausalLM,
    hybrid: HwHForCausalLM,
    sequences: Tensor,
    start_tokens: Tensor,
    settings: CalibrateSettings = CalibrateSettings(),
    *,
    progress: Callable[[int, float, float], None] | None = None,
) -> list[tuple[float, float]]:
    """Fits every layer of `hybrid` in place, first to last.

    Args:
        source: the source model in exact HwH form, float32.
        hybrid: the converted model, float32.
        sequences: training text, `[S, T]` tokens.
        start_tokens: `[N]` tokens that each stand alone in a row of their own, for the attention sink.
        settings: how.
        progress: called with the layer and its error before and after.

    Returns:
        Per layer, the share of the target's energy that is missed before and after.
    """
    errors = []
    for layer, groups in walk_layers(source, [sequences, start_tokens[:, None]]):
        errors.append(calibrate_layer(hybrid, layer, groups, settings))
        if progress is not None:
            progress(layer, *errors[-1])
    return errors

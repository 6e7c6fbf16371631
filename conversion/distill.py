"""Healing by gradient descent, stage by stage. Stage `align`: every layer's mixer learns its source's output.

Each layer is a small regression of its own, on the source's activations or on the hybrid's ([`walk_layers`]), so the
stage needs the memory of one layer, and a finished layer is saved and never touched again: a killed run goes on with
the first unfinished one.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_hybrid import HwHForCausalLM
from hf_hybrid.conversion.calibrate import calibrate_layer
from hf_hybrid.conversion.layerwise import LayerRunner, Rows, walk_layers


@dataclass(frozen=True)
class AlignSettings:
    """How one layer's mixer is trained.

    Attributes:
        epochs: passes over the sequences.
        batch_rows: sequences per step.
        learning_rate: peak of Adam's; it warms up over a twentieth of the steps and falls to zero along a cosine.
        start_weight: weight of a first token's squared error against another token's.
        follow: whose activations are the input, see [`walk_layers`].
        calibrate: strength of the ridge regression that ends each layer; None = none.
        seed: of the order of the sequences.
    """

    epochs: int = 1
    batch_rows: int = 4
    learning_rate: float = 3e-3
    start_weight: float = 20.0
    follow: str = "hybrid"
    calibrate: float | None = 1e-3
    seed: int = 0


def trained_parameters(mixer: nn.Module) -> dict[str, nn.Parameter]:
    """What the stage trains of one mixer: everything."""
    return dict(mixer.named_parameters())


def align_layer(hybrid: HwHForCausalLM, layer: int, groups: list[Rows], settings: AlignSettings) -> tuple[float, float]:
    """Trains one layer's mixer in place on `groups` (sequences, then rows of a single start token).

    Returns:
        Mean loss of the first and of the last tenth of the steps; 1 = predicting zero.
    """
    runner, mixer = LayerRunner(hybrid), hybrid.model.layers[layer].token_mixer
    parameters = trained_parameters(mixer)
    generator = torch.Generator().manual_seed(settings.seed * 1009 + layer)
    sequences, starts = groups
    rows = len(sequences.tokens)
    steps_per_epoch = math.ceil(rows / settings.batch_rows)
    steps = settings.epochs * steps_per_epoch
    # The energy that is to be explained, first tokens apart: theirs is of another size.
    energy = sequences.targets[:, 1:].pow(2).mean().clamp(min=1e-12)
    start_energy = starts.targets.pow(2).mean().clamp(min=1e-12)
    optimizer = torch.optim.Adam(parameters.values(), lr=settings.learning_rate, betas=(0.9, 0.98))
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    losses = []
    starts_per_step = math.ceil(len(starts.tokens) / steps_per_epoch)
    with torch.enable_grad():
        for _ in range(settings.epochs):
            order = torch.randperm(rows, generator=generator)
            start_order = torch.randperm(len(starts.tokens), generator=generator)
            for step in range(steps_per_epoch):
                chosen = order[step * settings.batch_rows : (step + 1) * settings.batch_rows]
                error = runner.mixer(layer, sequences.inputs[chosen]) - sequences.targets[chosen]
                body = error[:, 1:].pow(2).mean() / energy
                picked = start_order[step * starts_per_step : (step + 1) * starts_per_step]
                if len(picked) == 0:
                    picked = start_order[:starts_per_step]
                start_error = runner.mixer(layer, starts.inputs[picked]) - starts.targets[picked]
                head = (error[:, 0].pow(2).mean() + start_error.pow(2).mean()) / start_energy
                loss = body + settings.start_weight / sequences.tokens.shape[1] * head
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(parameters.values(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(body.item())
    tenth = max(1, len(losses) // 10)
    return sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth

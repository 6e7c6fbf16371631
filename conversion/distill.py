"""Healing by gradient descent, stage by stage. Stage `align`: every layer's mixer learns its source's output.

Each layer is a small regression of its own, so the stage needs the memory of one layer's training, and a finished layer
is saved and never touched again: a killed run goes on with the first unfinished one. A ridge regression of the output
projection ([`calibrate_layer`]) stands before and after the descent: before, so that it starts from the right scale;
after, since the best projection of the trained heads has a closed form.
"""

import hashlib
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from hf_hybrid import HwHForCausalLM
from hf_hybrid.conversion.calibrate import CalibrateSettings, calibrate_layer
from hf_hybrid.conversion.files import read_json, write_atomically, write_json
from hf_hybrid.conversion.healing import HealingError
from hf_hybrid.conversion.layerwise import LayerRunner, Rows, walk_layers
from hf_hybrid.validators import validate_at_least, validate_range

SETTINGS = "settings.json"
# Share of the energy: float32 rounding.
NOTHING_MISSED = 1e-9


@dataclass(frozen=True)
class AlignSettings:
    """How one layer's mixer is trained. Steps of one short row: at small budgets the number of steps decides.

    Attributes:
        epochs: passes over the sequences.
        batch_rows: sequences per step.
        learning_rate: peak of Adam's; it warms up over a twentieth of the steps and falls to zero along a cosine.
        start_weight: weight of a first token's squared error against another token's.
        ridge: strength of the ridge regressions before and after, see [`calibrate`].
        seed: of the order of the sequences.

    Raises:
        ValueError: a number is out of its range.
    """

    epochs: int = 1
    batch_rows: int = 1
    learning_rate: float = 3e-3
    start_weight: float = 20.0
    ridge: float = 1e-2
    seed: int = 0

    def __post_init__(self):
        validate_at_least("epochs", self.epochs, 1)
        validate_at_least("batch_rows", self.batch_rows, 1)
        validate_range("learning_rate", self.learning_rate, 0, above=True)
        self.calibration  # noqa: B018 (it checks its own two)

    @property
    def calibration(self) -> CalibrateSettings:
        """Of the regressions before and after."""
        return CalibrateSettings(self.start_weight, self.ridge)


def align_layer(hybrid: HwHForCausalLM, layer: int, groups: list[Rows], settings: AlignSettings) -> tuple[float, float]:
    """Trains one layer's mixer in place on `groups`: sequences, then rows of a single start token.

    Returns:
        Mean loss of the first and of the last tenth of the steps, first tokens left out; 1 = predicting zero.
    """
    runner = LayerRunner(hybrid)
    parameters = list(hybrid.model.layers[layer].token_mixer.parameters())
    sequences, starts = groups
    rows, length = sequences.tokens.shape
    steps_per_epoch = math.ceil(rows / settings.batch_rows)
    steps = settings.epochs * steps_per_epoch
    # First tokens carry energy of another order, so both kinds are measured against their own.
    energy = sequences.targets[:, 1:].pow(2).mean().clamp(min=1e-12)
    start_energy = starts.targets.pow(2).mean().clamp(min=1e-12)
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate, betas=(0.9, 0.95))
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    generator = torch.Generator().manual_seed(settings.seed * 1009 + layer)
    losses = []
    with torch.enable_grad():
        for _ in range(settings.epochs):
            order = torch.randperm(rows, generator=generator).split(settings.batch_rows)
            start_order = torch.randperm(len(starts.tokens), generator=generator)
            for step, chosen in enumerate(order):
                error = runner.mixer(layer, sequences.inputs[chosen]) - sequences.targets[chosen]
                # The start tokens are dealt out over the epoch's steps; every step gets at least one.
                dealt = start_order[step % len(start_order) :: steps_per_epoch]
                start_error = runner.mixer(layer, starts.inputs[dealt]) - starts.targets[dealt]
                body = error[:, 1:].pow(2).mean() / energy
                start = (error[:, 0].pow(2).mean() + start_error.pow(2).mean()) / start_energy
                optimizer.zero_grad(set_to_none=True)
                (body + settings.start_weight / length * start).backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                losses.append(body.item())
    tenth = max(1, len(losses) // 10)
    return sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth


def align(
    source: HwHForCausalLM,
    hybrid: HwHForCausalLM,
    sequences: Tensor,
    start_tokens: Tensor,
    settings: AlignSettings,
    *,
    checkpoint: Path | None = None,
    progress: Callable[[int, float, float], None] | None = None,
) -> list[tuple[float, float]]:
    """Trains every layer of `hybrid` in place, first to last.

    Args:
        source: the source model in exact HwH form, float32.
        hybrid: the converted model, float32.
        sequences: training text, `[S, T]` tokens.
        start_tokens: `[N]` tokens that each stand alone in a row of their own, for the attention sink.
        settings: how.
        checkpoint: folder that keeps each finished layer; a run with the same settings and text goes on from there.
        progress: called with the layer and the share of the target's energy that is missed before and after.

    Returns:
        Per layer, the share of the target's energy that is missed before and after; first tokens left out.

    Raises:
        HealingError: `checkpoint` holds layers of a run with other settings, text or model; or training diverged.
    """
    if checkpoint is not None:
        _open_checkpoint(checkpoint, settings, sequences, start_tokens, source, hybrid)
    errors = []
    for layer, groups in walk_layers(source, [sequences, start_tokens[:, None]]):
        mixer = hybrid.model.layers[layer].token_mixer
        saved = None if checkpoint is None else checkpoint / f"layer-{layer:03d}.safetensors"
        if saved is not None and saved.is_file():
            state = load_file(saved)
            errors.append(tuple(state.pop("errors").tolist()))
            mixer.load_state_dict(state)
        else:
            before, after = calibrate_layer(hybrid, layer, groups, settings.calibration)
            # A layer that is its source's has nothing to learn.
            if after > NOTHING_MISSED:
                align_layer(hybrid, layer, groups, settings)
                if not all(parameter.isfinite().all() for parameter in mixer.parameters()):
                    raise HealingError(
                        f"layer {layer} has values that are not finite with learning_rate {settings.learning_rate}: "
                        "take a smaller one" + _forget(checkpoint)
                    )
                _, after = calibrate_layer(hybrid, layer, groups, settings.calibration, fit_gains=False)
            errors.append((before, after))
            if saved is not None:
                state = {name: tensor.contiguous() for name, tensor in mixer.state_dict().items()}
                state["errors"] = torch.tensor([before, after], dtype=torch.float64)
                write_atomically(saved, save(state))
        if progress is not None:
            progress(layer, *errors[-1])
    return errors


def _forget(checkpoint: Path | None) -> str:
    """Removes a checkpoint that holds no finished layer; otherwise says that it is in the way."""
    if checkpoint is None:
        return ""
    if any(checkpoint.glob("layer-*.safetensors")):
        return f", and remove {checkpoint}, whose layers were trained with this one"
    shutil.rmtree(checkpoint)
    return ""


def _open_checkpoint(
    folder: Path,
    settings: AlignSettings,
    sequences: Tensor,
    start_tokens: Tensor,
    source: HwHForCausalLM,
    hybrid: HwHForCausalLM,
):
    """Makes the folder, or checks that it belongs to the same run."""
    run = {
        "settings": asdict(settings),
        "sequences": _digest(sequences),
        "start_tokens": _digest(start_tokens),
        "source": _digest(*source.state_dict().values()),
        "hybrid": _digest(*hybrid.state_dict().values()),
    }
    path = folder / SETTINGS
    if path.is_file():
        found = read_json(path, error=HealingError)
        if different := [name for name in run if found.get(name) != run[name]]:
            raise HealingError(
                f"{folder} keeps layers of another run (other {', '.join(different)}): finish it as it was started, or "
                "remove it"
            )
    elif folder.exists() and any(entry.name != f"{SETTINGS}.tmp" for entry in folder.iterdir()):
        raise HealingError(f"{folder} is not a folder of finished layers (no {SETTINGS}): move it out of the way")
    else:
        write_json(path, run)


def _digest(*tensors: Tensor) -> str:
    """sha256 over shapes, dtypes and contents."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

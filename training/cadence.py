"""Update cadence of Hope's continuum memory under the Trainer: slow levels step rarely, on all gradients since.

trainer = Trainer(model, ..., callbacks=[CadenceCallback()])
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_hybrid.continuum_memory import ContinuumMemory

KEPT = "cadence.safetensors"


def parameters_with_periods(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Name, parameter and period, in optimizer steps, of every level that does not step each time."""
    periods = model.config.cms_periods
    for name, module in model.named_modules():
        if isinstance(module, ContinuumMemory):
            for index, (level, period) in enumerate(zip(module.levels, periods, strict=True)):
                if period > 1:
                    for parameter_name, parameter in level.named_parameters(prefix=f"{name}.levels.{index}"):
                        yield parameter_name, parameter, period


class CadenceCallback(TrainerCallback):
    """Holds a slow level's gradient back until its step is due, then gives the optimizer the sum.

    In between the optimizer finds no gradient, so it leaves the level, and its moments, as they are. What is held back
    is saved with each checkpoint. Gradients after a level's last due step are dropped at the end of training.
    """

    def __init__(self):
        self.held: dict[str, Tensor] = {}

    def on_train_begin(self, args, state, control, model, **kwargs):
        """Takes up what the checkpoint held back, if training goes on from one. Raises `ValueError` without levels."""
        if not any(isinstance(module, ContinuumMemory) for module in model.modules()):
            raise ValueError(f"{type(model).__name__} has no continuum memory: give token_mixer='hope', or no cadence")
        kept = Path(args.output_dir) / f"checkpoint-{state.global_step}" / KEPT
        self.held = load_file(kept) if state.global_step and kept.is_file() else {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        """Before step `global_step + 1`."""
        for name, parameter, period in parameters_with_periods(model):
            if parameter.grad is not None:
                held = self.held.get(name)
                self.held[name] = parameter.grad if held is None else held.to(parameter.grad.device) + parameter.grad
            is_due = (state.global_step + 1) % period == 0
            parameter.grad = self.held.pop(name, None) if is_due else None

    def on_save(self, args, state, control, **kwargs):
        """Beside the Trainer's own checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.held and folder.is_dir():
            save_file({name: torch.clone(gradient).contiguous() for name, gradient in self.held.items()}, folder / KEPT)

"""Start groups of Mobius models in training and evaluation (arXiv 2607.17843): which sequence starts at which group."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, default_data_collator

from hf_hybrid import MobiusForCausalLM
from hf_hybrid.validators import validate_at_least


def balanced_start_groups(batch_size: int, num_groups: int, seed: int) -> Tensor:
    """`[batch_size]` groups in random order, each as often as the others: the counts differ by one at most.

    Which groups have one more is random too, so that over batches of any size every group is as frequent.
    """
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-batch_size // num_groups)
    # Whole rounds in full, the last one in part.
    groups = torch.cat([torch.randperm(num_groups, generator=generator) for _ in range(rounds)])[:batch_size]
    return groups[torch.randperm(batch_size, generator=generator)]


class StartGroupCollator:
    """A data collator for the Trainer that adds `start_groups` `[B]` to each batch, balanced over its rows.

    The groups of a batch follow from `seed` and from its tokens alone. So they are the same in any number of loader
    processes and after a resumed run skipped the batches that it has seen, and a second epoch in another order pairs
    sequences and groups anew.

    Args:
        num_groups: P, the model's `num_block_groups`.
        seed: of the assignment.
        collator: makes the batch, with `input_ids`; default: transformers' own.
    """

    def __init__(
        self,
        num_groups: int,
        seed: int = 0,
        collator: Callable[[Sequence[Any]], dict[str, Any]] = default_data_collator,
    ):
        validate_at_least("num_groups", num_groups, 1)
        self.num_groups, self.seed, self.collator = num_groups, seed, collator

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        batch = self.collator(rows)
        # Rows that say where they start, as those of `evaluate_starts`, keep it.
        if "start_groups" not in batch:
            tokens = batch["input_ids"]
            seed = zlib.crc32(tokens.numpy().tobytes(), self.seed)
            batch["start_groups"] = balanced_start_groups(len(tokens), self.num_groups, seed)
        return batch


class _FromStart(torch.utils.data.Dataset):
    """The rows of a dataset, each with the same start group."""

    def __init__(self, dataset, start_group: int):
        self.dataset, self.start_group = dataset, start_group

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index], "start_groups": self.start_group}


def evaluate_starts(trainer: Trainer, dataset=None, metric_key_prefix: str = "eval") -> dict[str, float]:
    """The trainer's metrics from every start group, `eval_start_0_loss` and so on, and their mean, `eval_loss`.

    Args:
        trainer: of a cyclic Mobius model.
        dataset: rows with `input_ids` and `labels`; default: the trainer's evaluation dataset.
        metric_key_prefix: in place of `eval`.
    """
    dataset = trainer.eval_dataset if dataset is None else dataset
    metrics, losses = {}, []
    for start in range(trainer.model.config.num_block_groups):
        prefix = f"{metric_key_prefix}_start_{start}"
        metrics.update(trainer.evaluate(_FromStart(dataset, start), metric_key_prefix=prefix))
        losses.append(metrics[f"{prefix}_loss"])
    metrics[f"{metric_key_prefix}_loss"] = sum(losses) / len(losses)
    trainer.log({f"{metric_key_prefix}_loss": metrics[f"{metric_key_prefix}_loss"]})
    return metrics


@torch.no_grad()
def start_losses(model: MobiusForCausalLM, windows: Tensor) -> list[float]:
    """Mean loss in nats a token over `windows` `[W, T]`, each read alone, from every group a sequence can start at."""
    cyclic = model.config.depth_order == "cyclic"
    return [
        sum(
            model(window[None], labels=window[None], start_groups=start, use_cache=False).loss.item()
            for window in windows
        )
        / len(windows)
        for start in range(model.config.num_block_groups if cyclic else 1)
    ]

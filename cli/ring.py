"""`hf-hybrid ring`: train a Mobius model as a ring of workers. Started by torchrun, once for each worker."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_hybrid.cli.options import SEEDS

Muon = StrEnum("Muon", ["auto", "torch", "batched", "none"])


def ring(
    model: Annotated[Path, typer.Argument(help="Folder of a Mobius model with its tokenizer.")],
    out: Annotated[Path, typer.Argument(help="Folder of the run: checkpoints, and the ordinary model at the end.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; default: Python's own documentation.")] = None,
    batch_rows: Annotated[int, typer.Option(help="Rows of each worker's batch.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    accumulation: Annotated[int, typer.Option(help="Batches of each worker per optimizer step.")] = 1,
    muon: Annotated[Muon, typer.Option(help="For the layers' matrices; none = AdamW for everything.")] = Muon.auto,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW.")] = 4e-3,
    muon_learning_rate: Annotated[float, typer.Option(help="Peak of Muon.")] = 0.02,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.1,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 50,
    max_norm: Annotated[float, typer.Option(help="Gradients of all workers are scaled down to this norm.")] = 1.0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    timeout: Annotated[float, typer.Option(help="Seconds without a word from a neighbour until the run ends.")] = 120.0,
    seed: Annotated[int, typer.Option(**SEEDS, help="Of the order of the rows.")] = 0,
) -> None:
    """Train a Mobius model as a ring of workers, each with one block group and its own part of the text.

    torchrun --nproc-per-node WORKERS --no-python hf-hybrid ring MODEL OUT; once more goes on from the last checkpoint.
    """
    from hf_hybrid.training.ring_run import RingSettings, gather, open_ring, train

    settings = RingSettings(
        steps=steps,
        batch_rows=batch_rows,
        length=length,
        accumulation=accumulation,
        muon=muon.value,
        learning_rate=learning_rate,
        muon_learning_rate=muon_learning_rate,
        weight_decay=weight_decay,
        warmup=warmup,
        max_norm=max_norm,
        save_every=save_every,
        timeout=timeout,
        seed=seed,
    )
    import torch
    import torch.distributed as dist

    from hf_hybrid.conversion.source_model import load_tokenizer
    from hf_hybrid.conversion.text_data import load_text, training_tokens

    load_text(text)
    place = open_ring(settings)
    tokens = training_tokens(load_tokenizer(model), text).chunk(place.size)[place.rank]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(place.rank % torch.cuda.device_count())

    def log(step: int, losses: list[float]) -> None:
        each = " ".join(f"{loss:.4f}" for loss in losses)
        typer.echo(f"step {step}/{settings.steps}  loss {sum(losses) / len(losses):.4f}  by start group {each}")

    train(model, out, tokens, settings, place, device=device, log=log)
    if place.rank == 0:
        typer.echo(f"wrote {gather(model, out)}")
    dist.barrier()
    dist.destroy_process_group()

"""`hf-hybrid distill`: healing of a converted model by gradient descent."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_hybrid.cli.options import SEEDS

Stage = StrEnum("Stage", ["align"])


def distill(
    hybrid: Annotated[Path, typer.Argument(help="Folder that hf-hybrid convert or calibrate wrote.")],
    source: Annotated[str, typer.Argument(help="The model it was made from: folder, hub id or GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; OUT.align keeps finished layers until then.")],
    stage: Annotated[Stage, typer.Option(help="align: each layer learns the source's attention output.")] = Stage.align,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; default: Python's own documentation.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to train on.")] = 65536,
    length: Annotated[int, typer.Option(help="Tokens per row; one row is one step.")] = 256,
    epochs: Annotated[int, typer.Option(help="Passes over the text.")] = 1,
    batch_rows: Annotated[int, typer.Option(help="Rows per step.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak of Adam's learning rate.")] = 3e-3,
    starts: Annotated[int, typer.Option(help="Extra rows of one random start token, for the attention sink.")] = 192,
    start_weight: Annotated[float, typer.Option(help="Weight of a first token against another one.")] = 20.0,
    ridge: Annotated[float, typer.Option(help="Ridge strength before and after each layer's training.")] = 1e-2,
    seed: Annotated[int, typer.Option(**SEEDS, help="Seed of the order and of the start tokens.")] = 0,
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file in SOURCE.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub SOURCE.")] = None,
) -> None:
    """Train a converted model towards its source."""
    from hf_hybrid.cli.heal import heal
    from hf_hybrid.conversion.distill import AlignSettings

    settings = AlignSettings(
        epochs=epochs,
        batch_rows=batch_rows,
        learning_rate=learning_rate,
        start_weight=start_weight,
        ridge=ridge,
        seed=seed,
    )
    rows = {"num_tokens": tokens, "length": length, "num_starts": starts, "seed": seed}
    heal(hybrid, source, out, settings, text, rows, gguf_file=gguf_file, revision=revision)

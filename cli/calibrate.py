"""`hf-hybrid calibrate`: closed-form healing of a converted model."""

from pathlib import Path
from typing import Annotated

import typer

from hf_hybrid.cli.options import SEEDS


def calibrate(
    hybrid: Annotated[Path, typer.Argument(help="Folder that hf-hybrid convert or distill wrote.")],
    source: Annotated[str, typer.Argument(help="The model it was made from: folder, hub id or GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; default: Python's own documentation.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to fit on.")] = 8192,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    starts: Annotated[int, typer.Option(help="Extra rows of one random start token, for the attention sink.")] = 192,
    start_weight: Annotated[float, typer.Option(help="Weight of a first token against another one.")] = 20.0,
    ridge: Annotated[float, typer.Option(help="Ridge strength, relative to the features' mean energy.")] = 1e-2,
    seed: Annotated[int, typer.Option(**SEEDS, help="Seed of the start tokens.")] = 0,
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file in SOURCE.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub SOURCE.")] = None,
) -> None:
    """Fit the output projections of a converted model in closed form."""
    from hf_hybrid.cli.heal import heal
    from hf_hybrid.conversion.calibrate import CalibrateSettings

    settings = CalibrateSettings(start_weight=start_weight, ridge=ridge)
    rows = {"num_tokens": tokens, "length": length, "num_starts": starts, "seed": seed}
    heal(hybrid, source, out, settings, text, rows, gguf_file=gguf_file, revision=revision)

"""`hf-hybrid distill`: healing of a converted model by gradient descent."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

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
    seed: Annotated[int, typer.Option(help="Seed of the order and of the start tokens.")] = 0,
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file in SOURCE.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub SOURCE.")] = None,
) -> None:
    """Train a converted model towards its source."""
    import shutil
    from dataclasses import asdict

    from hf_hybrid.cli.progress import layer_progress
    from hf_hybrid.conversion.distill import AlignSettings, align
    from hf_hybrid.conversion.healing import healing_text, load_pair, refuse_existing, write_healed

    refuse_existing(out)
    settings = AlignSettings(
        epochs=epochs,
        batch_rows=batch_rows,
        learning_rate=learning_rate,
        start_weight=start_weight,
        ridge=ridge,
        seed=seed,
    )
    pair = load_pair(hybrid, source, gguf_file=gguf_file, revision=revision)
    data = healing_text(pair.tokenizer, text, num_tokens=tokens, length=length, num_starts=starts, seed=seed)
    checkpoint = out.with_name(f"{out.name}.{stage.value}")
    with layer_progress(stage.value, pair.hybrid.config.num_hidden_layers) as advance:
        errors = align(
            pair.source, pair.hybrid, data.sequences, data.starts, settings, checkpoint=checkpoint, progress=advance
        )
    record = {
        "stage": stage.value,
        "tokens": data.sequences.numel(),
        "length": length,
        "starts": starts,
        **asdict(settings),
        "text_digest": data.digest,
        "missed_energy": round(sum(after for _, after in errors) / len(errors), 4),
    }
    write_healed(pair, out, record)
    shutil.rmtree(checkpoint)
    typer.echo(
        f"wrote {out}: share of the attention outputs' energy that is missed, mean over layers, "
        f"{sum(before for before, _ in errors) / len(errors):.3f} -> {record['missed_energy']:.3f}"
    )

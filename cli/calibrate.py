"""`hf-hybrid calibrate`: closed-form healing of a converted model."""

from pathlib import Path
from typing import Annotated

import typer


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
    seed: Annotated[int, typer.Option(help="Seed of the start tokens.")] = 0,
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file in SOURCE.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub SOURCE.")] = None,
) -> None:
    """Fit the output projections of a converted model in closed form."""
    from hf_hybrid.cli.progress import layer_progress
    from hf_hybrid.conversion.calibrate import calibrate as fit
    from hf_hybrid.conversion.healing import healing_text, load_pair, refuse_existing, write_healed

    refuse_existing(out)
    pair = load_pair(hybrid, source, gguf_file=gguf_file, revision=revision)
    data = healing_text(pair.tokenizer, text, num_tokens=tokens, length=length, num_starts=starts, seed=seed)
    with layer_progress("calibrate", pair.hybrid.config.num_hidden_layers) as advance:
        errors = fit(
            pair.source,
            pair.hybrid,
            data.sequences,
            data.starts,
            start_weight=start_weight,
            strength=ridge,
            progress=advance,
        )
    stage = {
        "stage": "calibrate",
        "tokens": data.sequences.numel(),
        "length": length,
        "starts": starts,
        "start_weight": start_weight,
        "ridge": ridge,
        "seed": seed,
        "text_digest": data.digest,
        "missed_energy": round(sum(after for _, after in errors) / len(errors), 4),
    }
    write_healed(pair, out, stage)
    typer.echo(
        f"wrote {out}: share of the attention outputs' energy that is missed, mean over layers, "
        f"{sum(before for before, _ in errors) / len(errors):.3f} -> {stage['missed_energy']:.3f}"
    )

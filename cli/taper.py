"""`hf-hybrid taper`: a uniform checkpoint -> one whose MLPs narrow with depth."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_hybrid.cli.options import SEEDS

Schedule = StrEnum("Schedule", ["cosine", "linear", "sigmoid", "step", "reverse"])


def taper(
    model: Annotated[str, typer.Argument(help="A model of the zoo (folder), or a RoPE checkpoint to convert exactly.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    schedule: Annotated[Schedule, typer.Option(help="How the widths fall with depth.")] = Schedule.cosine,
    start: Annotated[float, typer.Option(help="First width over the mean.")] = 1.5,
    end: Annotated[float, typer.Option(help="Last width over the mean.")] = 0.5,
    multiple_of: Annotated[int, typer.Option(min=1, help="What every width is a multiple of.")] = 16,
    grow_only: Annotated[bool, typer.Option("--grow-only", help="Only add neurons: the same function.")] = False,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; default: Python's own documentation.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of it that say which neurons matter.")] = 8192,
    length: Annotated[int, typer.Option(min=2, help="Tokens per row.")] = 512,
    seed: Annotated[int, typer.Option(**SEEDS, help="Seed of the new neurons.")] = 0,
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file in MODEL.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub MODEL.")] = None,
) -> None:
    """Turn a uniform checkpoint into a tapered one of the same size: late MLPs lose neurons, early ones gain some."""
    from hf_hybrid.conversion.files import require_place

    require_place(out)
    from rich.progress import Progress

    from hf_hybrid.cli.analyze import advance
    from hf_hybrid.conversion.healing import healing_text, stages, stored_dtypes, write_stage
    from hf_hybrid.conversion.measure import heldout_nll
    from hf_hybrid.conversion.source_model import load_tokenizer
    from hf_hybrid.conversion.taper import neuron_importance, open_zoo_model
    from hf_hybrid.conversion.taper import taper as run
    from hf_hybrid.conversion.text_data import check_context, heldout_windows
    from hf_hybrid.width_taper import tapered_widths

    mlp_taper = {"schedule": schedule.value, "start": start, "end": end, "multiple_of": multiple_of}
    with open_zoo_model(model, gguf_file=gguf_file, revision=revision) as (loaded, folder):
        # Before the work: widths that don't fit, and texts that are too short.
        tapered_widths(loaded.config.num_hidden_layers, loaded.config.intermediate_size, **mlp_taper)
        check_context(length, loaded.config)
        tokenizer = load_tokenizer(model, folder)
        windows = heldout_windows(tokenizer, text, length=length)
        importance, stage = None, {"stage": "taper", **mlp_taper, "grow_only": grow_only, "seed": seed}
        before = heldout_nll(loaded, windows)
        if not grow_only:
            data = healing_text(tokenizer, text, num_tokens=tokens, length=length, num_starts=1, seed=seed)
            with Progress() as bar:
                importance = neuron_importance(loaded, data.sequences, progress=advance(bar, "rows"))
            stage |= {"tokens": data.sequences.numel(), "length": length, "text_digest": data.digest}
        widths = run(loaded, importance, mlp_taper=mlp_taper, grow_only=grow_only, seed=seed)
        after = heldout_nll(loaded, windows)
        stage |= {"heldout_nll_before": round(before, 4), "heldout_nll_after": round(after, 4)}
        write_stage(loaded, folder, stored_dtypes(folder), out, [*stages(folder), stage])
    typer.echo(f"widths {' '.join(map(str, widths))}")
    typer.echo(f"held-out NLL {before:.3f} -> {after:.3f} nats per token, before any training")
    typer.echo(f"wrote {out}")

"""What the commands that heal a converted model share; no command of its own."""

from pathlib import Path

import typer


def heal(hybrid: Path, source: str, out: Path, settings, text: Path | None, rows: dict, **where) -> None:
    """Runs the stage of `settings` on `hybrid` with a progress bar. Cheap checks come before the models are opened.

    Args:
        rows: arguments of `healing_text` beside the text.
        where: `gguf_file` and `revision` of the source.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from transformers import AutoConfig

    from hf_hybrid.conversion.files import require_place
    from hf_hybrid.conversion.healing import check_hybrid, healing_text, load_pair
    from hf_hybrid.conversion.healing_stages import run_stage
    from hf_hybrid.conversion.source_model import load_tokenizer
    from hf_hybrid.conversion.text_data import check_context

    require_place(out)
    check_context(rows["length"], AutoConfig.from_pretrained(check_hybrid(hybrid)))
    data = healing_text(load_tokenizer(check_hybrid(hybrid)), text, **rows)
    pair = load_pair(hybrid, source, **where)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("healing", total=pair.hybrid.config.num_hidden_layers)

        def advance(layer: int, before: float, after: float) -> None:
            bar.update(task, advance=1, description=f"layer {layer}: missed {before:.3f} -> {after:.3f}")

        before, after = run_stage(pair, data, settings, out, progress=advance)
    typer.echo(
        f"wrote {out}: share of the attention outputs' energy that is missed, mean over layers, {before:.3f} -> "
        f"{after:.3f}"
    )

"""`hf-hybrid demo`: the main job on a small real checkpoint."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Budget = StrEnum("Budget", ["short", "long"])


def demo(
    model: Annotated[str | None, typer.Argument(help="Folder, hub id or GGUF file; default: SmolLM2-135M.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for all results; finished stages are kept.")] = Path("runs/demo"),
    budget: Annotated[Budget, typer.Option(help="Align on 16k tokens (short) or 65k (long).")] = Budget.short,
) -> None:
    """Run all of it on a small real checkpoint and compare the stages."""
    import time
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hf_hybrid.cli.allocate import describe
    from hf_hybrid.conversion import demo as job
    from hf_hybrid.conversion.allocate import Allocation
    from hf_hybrid.conversion.head_map import HeadMap

    console = Console()
    began = time.perf_counter()

    @contextmanager
    def bar(name: str, steps: int):
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        ) as progress:
            task = progress.add_task(name, total=steps)
            yield lambda *_: progress.advance(task)

    source = job.bundled_checkpoint() if model is None else model
    rows = job.run_demo(source, out, budget=budget.value, bar=bar, say=typer.echo)
    head_dim = HeadMap.load(out / "head_map.safetensors").metadata.get("head_dim")
    typer.echo(describe(Allocation.load(out / "heads-rpd.json"), head_dim))
    console.print(table(rows, job))
    typer.echo(
        f"Calibrated on {job.CALIBRATION_TOKENS:,} tokens, aligned on {job.BUDGETS[budget.value]:,}.\n"
        "NLL: nats per token of text that no stage saw.\n"
        "Copy: loss in nats and top-1 of the second copy of 64 random tokens of it, so many tokens after the first.\n"
        f"Cache in float32; decoding one row behind {job.LONG_CONTEXT:,} tokens."
    )
    folder = out / f"aligned-{budget.value}"
    typer.echo(f"\nfrom {folder}, loaded with trust_remote_code in a process without hf_hybrid:")
    typer.echo(f"  {job.generate_in_a_fresh_process(folder)}")
    typer.echo(f"\nthe heads, in pictures: {out / 'report' / 'index.html'}")
    typer.echo(f"done in {(time.perf_counter() - began) / 60:.1f} minutes")


def table(rows, job):
    """The stages side by side."""
    from rich import box
    from rich.table import Table

    # Fits a terminal of 80 columns.
    result = Table(title="What the stages did", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("model")
    result.add_column("NLL", justify="right")
    for distance in job.DISTANCES:
        result.add_column(f"copy at\n{distance:,}", justify="right", no_wrap=True)
    for column in ("sink\nkept", "cache\nB/token", "decode\ntokens/s"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(
            row.model,
            f"{row.nll:.3f}",
            *(f"{recall.loss:.1f} {recall.top1:4.0%}" for recall in row.recall),
            f"{row.sink:.1%}".replace("100.0%", "100%"),
            f"{row.cache_bytes_per_token:,}",
            f"{row.decode_tokens_per_second:.1f}",
        )
    return result

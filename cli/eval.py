"""`hf-hybrid eval`: retrieval, extrapolation and any task of lm-eval, several models side by side."""

import logging
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_hybrid.cli.options import SEEDS

Dtype = StrEnum("Dtype", ["auto", "float32", "bfloat16", "float16"])


def eval(
    models: Annotated[list[str], typer.Argument(help="Folders, hub ids or .gguf files; NAME=MODEL names one.")],
    tasks: Annotated[str, typer.Option(help="Tasks and groups of lm-eval, joined by commas.")] = "hybrid_retrieval",
    lengths: Annotated[str, typer.Option(help="Tokens of the model, joined by commas.")] = "1024,2048,4096",
    depths: Annotated[str | None, typer.Option(help="Where needles stand, 0 to 1, joined by commas.")] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Documents of each task and length.")] = 20,
    seed: Annotated[int, typer.Option(**SEEDS, help="Seed of the documents.")] = 42,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; without it, Python's own documentation.")] = None,
    curve: Annotated[int, typer.Option(min=0, help="Stretches of text for the loss by position; 0 = none.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that are answered together.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; auto keeps the checkpoint's.")] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; the first GPU if there is one.")] = None,
    share: Annotated[bool, typer.Option("--share/--no-share", help="Read shared prefixes once.")] = True,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of a model's.")] = False,
    out: Annotated[Path, typer.Option(help="The folder for results; finished ones in it are taken over.")] = Path(
        "evaluation"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results of other runs.")] = False,
) -> None:
    """Evaluate models with lm-eval's tasks at several lengths; write JSON, a table and a page."""
    from hf_hybrid.conversion.source_model import locate
    from hf_hybrid.eval.runner import EvaluationError, Plan, Subject, run

    plan = Plan(
        tasks=tuple(filter(None, tasks.split(","))),
        lengths=numbers("lengths", lengths, int),
        depths=None if depths is None else numbers("depths", depths, float),
        num_samples=num_samples,
        seed=seed,
        text=None if text is None else str(text),
        batch_size=batch_size,
        dtype=dtype.value,
        device=device,
        trust_remote_code=trust_remote_code,
        share_prefixes=share,
        curve_windows=curve,
    )
    subjects = []
    for entry in models:
        name, equals, location = entry.rpartition("=")
        location, gguf_file = locate(location, None)
        subjects.append(Subject(name if equals else short_name(entry), location, gguf_file))
    if out.exists() and not out.is_dir():
        raise EvaluationError(f"{out} is a file: --out takes a folder")

    from rich.console import Console

    from hf_hybrid.conversion.files import write_json
    from hf_hybrid.eval.page import write_results_page
    from hf_hybrid.eval.results import summary

    # What it warns of is checked here (truncation) or of no use (families that it does not know).
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    console = Console()
    cells, curves = run(subjects, plan, out, overwrite=overwrite, say=lambda line: console.print(line, markup=False))
    console.print(table(cells))
    facts = {
        "Tasks": ", ".join(plan.tasks),
        "Lengths": ", ".join(f"{length:,}" for length in plan.lengths),
        "Documents": f"{num_samples} of each task and length, seed {seed}",
        "Written by": "hf-hybrid eval",
    }
    results = {"facts": facts, "scores": summary(cells), "nll_by_position": [asdict(each) for each in curves]}
    write_json(out / "results.json", results)
    typer.echo(f"wrote {out / 'results.json'}")
    for path in write_results_page(out, cells, curves, facts=facts):
        if path.suffix != ".svg":
            typer.echo(f"wrote {path}")


def numbers(option: str, value: str, kind: type) -> tuple:
    """Numbers joined by commas. Raises `ValueError` naming the option."""
    try:
        return tuple(kind(part) for part in value.split(","))
    except ValueError as error:
        word = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"--{option} is {value!r}: give {word} joined by commas, such as 1024,2048") from error


def short_name(model: str) -> str:
    """A model's name for tables: a folder's own name, a hub id as it is."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def table(cells):
    """Tasks and lengths in rows, models in columns."""
    from rich import box
    from rich.table import Table

    from hf_hybrid.eval.results import score_rows

    (task, *columns), *rows = score_rows(cells)
    result = Table(title="Scores", box=box.SIMPLE_HEAD)
    result.add_column(task)
    for column in columns:
        result.add_column(column, justify="right")
    for row in rows:
        result.add_row(*row)
    return result

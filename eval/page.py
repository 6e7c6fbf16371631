"""The page of an evaluation: tables, accuracy by length and depth, and loss by position, models side by side."""

import html
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, repeat
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hf_hybrid.conversion.picture_page import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Picture,
    write_page,
)
from hf_hybrid.eval.results import Cell, by_depth, models_of, score_rows
from hf_hybrid.eval.runner import Curve

COLORS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK)
FONT = {"fontsize": 9}


def write_results_page(
    folder: str | Path, cells: Sequence[Cell], curves: Sequence[Curve], *, facts: dict[str, str]
) -> list[Path]:
    """Writes index.html, which needs no other file, and each picture as PNG and SVG. Returns what it wrote."""
    head = f"<h2>Scores</h2>\n{score_table(cells)}"
    title = "Evaluation of " + ", ".join(models_of(cells))
    return write_page(folder, title, facts, pictures(cells, curves), head=head)


def pictures(cells: Sequence[Cell], curves: Sequence[Curve]) -> Iterator[Picture]:
    """Accuracy over length where a task ran at two lengths or more, a heat map where it has depths, and the curves."""
    by_task: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.length is not None and "score" in cell.scores:
            by_task.setdefault(cell.task, []).append(cell)
    several = {task: own for task, own in by_task.items() if len({cell.length for cell in own}) > 1}
    if several:
        yield score_by_length(several)
    for task, own in by_task.items():
        if any(sample["depth"] is not None for cell in own for sample in cell.samples):
            yield heat_map(task, own)
    if curves:
        yield loss_by_position(curves)


def score_by_length(by_task: dict[str, list[Cell]]) -> Picture:
    """A small panel per task: score over length, with standard errors, a line per model."""
    columns = min(4, len(by_task))
    rows = -(-len(by_task) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.1 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    models = models_of([cell for own in by_task.values() for cell in own])
    for axes, (task, own) in zip(panels.flat, by_task.items(), strict=False):
        lengths = sorted({cell.length for cell in own})
        for color, model in zip(cycle(COLORS), models, strict=False):
            points = sorted((cell for cell in own if cell.model == model), key=lambda cell: cell.length)
            axes.errorbar(
                [cell.length for cell in points],
                [cell.scores["score"] for cell in points],
                [cell.stderr.get("score", 0) for cell in points],
                color=color,
                marker="o",
                markersize=4,
                capsize=2,
                label=model,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False, rotation=30, **FONT)
        if max(cell.scores["score"] for cell in own) <= 1:
            axes.set_ylim(-0.05, 1.05)
        axes.set_title(task.removeprefix("hybrid_"), **FONT)
    for axes in panels.flat[len(by_task) :]:
        axes.set_visible(False)
    figure.supxlabel("length (tokens)", **FONT)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, **FONT)
    return Picture("score_by_length", "Score by length", "Means with standard errors over documents.", figure)


def heat_map(task: str, cells: Sequence[Cell]) -> Picture:
    """Accuracy over length and depth, a panel per model."""
    models = models_of(cells)
    tables = {model: by_depth(cell for cell in cells if cell.model == model) for model in models}
    lengths = sorted({length for table in tables.values() for length in table})
    depths = sorted({depth for table in tables.values() for row in table.values() for depth in row})
    width, height = 0.75 * len(lengths) * len(models) + 2.0, 0.24 * len(depths) + 1.5
    figure = Figure(figsize=(max(width, 4.0), max(height, 2.4)), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axes, (model, table) in zip(panels, tables.items(), strict=True):
        grid = [[table.get(length, {}).get(depth, np.nan) for length in lengths] for depth in depths]
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_facecolor("#DDDDDD")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=30, **FONT)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], **FONT)
        axes.set_title(model, **FONT)
    panels[0].set_ylabel("depth of the answer", **FONT)
    figure.supxlabel("length (tokens)", **FONT)
    figure.colorbar(image, ax=panels, label="score")
    name = task.removeprefix("hybrid_")
    caption = "Mean score by where in the text the answer stands; grey where no document asked."
    return Picture(f"depth_{name}", f"{name}: score by length and depth", caption, figure)


def loss_by_position(curves: Sequence[Curve]) -> Picture:
    """Loss over position, a line and its standard error per model, and the training lengths that it passes."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for color, curve in zip(cycle(COLORS), curves, strict=False):
        middle = [(bucket.start + bucket.end) / 2 for bucket in curve.buckets]
        nll = np.array([bucket.nll for bucket in curve.buckets])
        axes.plot(middle, nll, color=color, label=curve.model)
        if all(bucket.stderr is not None for bucket in curve.buckets):
            error = np.array([bucket.stderr for bucket in curve.buckets])
            axes.fill_between(middle, nll - error, nll + error, color=color, alpha=0.15, linewidth=0)
        if curve.training_length is not None and curve.training_length <= curve.buckets[-1].end:
            axes.axvline(curve.training_length, color=color, linestyle="--", linewidth=1)
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(0)
    axes.legend(**FONT)
    caption = (
        "Mean loss of the tokens at each position, with its standard error over stretches of text; dashed: the "
        "training length, where the curve reaches it."
    )
    return Picture("nll_by_position", "Loss by position", caption, figure)


def score_table(cells: Sequence[Cell]) -> str:
    """HTML of `score_rows`."""
    head, *rows = (
        "".join(f"<{kind}>{html.escape(entry)}</{kind}>" for entry in row)
        for kind, row in zip(chain(["th"], repeat("td")), score_rows(cells), strict=False)
    )
    return '<table class="scores">' + "\n".join(f"<tr>{row}</tr>" for row in (head, *rows)) + "</table>"

"""The page of an evaluation: tables, accuracy by length and depth, and loss by position, models side by side."""

import base64
import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from hf_hybrid.conversion.files import write_atomically
from hf_hybrid.eval.results import Cell, by_depth
from hf_hybrid.eval.runner import Curve

# Okabe and Ito's colours: told apart by colour-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
FONT = {"fontsize": 9}


@dataclass(frozen=True)
class Picture:
    stem: str
    title: str
    caption: str
    figure: Figure


def write_page(
    folder: str | Path, cells: Sequence[Cell], curves: Sequence[Curve], *, facts: dict[str, str]
) -> list[Path]:
    """Writes index.html, which needs no other file, and each picture as PNG and SVG. Returns what it wrote."""
    folder, written, sections = Path(folder), [], []
    for picture in pictures(cells, curves):
        for suffix in ("png", "svg"):
            image = render(picture.figure, suffix)
            written.append(folder / f"{picture.stem}.{suffix}")
            write_atomically(written[-1], image)
        source = base64.b64encode(image).decode()
        sections.append(
            f"<h2>{html.escape(picture.title)}</h2>\n<figure><img src='data:image/svg+xml;base64,{source}' "
            f"alt='{html.escape(picture.title, quote=True)}'><figcaption>{html.escape(picture.caption)} "
            f"<a href='{picture.stem}.png'>PNG</a> <a href='{picture.stem}.svg'>SVG</a></figcaption></figure>"
        )
    page = folder / "index.html"
    write_atomically(page, html_page(cells, sections, facts).encode())
    return [page, *written]


def render(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    # Without a date and with fixed ids the same results give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "hf_hybrid"}):
        figure.savefig(buffer, format=suffix, dpi=160, metadata={"Date": None} if suffix == "svg" else None)
    return buffer.getvalue()


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


def models_of(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.model for cell in cells))


def score_by_length(by_task: dict[str, list[Cell]]) -> Picture:
    """A small panel per task: score over length, with standard errors, a line per model."""
    columns = min(4, len(by_task))
    rows = -(-len(by_task) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.1 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    models = models_of([cell for own in by_task.values() for cell in own])
    for axes, (task, own) in zip(panels.flat, by_task.items(), strict=False):
        lengths = sorted({cell.length for cell in own})
        for color, model in zip(colors(), models, strict=False):
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
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(by_task) :]:
        axes.set_visible(False)
    figure.supxlabel("length (tokens)", **FONT)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False, **FONT)
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
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for color, curve in zip(colors(), curves, strict=False):
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
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, **FONT)
    caption = (
        "Mean loss of the tokens at each position, with its standard error over stretches of text; dashed: the "
        "training length, where the curve reaches it."
    )
    return Picture("nll_by_position", "Loss by position", caption, figure)


def colors() -> Iterator[str]:
    while True:
        yield from COLORS


def html_page(cells: Sequence[Cell], sections: Sequence[str], facts: dict[str, str]) -> str:
    rows = "\n".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in facts.items()
    )
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Evaluation</title>
<style>{CSS}</style>
</head>
<body>
<h1>{html.escape(", ".join(models_of(cells)))}</h1>
<table class="facts">
{rows}
</table>
<h2>Scores</h2>
{score_table(cells)}
{body}
</body>
</html>
"""


def score_table(cells: Sequence[Cell]) -> str:
    """Tasks and lengths in rows, models in columns."""
    models = models_of(cells)
    found = {(cell.task, cell.length, metric, cell.model): cell for cell in cells for metric in cell.scores}
    head = "".join(f"<th>{html.escape(model)}</th>" for model in models)
    rows = []
    for task, length, metric in dict.fromkeys(key[:3] for key in found):
        entries = []
        for model in models:
            cell = found.get((task, length, metric, model))
            error = "" if cell is None or metric not in cell.stderr else f" ± {cell.stderr[metric]:.3f}"
            entries.append("<td></td>" if cell is None else f"<td>{cell.scores[metric]:.3f}{error}</td>")
        at = "" if length is None else f"{length:,}"
        name = task if metric == "score" else f"{task}, {metric}"
        rows.append(f"<tr><td>{html.escape(name)}</td><td>{at}</td>{''.join(entries)}</tr>")
    return f'<table class="scores"><tr><th>task</th><th>tokens</th>{head}</tr>\n' + "\n".join(rows) + "</table>"


CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 900px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
th { text-align: left; padding: 0.15rem 1.2rem 0.15rem 0; vertical-align: top; }
td { padding: 0.1rem 1.2rem 0.1rem 0; overflow-wrap: anywhere; }
.scores td:nth-child(n+2), .scores th:nth-child(n+2) { text-align: right; font-variant-numeric: tabular-nums; }
.scores tr:nth-child(even) { background: #f5f5f5; }
figure { margin: 0; }
img { max-width: 100%; height: auto; }
figcaption { font-size: 0.9rem; color: #444; }
"""

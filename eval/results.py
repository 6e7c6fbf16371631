"""What an evaluation keeps: one JSON file per model, task and length, and the summary of all of them.

A file appears when its length is done, and says which documents it is about. A later run takes it over when model,
documents and precision are the same, and refuses to mix it with others when they are not.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_hybrid.conversion.files import write_json

VERSION = 1


class ResultsError(ValueError):
    """Results on disk cannot be used; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Cell:
    """Scores of one model in one task at one length.

    Attributes:
        model: as it was named. task, length: of the documents; length None for a task that has no lengths.
        scores: metric name to mean; tasks with lengths have the one metric "score".
        stderr: metric name to standard error of the mean; without those that have none (a single document).
        samples: one entry per document: index, depth (0 to 1 or None), score, answer (text, or None).
        run: what must be equal for the cell to be the same again: model fingerprint, documents, dtype, task version.
        seconds: that the documents took.
    """

    model: str
    task: str
    length: int | None
    scores: dict[str, float]
    stderr: dict[str, float]
    samples: list[dict[str, Any]]
    run: dict[str, Any]
    seconds: float

    @property
    def label(self) -> str:
        """Task and length, for people."""
        return self.task if self.length is None else f"{self.task} at {self.length:,} tokens"


def digest(content: Any) -> str:
    """sha256 of anything that JSON holds, shortened to 16 digits; values that it does not hold count as their text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Store:
    """The folder of an evaluation."""

    def __init__(self, folder: str | Path, *, overwrite: bool = False):
        self.folder, self.overwrite = Path(folder), overwrite

    def model_folder(self, model: str) -> Path:
        """Where the cells of one model lie."""
        return self.folder / re.sub(r"[^\w.-]+", "--", model).strip("-")

    def path(self, model: str, task: str, length: int | None) -> Path:
        """The file of one cell."""
        return self.model_folder(model) / task / f"{'all' if length is None else length}.json"

    def load(self, model: str, task: str, length: int | None, run: dict[str, Any]) -> Cell | None:
        """The cell, if it is there and of the same run.

        Raises:
            ResultsError: it is there and of another run (unless it is to be overwritten), or cannot be read.
        """
        path = self.path(model, task, length)
        if not path.is_file():
            return None
        cell = read_cell(path)
        different = [name for name in run if cell.run.get(name) != run[name]]
        if not different:
            return cell
        if self.overwrite:
            return None
        values = ", ".join(f"{name} {cell.run.get(name)!r} there, {run[name]!r} here" for name in different)
        raise ResultsError(
            f"{path} holds {cell.label} of another run ({values}): choose another folder, or --overwrite"
        )

    def save(self, cell: Cell) -> None:
        """Writes one cell, in one piece."""
        write_json(self.path(cell.model, cell.task, cell.length), {"version": VERSION, **asdict(cell)})


def read_cell(path: str | Path) -> Cell:
    """Raises `ResultsError` if the file is not a cell."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        version = content.pop("version")
        if version != VERSION:
            raise ResultsError(f"{path} has version {version}; this program reads {VERSION}")
        return Cell(**content)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} is not a result of an evaluation: {error!r}; remove it to run it again") from error


def by_depth(cells: Iterable[Cell]) -> dict[int, dict[float, float]]:
    """Mean score by length and depth of one model in one task; lengths without depths are left out."""
    table: dict[int, dict[float, list[float]]] = {}
    for cell in cells:
        for sample in cell.samples:
            if sample["depth"] is not None:
                table.setdefault(cell.length, {}).setdefault(sample["depth"], []).append(sample["score"])
    return {
        length: {depth: sum(scores) / len(scores) for depth, scores in sorted(row.items())}
        for length, row in sorted(table.items())
    }


def summary(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """One row per model, task, length and metric: mean, standard error (None where there is none), documents."""
    return [
        {
            "model": cell.model,
            "task": cell.task,
            "length": cell.length,
            "metric": metric,
            "mean": value,
            "stderr": cell.stderr.get(metric),
            "documents": len(cell.samples),
        }
        for cell in cells
        for metric, value in cell.scores.items()
    ]


def models_of(cells: Iterable[Cell]) -> list[str]:
    """The models' names, in the order of the cells."""
    return list(dict.fromkeys(cell.model for cell in cells))


def score_rows(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """The table of scores: a heading, then a row per task, length and metric, with a column per model."""
    models = models_of(cells)
    found = {(cell.task, cell.length, metric, cell.model): cell for cell in cells for metric in cell.scores}
    yield ["task", "tokens", *models]
    for task, length, metric in dict.fromkeys(key[:3] for key in found):
        row = [task if metric == "score" else f"{task}, {metric}", "" if length is None else f"{length:,}"]
        for model in models:
            cell = found.get((task, length, metric, model))
            error = "" if cell is None or metric not in cell.stderr else f" ± {cell.stderr[metric]:.3f}"
            row.append("" if cell is None else f"{cell.scores[metric]:.3f}{error}")
        yield row

"""Progress bars of commands that go through a model layer by layer."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def layer_progress(name: str, layers: int) -> Iterator:
    """A bar over `layers`; yields a callback that takes the layer and its error before and after."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=layers)

        def advance(layer: int, before: float, after: float) -> None:
            description = f"{name}: layer {layer}, missed {before:.3f} -> {after:.3f}"
            progress.update(task, advance=1, description=description)

        yield advance

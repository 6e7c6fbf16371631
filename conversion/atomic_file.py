"""Files that appear under their name only when they are complete."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A binary file, written beside `path` and renamed into its place when the block ends without an error."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Write `data` to `path`, whose folder is made if absent; a reader never sees half of it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(data)


def write_json(path: str | os.PathLike, content: object) -> None:
    """Write `content` to `path` as indented JSON, atomically."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())

"""Files and folders: places that are free, contents that appear only when complete, JSON that names its file."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

JSON_KINDS = {dict: "object", list: "array"}


def require_place(path: str | os.PathLike, *, overwrite: bool = False, remedy: str = "remove it") -> Path:
    """Checks, before the work, that `path` can be written after it.

    Args:
        overwrite: a file that is there may be replaced.
        remedy: what else the user may do about a path that is there.

    Raises:
        FileExistsError: something is there.
        NotADirectoryError: a part of the path is a file.
        PermissionError: the nearest folder that exists may not be written to.
    """
    path = Path(path)
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(f"{path} exists and is not overwritten: choose another place, or {remedy}")
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {above} is a file; choose another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: no permission in {above}; choose another place")
    return path


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


@contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A new folder, filled in a hidden one beside `path` and renamed when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as hidden:
        folder = Path(hidden) / path.name
        folder.mkdir()
        yield folder
        folder.rename(path)


def write_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Write `data` to `path`, whose folder is made if absent; a reader never sees half of it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(data)


def write_json(path: str | os.PathLike, content: object) -> None:
    """Write `content` to `path` as indented JSON, atomically."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: str | os.PathLike, kind: type = dict, error: type[ValueError] = ValueError) -> Any:
    """The content of a JSON file, an object (`dict`) or an array (`list`). Raises `error`, naming the file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as cause:
        raise error(f"{path} is not JSON: {cause}") from cause
    if not isinstance(content, kind):
        raise error(f"{path} must hold a JSON {JSON_KINDS[kind]}, not {type(content).__name__}")
    return content

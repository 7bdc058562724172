"""Files that are whole or not there, and JSON that is what it should be."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codmd.errors import UserError


def write_whole(path: Path, content: bytes) -> None:
    """The whole file or no file: written aside, synced, renamed."""
    with replacing(path) as aside:
        aside.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` once all went well and is gone otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        yield aside
        with aside.open("rb") as handle:
            os.fsync(handle.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; whatever is wrong with it is said in one line."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; copy the model again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); copy the model again") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object, got {json.dumps(content)[:60]}")
    return content

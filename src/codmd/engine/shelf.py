"""The checkpoints in a run's folder: which there are, whether each is whole, and which of them stay.

Whole is what is as its manifest says, with the size and SHA-256 of every file. `engine.checkpoint` says what is in one.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codmd.errors import UserError
from codmd.files import replacing, sync

MANIFEST = "manifest.json"


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def committed(run: Path) -> list[Path]:
    """Checkpoints that were renamed into place, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted((p for p in found if re.fullmatch(r"step-\d+", p.name)), key=lambda p: int(p.name[5:]))


def seal(folder: Path, files: Mapping[str, Any]) -> None:
    """Writes the manifest, of the fingerprints of all files."""
    (folder / MANIFEST).write_text(as_json({"files": files, "sha256": _digest(files)}), encoding="utf-8")


def damage(folder: Path) -> str | None:
    """What is wrong with a committed checkpoint; None when every file is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["sha256"] != _digest(manifest["files"]):
            return f"{MANIFEST} is not as it was written"
        for name, written in manifest["files"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if fingerprint(folder / name) != written:
                return f"{name} is not as it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({' '.join(str(error).split())})"
    return None


def point(link: Path, target: Path) -> None:
    """Moves a link in one step, so that it always leads somewhere; relative, so that a run can be moved."""
    aside = link.with_name(f".{link.name}.writing")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target.relative_to(link.parent))
    aside.replace(link)
    sync(link.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """The whole file or the one before it."""
    with replacing(path) as aside:
        aside.write_text(as_json(content), encoding="utf-8")
    sync(path.parent)


def as_json(content: Mapping[str, Any]) -> str:
    # No line end after the last brace: a file that lost its last byte is no JSON any more.
    return json.dumps(content, indent=2, ensure_ascii=False)


def _digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as handle:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def newest_whole(run: Path, warn: Any = print) -> Path | None:
    """The newest checkpoint that is as it was written. A damaged one is named and set aside.

    None when there is none at all. Where only damaged ones are left, a new start would lose the run in
    silence: that is the person's to decide.
    """
    for folder in reversed(committed(run)):
        wrong = damage(folder)
        if wrong is None:
            latest = run / "latest"
            if latest.is_symlink() and not latest.exists():
                point(latest, folder)
            return folder
        aside = folder.with_name(f"damaged-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        (run / "chosen.json").unlink(missing_ok=True)  # it may name this one; the next commit writes it anew
        warn(f"warning: checkpoint {folder} is damaged ({wrong}); set aside as {aside.name}")
    if any((run / "checkpoints").glob("damaged-step-*")):
        raise UserError(f"{run}: every checkpoint is damaged; give another --out, or delete the folder to start anew")
    return None


def clear_unfinished(run: Path) -> None:
    """Deletes what a killed process was writing or deleting: it is as large as a checkpoint, and no use to anyone."""
    for aside in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(aside, ignore_errors=True)


def prune(run: Path, keep: int, spared: Path | None) -> None:
    """Deletes all but the newest `keep` checkpoints and the spared one."""
    for folder in committed(run)[:-keep]:
        if folder != spared:
            aside = folder.with_name(f".{folder.name}.deleted")  # what is half deleted is no checkpoint
            folder.rename(aside)
            shutil.rmtree(aside)

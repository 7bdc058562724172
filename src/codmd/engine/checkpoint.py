"""Checkpoints that are whole or not there. Safetensors, JSON and TOML only; nothing in them is pickled.

A run folder holds `checkpoints/step-000200/`, and `latest`, a link to the newest. Each checkpoint is a
student that `codmd sample` loads, and all that the run needs to go on as if it had never stopped::

    student/                  the transformer in the diffusers layout, averaged where there is an EMA
    sampling.json             its step list, and the base pipeline that it goes with
    student_raw.safetensors   the weights that learn, where they are not those in student/
    fake.safetensors          the fake network
    *_optimizer.safetensors   AdamW's moments and counts
    state.json, recipe.toml   counters; the resolved recipe
    manifest.json             size and SHA-256 of every file above

It is written beside its place, synced, and renamed into it: a crash leaves the old checkpoints or one more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from codmd.engine.learner import Learner
from codmd.engine.loop import Trainer
from codmd.errors import UserError
from codmd.files import replacing, sync
from codmd.networks import WanNetwork
from codmd.recipe import to_toml

FORMAT = 1
MANIFEST = "manifest.json"


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def committed(run: Path) -> list[Path]:
    """Checkpoints that were renamed into place, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted((p for p in found if re.fullmatch(r"step-\d+", p.name)), key=lambda p: int(p.name[5:]))


# ---- the commit ----------------------------------------------------------------------------------


@contextlib.contextmanager
def commit(folder: Path) -> Iterator[Path]:
    """A folder to write to: it becomes `folder` once all of it is on disk, and is gone otherwise."""
    aside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        files = {name: _fingerprint(aside / name) for name in _files(aside)}
        _write_json(aside / MANIFEST, {"files": files, "sha256": _digest(files)})
        for path in (*aside.rglob("*"), aside):
            sync(path)
        aside.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a committed checkpoint; None when every file is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["sha256"] != _digest(manifest["files"]):
            return f"{MANIFEST} is not as it was written"
        for name, fingerprint in manifest["files"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _fingerprint(folder / name) != fingerprint:
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
        _write_json(aside, content)
    sync(path.parent)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    # No line end after the last brace: a file that lost its last byte is no JSON any more.
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as handle:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


# ---- what is in it -------------------------------------------------------------------------------


def save(run: Path, trainer: Trainer, sampling: Mapping[str, Any], init: str | None) -> Path:
    """Commits the trainer's state, unless this step's is there already, and moves `latest` to it."""
    folder = folder_of(run, trainer.step)
    if not folder.exists():
        with commit(folder) as aside:
            _write(aside, trainer, sampling, init)
    point(run / "latest", folder)
    return folder


def _write(folder: Path, trainer: Trainer, sampling: Mapping[str, Any], init: str | None) -> None:
    transformer = trainer.roles.student.transformer
    with trainer.ema.applied() if trainer.ema is not None else contextlib.nullcontext():
        transformer.save_pretrained(folder / "student")
    if trainer.ema is not None:
        save_file(_tensors(transformer.state_dict()), folder / "student_raw.safetensors")
    save_file(_tensors(trainer.roles.fake.transformer.state_dict()), folder / "fake.safetensors")
    for name, learner in _learners(trainer).items():
        save_file(_moments(learner), folder / f"{name}_optimizer.safetensors")
    counters = {"iteration": trainer.step, "student_updates": trainer.student.updates}
    _write_json(folder / "sampling.json", {**sampling, **counters, "ema": trainer.ema is not None})
    state = {
        "format": FORMAT,
        "step": trainer.step,
        "student_updates": trainer.student.updates,
        "fake_updates": trainer.fake.updates,
        "refused_in_a_row": trainer.guard.in_a_row,
        "init": init,
    }
    _write_json(folder / "state.json", state)
    (folder / "recipe.toml").write_text(to_toml(trainer.recipe), encoding="utf-8")


def load(folder: Path, trainer: Trainer) -> None:
    """Puts the trainer where it was when the checkpoint was written."""
    state = read_state(folder)
    shown = _read_weights(folder / "student")
    raw = folder / "student_raw.safetensors"
    trainer.roles.student.transformer.load_state_dict(load_file(raw) if raw.exists() else shown)
    trainer.roles.fake.transformer.load_state_dict(load_file(folder / "fake.safetensors"))
    if trainer.ema is not None:
        for name, average in trainer.ema.average.items():
            average.copy_(shown[name.removeprefix("transformer.")])
    for name, learner in _learners(trainer).items():
        _restore_moments(learner, load_file(folder / f"{name}_optimizer.safetensors"))
        learner.updates = state[f"{name}_updates"]
    trainer.step, trainer.guard.in_a_row = state["step"], state["refused_in_a_row"]


def read_state(folder: Path) -> dict[str, Any]:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise UserError(f"{folder}: checkpoint format {state['format']}, this version reads {FORMAT}")
    return state


def load_student(network: WanNetwork, weights: Mapping[str, Tensor], where: str) -> None:
    """Another student's weights; refused in one line where they don't fit."""
    try:
        network.transformer.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{where}: its weights do not fit the recipe's base: {reason}") from None


def _learners(trainer: Trainer) -> dict[str, Learner]:
    return {"student": trainer.student, "fake": trainer.fake}


def _tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """A network in the diffusers layout, in one file or in shards."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def _moments(learner: Learner) -> dict[str, Tensor]:
    state = learner.optimizer.state_dict()["state"]
    return _tensors({f"{i}.{key}": torch.as_tensor(v) for i, entry in state.items() for key, v in entry.items()})


def _restore_moments(learner: Learner, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    groups = learner.optimizer.state_dict()["param_groups"]
    learner.optimizer.load_state_dict({"state": state, "param_groups": groups})


# ---- which of them -------------------------------------------------------------------------------


def newest_whole(run: Path, warn: Any = print) -> Path | None:
    """The newest checkpoint that is as it was written. A damaged one is named and set aside.

    None when there is none at all. Where only damaged ones are left, a new start would lose the run in
    silence: that is the person's to decide.
    """
    for folder in reversed(committed(run)):
        wrong = damage(folder)
        if wrong is None:
            return folder
        aside = folder.with_name(f"damaged-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        warn(f"warning: checkpoint {folder} is damaged ({wrong}); set aside as {aside.name}")
    if any((run / "checkpoints").glob("damaged-step-*")):
        raise UserError(f"{run}: every checkpoint is damaged; give another --out, or delete the folder to start anew")
    return None


def prune(run: Path, keep: int, spared: Path | None) -> None:
    """Deletes all but the newest `keep` checkpoints and the spared one."""
    for folder in committed(run)[:-keep]:
        if folder != spared:
            shutil.rmtree(folder)

"""Checkpoints: whole or not there, and a run goes on from them as if it had never stopped."""

import contextlib
import errno
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from engine_runs import numbers, runs, snapshot
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystem

from codmd.engine import checkpoint, shelf
from codmd.errors import UserError
from codmd.models import load_model
from codmd.recipe import load_recipe

MOMENTS = [(Path, name) for name in ("write_text", "mkdir", "rename", "replace", "symlink_to")]
MOMENTS += [(checkpoint, "save_file")]
SAMPLING = {"kind": "student", "steps": [1.0, 0.9375, 0.8333, 0.625]}


def save(run: Path, trainer) -> Path:
    return checkpoint.save(run, trainer, {**SAMPLING, "base": str(runs.folder)}, None)


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("cut", [1, 2, 3])  # after a student's turn, between two, before the next
def test_a_resumed_run_is_the_run_bit_for_bit(tmp_path: Path, ema: float, cut: int) -> None:
    overrides = (f"train.ema_decay={ema}", "train.warmup=3")
    whole = runs.trainer(*overrides)
    records = [numbers(whole.iterate()) for _ in range(5)]

    first = runs.trainer(*overrides)
    for _ in range(cut):
        first.iterate()
    folder = save(tmp_path, first)
    second = runs.trainer(*overrides)
    torch.rand(7)  # no global stream counts
    checkpoint.load(folder, second)
    assert [numbers(second.iterate()) for _ in range(5 - cut)] == records[cut:]
    ours, theirs = snapshot(second), snapshot(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_what_is_saved_is_what_stock_diffusers_and_sample_load(tmp_path: Path, ema: float) -> None:
    trainer = runs.trainer(f"train.ema_decay={ema}")
    for _ in range(4):
        trainer.iterate()
    folder = save(tmp_path, trainer)
    expected = trainer.roles.student.learned() if not ema else trainer.ema.average
    stock = WanTransformer3DModel.from_pretrained(folder / "student")
    sampled = load_model(tmp_path / "latest")
    for name, weight in stock.named_parameters():
        assert torch.equal(weight, expected[name])
        assert torch.equal(weight, sampled.network.transformer.get_parameter(name))
    assert (sampled.about["iteration"], sampled.about["student_updates"]) == (4, 2)
    assert load_recipe(folder / "recipe.toml") == trainer.recipe


def test_every_file_is_safetensors_json_or_toml(tmp_path: Path) -> None:
    trainer = runs.trainer("train.ema_decay=0.9")
    trainer.iterate()
    folder = save(tmp_path, trainer)
    readers = {".safetensors": load_file, ".json": lambda p: json.loads(p.read_text()), ".toml": load_recipe}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == set(readers)
    assert all(readers[path.suffix](path) for path in files)  # each reads as what it is called, and holds something


class Mortal:
    """Counts all that touches the disk, and dies at the nth: what was not synced by then is lost."""

    def __init__(self, run: Path, fatal: int, patch: pytest.MonkeyPatch) -> None:
        self.run, self.left = run, fatal
        self.synced = {path.stat().st_ino for path in run.rglob("*")}
        for owner, name in MOMENTS:
            patch.setattr(owner, name, self.counted(getattr(owner, name)))
        patch.setattr(os, "fsync", self.noted(os.fsync))
        patch.setattr(FileSystem, "create_stream", self.torn(FileSystem.create_stream))
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # the killed clean nothing up

    @property
    def dead(self) -> bool:
        return self.left <= 0

    def moment(self) -> None:
        self.left -= 1
        if not self.left:
            for path in self.run.rglob("*"):
                if path.is_file() and not path.is_symlink() and path.stat().st_ino not in self.synced:
                    os.truncate(path, path.stat().st_size // 2)
        if self.dead:
            raise SystemExit("killed")

    def counted(self, function):
        def wrapped(*args, **kwargs):
            self.moment()
            return function(*args, **kwargs)

        return wrapped

    def noted(self, fsync):
        def wrapped(handle: int) -> None:
            self.moment()
            fsync(handle)
            self.synced.add(os.fstat(handle).st_ino)

        return wrapped

    def torn(self, create_stream):
        """PyTorch's own files, in state/: before one is opened, and in the middle of each write."""

        @contextmanager
        def wrapped(*args, **kwargs):
            self.moment()
            with create_stream(*args, **kwargs) as stream:
                yield Torn(stream, self)

        return wrapped


class Torn:
    """A file to write to, in halves."""

    def __init__(self, stream, mortal: Mortal) -> None:
        self.stream, self.mortal = stream, mortal

    def write(self, data: bytes) -> None:
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.stream.write(half)
            self.stream.flush()
            self.mortal.moment()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_crash_at_any_moment_of_a_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Every write, sync and rename in turn is the last thing that happens; then the run goes on."""
    trainer = runs.trainer("train.ema_decay=0.9")
    first = save(tmp_path, trainer)
    trainer.iterate()
    second = shelf.folder_of(tmp_path, 1)

    def write() -> None:
        if not asynchronous:
            save(tmp_path, trainer)
            return
        background = checkpoint.Background(trainer.ranks)
        staged = checkpoint.stage(trainer, {**SAMPLING, "base": str(runs.folder)}, None, copy=True)
        background.write(tmp_path, staged, lambda folder: shelf.point(tmp_path / "latest", folder))
        background.wait()

    seen, reader = set(), runs.trainer("train.ema_decay=0.9")
    for fatal in range(1, 100):
        with monkeypatch.context() as patch:
            mortal = Mortal(tmp_path, fatal, patch)
            with contextlib.suppress(SystemExit):  # a thread's own death is silent
                write()
        if not mortal.dead:
            break
        newest = shelf.newest_whole(tmp_path)
        assert newest in (first, second) and shelf.damage(newest) is None
        assert (tmp_path / "latest").resolve() in (first.resolve(), newest.resolve())
        checkpoint.load(newest, reader)
        seen.add(newest)
        shelf.clear_unfinished(tmp_path)
        shutil.rmtree(second, ignore_errors=True)
        assert list((tmp_path / "checkpoints").iterdir()) == [first]
        shelf.point(tmp_path / "latest", first)
    assert fatal > 25 and seen == {first, second}
    assert (tmp_path / "latest").resolve() == second.resolve() == shelf.newest_whole(tmp_path).resolve()


def spoiled(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["flipped bit", "truncated", "missing"])
def test_damage_to_any_file_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = runs.trainer("train.ema_decay=0.9")
    first = save(tmp_path, trainer)
    trainer.iterate()
    second = save(tmp_path, trainer)
    kept = tmp_path / "kept"
    shutil.copytree(second, kept)
    for path in sorted(p.relative_to(kept) for p in kept.rglob("*") if p.is_file()):
        spoiled(second / path, how)
        assert shelf.newest_whole(tmp_path) == first
        said = capsys.readouterr().out
        assert path.name in said and "damaged-step-000001" in said
        assert (tmp_path / "latest").resolve() == first.resolve() == load_model(tmp_path).folder.resolve()
        shutil.copytree(kept, second)
        shelf.point(tmp_path / "latest", second)
        shelf.write_json(tmp_path / "chosen.json", {"checkpoint": f"checkpoints/{second.name}"})
    shutil.rmtree(second)
    spoiled(next((first / "state").glob("*.safetensors")), how)
    for _ in range(2):  # nor at a second try does the run start from zero in silence
        with pytest.raises(UserError, match="every checkpoint is damaged"):
            shelf.newest_whole(tmp_path)


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = runs.trainer()
    first = save(tmp_path, trainer)
    trainer.iterate()

    def full(*args: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(checkpoint, "save_file", full)
        save(tmp_path, trainer)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [first.name]
    assert shelf.damage(tmp_path / "latest") is None


def test_only_the_newest_and_the_spared_are_kept(tmp_path: Path) -> None:
    trainer = runs.trainer()
    for _ in range(4):
        save(tmp_path, trainer)
        trainer.iterate()
    shelf.prune(tmp_path, 2, shelf.folder_of(tmp_path, 0))
    assert [p.name for p in shelf.committed(tmp_path)] == ["step-000000", "step-000002", "step-000003"]


def test_a_checkpoint_that_is_half_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = runs.trainer()
    for _ in range(3):
        save(tmp_path, trainer)
        trainer.iterate()

    def dies(folder: Path, **named: object) -> None:
        next(folder.rglob("*.safetensors")).unlink()
        raise SystemExit("killed")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", dies)
        shelf.prune(tmp_path, 1, None)
    assert all(shelf.damage(folder) is None for folder in shelf.committed(tmp_path))
    shelf.prune(tmp_path, 1, None)
    shelf.clear_unfinished(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]

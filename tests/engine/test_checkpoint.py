"""Checkpoints: whole or not there, and a run goes on from them as if it had never stopped."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from engine_runs import numbers, runs, snapshot
from safetensors.torch import load_file

from codmd.engine import checkpoint
from codmd.errors import UserError
from codmd.models import load_model
from codmd.recipe import load_recipe

MOMENTS = [(checkpoint, "save_file"), (os, "fsync")]
MOMENTS += [(Path, name) for name in ("write_text", "mkdir", "rename", "replace", "symlink_to")]
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


def test_a_crash_at_any_moment_of_a_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write, sync and rename in turn is the last thing that happens; then the run goes on."""
    trainer = runs.trainer()
    first = save(tmp_path, trainer)
    trainer.iterate()
    calls = 0

    def dies_at(fatal: int, function):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fatal:
                raise SystemExit("killed")
            return function(*args, **kwargs)

        return wrapped

    fatal = 0
    while True:
        fatal, calls = fatal + 1, 0
        with monkeypatch.context() as patch:
            for module, name in MOMENTS:
                patch.setattr(module, name, dies_at(fatal, getattr(module, name)))
            patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # the killed clean nothing up
            try:
                save(tmp_path, trainer)
            except SystemExit:
                pass
            else:
                break
        newest = checkpoint.newest_whole(tmp_path)
        assert newest in (first, checkpoint.folder_of(tmp_path, 1))
        assert checkpoint.damage(newest) is None
        assert (tmp_path / "latest").resolve() in (first.resolve(), newest.resolve())
        assert checkpoint.damage(tmp_path / "latest") is None
        shutil.rmtree(checkpoint.folder_of(tmp_path, 1), ignore_errors=True)
        shutil.rmtree(checkpoint.folder_of(tmp_path, 1).with_name(".step-000001.writing"), ignore_errors=True)
        checkpoint.point(tmp_path / "latest", first)
    assert fatal > 20
    assert (tmp_path / "latest").resolve() == checkpoint.folder_of(tmp_path, 1).resolve()


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
        assert checkpoint.newest_whole(tmp_path) == first
        said = capsys.readouterr().out
        assert path.name in said and "damaged-step-000001" in said
        shutil.copytree(kept, second)
    shutil.rmtree(second)
    spoiled(next((first / "state").glob("*.safetensors")), how)
    for _ in range(2):  # nor at a second try does the run start from zero in silence
        with pytest.raises(UserError, match="every checkpoint is damaged"):
            checkpoint.newest_whole(tmp_path)


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
    assert checkpoint.damage(tmp_path / "latest") is None


def test_only_the_newest_and_the_spared_are_kept(tmp_path: Path) -> None:
    trainer = runs.trainer()
    for _ in range(4):
        save(tmp_path, trainer)
        trainer.iterate()
    checkpoint.prune(tmp_path, 2, checkpoint.folder_of(tmp_path, 0))
    assert [p.name for p in checkpoint.committed(tmp_path)] == ["step-000000", "step-000002", "step-000003"]

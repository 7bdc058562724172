"""A run: what its folder holds, how it is stopped, how it goes on, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import numbers, runs

from codmd.cli import main
from codmd.engine import distill as engine
from codmd.engine import shelf, tracking
from codmd.engine.distill import distill
from codmd.engine.tracking import read_json_lines
from codmd.errors import NON_FINITE, UserError
from codmd.models import load_model
from codmd.recipe import load_recipe, to_toml
from codmd.sampling import generate_latents

CURVE = ("validation.every=2", "validation.prompts=1")


def records(out: Path) -> list[dict[str, Any]]:
    lines = read_json_lines(out / "metrics.jsonl")
    return [numbers(line) for line in lines]


def student(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(out).network.named_parameters())


def assert_same_run(one: Path, other: Path) -> None:
    assert records(one) == records(other)
    assert read_json_lines(one / "learning_curve.jsonl") == read_json_lines(other / "learning_curve.jsonl")
    ours, theirs = student(one), student(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_folder(tmp_path: Path) -> None:
    recipe = runs.recipe(*CURVE, "train.checkpoint_every=2", "train.keep=2")
    heard: list[int] = []
    result = distill(recipe, tmp_path / "run", score=runs.score, on_step=lambda r: heard.append(r["step"]))
    out = result.out
    assert heard == [line["step"] for line in records(out)] == list(range(6))
    curve = read_json_lines(out / "learning_curve.jsonl")
    assert [(p["step"], p["student_updates"]) for p in curve] == [(0, 0), (2, 1), (4, 2), (6, 2)]
    assert [p.name for p in shelf.committed(out)] == ["step-000004", "step-000006"]
    assert (out / "latest").resolve() == result.checkpoint.resolve()
    assert load_recipe(out / "recipe.toml") == recipe
    assert (result.iterations, result.student_updates, result.exit_code) == (6, 2, 0)
    model = load_model(out)
    assert model.kind == "student" and model.times == recipe.rollout.steps
    latents = generate_latents(model, ["a circle"], [3])
    assert latents.isfinite().all()
    kinds = {p.suffix for p in out.rglob("*") if p.is_file()}
    assert kinds == {".safetensors", ".json", ".jsonl", ".toml"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_at_a_checkpoint_and_the_same_command_goes_on(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = runs.recipe(*CURVE, "train.ema_decay=0.9")
    distill(recipe, tmp_path / "whole", score=runs.score)

    def interrupt(record: dict[str, Any]) -> None:
        if record["step"] == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    stopped = distill(recipe, tmp_path / "cut", score=runs.score, on_step=interrupt)
    assert stopped.exit_code == 128 + number and stopped.iterations == 3
    assert signal.getsignal(number) is before
    assert shelf.damage(tmp_path / "cut" / "checkpoints" / "step-000003") is None
    assert distill(recipe, tmp_path / "cut", score=runs.score).exit_code == 0
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    # and once more: it is done, and stays as it is
    distill(recipe, tmp_path / "cut", score=runs.score)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_killed_in_the_middle_a_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    recipe = runs.recipe("train.checkpoint_every=2")
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    program = """
import os, signal, sys
from codmd.engine.distill import distill
from codmd.recipe import load_recipe
kill = lambda record: record["step"] == 4 and os.kill(os.getpid(), signal.SIGKILL)
distill(load_recipe(sys.argv[1]), sys.argv[2], on_step=kill)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "recipe.toml"), str(tmp_path / "cut")]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert len(records(tmp_path / "cut")) == 5 and (tmp_path / "cut/latest").resolve().name == "step-000004"
    distill(recipe, tmp_path / "cut")
    distill(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_another_recipe_is_refused_with_its_differences_unless_allowed(tmp_path: Path) -> None:
    distill(runs.recipe("train.iterations=1"), tmp_path / "run")
    changed = runs.recipe("train.iterations=2", "objective.tau=0.2")
    with pytest.raises(UserError, match="--allow-changes") as error:
        distill(changed, tmp_path / "run")
    said = str(error.value)
    assert "objective.tau: 0.1 -> 0.2" in said and "train.iterations: 1 -> 2" in said and "\n" not in said
    with pytest.raises(UserError, match="--init"):
        distill(runs.recipe("train.iterations=1"), tmp_path / "run", init="elsewhere")
    assert distill(changed, tmp_path / "run", allow_changes=True).iterations == 2
    assert load_recipe(tmp_path / "run" / "recipe.toml") == changed


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not the folder of a run"):
        distill(runs.recipe(), tmp_path)
    with pytest.raises(UserError, match="a file"):
        distill(runs.recipe(), tmp_path / "notes.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_it_does_not_go_on_with_another_teacher_of_the_same_name(tmp_path: Path) -> None:
    recipe = runs.recipe("train.iterations=1")
    assert distill(recipe, tmp_path / "run", base=runs.base()).teacher == {}
    other = runs.base()
    other.__dict__["sha256"] = "0" * 64  # what a teacher with other weights says of itself
    with pytest.raises(UserError, match=r"the teacher's weights have changed.*--allow-changes"):
        distill(recipe, tmp_path / "run", base=other)
    assert distill(recipe, tmp_path / "run", base=other, allow_changes=True).iterations == 1


def test_it_does_not_go_on_with_other_prompts_in_the_same_file(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a circle\na square\n")
    recipe = runs.recipe("train.iterations=1", f"data.prompts={prompts}")
    distill(recipe, tmp_path / "run")
    prompts.write_text("a circle\na triangle\n")
    with pytest.raises(UserError, match=r"the prompts have changed since"):
        distill(recipe, tmp_path / "run")
    assert distill(recipe, tmp_path / "run", allow_changes=True).iterations == 1


def test_a_recipe_that_a_person_wrote_is_not_written_over(tmp_path: Path) -> None:
    recipe = runs.recipe("train.iterations=1")
    written = "# mine\n" + to_toml(recipe)
    (tmp_path / "recipe.toml").write_text(written)
    with pytest.raises(UserError, match="not written by a run"):
        distill(recipe, tmp_path)
    assert (tmp_path / "recipe.toml").read_text() == written


def test_a_run_that_died_before_its_first_checkpoint_begins_its_curve_anew(tmp_path: Path) -> None:
    recipe = runs.recipe(*CURVE, "train.iterations=2")

    def die(record: dict[str, Any]) -> None:
        raise RuntimeError("a crash")

    with pytest.raises(RuntimeError, match="a crash"):
        distill(recipe, tmp_path / "run", score=runs.score, on_step=die)
    assert not shelf.committed(tmp_path / "run")
    recipe = runs.recipe(*CURVE, "train.iterations=2", "train.batch=2")  # it may have been too large
    distill(recipe, tmp_path / "run", score=runs.score)
    assert load_recipe(tmp_path / "run" / "recipe.toml") == recipe
    curve = read_json_lines(tmp_path / "run" / "learning_curve.jsonl")
    assert [point["step"] for point in curve] == [0, 2]


def test_nothing_is_written_for_a_run_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    for overrides, says in (
        (["video.height=33"], "height"),
        (["data.prompts=/nowhere.txt"], "nowhere"),
        (["model.base=/nowhere"], "nowhere"),
        (["train.micro_batch=2"], "micro_batch"),
        (CURVE, r"data\.prompts"),
        (["validation.every=2"], "validation would keep 16"),
        (['train.track=["wandb"]'], r"train\.track: wandb is not installed: pip install"),
    ):
        with pytest.raises(UserError, match=says):
            distill(runs.recipe(*overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_init_starts_the_student_from_another_and_the_fake_network_from_the_teacher(tmp_path: Path) -> None:
    recipe = runs.recipe("train.iterations=1")
    distill(recipe, tmp_path / "first")
    trainer, _ = engine.assemble(recipe, runs.base(), init=str(tmp_path / "first"))
    first = student(tmp_path / "first")
    assert all(torch.equal(p, first[name]) for name, p in trainer.roles.student.named_parameters())
    teacher = dict(trainer.roles.teacher.network.named_parameters())
    assert all(torch.equal(p, teacher[name]) for name, p in trainer.roles.fake.named_parameters())
    assert any(not torch.equal(first[name], teacher[name]) for name in first)


def test_the_best_checkpoint_is_chosen_by_the_rule_and_outlives_the_newest(tmp_path: Path) -> None:
    recipe = runs.recipe(*CURVE, "train.keep=1", "train.choose=best:total")
    for best, curve in (("step-000002", [0.1, 0.9, 0.3, 0.2]), ("step-000000", [0.9, 0.9, 0.1, 0.2])):
        values = iter([0.5, *curve])  # the teacher's first

        def score(videos: Any, captions: list[str], values: Any = values) -> dict[str, float]:
            return {"total": next(values), "other": float("nan")}

        result = distill(recipe, tmp_path / best, score=score)
        assert [p.name for p in shelf.committed(tmp_path / best)] == [best, "step-000006"]
        assert result.checkpoint.name == best == load_model(tmp_path / best).folder.name
        assert (tmp_path / best / "latest").resolve().name == "step-000006"
    points = [{"saturation": value, "relation_gap": value} for value in (0.7, 1.1, 1.6)]
    assert engine.best(points, "saturation") == points[1]  # 1 is right, more is too much
    assert engine.best(points, "relation_gap") == points[0]
    misspelt = runs.recipe(*CURVE, "train.choose=best:totl")
    with pytest.raises(UserError, match=r"train\.choose.*total"):
        distill(misspelt, tmp_path / "other", score=lambda videos, captions: {"total": 1.0})


def test_a_tracker_hears_of_the_curve_and_again_of_the_point_at_which_it_resumes(tmp_path: Path) -> None:
    heard: list[tuple[int, Mapping[str, Any]]] = []

    class Listener:
        def log(self, step: int, values: Mapping[str, Any]) -> None:
            heard.append((step, values))

        def close(self) -> None: ...

    recipe = runs.recipe(*CURVE)
    distill(recipe, tmp_path / "run", score=runs.score, trackers=[Listener()])
    curve = [(step, values) for step, values in heard if "curve/dynamic_degree" in values]
    assert [step for step, _ in curve] == [0, 2, 4, 6]
    distill(recipe, tmp_path / "run", score=runs.score, trackers=[Listener()])  # it is done
    step, values = heard[-1]
    assert step == 6 and values["curve/dynamic_degree"] == curve[-1][1]["curve/dynamic_degree"]


def test_it_warns_when_motion_falls_or_saturation_rises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher, fine, bad = (0.8, 1.0), (0.7, 1.1), (0.6, 1.3)
    values = iter([teacher, fine, fine, bad, fine])

    def score(videos: Any, captions: list[str]) -> dict[str, float]:
        return dict(zip(("dynamic_degree", "saturation"), next(values), strict=True))

    distill(runs.recipe(*CURVE), tmp_path / "run", score=score)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(said) == 2 and all("step 4" in line for line in said)
    assert "motion" in said[0] and "saturation 1.3" in said[1]


def test_the_teachers_figures_are_measured_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def score(videos: Any, captions: list[str]) -> dict[str, float]:
        calls.append(len(videos))
        return {"total": 1.0}

    for name in ("one", "two"):
        shared = tmp_path / "reference"
        result = distill(runs.recipe(*CURVE), tmp_path / name, score=score, reference_cache=shared)
        assert result.teacher == {"total": 1.0}
    assert len(calls) == 1 + 4 + 4
    (kept,) = (tmp_path / "reference").iterdir()
    assert json.loads(kept.read_text())["scores"] == {"total": 1.0}


def test_exit_codes_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(runs.recipe("train.iterations=8", "train.student_lr=1e30")))
    assert main(["distill", str(path), "--out", str(tmp_path / "run")]) == NON_FINITE
    refused = [line for line in read_json_lines(tmp_path / "run/metrics.jsonl") if line["refused"]]
    assert refused and "samples" in refused[0]["refused"] and "nan" in json.dumps(refused[0])

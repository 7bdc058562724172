"""The runs: one after the other, by as many processes as there are to do them.

A folder holds `runs/NAME` (a distillation, as `codmd distill` leaves it), `scores/` (the benchmark's scores of
teacher and checkpoints), `results/NAME.json` (a run that is done) and `locks/`. Whoever wants to work takes the
first run that is neither done nor locked; a lock dies with its process, so that any number of processes, started
together or apart, share the work, and what was interrupted is gone on with.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from codmd.engine import shelf
from codmd.engine.assembly import assemble
from codmd.engine.distill import distill
from codmd.engine.signals import stop_on_signals
from codmd.engine.tracking import read_json_lines
from codmd.errors import NonFiniteError, UserError, exit_code, explain
from codmd.evaluation.run import evaluation_clips, score_model, scores_key
from codmd.files import write_whole
from codmd.models import Model, as_student, load_model, with_shift
from codmd.recipe import Recipe, diff, parse_recipe, to_toml
from codmd.reproduce.plan import Plan, Run
from codmd.sampling import Settings


def prepare(plan: Plan, out: Path) -> None:
    """What all runs share: the teacher's scores, on the evaluation's clips and on the learning curve's, and those of
    its own weights sampled as a student: what all students are before they learn."""
    recipe = plan.runs[0].recipe
    for run in (*plan.runs, *replace(plan, only=(), seeds=None).runs):
        result(plan, out, run)  # refuses a folder with other runs before anything is computed
    base = with_shift(load_model(recipe.model.base), recipe.model.teacher_shift)
    facts = out / "teacher.json"
    if facts.is_file() and json.loads(facts.read_text(encoding="utf-8")).get("sha256") != base.sha256:
        raise UserError(f"{facts}: those runs had another teacher (its weights were others); give another --out")
    captions, seeds = evaluation_clips(plan.prompts, plan.clips)
    settings = teacher_settings(base, recipe)
    untaught = as_student(base, recipe.rollout.steps)
    said: dict[str, Any] = {"sha256": base.sha256, "asked": asked(plan)}
    for name, model, how in (
        ("scores", base, settings),
        ("untaught", untaught, Settings.of(untaught, **vars(recipe.video))),
    ):
        score_model(model, captions, seeds, out / "scores", settings=how)
        said[name] = scores_key(model, how, captions, seeds)
    write_json(facts, said)
    if recipe.validation.every:
        validation = assemble(recipe, base)[1]
        assert validation is not None
        validation.teacher(out / "reference")


def work(plan: Plan, out: Path, deadline: float | None) -> int:
    """Does what is left until `deadline` (of `time.monotonic`); an exit code, 0 when nothing is wrong.

    The deadline is looked at between runs.
    """
    parent = os.getppid()
    base = load_model(plan.runs[0].recipe.model.base)
    for run in plan.runs:
        if deadline is not None and time.monotonic() > deadline:
            return 0
        if os.getppid() != parent:
            return 1  # the command that started this process is gone
        with lock(out / "locks" / run.name) as mine:
            if not mine or result(plan, out, run) is not None:
                continue
            print(f"{run.name}: begun", file=sys.stderr, flush=True)
            code = one(plan, out, run, base)
        if code:
            return code
    return 0


def one(plan: Plan, out: Path, run: Run, base: Model) -> int:
    """Distils and scores one student; 0 when its result is written, else the exit code of what stopped it."""
    folder = out / "runs" / run.name
    content: dict[str, Any] = {
        "variant": run.variant, "seed": run.seed, "asked": asked(plan), "recipe": to_toml(run.recipe),
        "threads": torch.get_num_threads(), "versions": versions(),
    }  # fmt: skip
    try:
        done = distill(run.recipe, folder, base=base, reference_cache=out / "reference")
    except NonFiniteError as error:
        write_json(out / "results" / f"{run.name}.json", {**content, "failed": str(error)})
        return 0
    if done.exit_code:
        return done.exit_code
    begun = time.monotonic()
    captions, seeds = evaluation_clips(plan.prompts, plan.clips)
    scored = []
    for path in shelf.committed(folder)[-plan.checkpoints :]:
        student = load_model(path)
        score_model(student, captions, seeds, out / "scores")
        key = scores_key(student, Settings.of(student), captions, seeds)
        about = student.about
        scored.append({"step": about["iteration"], "student_updates": about["student_updates"], "scores": key})
    scoring = time.monotonic() - begun
    content |= {
        "iterations": done.iterations,
        "student_updates": done.student_updates,
        "checkpoints": scored,
        "teacher_curve": dict(done.teacher),
        "curve": read_json_lines(folder / "learning_curve.jsonl"),
        "diagnostics": diagnostics(folder / "metrics.jsonl"),
        "seconds": {"training": round(seconds_in(folder / "metrics.jsonl"), 1), "scoring": round(scoring, 1)},
    }
    write_json(out / "results" / f"{run.name}.json", content)
    for path in shelf.committed(folder)[:-1]:  # scored, and large; the last one stays
        shutil.rmtree(path)
    return 0


def result(plan: Plan, out: Path, run: Run) -> dict[str, Any] | None:
    """What is known of a run that is done; refused when it was not of this plan."""
    path = out / "results" / f"{run.name}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    changes = [str(c) for c in diff(parse_recipe(content["recipe"], str(path)), run.recipe)]
    before = content.get("asked", {})
    changes += [f"{k}: {before.get(k)} -> {v}" for k, v in asked(plan).items() if before.get(k) != v]
    if changes:
        raise UserError(f"{path}: that run was another ({'; '.join(changes)}); give another --out")
    return content


def asked(plan: Plan) -> dict[str, int]:
    """How runs are scored, which decides whether two results may stand in one table."""
    return {"prompts": plan.prompts, "clips": plan.clips, "checkpoints": plan.checkpoints}


def teacher_settings(base: Model, recipe: Recipe) -> Settings:
    config = recipe.model
    return Settings.of(
        base,
        steps=config.teacher_steps,
        guidance=config.guidance_scale_standard,
        negative_prompt=config.negative_prompt,
        **vars(recipe.video),
    )


def diagnostics(metrics: Path) -> dict[str, float]:
    """Where to look when something went wrong: means over a run's last quarter, and what was refused."""
    records = read_json_lines(metrics)
    late = records[-max(len(records) // 4, 1) :]
    names = (
        "loss/fake", "gradient/student", "gradient/fake", "residual/frame", "residual/batch", "loss/dmd",
        "loss/batch", "loss/frame",
    )  # fmt: skip
    found: dict[str, float] = {"refused": sum(bool(r.get("refused")) for r in records)}
    for name in names:
        values = [r[name] for r in late if isinstance(r.get(name), int | float)]
        if values:
            found[name] = sum(values) / len(values)
    return found


def seconds_in(metrics: Path) -> float:
    """Of a run's iterations, over all its sittings."""
    records = read_json_lines(metrics)
    return sum(value for one in records for name, value in one.items() if name.startswith("seconds/"))


def versions() -> dict[str, str]:
    import diffusers
    import transformers

    import codmd

    return {
        "codmd": codmd.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Whether nobody else holds this lock; it is held while the block runs, and no longer than its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


# ---- several processes ---------------------------------------------------------------------------


def work_together(plan: Plan, out: Path, workers: int, minutes: float | None) -> int:
    """`work` in this process, or in `workers` processes of one thread each; the first exit code that isn't 0."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    if workers == 1:
        return work(plan, out, deadline)
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes as they import torch
    spawn = multiprocessing.get_context("spawn")
    # A process of its own clock: what is left is told, not when it ends.
    processes = [spawn.Process(target=_worker, args=(plan, out, minutes)) for _ in range(workers)]
    forwarded = False
    try:
        for process in processes:
            process.start()
        with stop_on_signals() as stop:
            while any(process.is_alive() for process in processes):
                for process in processes:
                    process.join(timeout=0.2)
                    if stop.signal is not None and not forwarded and process.pid is not None:
                        _tell(processes, stop.signal)
                        forwarded = True
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    codes = [process.exitcode or 0 for process in processes]
    return next((128 - code if code < 0 else code for code in codes if code), stop.exit_code)


def _tell(processes: list[Any], number: int) -> None:
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)


def _worker(plan: Plan, out: Path, minutes: float | None) -> None:
    os.setsid()  # a Ctrl-C reaches the command, which passes it on once
    torch.set_num_threads(1)
    try:
        code = work(plan, out, None if minutes is None else time.monotonic() + 60 * minutes)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        code = exit_code(error)
    sys.exit(code)

"""A run from a recipe: put the parts together, go through the iterations, keep what must be kept.

A run folder holds `recipe.toml`, `metrics.jsonl` (a line an iteration), `learning_curve.jsonl` (a line a
validation), `checkpoints/`, `latest` and `chosen.json`. The same call on the same folder goes on from there.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codmd.console import meter
from codmd.data.prompts import EncodedPrompts, load_prompts
from codmd.engine import checkpoint
from codmd.engine.loop import Roles, Trainer
from codmd.engine.signals import stop_on_signals
from codmd.engine.tracking import JsonLines, Tracker, check_trackers, open_trackers, read_json_lines, summary
from codmd.engine.validation import Score, Validation, best, mini_score, warnings
from codmd.errors import UserError
from codmd.files import write_whole
from codmd.models import Model, load_model, with_shift
from codmd.networks import GuidedTeacher
from codmd.recipe import Recipe, diff, load_recipe, parse_recipe, to_toml
from codmd.sampling import Settings
from codmd.schema import nearest

OnStep = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a run."""

    out: Path
    checkpoint: Path
    """The checkpoint that the recipe's rule chose."""
    iterations: int
    student_updates: int
    exit_code: int
    """0 when the run is done; 130 or 143 when a signal stopped it, at a checkpoint to go on from."""
    teacher: Mapping[str, float]
    """The teacher's scores on the learning curve's clips; empty where there is no learning curve."""


def run(
    recipe: str,
    *,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    init: str | None = None,
    allow_changes: bool = False,
) -> None:
    """`codmd distill`. Exit codes: 130 after Ctrl-C, 143 after SIGTERM."""
    resolved = load_recipe(recipe, overrides)
    print(to_toml(resolved))
    out = out or Path("runs") / resolved.name
    result = distill(resolved, out, init=init, allow_changes=allow_changes)
    if result.exit_code:
        print(
            f"stopped after {result.iterations} iterations; the same command goes on from there",
            file=sys.stderr,
        )
        raise SystemExit(result.exit_code)
    print(f"{result.student_updates} student updates; the student: {result.checkpoint}")


def distill(
    recipe: Recipe,
    out: Path | str,
    *,
    init: str | None = None,
    base: Model | None = None,
    score: Score | None = None,
    on_step: OnStep | None = None,
    trackers: Sequence[Tracker] = (),
    reference_cache: Path | None = None,
    allow_changes: bool = False,
) -> Result:
    """Distils `recipe` into the folder `out`, or goes on with the run that lies there.

    `init` names a student to start from. `base`, the loaded teacher, and `score`, the measures of the
    learning curve, come from the recipe when left out. `on_step` hears of each iteration's record.
    `reference_cache` is a folder that several runs of one teacher may share. `allow_changes` goes on although
    the recipe is not the run's.
    """
    out = Path(out)
    start = _check_folder(out, recipe, init, allow_changes)
    check_trackers(recipe.train.track)
    base = with_shift(base or load_model(recipe.model.base), recipe.model.teacher_shift)
    trainer, validation = assemble(recipe, base, init, score)
    session = Session(out, trainer, validation, base, init, reference_cache or out / "reference")
    if start is not None:
        if not allow_changes:
            _check_made_of(start, session.sampling)
        checkpoint.load(start, trainer)
        print(f"going on from {start}", file=sys.stderr)
    write_whole(out / "recipe.toml", to_toml(recipe).encode())
    return session.go(on_step, trackers)


def assemble(
    recipe: Recipe, base: Model, init: str | None = None, score: Score | None = None
) -> tuple[Trainer, Validation | None]:
    """The three networks, the encoded prompts and the learning curve's clips."""
    if base.kind != "teacher":
        raise UserError(f"model.base: {base.ref} is a student; a base is a teacher, --init takes students")
    if recipe.train.micro_batch not in (None, recipe.train.batch):
        raise UserError("train.micro_batch: only the whole batch at once for now; leave it out")
    settings = Settings.of(base, **vars(recipe.video))
    pipeline = base.pipeline
    device = next(pipeline.network.parameters()).device
    student, fake = copy.deepcopy(pipeline.network), copy.deepcopy(pipeline.network)
    if init is not None:
        checkpoint.load_student(student, load_model(init).network.transformer.state_dict(), init)
    student.requires_grad_(True)
    fake.requires_grad_(True)
    negative = pipeline.text.encode([recipe.model.negative_prompt]).to(device)
    teacher = GuidedTeacher(pipeline.network, negative, recipe.model.guidance_scale_standard)

    curve = recipe.validation
    prompts = load_prompts(
        recipe.data.prompts,
        count=recipe.data.count,
        needed=recipe.train.iterations * recipe.train.batch,
        held_out_seed=recipe.data.held_out_seed,
        validation=curve.prompts if curve.every else 0,
    )
    with meter("encoding prompts", len(set(prompts.training))) as advance:
        encoded = EncodedPrompts(pipeline.text, prompts.training, progress=lambda done, _: advance(done, ""))
    trainer = Trainer(recipe, Roles(student, teacher, fake), encoded, settings.latent_shape(base))
    validation = Validation(recipe, base, prompts.validation, score or _score_for(recipe)) if curve.every else None
    return trainer, validation


class Session:
    """One sitting of a run: iterations, and between them validation, checkpoints, signals."""

    def __init__(
        self,
        out: Path,
        trainer: Trainer,
        validation: Validation | None,
        base: Model,
        init: str | None,
        cache: Path,
    ) -> None:
        self.out, self.trainer, self.validation, self.init, self.cache = out, trainer, validation, init, cache
        self.recipe = trainer.recipe
        self.metric = self.recipe.train.best_metric
        self.sampling = {
            "kind": "student",
            "base": base.ref if base.ref == "mini" else str(base.folder.resolve()),
            "base_sha256": base.sha256,
            "prompts_sha256": _digest(trainer.prompts.prompts, validation.prompts if validation is not None else ()),
            "steps": list(self.recipe.rollout.steps),
            "renoise": "fresh",
            "guidance": 1.0,
            **vars(self.recipe.video),
            "recipe": self.recipe.name,
            "method": self.recipe.objective.method,
        }

    def go(self, on_step: OnStep | None = None, trackers: Sequence[Tracker] = ()) -> Result:
        """The iterations that are left."""
        trainer, total, first = self.trainer, self.recipe.train.iterations, self.trainer.step
        self.trackers = (*trackers, *open_trackers(self.recipe.train.track, self.out, first))
        metrics = JsonLines(self.out / "metrics.jsonl", first)
        # The curve's point at step n is made before iteration n, and before the checkpoint of step n.
        self.curve = JsonLines(self.out / "learning_curve.jsonl", first + 1 if first else 0)
        for point in self._points() if first else ():
            if point["step"] == first:  # which trackers, that begin anew at this step, have forgotten
                self._track(first, point)
        self.teacher = self.validation.teacher(self.cache) if self.validation is not None else {}
        if self.metric and self.metric not in self.teacher:
            raise UserError(f"train.choose: no measure is called {self.metric}, {nearest(self.metric, self.teacher)}")
        if self._validation_is_due() and first == 0 and self._validate():
            self._save()
        with stop_on_signals() as stop, meter("distilling", max(total - first, 1)) as advance:
            while trainer.step < total and stop.signal is None:
                record = trainer.iterate()
                for tracker in (metrics, *self.trackers):
                    tracker.log(record["step"], record)
                if record["refused"]:
                    print(f"warning: {record['refused']}", file=sys.stderr)
                if on_step is not None:
                    on_step(record)
                advance(trainer.step - first, summary(record))
                improved = self._validation_is_due() and self._validate()
                if improved or stop.signal is not None or self._checkpoint_is_due():
                    self._save()
        for tracker in (metrics, self.curve, *self.trackers):
            tracker.close()
        return Result(
            out=self.out,
            checkpoint=self._save(),
            iterations=trainer.step,
            student_updates=trainer.student.updates,
            exit_code=stop.exit_code,
            teacher=self.teacher,
        )

    def _checkpoint_is_due(self) -> bool:
        every, step = self.recipe.train.checkpoint_every, self.trainer.step
        return step == self.recipe.train.iterations or (every > 0 and step % every == 0)

    def _validation_is_due(self) -> bool:
        every, step = self.recipe.validation.every, self.trainer.step
        return every > 0 and (step % every == 0 or step == self.recipe.train.iterations)

    def _validate(self) -> bool:
        """Adds a point to the learning curve; whether it is the best so far by the recipe's rule."""
        assert self.validation is not None
        trainer = self.trainer
        scores = self.validation.student(trainer.roles.student, trainer.ema)
        self.curve.log(trainer.step, {"student_updates": trainer.student.updates, **scores})
        self._track(trainer.step, scores)
        for warning in warnings(scores, self.teacher, self.recipe.validation):
            print(f"warning: step {trainer.step}: {warning}", file=sys.stderr)
        leader = best(self._points(), self.metric) if self.metric else None
        return leader is not None and leader["step"] == trainer.step

    def _track(self, step: int, scores: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(step, {f"curve/{name}": value for name, value in scores.items() if name != "step"})

    def _points(self) -> list[dict[str, Any]]:
        return read_json_lines(self.out / "learning_curve.jsonl")

    def _save(self) -> Path:
        """Commits a checkpoint; says which is chosen; only then deletes what is no longer kept."""
        chosen = newest = checkpoint.save(self.out, self.trainer, self.sampling, self.init)
        if self.metric:
            there = [p for p in self._points() if checkpoint.folder_of(self.out, p["step"]).is_dir()]
            leader = best(there, self.metric)
            chosen = checkpoint.folder_of(self.out, leader["step"]) if leader is not None else newest
        rule = self.recipe.train.choose
        about = {"checkpoint": str(chosen.relative_to(self.out)), "rule": rule, "newest": newest.name}
        checkpoint.write_json(self.out / "chosen.json", about)
        checkpoint.prune(self.out, self.recipe.train.keep, chosen)
        return chosen


def _check_folder(out: Path, recipe: Recipe, init: str | None, allow_changes: bool) -> Path | None:
    """The checkpoint to go on from; None for a new run. Refuses a folder that is not this run's."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file; --out needs a folder")
    saved = out / "recipe.toml"
    if not saved.is_file():
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out}: not empty, and not the folder of a run (no recipe.toml); give another --out")
        return None
    start = checkpoint.newest_whole(out, warn=lambda message: print(message, file=sys.stderr))
    if start is None:
        # A run that ended before its first checkpoint may begin anew, with another recipe too: nothing is lost.
        if not (out / "metrics.jsonl").is_file() and saved.read_text(encoding="utf-8") != to_toml(recipe):
            raise UserError(f"{out}: its recipe.toml was not written by a run, and would be lost; give another --out")
        return None
    changes = [
        str(c) for c in diff(parse_recipe((start / "recipe.toml").read_text(encoding="utf-8"), str(saved)), recipe)
    ]
    before = checkpoint.read_state(start)["init"]
    if before != init:
        changes.append(f"--init: {before or '(not set)'} -> {init or '(not set)'}")
    if changes and not allow_changes:
        raise UserError(
            f"{out}: its run had another recipe ({'; '.join(changes)}); give another --out for a new run, "
            "or --allow-changes to go on with this one"
        )
    return start


MADE_OF = {"base_sha256": "the teacher's weights", "prompts_sha256": "the prompts"}
"""What a recipe names and does not hold: the files may have changed under the same name."""


def _check_made_of(start: Path, now: Mapping[str, Any]) -> None:
    """Refuses to go on with another teacher, or other prompts, under the same name."""
    before = json.loads((start / "sampling.json").read_text(encoding="utf-8"))
    changed = [what for key, what in MADE_OF.items() if before.get(key) != now[key]]
    if changed:
        raise UserError(
            f"{start}: {' and '.join(changed)} have changed since (SHA-256); give another --out for a new run, "
            "or --allow-changes to go on with this one"
        )


def _digest(training: Sequence[str], validation: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([list(training), list(validation)]).encode()).hexdigest()


def _score_for(recipe: Recipe) -> Score:
    """The miniature's measures, which need its captions."""
    if recipe.data.prompts != "mini":
        raise UserError(
            "validation.every: the learning curve is measured on the miniature's captions, and data.prompts "
            f'is "{recipe.data.prompts}"; set validation.every = 0'
        )
    return mini_score

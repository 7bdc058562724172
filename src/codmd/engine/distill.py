"""A run from a recipe: put the parts together, go through the iterations, keep what must be kept.

A run folder holds `recipe.toml`, `metrics.jsonl` (a line an iteration), `learning_curve.jsonl` (a line a
validation), `checkpoints/`, `latest` and `chosen.json`. The same call on the same folder goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from codmd.engine import checkpoint, shelf
from codmd.engine.assembly import assemble, load_base
from codmd.engine.guard import TooManyRefusals
from codmd.engine.heartbeat import watched
from codmd.engine.loop import Trainer, part_size
from codmd.engine.ranks import Ranks, launched
from codmd.engine.signals import stop_on_signals
from codmd.engine.tracking import Clock, JsonLines, Tracker, check_trackers, open_trackers, read_json_lines
from codmd.engine.validation import Score, Validation, best, warnings
from codmd.engine.view import watch_run
from codmd.errors import UserError, explain
from codmd.files import write_whole
from codmd.models import Model
from codmd.networks.precision import reproducible
from codmd.recipe import Recipe, diff, load_recipe, parse_recipe, to_toml
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
    out = out or Path("runs") / resolved.name
    with launched(resolved.parallel) as ranks:
        if ranks.is_first:
            print(to_toml(resolved))
        result = distill(resolved, out, init=init, allow_changes=allow_changes, ranks=ranks)
        said = ranks.is_first
    if result.exit_code:
        if said:
            print(
                f"stopped after {result.iterations} iterations; the same command goes on from there",
                file=sys.stderr,
            )
        raise SystemExit(result.exit_code)
    if said:
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
    ranks: Ranks | None = None,
) -> Result:
    """Distils `recipe` into the folder `out`, or goes on with the run that lies there.

    `init` names a student to start from. `base`, the loaded teacher, and `score`, the measures of the
    learning curve, come from the recipe when left out. `on_step` hears of each iteration's record.
    `reference_cache` is a folder that several runs of one teacher may share. `allow_changes` goes on although
    the recipe is not the run's. Under torchrun every rank calls this; the first one writes and speaks. `ranks`
    is made from the recipe when left out.
    """
    out = Path(out)
    with ExitStack() as stack:
        ranks = ranks or stack.enter_context(launched(recipe.parallel))
        stack.enter_context(reproducible(recipe.compute.deterministic))
        stack.enter_context(watched(ranks))
        part_size(recipe, ranks)  # refuses what doesn't fit before anything takes long
        start = ranks.on_first(lambda: _check_folder(out, recipe, init, allow_changes))
        ranks.on_first(lambda: check_trackers(recipe.train.track))
        base = load_base(recipe, ranks, base)
        trainer, validation = assemble(recipe, base, init, score, ranks)
        session = Session(out, trainer, validation, base, init, reference_cache or out / "reference")
        if start is not None:
            if not allow_changes:
                ranks.on_first(lambda: _check_made_of(start, session.sampling))
            checkpoint.load(start, trainer)
            if ranks.is_first:
                print(f"going on from {start}", file=sys.stderr)
        ranks.on_first(lambda: write_whole(out / "recipe.toml", to_toml(recipe).encode()))
        ranks.on_first(lambda: shelf.clear_unfinished(out))
        stack.callback(session.settle)
        return session.go(on_step, trackers)


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
        self.recipe, self.ranks = trainer.recipe, trainer.ranks
        self.metric = self.recipe.train.best_metric
        self.background = checkpoint.Background(self.ranks) if self.recipe.train.asynchronous else None
        self.sampling = {
            "kind": "student",
            "base": base.ref if base.ref == "mini" else str(base.folder.resolve()),
            "base_sha256": self.ranks.on_first(lambda: base.sha256),
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
        self.trackers: tuple[Tracker, ...] = ()
        writers: tuple[Tracker, ...] = ()
        if self.ranks.is_first:
            self.trackers = (*trackers, *open_trackers(self.recipe.train.track, self.out, first))
            # The curve's point at step n is made before iteration n, and before the checkpoint of step n.
            self.curve = JsonLines(self.out / "learning_curve.jsonl", first + 1 if first else 0)
            writers = (JsonLines(self.out / "metrics.jsonl", first), *self.trackers)
            for point in self._points() if first else ():
                if point["step"] == first:  # which trackers, that begin anew at this step, have forgotten
                    self._track(first, point)
        self.teacher = self.validation.teacher(self.cache) if self.validation is not None else {}
        if self.metric and self.metric not in self.teacher:
            raise UserError(f"train.choose: no measure is called {self.metric}, {nearest(self.metric, self.teacher)}")
        if self._validation_is_due() and first == 0 and self._validate():
            self._save()
        between = Clock(trainer.device)
        watch = watch_run(self.recipe.name, total, first, shown=self.ranks.is_first)
        with stop_on_signals(alone=self.ranks.world == 1) as stop, watch as shown:
            while trainer.step < total and not stop.agreed(self.ranks):
                try:
                    record = {**trainer.iterate(), **between.seconds}
                except TooManyRefusals as error:
                    self._log(writers, {"step": trainer.step, **vars(error.refusal)})
                    raise
                between = Clock(trainer.device)
                self._log(writers, record)
                if record["refused"]:
                    self._warn(record["refused"])
                if on_step is not None:
                    on_step(record)
                shown(record)
                # What happens between two steps is in the record of the second.
                improved = False
                if self._validation_is_due():
                    with between("validation"):
                        improved = self._validate()
                if improved or self._checkpoint_is_due():
                    with between("checkpoint"):
                        self._save_or_warn()
            # Still under watch: torchrun asks the others to end as soon as one has.
            chosen = self._save(last=True)
            for tracker in (*writers, *((self.curve,) if self.ranks.is_first else ())):
                self._or_warn(trainer.step, tracker.close)
        return Result(
            out=self.out,
            checkpoint=chosen,
            iterations=trainer.step,
            student_updates=trainer.student.updates,
            exit_code=stop.exit_code,
            teacher=self.teacher,
        )

    def _log(self, writers: Sequence[Tracker], record: Mapping[str, Any]) -> None:
        for tracker in writers:
            self._or_warn(record["step"], partial(tracker.log, record["step"], record))

    def _or_warn(self, step: int, write: Callable[[], None]) -> None:
        """A line that a full disk does not take is no reason to stop."""
        try:
            write()
        except OSError as error:
            message = explain(error)
            if message is None:
                raise
            self._warn(f"step {step}: not written down yet, {message}; the run goes on")

    def _checkpoint_is_due(self) -> bool:
        every, step = self.recipe.train.checkpoint_every, self.trainer.step
        return every > 0 and step % every == 0

    def _validation_is_due(self) -> bool:
        every, step = self.recipe.validation.every, self.trainer.step
        return every > 0 and (step % every == 0 or step == self.recipe.train.iterations)

    def _validate(self) -> bool:
        """Adds a point to the learning curve; whether it is the best so far by the recipe's rule."""
        assert self.validation is not None
        trainer = self.trainer
        scores = self.validation.student(trainer.roles.student, trainer.ema)
        return self.ranks.on_first(lambda: self._add_point(scores))

    def _add_point(self, scores: Mapping[str, float]) -> bool:
        step = self.trainer.step
        self._log((self.curve,), {"step": step, "student_updates": self.trainer.student.updates, **scores})
        self._track(step, scores)
        for warning in warnings(scores, self.teacher, self.recipe.validation):
            self._warn(f"step {step}: {warning}")
        leader = best(self._points(), self.metric) if self.metric else None
        return leader is not None and leader["step"] == step

    def _track(self, step: int, scores: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(step, {f"curve/{name}": value for name, value in scores.items() if name != "step"})

    def _points(self) -> list[dict[str, Any]]:
        return read_json_lines(self.out / "learning_curve.jsonl")

    def _warn(self, message: str) -> None:
        if self.ranks.is_first:
            print(f"warning: {message}", file=sys.stderr)

    def settle(self) -> None:
        """Lets a checkpoint that is being written come to its end, whatever ended the run."""
        if self.background is not None:
            try:
                self.background.wait()
            except Exception as error:
                self._warn(f"no checkpoint, {explain(error) or error}")

    def _save_or_warn(self) -> None:
        """A checkpoint on the way. A disk that is full now may not be at the next: the old checkpoint stays."""
        try:
            self._save()
        except Exception as error:
            message = explain(error)
            if message is None:
                raise
            self._warn(f"step {self.trainer.step}: no checkpoint, {message}; the run goes on")

    def _save(self, *, last: bool = False) -> Path:
        """Commits a checkpoint; says which is chosen; only then deletes what is no longer kept."""
        trainer, folder = self.trainer, shelf.folder_of(self.out, self.trainer.step)
        if self.background is not None:
            try:
                self.background.wait()
            except Exception as error:
                message = explain(error)
                if message is None:
                    raise
                self._warn(f"no checkpoint, {message}; the run goes on")
            if not last and not self.ranks.on_first(folder.exists):
                staged = checkpoint.stage(trainer, self.sampling, self.init, copy=True)
                self.background.write(self.out, staged, self._committed)
                return folder
        checkpoint.save(self.out, trainer, self.sampling, self.init)
        return self.ranks.on_first(lambda: self._committed(folder))

    def _committed(self, newest: Path) -> Path:
        """What follows a commit, on the first rank: which checkpoint is chosen, and which are no longer kept."""
        if not self.ranks.is_first:
            return newest
        shelf.point(self.out / "latest", newest)
        chosen = newest
        if self.metric:
            there = [p for p in self._points() if shelf.folder_of(self.out, p["step"]).is_dir()]
            leader = best(there, self.metric)
            chosen = shelf.folder_of(self.out, leader["step"]) if leader is not None else newest
        rule = self.recipe.train.choose
        about = {"checkpoint": str(chosen.relative_to(self.out)), "rule": rule, "newest": newest.name}
        shelf.write_json(self.out / "chosen.json", about)
        shelf.prune(self.out, self.recipe.train.keep, chosen)
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
    start = shelf.newest_whole(out, warn=lambda message: print(message, file=sys.stderr))
    if start is None:
        # A run that ended before its first checkpoint may begin anew, with another recipe too: nothing is lost.
        if not (out / "metrics.jsonl").is_file() and saved.read_text(encoding="utf-8") != to_toml(recipe):
            raise UserError(f"{out}: its recipe.toml was not written by a run, and would be lost; give another --out")
        return None
    old = parse_recipe((start / "recipe.toml").read_text(encoding="utf-8"), str(saved))
    how: tuple[str, ...] = HOW
    if recipe.objective.release_batch_scaling:  # whose batch term depends on the number of ranks
        how = tuple(key for key in HOW if key != "parallel.")
    changes = [str(change) for change in diff(old, recipe) if not change.key.startswith(how)]
    before = checkpoint.read_state(start)["init"]
    if before != init:
        changes.append(f"--init: {before or '(not set)'} -> {init or '(not set)'}")
    if changes and not allow_changes:
        raise UserError(
            f"{out}: its run had another recipe ({'; '.join(changes)}); give another --out for a new run, "
            "or --allow-changes to go on with this one"
        )
    return start


HOW = ("parallel.", "compute.", "train.micro_batch", "train.asynchronous", "train.keep", "train.checkpoint_every")
"""Keys that say how a run is worked on, not what comes out: they may differ from one sitting to the next."""

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

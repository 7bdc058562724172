"""What a folder of runs holds, as the tables want it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from codmd.errors import UserError
from codmd.evaluation import MiniScores, compare
from codmd.reproduce.plan import BASELINE, VARIANTS, Plan
from codmd.reproduce.statistics import Estimate, bootstrap_total, by_clip, over_seeds
from codmd.reproduce.work import result

COMPARED = (
    "diversity ratio", "pixel diversity ratio", "mode coverage", "frame relation gap", "batch relation gap",
    "pairwise diversity difference",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Outcome:
    """One run that is done: its result, and the scores of its last checkpoints, oldest first."""

    variant: str
    seed: int
    content: Mapping[str, Any]
    checkpoints: tuple[MiniScores, ...]
    teacher: MiniScores

    @cached_property
    def end(self) -> dict[str, float]:
        """Figures of the last checkpoint."""
        return self._figures(self.checkpoints[-1])

    @cached_property
    def late(self) -> dict[str, float]:
        """Figures averaged over the last checkpoints."""
        each = [self._figures(scores) for scores in self.checkpoints]
        return {name: _mean([figures[name] for figures in each]) for name in each[0]}

    @cached_property
    def clips(self) -> np.ndarray:
        return by_clip(self.checkpoints)

    def _figures(self, scores: MiniScores) -> dict[str, float]:
        against = compare(scores, self.teacher)
        return scores.summary() | {name: against[name] for name in COMPARED}


@dataclass(frozen=True, eq=False)
class Results:
    """All that is there. `missing` names the runs that the full plan has and the folder has not."""

    plan: Plan
    teacher: MiniScores
    untaught: MiniScores
    outcomes: tuple[Outcome, ...]
    failed: Mapping[str, str]
    missing: tuple[str, ...]

    @classmethod
    def read(cls, plan: Plan, out: Path) -> Results:
        full = replace(plan, only=(), seeds=None)
        facts = json.loads((out / "teacher.json").read_text(encoding="utf-8"))
        if "untaught" not in facts:
            raise UserError(f"{out / 'teacher.json'}: not complete; run codmd reproduce without --report-only once")
        teacher, untaught = (MiniScores.load(out / "scores" / f"{facts[k]}.json") for k in ("scores", "untaught"))
        planned = {(run.variant, run.seed) for run in full.runs}
        outcomes, failed, missing = [], {}, []
        for variant in VARIANTS:
            there = [re.fullmatch(rf"{re.escape(variant.name)}-seed(\d+)", p.stem) for p in _files(out)]
            extra = {(variant.name, int(match[1])) for match in there if match}
            for name, seed in sorted({key for key in planned if key[0] == variant.name} | extra):
                run = full.run_of(variant, seed)
                content = result(full, out, run)
                if content is None:
                    missing.append(run.name)
                elif "failed" in content:
                    failed[run.name] = content["failed"]
                else:
                    paths = [out / "scores" / f"{c['scores']}.json" for c in content["checkpoints"]]
                    scores = tuple(MiniScores.load(path) for path in paths)
                    outcomes.append(Outcome(name, seed, content, scores, teacher))
        return cls(full, teacher, untaught, tuple(outcomes), failed, tuple(missing))

    def of(self, variant: str) -> dict[int, Outcome]:
        """A variant's outcomes by seed."""
        return {o.seed: o for o in self.outcomes if o.variant == variant}

    def mean(self, variant: str, measure: str, *, when: str = "late") -> Estimate:
        return over_seeds([getattr(o, when)[measure] for o in self.of(variant).values()])

    def pairs(self, variant: str) -> list[tuple[Outcome, Outcome]]:
        """The variant's run and the baseline's, for each seed that both have."""
        baseline = self.of(BASELINE)
        return [(o, baseline[seed]) for seed, o in sorted(self.of(variant).items()) if seed in baseline]

    def difference(self, variant: str, measure: str, *, when: str = "late") -> Estimate:
        """Variant minus baseline, seed by seed."""
        return over_seeds([getattr(a, when)[measure] - getattr(b, when)[measure] for a, b in self.pairs(variant)])

    def bootstrap(self, variant: str) -> Estimate:
        """The difference in total with seeds and prompts drawn anew."""
        pairs = [(a.clips, b.clips) for a, b in self.pairs(variant)]
        return bootstrap_total(pairs, self.teacher.captions)


def _files(out: Path) -> Sequence[Path]:
    return sorted((out / "results").glob("*.json"))


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan

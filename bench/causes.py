"""`python -m bench.causes`: what might hide a difference between DMD and CoDMD in the miniature, one cause at a time.

Each cause is a change of the recipe, run for both with paired seeds by `codmd reproduce`, in a folder of its own
under runs/causes; this page only lays their results side by side. What is measured, and over which checkpoints, is
the same as in docs/results/mini.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from codmd.errors import UserError
from codmd.files import write_whole
from codmd.reproduce.plan import Plan
from codmd.reproduce.results import Results
from codmd.reproduce.statistics import Estimate, over_seeds

RUNS, PAGE = Path("runs/causes"), Path("docs/results/causes.md")
MEASURES = ("total", "human action", "diversity ratio", "frame relation gap", "batch relation gap")
_CELLS = "objective.pool_grid=4"
LONG = ("train.iterations=1000", "validation.every=200")


@dataclass(frozen=True)
class Cause:
    """A change of the recipe that both objectives get."""

    name: str
    what: str
    seeds: int
    overrides: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return Plan(only=("dmd", "codmd"), seeds=self.seeds, overrides=("train.precision=bf16", *self.overrides))

    @property
    def command(self) -> str:
        changes = "".join(f" --set {change}" for change in self.plan.overrides)
        return (
            f"codmd reproduce --out {RUNS / self.name} --report {RUNS / self.name}.md --only dmd --only codmd "
            f"--seeds {self.seeds}{changes}"
        )


CAUSES = (
    Cause("gpu", "nothing changed", 5),
    Cause("shared-time", "one noise level for the batch (R9)", 5, ("renoise.mode=shared",)),
    Cause("own-exit", "an exit for each sample (R17)", 5, ("rollout.exit=per_sample",)),
    Cause("grid", "features from 4 × 4 cells (R3)", 5, (_CELLS,)),
    Cause("cold", "τ = 0.03", 3, ("objective.tau=0.03",)),
    Cause("warm", "τ = 0.5", 3, ("objective.tau=0.5",)),
    Cause("long", "five times as long", 3, LONG),
    Cause("long-all", "as long, one noise level, 4 × 4 cells", 3, (*LONG, "renoise.mode=shared", _CELLS)),
)


def lines() -> Iterator[str]:
    yield from ("# What might hide a difference", "")
    yield "Written by `python -m bench.causes`; the conclusions were written by hand. DMD and CoDMD with one change of"
    yield "the recipe at a time, paired by seed; the rest is as in [mini.md](mini.md), the averages over a run's last"
    yield "three checkpoints among it."
    yield ""
    notes = PAGE.with_name("causes-notes.md")
    if notes.is_file():
        yield from ("## Conclusions", "", notes.read_text(encoding="utf-8").strip(), "")
    found = {cause: Results.read(cause.plan, RUNS / cause.name) for cause in CAUSES if (RUNS / cause.name).is_dir()}
    if not found:
        raise UserError(f"{RUNS}: no results; run first, for example: {CAUSES[0].command}")
    for measure in MEASURES:
        yield from (f"## {measure.capitalize()}", "")
        first = next(iter(found.values()))
        teacher, untaught = first.teacher.summary().get(measure), first.untaught.summary().get(measure)
        if teacher is not None and untaught is not None:
            yield f"Teacher {teacher:.3f}; a student before it learns {untaught:.3f}."
            yield ""
        yield "| change | pairs | DMD | CoDMD | CoDMD − DMD |"
        yield "| --- | ---: | ---: | ---: | ---: |"
        for cause, results in found.items():
            means = " | ".join(f"{results.mean(name, measure).mean:.3f}" for name in ("dmd", "codmd"))
            difference = results.difference("codmd", measure)
            yield f"| {cause.what} | {difference.count} | {means} | {_cell(difference)} |"
        yield ""
    yield from ("## Inside the training", "", "Means over a run's last quarter, of CoDMD: the largest entry of")
    yield from ("S_fake − S_real, the losses, and the student's gradient; DMD's gradient beside it.", "")
    yield "| change | between frames | between samples | batch term | frame term | gradient | DMD's gradient |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for cause, results in found.items():
        cells = [
            _inside(results, variant, name)
            for variant, name in (
                *(("codmd", n) for n in ("residual/frame", "residual/batch", "loss/batch", "loss/frame")),
                ("codmd", "gradient/student"),
                ("dmd", "gradient/student"),
            )
        ]
        yield f"| {cause.what} | " + " | ".join(cells) + " |"
    yield from ("", "## Commands", "")
    yield from ("Made in bf16 on one H200, up to 15 runs side by side. Each command resumes.", "")
    for cause in found:
        yield f"- `{cause.command}`"
    yield "- `python -m bench.causes`"


def _cell(estimate: Estimate) -> str:
    if estimate.low is None:
        return f"{estimate.mean:+.3f}"
    text = f"{estimate.mean:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"
    return f"**{text}**" if estimate.leaves_out_zero else text


def _inside(results: Results, variant: str, name: str) -> str:
    values = [o.content["diagnostics"].get(name) for o in results.of(variant).values()]
    return f"{over_seeds([v for v in values if v is not None]).mean:.3f}"


if __name__ == "__main__":
    write_whole(PAGE, ("\n".join(lines()).rstrip() + "\n").encode())
    print(PAGE)

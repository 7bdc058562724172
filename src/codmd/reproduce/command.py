"""`codmd reproduce`: do what is left of the plan, then write the report of what there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codmd.errors import UserError
from codmd.reproduce.plan import Plan


def run(
    *,
    out: Path = Path("runs/reproduce"),
    report: Path = Path("docs/results/mini.md"),
    only: Sequence[str] = (),
    seeds: int | None = None,
    overrides: Sequence[str] = (),
    prompts: int = 48,
    clips: int = 2,
    checkpoints: int = 3,
    workers: int = 1,
    budget: float | None = None,
    report_only: bool = False,
) -> None:
    """Runs what is not done yet, and writes the report; `budget` in minutes, looked at between runs."""
    plan = Plan(
        only=tuple(only),
        seeds=seeds,
        overrides=tuple(overrides),
        prompts=prompts,
        clips=clips,
        checkpoints=checkpoints,
    )
    if workers < 1:
        raise UserError(f"--workers: expected at least 1, got {workers}")
    if budget is not None and not budget >= 0:
        raise UserError(f"--budget: expected minutes of at least 0, got {budget}")
    for path, what in ((out, "--out"), (report.parent, "--report")):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: a file; {what} needs a folder")
    from codmd.reproduce import work
    from codmd.reproduce.report import write_report

    code = 0
    try:
        if not report_only:
            out.mkdir(parents=True, exist_ok=True)
            work.prepare(plan, out)
            code = work.work_together(plan, out, workers, budget)
    finally:
        done = sum(work.result(plan, out, one) is not None for one in plan.runs)
        if done:
            write_report(plan, out, report)
        print(f"{done} of {len(plan.runs)} runs are done" + (f"; the report: {report}" if done else ""))
    if code:
        raise SystemExit(code)

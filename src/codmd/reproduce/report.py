"""`docs/results/mini.md`: what was run, what came out, what is missing. Words on what it means are a person's.

Beside the report lie its figures and `mini.json`, the numbers that it was made from. A hand-written
`mini-notes.md` there becomes its section of conclusions.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from codmd.evaluation.mini_scores import plain
from codmd.files import write_whole
from codmd.recipe import to_toml
from codmd.reproduce.figures import learning_curves, sweep
from codmd.reproduce.plan import ABLATION, BASELINE, SWEEP, TITLES, VARIANTS, Plan, Variant
from codmd.reproduce.results import Results
from codmd.reproduce.statistics import Estimate
from codmd.reproduce.work import write_json

MEASURES = ("total", "quality", "semantic", "dynamic degree", "human action", "color", "saturation error")
MORE = (
    "object class", "multiple objects", "spatial relationship", "scene", "subject consistency", "imaging quality",
    "aesthetic quality", "diversity ratio", "mode coverage", "frame relation gap", "batch relation gap",
)  # fmt: skip
PAPER = {  # Wan2.1 1.3B, 4 steps, in percent: dynamic degree, quality, semantic, total
    "dmd": (71.1, 84.5, 78.8, 83.4), "batch": (83.1, 85.1, 79.4, 84.0), "frame": (93.3, 85.0, 76.8, 83.9),
    "codmd": (86.1, 85.5, 80.3, 84.5), "direct": (88.6, 84.7, 79.0, 83.8),
}  # fmt: skip


def write_report(plan: Plan, out: Path, path: Path) -> None:
    """Writes the report of whatever is there; at least one run must be done."""
    results = Results.read(plan, out)
    write_whole(path, ("\n".join(lines(results, path)).rstrip() + "\n").encode())
    write_json(path.with_suffix(".json"), plain(numbers(results)))


def lines(results: Results, path: Path) -> Iterator[str]:
    plan, done = results.plan, results.outcomes
    yield "# The ablation and the sweep of λ, in the miniature"
    yield ""
    yield "Written by `codmd reproduce`; only the section of conclusions, where there is one, was written by hand."
    yield ""
    yield from _what(results)
    notes = path.with_name(f"{path.stem}-notes.md")
    if notes.is_file():
        yield from ("## Conclusions", "", notes.read_text(encoding="utf-8").strip(), "")
    if not done:
        return
    names = [v.name for v in VARIANTS if results.of(v.name)]
    yield from ("## Means", "")
    yield f"Over seeds, and over each run's last {plan.checkpoints} checkpoints (fewer where it has fewer)."
    yield "Dynamic degree counts what moves whatever is asked, so that the teacher's is right, and more is not better."
    yield ""
    yield from _means(results, names)
    yield from ("## Paired differences from DMD", "")
    yield from _differences(results, [name for name in names if name != BASELINE])
    yield from ("## At the last checkpoint alone", "")
    yield "The same differences without the average over checkpoints, to show what one evaluation is worth."
    yield ""
    yield from _difference_table(results, [n for n in names if n != BASELINE], MEASURES, "end")
    yield from ("## Other measures", "", "Differences from DMD, as above, averaged over checkpoints.", "")
    yield from _difference_table(results, [n for n in names if n != BASELINE], MORE, "late")
    yield from _figures(results, path)
    yield from _diagnostics(results, names)
    yield from _how(results)


def _what(results: Results) -> Iterator[str]:
    plan = results.plan
    total = len(results.outcomes) + len(results.failed) + len(results.missing)
    yield from ("## What was run", "")
    yield f"{len(results.outcomes)} of {total} runs are done."
    yield "Runs of one seed share prompts, noise, times and exits, so that differences are paired by seed."
    yield f"Each student is scored on {plan.prompts} evaluation prompts × {plan.clips} clips,"
    yield "which no training and no learning curve has seen."
    yield ""
    yield from _table(
        ["variant", "objective", "seeds done", "missing", "stopped by non-finite steps"],
        [
            [
                v.title,
                ", ".join(f"`{o}`" for o in v.overrides),
                _list(results.of(v.name)),
                _list(n.rpartition("seed")[2] for n in results.missing if n.rpartition("-seed")[0] == v.name),
                _list(n.rpartition("seed")[2] for n in results.failed if n.rpartition("-seed")[0] == v.name),
            ]
            for v in VARIANTS
        ],
    )
    if results.missing:
        yield "**Not all of the plan was run**: what follows speaks of the seeds above and of no others."
        yield ""
    for name, why in results.failed.items():
        yield f"- {name}: {why}"
    if results.failed:
        yield ""


def _means(results: Results, names: Sequence[str]) -> Iterator[str]:
    rows = [
        [name, "–", *(_number(scores.summary()[measure]) for measure in MEASURES)]
        for name, scores in (("teacher", results.teacher), ("a student before it learns", results.untaught))
    ]
    for name in names:
        estimates = [results.mean(name, m) for m in MEASURES]
        rows.append([TITLES[name], str(len(results.of(name))), *(_number(e.mean) for e in estimates)])
    yield from _table(["", "seeds", *MEASURES], rows)
    yield "The paper's own figures (Wan2.1 1.3B, 4 steps, VBench in percent), for the direction of its effects alone:"
    yield ""
    rows = [[TITLES[n], *(f"{v:.1f}" for v in PAPER[n])] for n in ABLATION]
    yield from _table(["", "dynamic degree", "quality", "semantic", "total"], rows)


def _differences(results: Results, names: Sequence[str]) -> Iterator[str]:
    compared = [name for name in names if results.pairs(name)]
    if not compared:
        yield from (f"None yet: no seed has both {TITLES[BASELINE]} and another variant.", "")
        return
    yield "Variant minus DMD, seed by seed, averaged over checkpoints; in brackets the 95% t-interval over seeds."
    yield "Bold: the interval leaves out 0. With this many entries some will by chance alone (1 in 20 of true zeros)."
    yield ""
    yield from _difference_table(results, names, MEASURES, "late")
    yield "The difference in total again, with an interval that draws prompts as well as seeds anew (2,000 draws,"
    yield "percentiles; the clips of a prompt stay together, both of a pair meet the same prompts; with 3 seeds it"
    yield "is too narrow, since three seeds drawn from three repeat themselves):"
    yield ""
    rows = [
        [TITLES[n], str(len(results.pairs(n))), _interval(results.bootstrap(n))]
        for n in names
        if len(results.pairs(n)) > 1
    ]
    yield from _table(["", "pairs", "total"], rows)


def _difference_table(results: Results, names: Sequence[str], measures: Sequence[str], when: str) -> Iterator[str]:
    rows = [
        [
            TITLES[name],
            str(len(results.pairs(name))),
            *(_interval(results.difference(name, m, when=when)) for m in measures),
        ]
        for name in names
        if results.pairs(name)
    ]
    yield from _table(["", "pairs", *measures], rows)


def _figures(results: Results, path: Path) -> Iterator[str]:
    curves, weights = (path.with_name(f"{path.stem}-{what}.svg") for what in ("curves", "lambda"))
    if learning_curves(results, curves, ABLATION):
        yield from ("## Learning curves", "")
        yield "On the validation prompts, which are neither the training's nor the evaluation's; means over seeds"
        yield "(how many: in brackets), at the points that all of them have."
        yield ""
        yield from (f"![Learning curves of the ablation]({curves.name})", "")
    if sweep(results, weights):
        yield from ("## The sweep of λ", "")
        yield "λ is both weights; 0 is DMD and 0.1 CoDMD, whose runs are those above. Lines: 95% t-intervals of the"
        yield "means, unpaired; the paired differences above are the sharper comparison."
        yield ""
        yield from (f"![Total against λ]({weights.name})", "")
        rows = [
            [f"{v.weight:g}", str(len(results.of(v.name))), _number(results.mean(v.name, "total").mean),
             _interval(results.difference(v.name, "total")) if v.name != BASELINE else "–"]
            for v in sorted((v for v in VARIANTS if v.name in SWEEP), key=lambda v: v.weight or 0)
        ]  # fmt: skip
        yield from _table(["λ", "seeds", "total", "minus DMD"], rows)


def _diagnostics(results: Results, names: Sequence[str]) -> Iterator[str]:
    each = {n: [o.content["diagnostics"] for o in results.of(n).values()] for n in names}
    shown = list(dict.fromkeys(key for found in each.values() for one in found for key in one))
    yield from ("## Inside the training", "")
    yield "Means over seeds and over the last quarter of each run: is the fake network behind, how large are the terms"
    yield "(before λ), and how far apart are the matrices (`residual`: max |S_fake − S_real|)? `refused` counts"
    yield "non-finite steps."
    yield ""
    rows = []
    for name, found in each.items():
        values = [[one[key] for one in found if key in one] for key in shown]
        rows.append([TITLES[name], *(f"{sum(v) / len(v):.3g}" if v else "–" for v in values)])
    yield from _table(["", *(f"`{key}`" for key in shown)], rows)


def _how(results: Results) -> Iterator[str]:
    plan, first = results.plan, results.outcomes[0].content
    updates = sorted({o.content["student_updates"] for o in results.outcomes})
    hours = sum(sum(o.content["seconds"].values()) * o.content["threads"] for o in results.outcomes) / 3600
    # Whatever is set or scored differently belongs to the command; how many processes share it does not.
    command = ["codmd", "reproduce", *(word for override in plan.overrides for word in ("--set", override))]
    defaults = Plan()
    for key in ("prompts", "clips", "checkpoints"):
        if getattr(plan, key) != getattr(defaults, key):
            command += [f"--{key}", str(getattr(plan, key))]
    one = results.outcomes[0]
    said = [*results.plan.kept, *plan.overrides, *_variant(one.variant), f"seed={one.seed}"]
    distil = shlex.join(["codmd", "distill", "mini", *(word for item in said for word in ("--set", item))])
    yield from ("## How to run it again", "", "```sh", shlex.join(command), "```", "")
    yield "It goes on from whatever is there; `--workers 2` runs two at once with one thread each, `--only`,"
    yield "`--seeds` and `--budget` do a part. One run alone:"
    yield ""
    yield from ("```sh", distil, "```", "")
    threads = sorted({o.content["threads"] for o in results.outcomes})
    yield from _table(
        ["", ""],
        [
            ["student updates", _list(updates)],
            ["threads of a run", _list(threads)],
            ["iterations and scoring of all runs, times their threads", f"{hours:.1f} h"],
            ["machine", f"{os.cpu_count()} × {platform.machine()}"],
            *([name, version] for name, version in first["versions"].items()),
        ],
    )
    yield from ("<details><summary>The recipe of the first run</summary>", "")
    yield from ("```toml", to_toml(plan.run_of(_by_name(one.variant), one.seed).recipe).strip(), "```", "")
    yield "</details>"


def numbers(results: Results) -> dict[str, object]:
    """Every run's figures, for whoever wants to reckon again."""
    return {
        "teacher": results.teacher.summary(),
        "a student before it learns": results.untaught.summary(),
        "missing": list(results.missing),
        "failed": dict(results.failed),
        "runs": [
            {
                "variant": o.variant, "seed": o.seed, "student_updates": o.content["student_updates"],
                "steps": [c["step"] for c in o.content["checkpoints"]], "end": o.end, "late": o.late,
                "curve": o.content["curve"], "diagnostics": o.content["diagnostics"],
                "seconds": o.content["seconds"], "threads": o.content["threads"],
            }
            for o in results.outcomes
        ],
    }  # fmt: skip


# ---- small words ---------------------------------------------------------------------------------


def _by_name(name: str) -> Variant:
    return next(v for v in VARIANTS if v.name == name)


def _variant(name: str) -> tuple[str, ...]:
    return _by_name(name).overrides


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield "| " + " | ".join(head) + " |"
    yield "| --- |" + " ---: |" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _number(value: float) -> str:
    return f"{value:.3f}" if value == value else "–"


def _interval(estimate: Estimate) -> str:
    if not estimate.count:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:+.3f} (one seed)"
    said = f"{estimate.mean:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"
    return f"**{said}**" if estimate.leaves_out_zero else said


def _list(items: Iterable[object]) -> str:
    return ", ".join(map(str, items)) or "–"

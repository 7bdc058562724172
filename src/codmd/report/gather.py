"""From runs, clips and scores to what the page shows."""

from __future__ import annotations

import math
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codmd.console import clock
from codmd.engine.tracking import read_json_lines
from codmd.evaluation import MEASURES, MiniScores, compare
from codmd.models import Model
from codmd.recipe import Recipe
from codmd.report.result import Check, Column, Curve, DemoResult, Shot
from codmd.sampling import Settings
from codmd.video import encode_mp4

NAMES = {"teacher": "Teacher", "dmd": "DMD", "codmd": "CoDMD"}
CURVES = {
    "total": ("Total", "more is better"),
    "dynamic_degree": ("Dynamic degree", "as much as the teacher"),
    "saturation_error": ("Colour-saturation error", "nearer to 0 is better"),
    "human_action": ("Human action: the motion asked for", "more is better"),
    "color": ("Colour", "more is better"),
    "imaging_quality": ("Imaging quality", "more is better"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """A model's clips, prompt by prompt and seed by seed."""

    videos: np.ndarray  # [N, F, H, W, 3] uint8
    latents: torch.Tensor
    seconds_per_clip: float
    evaluations: int
    key: str  # names all that they were made from


def column(name: str, samples: Samples, scores: Mapping[str, MiniScores], model: Model, teacher: Settings) -> Column:
    summary = scores[name].summary()
    against = compare(scores[name], scores["teacher"]) if name != "teacher" else {}
    steps = len(model.times) if model.times else teacher.steps
    return Column(
        key=name,
        name=NAMES[name],
        role=f"{steps} steps" + ("" if model.times else f", guidance {teacher.guidance:g}"),
        evaluations=samples.evaluations,
        seconds_per_clip=samples.seconds_per_clip,
        quality=summary["quality"],
        semantic=summary["semantic"],
        total=summary["total"],
        measures={measure: known(summary[measure]) for measure in MEASURES},
        extras={key: known(value) for key, value in {**summary, **against}.items() if key not in MEASURES},
        updates=model.about.get("student_updates"),
    )


def known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def shots(
    samples: Mapping[str, Samples],
    scores: Mapping[str, MiniScores],
    captions: Sequence[str],
    seeds: Sequence[int],
    fps: float,
) -> Iterator[Shot]:
    """Every clip as a video, with what its prompt asked for."""
    for i, (prompt, seed) in enumerate(zip(captions, seeds, strict=True)):
        for name, some in samples.items():
            checks = tuple(Check(asked=c.asked, met=c.met) for c in scores[name].checks[i])
            mp4 = encode_mp4(some.videos[i], fps=fps)
            yield Shot(prompt=prompt, seed=seed, column=name, mp4=mp4, checks=checks)


def curves(runs: Mapping[str, Path], teacher: Mapping[str, float]) -> tuple[Curve, ...]:
    """The runs' learning curves, with the teacher's level."""
    records = {method: read_json_lines(run / "learning_curve.jsonl") for method, run in runs.items()}
    found = []
    for key, (title, better) in CURVES.items():
        lines = {
            method: tuple((r["student_updates"], r[key]) for r in rows if isinstance(r.get(key), float))
            for method, rows in records.items()
        }
        if all(lines.values()):
            found.append(Curve(title=title, lines=lines, level=teacher.get(key), better=better))
    return tuple(found)


def facts(recipe: Recipe, teacher: Model, prompts: int, seeds: int, took: Mapping[str, float]) -> dict[str, str]:
    """What was run, and on what."""
    import diffusers
    import transformers

    import codmd

    train = recipe.train
    times = ", ".join(f"{name} {clock(spent)}" for name, spent in took.items())
    versions = {
        "codmd": codmd.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }
    return {
        "Teacher": f"{teacher.ref}, SHA-256 {teacher.sha256[:16]}…",
        "Students": f"{train.iterations} iterations with a batch of {train.batch}; "
        f"the student learns at every {train.student_every}th, the fake network at each",
        "Training seed": f"{recipe.seed}, with the same prompts, noise and times for both students",
        "Evaluation": f"{prompts} prompts, none of them trained on, × {seeds} seeds",
        "Time": f"{clock(sum(took.values()))} in all ({times})",
        "Machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads",
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def commands(out: Path, seed: int, quick: bool) -> tuple[str, ...]:
    """What makes this page again, and each of its parts by hand."""
    whole = f"codmd demo --seed {seed}{' --quick' if quick else ''} --out {shlex.quote(str(out))}"
    if quick:
        return (whole,)
    students = [
        f"codmd distill mini --set objective.method={method} --set seed={seed} --out runs/{method}"
        for method in ("dmd", "codmd")
    ]
    return (whole, *students, "codmd evaluate mini runs/codmd", "codmd reproduce")


def as_json(page: DemoResult) -> dict[str, Any]:
    """All figures of the page."""
    return {
        "columns": [{**vars(c), "measures": dict(c.measures), "extras": dict(c.extras)} for c in page.columns],
        "curves": [{**vars(c), "lines": dict(c.lines)} for c in page.curves],
        "facts": dict(page.facts),
        "commands": page.commands,
        "quick": page.quick,
    }

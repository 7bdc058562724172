"""The report's figures: lines that differ in dash and marker too, so that they can be told apart in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from codmd.files import replacing
from codmd.reproduce.plan import SWEEP, TITLES, VARIANTS
from codmd.reproduce.results import Results
from codmd.reproduce.statistics import over_seeds

CURVES = {
    "total": "Total",
    "dynamic_degree": "Dynamic degree",
    "human_action": "Human action: the motion asked for",
    "color": "Colour",
    "saturation_error": "Saturation error (0 is right)",
    "imaging_quality": "Imaging quality",
}
LOOKS = {  # dark to light, so that the order survives in grey
    "dmd": ("#000000", "-", "o"), "codmd": ("#b3001b", "-", "s"), "batch": ("#1f5fa8", "--", "^"),
    "frame": ("#2e8b57", "-.", "v"), "direct": ("#8a6d00", ":", "D"),
}  # fmt: skip


def learning_curves(results: Results, path: Path, variants: Sequence[str]) -> list[str]:
    """Means over seeds of the learning curve's measures; returns what was drawn. The teacher is a grey band."""
    drawn = [name for name in variants if any(o.content["curve"] for o in results.of(name).values())]
    if not drawn:
        return []
    plot = _pyplot()
    figure, axes = plot.subplots(2, 3, figsize=(11, 6.2), layout="constrained")
    for axis, (measure, title) in zip(axes.flat, CURVES.items(), strict=True):
        level = next(
            (o.content["teacher_curve"].get(measure) for o in results.outcomes if o.content["teacher_curve"]), None
        )
        if level is not None:
            axis.axhline(level, color="0.6", linewidth=4, alpha=0.5, label="teacher")
        for name in drawn:
            colour, dash, marker = LOOKS[name]
            points = _mean_curve([o.content["curve"] for o in results.of(name).values()], measure)
            label = f"{TITLES[name]} ({len(results.of(name))})"
            axis.plot(*zip(*points, strict=True), dash, color=colour, marker=marker, ms=4, lw=1.4, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("student updates", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(color="0.9")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    _save(figure, path)
    return drawn


def sweep(results: Results, path: Path) -> list[str]:
    """Total against λ: every seed's run, and the mean with its interval."""
    weights = {v.name: v.weight for v in VARIANTS if v.weight is not None}
    drawn = [name for name in SWEEP if results.of(name)]
    if len(drawn) < 2:
        return []
    plot = _pyplot()
    figure, axis = plot.subplots(figsize=(6, 3.6), layout="constrained")
    for place, name in enumerate(drawn):
        values = [o.late["total"] for o in results.of(name).values()]
        axis.plot([place] * len(values), values, "o", color="0.6", ms=4, label="one seed" if not place else None)
        estimate = over_seeds(values)
        if estimate.low is not None and estimate.high is not None:
            axis.plot([place, place], [estimate.low, estimate.high], "-", color="black", lw=1.2)
        axis.plot([place], [estimate.mean], "s", color="black", ms=7, label="mean" if not place else None)
    teacher = results.teacher.summary()["total"]
    axis.axhline(teacher, color="0.6", linewidth=4, alpha=0.5, label="teacher")
    axis.set_xticks(range(len(drawn)), [f"{weights[name]:g}" for name in drawn])
    axis.set_xlabel("λ (0 is DMD)")
    axis.set_ylabel("total")
    axis.grid(color="0.9", axis="y")
    axis.legend(fontsize=8, frameon=False)
    _save(figure, path)
    return drawn


def _mean_curve(curves: Sequence[Sequence[Mapping[str, Any]]], measure: str) -> list[tuple[float, float]]:
    """The mean over seeds at each point that every one of them has."""
    by_seed = [{r["student_updates"]: r[measure] for r in c if isinstance(r.get(measure), float)} for c in curves]
    shared = set.intersection(*(set(points) for points in by_seed)) if by_seed else set()
    mean = [(float(x), sum(points[x] for points in by_seed) / len(by_seed)) for x in sorted(shared)]
    return mean or [(float("nan"), float("nan"))]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "codmd"  # the same file from the same numbers
    import matplotlib.pyplot as plot

    return plot


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as aside:
        figure.savefig(aside, format="svg", metadata={"Date": None})
    _pyplot().close(figure)

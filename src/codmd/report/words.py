"""What the page says, in words: made from a result, escaped."""

from __future__ import annotations

from html import escape

from codmd.report.charts import axis_start
from codmd.report.result import DemoResult, unique

NUMBERS_NOTE = (
    "↑ more is better, ↓ less is better. Seconds are for text and denoising on this machine, without "
    "decoding. Quality, semantic and total use VBench's weights without its normalisation, so they compare "
    "with each other and not with VBench's own tables."
)


def headline(result: DemoResult) -> str:
    least = min((student.evaluations for student in result.students), default=0)
    return f"{result.teacher.evaluations} network evaluations a clip, distilled into {least}"


def lead(result: DemoResult) -> str:
    students = " and ".join(escape(student.name) for student in result.students)
    return (
        f"A miniature Wan2.1, the teacher, makes a clip with {escape(result.teacher.role)}. "
        f"Its students, {students}, make one in a few steps without guidance. All of them were run on this "
        "machine: here is what they make of the same prompts from the same noise, and what an analytic "
        "oracle says of it."
    )


def tiles(result: DemoResult) -> str:
    shown = [(f"{column.total:.3f}", f"total score, {escape(column.name)}") for column in result.columns]
    ratios = sorted({round(result.speedup(student)) for student in result.students})
    if ratios:
        span = f"{ratios[0]}×" if len(ratios) == 1 else f"{ratios[0]}–{ratios[-1]}×"
        shown.insert(0, (span, "as fast as the teacher"))
    return "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for value, label in shown)


def warning(result: DemoResult) -> str:
    if not result.quick:
        return ""
    return '<p class="warning">A quick run: it shows that everything works. Its figures mean nothing.</p>'


def videos_text(result: DemoResult) -> str:
    prompts = len(unique(shot.prompt for shot in result.shots))
    seeds = len(unique(shot.seed for shot in result.shots))
    return (
        f"Every prompt of the evaluation, not a selection: {prompts}, each with "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'}, from the same starting noise in each column. "
        "No prompt here was trained on. Where a prompt leaves something open, any answer is right. Below "
        "each clip is what its prompt asked for, and whether the oracle finds it."
    )


def radar_text(result: DemoResult) -> str:
    start = axis_start([v for column in result.columns for v in column.measures.values() if v is not None])
    return f"The centre of the chart is {start:g}, not 0." if start else "The centre of the chart is 0."


def curves_text(result: DemoResult) -> str:
    if not result.curves:
        return "No learning curve was recorded in this run."
    return (
        "A fixed set of prompts, apart from those above, sampled and scored as the students were trained. "
        f"The level line is the {escape(result.teacher.name.lower())}'s on the same prompts."
    )


def honest(result: DemoResult) -> str:
    updates = sorted({student.updates for student in result.students if student.updates is not None})
    had = f"Each student had {' or '.join(map(str, updates))} updates. " if updates else ""
    return (
        f"<p>This is one run with one training seed. {had}A difference between two students that is smaller "
        "than what another seed would change says nothing. <code>codmd reproduce</code> repeats the "
        "comparison over paired seeds and gives intervals.</p><p>The miniature's world is simple shapes. "
        "What holds here need not hold for natural video.</p>"
    )


def facts(result: DemoResult) -> str:
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in result.facts.items())
    return f'<dl class="facts">{rows}</dl>'

"""The page's tables: a row a measure, a column a model, so that they fit a telephone."""

from __future__ import annotations

from html import escape

from codmd.report import charts
from codmd.report.result import DemoResult

EXTRAS = {
    "dynamic where asked": ("Moves where it should ↑", "share of the clips whose prompt asks for motion"),
    "saturation error": ("Colour-saturation error", "0 is right, 0.1 is a tenth too much"),
    "diversity": ("Diversity across seeds", "share of what a prompt leaves open that differs between seeds"),
    "diversity ratio": ("Diversity, as a share of the teacher's", "1 is the teacher's"),
    "mode coverage": (
        "Distance of attribute distributions ↓",
        "total variation to the teacher's, open prompts",
    ),
    "mode coverage of equals": ("The same by chance alone", "what two equal models would show"),
    "frame relation gap": ("Relations between frames: gap ↓", "of similarity matrices to the teacher's"),
    "batch relation gap": ("Relations between samples: gap ↓", "of similarity matrices to the teacher's"),
    "pairwise diversity difference": (
        "Pairwise diversity: what is lost",
        "D(P) − D(Q) of Proposition 3; above 0, the student is less diverse",
    ),
}


def measures(result: DemoResult) -> str:
    """The sixteen measures."""
    rows = []
    for name in result.teacher.measures:
        cells = "".join(f"<td>{_shown(column.measures[name])}</td>" for column in result.columns)
        rows.append(f'<tr><th scope="row">{escape(name.capitalize())}</th>{cells}</tr>')
    return f"<table>{_head(result)}<tbody>{''.join(rows)}</tbody></table>"


def numbers(result: DemoResult) -> str:
    """Cost, the three totals, and what VBench does not see."""
    columns = result.columns
    parts = [_group("Cost of a clip", len(columns))]
    parts.append(_row("Network evaluations (NFE)", [f"{c.evaluations}" for c in columns]))
    parts.append(_row("Seconds", [f"{c.seconds_per_clip:.3g}" for c in columns]))
    faster = [f"{result.speedup(c):.1f}×" for c in columns]
    parts.append(_row("Speed-up", faster, strong=True))
    parts.append(_row("Student updates", ["–" if c.updates is None else f"{c.updates}" for c in columns]))
    parts.append(_group("VBench's weights", len(columns)))
    for title in ("Quality", "Semantic", "Total"):
        values = [f"{getattr(c, title.lower()):.3f}" for c in columns]
        parts.append(_row(f"{title} ↑", values, strong=title == "Total"))
    known = [key for key in EXTRAS if any(c.extras.get(key) is not None for c in columns)]
    if known:
        parts.append(_group("Likeness to the teacher", len(columns)))
        parts += [
            _row(EXTRAS[key][0], [_shown(c.extras.get(key)) for c in columns], hint=EXTRAS[key][1]) for key in known
        ]
    return f"<table>{_head(result)}<tbody>{''.join(parts)}</tbody></table>"


def _head(result: DemoResult) -> str:
    names = "".join(
        f'<th scope="col"><span class="name">{charts.swatch(i)}{escape(column.name)}</span></th>'
        for i, column in enumerate(result.columns)
    )
    return f"<thead><tr><td></td>{names}</tr></thead>"


def _group(title: str, columns: int) -> str:
    return f'<tr class="group"><th scope="colgroup" colspan="{columns + 1}">{escape(title)}</th></tr>'


def _row(title: str, values: list[str], *, strong: bool = False, hint: str = "") -> str:
    small = f"<small>{escape(hint)}</small>" if hint else ""
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    return f'<tr{" class=strong" if strong else ""}><th scope="row">{escape(title)}{small}</th>{cells}</tr>'


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"

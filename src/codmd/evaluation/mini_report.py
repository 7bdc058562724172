"""Tables of scores: one column for each model, the first of which the others are held against."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from codmd.errors import UserError
from codmd.evaluation.mini_benchmark import compare
from codmd.evaluation.mini_measures import QUALITY, SEMANTIC
from codmd.evaluation.mini_scores import MiniScores, plain
from codmd.files import replacing, write_whole

GROUPS = ("quality", "semantic", "total")
ALONE = ("dynamic where asked", "saturation error", "diversity", "pixel diversity")
NOT_APPLICABLE = "–"
NOTE = f"{NOT_APPLICABLE} no clip to which the measure applies; it is left out of the means."


def rows(scores: Mapping[str, MiniScores]) -> list[tuple[str, list[float]]]:
    """Every line of the table, with a value for each model; comparisons are with the first model."""
    if not scores:
        raise UserError("table: no scores given")
    summaries = [s.summary() for s in scores.values()]
    lines = [(name, [s[name] for s in summaries]) for name in (*QUALITY, *SEMANTIC, *GROUPS, *ALONE)]
    first, *others = scores.values()
    against = [compare(other, first) for other in others]
    if against:
        lines += [(name, [math.nan, *(a[name] for a in against)]) for name in against[0]]
    return lines


def table(scores: Mapping[str, MiniScores], format: str = "text") -> str:
    """The table as `text` or `markdown`."""
    if format not in ("text", "markdown"):
        raise UserError(f"table: unknown format {format!r}, expected text or markdown")
    lines = [["measure", *scores]] + [[name, *map(_show, values)] for name, values in rows(scores)]
    if format == "markdown":
        rule = ["---"] + ["---:"] * len(scores)
        body = "\n".join("| " + " | ".join(cells) + " |" for cells in (lines[0], rule, *lines[1:]))
    else:
        widths = [max(len(cells[i]) for cells in lines) for i in range(len(lines[0]))]
        body = "\n".join(
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
            for cells in lines
        )
    return f"{body}\n\n{NOTE}\n"


def report(scores: Mapping[str, MiniScores], out: Path | str, console: Console | None = None) -> None:
    """Print the table; write `scores.md`, `scores.json` and each model's `scores/NAME.json` under `out`."""
    out = Path(out)
    lines = rows(scores)
    shown = Table("measure", *scores)
    for column in shown.columns[1:]:
        column.justify = "right"
    ends = (QUALITY[-1], SEMANTIC[-1], GROUPS[-1], ALONE[-1])
    for name, values in lines:
        shown.add_row(name, *map(_show, values), end_section=name in ends)
    console = console or Console()
    console.print(shown)
    if any(s.absent() for s in scores.values()):
        console.print(NOTE, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "scores.md", table(scores, "markdown").encode())
    by_model = {name: {line: values[i] for line, values in lines} for i, name in enumerate(scores)}
    write_whole(out / "scores.json", (json.dumps(plain(by_model), indent=1, allow_nan=False) + "\n").encode())
    for name, one in scores.items():
        with replacing(out / "scores" / f"{name.replace('/', '_')}.json") as aside:
            one.save(aside)


def _show(value: float) -> str:
    return NOT_APPLICABLE if math.isnan(value) else f"{value:.3f}"

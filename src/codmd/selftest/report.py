"""One line for each check, in Markdown that also reads well as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["PASS", "FAIL", "SKIPPED"]
HEADS = ("check", "result", "figure", "bound", "s", "what was measured, or why not")


@dataclass(frozen=True)
class Line:
    """What became of one check."""

    name: str
    verdict: Verdict
    seconds: float
    note: str
    figure: float = math.nan
    bound: float = math.nan

    def cells(self) -> tuple[str, ...]:
        note = " ".join(self.note.split()).replace("|", "\\|")
        return (self.name, self.verdict, _number(self.figure), _number(self.bound), f"{self.seconds:.1f}", note)


def table(lines: Sequence[Line]) -> str:
    rows = [HEADS, *(line.cells() for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS) - 1)]
    texts = ["| " + " | ".join((*map(str.ljust, row, widths), row[-1])) + " |" for row in rows]
    texts.insert(1, "| " + " | ".join("-" * width for width in (*widths, 3)) + " |")
    return "\n".join(texts)


def page(facts: Mapping[str, str], lines: Sequence[Line]) -> str:
    counts = [(verdict, sum(line.verdict == verdict for line in lines)) for verdict in ("PASS", "FAIL", "SKIPPED")]
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
    seconds = sum(line.seconds for line in lines)
    head = "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    return f"### codmd selftest: {told}, {seconds:.0f} s\n\n{head}\n\n{table(lines)}\n"


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    if value == int(value) if math.isfinite(value) else False:
        return str(int(value))
    return f"{value:.2g}"

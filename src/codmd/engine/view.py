"""A run as one watches it: how far it is, how long it takes yet, and the numbers worth a look."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from codmd.console import meter

Show = Callable[[Mapping[str, Any]], None]
"""Called with each step's record."""

LEFT = {
    "student's loss": "loss/student",
    "  DMD": "loss/dmd",
    "  batch relations": "loss/batch",
    "  frame relations": "loss/frame",
    "fake's loss": "loss/fake",
    "student's gradient": "gradient/student",
    "fake's gradient": "gradient/fake",
}
RIGHT = {
    "student updates": "student_updates",
    "ΔS between frames": "residual/frame",
    "ΔS between samples": "residual/batch",
    "tokens a second": "tokens_per_second",
    "share of the peak": "mfu",
    "peak memory, GB": "memory/peak_gb",
    "seconds a step": "seconds/step",
}
PHASE = "seconds/"


@contextmanager
def watch_run(name: str, total: int, first: int, *, shown: bool = True) -> Iterator[Show]:
    """Shows a run on stderr: a table and a bar on a terminal, elsewhere a line now and then."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        with meter("distilling", max(total - first, 1), shown=shown) as advance:
            yield lambda record: advance(record["step"] + 1 - first, summary(record))
        return
    columns = (TextColumn(name), BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
    task = bar.add_task(name, total=total, completed=first)
    known: dict[str, Any] = {}
    with Live(console=console, refresh_per_second=4) as live:

        def show(record: Mapping[str, Any]) -> None:
            known.update(record)  # a student's numbers stay until its next turn
            bar.update(task, completed=record["step"] + 1)
            live.update(Group(bar, numbers(known), phases(record)))

        yield show


def numbers(record: Mapping[str, Any]) -> Table:
    """Losses and gradients on the left; relations, speed and memory on the right."""
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(style="dim")
        table.add_column(justify="right")
    columns = [[(label, _said(record[key])) for label, key in side.items() if key in record] for side in (LEFT, RIGHT)]
    rows = max(map(len, columns))
    for row in range(rows):
        table.add_row(*(cell for column in columns for cell in (column[row] if row < len(column) else ("", ""))))
    return table


def phases(record: Mapping[str, Any]) -> str:
    """Where the last step's time went."""
    spent = {n[len(PHASE) :]: s for n, s in record.items() if n.startswith(PHASE) and n != "seconds/step"}
    whole = sum(spent.values())
    if not whole:
        return ""
    return "[dim]" + "  ".join(f"{phase} {seconds / whole:.0%}" for phase, seconds in spent.items()) + "[/dim]"


def summary(record: Mapping[str, Any]) -> str:
    """The few numbers of a step that go on one line."""
    shown = {
        "loss/student": "student",
        "loss/fake": "fake",
        "gradient/student": "|g|",
        "residual/frame": "dS",
    }
    return ", ".join(f"{label} {record[name]:.3g}" for name, label in shown.items() if name in record)


def _said(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"

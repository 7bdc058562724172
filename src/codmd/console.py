"""Progress on a terminal as a bar with time left; elsewhere as a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[[float, str], None]
"""Called with how much is done, and a word on what is being done."""

LINE_EVERY = 20.0  # seconds


@contextlib.contextmanager
def meter(title: str, total: float, *, shown: bool = True) -> Iterator[Advance]:
    """Shows progress on stderr while the block runs; nothing where another process shows it."""
    if not shown:
        yield lambda done, said: None
        return
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[said]}"), console=console) as bar:
            task = bar.add_task(title, total=total, said="")

            def draw(done: float, said: str = "") -> None:
                bar.update(task, completed=done, said=said)

            yield draw
        return
    begun = last = time.monotonic()

    def say(done: float, said: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > LINE_EVERY and 0 < done < total:
            last = now
            left = (now - begun) / done * (total - done)
            console.print(f"{title}: {done / total:.0%}, {clock(left)} left {said}".rstrip(), highlight=False)

    yield say


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

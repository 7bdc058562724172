"""Ctrl-C and SIGTERM ask a run to stop at its next step's end; asked again, later, it stops at once."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from codmd.engine.ranks import Ranks

ONCE = 2.0
"""Seconds in which signals count as one: schedulers signal every process, and torchrun then passes its own on."""


class Stop:
    """Whether a signal has asked for the end, and which."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        """What came to this process."""
        self.signal: signal.Signals | None = None
        """What all ranks end for. One that came too late for that, in the last step, stops nothing: the run is done."""

    def agreed(self, ranks: Ranks) -> bool:
        """Whether any rank was asked to end: then all are, at the same step."""
        number = int(ranks.largest({"signal": float(self.asked or 0)})["signal"])
        if number:
            self.signal = signal.Signals(number)
        return number != 0

    @property
    def exit_code(self) -> int:
        """As shells count: 130 after Ctrl-C, 143 after SIGTERM, 0 when none came."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signals(*, alone: bool = True) -> Iterator[Stop]:
    """Watches while the block runs. Only a process's main thread can; elsewhere nothing is watched.

    A rank that is not alone goes on ignoring SIGTERM once all have agreed to end: torchrun sends it to those that are
    a moment later than the first, and their exit code would be another.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in watched}
    first = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if stop.asked is None:
            stop.asked, first = signal.Signals(number), time.monotonic()
            print(f"{stop.asked.name}: finishing this step, then saving; again to stop at once", file=sys.stderr)
        elif time.monotonic() - first > ONCE:
            for each in watched:
                signal.signal(each, before[each])
            signal.raise_signal(number)

    for number in watched:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        if stop.signal is not None and not alone:
            before[signal.SIGTERM] = signal.SIG_IGN
        for number in watched:
            signal.signal(number, before[number])

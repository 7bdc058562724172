"""Ctrl-C and SIGTERM ask a run to stop at its next step's end; a second one stops it at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from codmd.engine.ranks import Ranks


class Stop:
    """Whether a signal has asked for the end, and which."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def agreed(self, ranks: Ranks) -> bool:
        """Whether any rank was asked to end: then all are, at the same step."""
        number = int(ranks.largest({"signal": float(self.signal or 0)})["signal"])
        if number and self.signal is None:
            self.signal = signal.Signals(number)
        return number != 0

    @property
    def exit_code(self) -> int:
        """As shells count: 130 after Ctrl-C, 143 after SIGTERM, 0 when none came."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Watches while the block runs. Only a process's main thread can; elsewhere nothing is watched."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in watched}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number)
        print(f"{stop.signal.name}: finishing this step, then saving; again to stop at once", file=sys.stderr)
        for each in watched:
            signal.signal(each, before[each])

    for number in watched:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number in watched:
            signal.signal(number, before[number])

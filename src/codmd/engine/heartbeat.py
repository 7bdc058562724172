"""A rank that dies is noticed, and named, and nobody hangs.

Ranks that wait in a collective for one that is gone can do nothing by themselves, and NCCL's own patience is half an
hour. So a thread on each rank leaves a sign of life in the store that torchrun keeps, looks for the others', and ends
its process when one of them is missing. Gloo breaks off at once instead, and knows an address and no rank: what it
raises waits here until the thread has found out who it was. `torchrun --max-restarts` then starts all of them anew,
and the run resumes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from codmd.engine.ranks import Ranks

BEAT, PATIENCE = 1.0, 30.0
"""Seconds between two signs of life, and without one until a rank counts as dead."""
CUT_OFF = 5
"""How many signs of life a rank may miss once a connection is broken."""
UNWINDING = 5
"""How many beats a rank has to end by itself once another has said why it ends."""
LOST = 4
"""Exit code of a process that ends because another has."""
GONE = "gone"


@contextmanager
def watched(ranks: Ranks, *, beat: float = BEAT, patience: float = PATIENCE) -> Iterator[None]:
    """While the block runs, this process ends within `patience` seconds of another rank's end."""
    if ranks.mesh is None:
        yield
        return
    watch = Watch(ranks, beat, patience)
    watch.thread.start()
    try:
        yield
    except BaseException as error:
        if _is_broken_connection(error):
            watch.find_the_lost()
        # What broke here is told at once; the others need not find out by waiting.
        watch.leave(f"{type(error).__name__}: {error}")
        raise
    else:
        watch.leave("")


def _is_broken_connection(error: BaseException) -> bool:
    """Whether it says that another rank cannot be reached. Gloo has no exception of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class Watch:
    """The signs of life of all ranks."""

    def __init__(self, ranks: Ranks, beat: float, patience: float) -> None:
        self.ranks, self.beat, self.patience = ranks, beat, patience
        # A connection of its own: the training may be waiting on the other.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.store = dist.PrefixStore("heartbeat", store)
        self.store.set_timeout(timedelta(seconds=patience))
        self.store.set(f"name {ranks.rank}", ranks.name)
        self.store.set(f"beat {ranks.rank}", "0")  # of a run before, in the same processes, there may be an end
        self.names = {rank: f"rank {rank}" for rank in range(ranks.world)}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def leave(self, reason: str) -> None:
        """Stops watching; with a reason, the others are told that it was no good end."""
        self.ended.set()
        self.thread.join()
        try:
            self.store.set(f"beat {self.ranks.rank}", f"{GONE}{reason}")
        except Exception as error:  # the store's own process may have ended first
            print(f"{self.ranks.name}: {error}", file=sys.stderr)

    def find_the_lost(self) -> None:
        """Waits for the thread to name whoever is gone, and to end the process; returns when all are there."""
        self.patience = min(self.patience, CUT_OFF * self.beat)
        self.thread.join(self.patience + 2 * self.beat)

    def _run(self) -> None:
        others = [rank for rank in range(self.ranks.world) if rank != self.ranks.rank]
        last = dict.fromkeys(others, "")
        # Silence is counted in this thread's own beats. Where Python is held up, by a large file that is written, say,
        # it hears nobody, and that says nothing of the others.
        missed = dict.fromkeys(others, 0)
        count = 0
        while not self.ended.wait(self.beat):
            count += 1
            try:
                self.store.set(f"beat {self.ranks.rank}", str(count))
                for rank in others:
                    sign = self._read(f"beat {rank}")
                    missed[rank] = 0 if sign != last[rank] else missed[rank] + 1
                    if sign != last[rank]:
                        last[rank] = sign
                        self.names[rank] = self._read(f"name {rank}") or self.names[rank]
            except Exception as error:
                self._end(f"{self._keeper()} is gone ({' '.join(str(error).split())[:100]})")
            for rank in others:
                silent = missed[rank] * self.beat
                if not last[rank].startswith(GONE):
                    if silent > self.patience:
                        self._end(f"{self.names[rank]} has not been heard for {silent:.0f} seconds")
                elif last[rank] != GONE and missed[rank] >= UNWINDING:
                    # Not at once: where all ranks end for the same reason, each says so, and has its own exit code.
                    self._end(f"{self.names[rank]} has ended: {last[rank][len(GONE) :]}")

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _keeper(self) -> str:
        """Who keeps the store."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "torchrun, which keeps the store of all ranks,"
        return f"{self.names[0]}, which keeps the store of all ranks,"

    def _end(self, why: str) -> None:
        if self.ended.is_set():
            return
        print(
            f"error: {why}; {self.ranks.name} ends too. The same command goes on from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST)  # the main thread may be waiting for ever

"""A rank that dies is noticed, and named, and nobody hangs.

Ranks that wait in a collective for one that is gone can do nothing by themselves, and NCCL's own patience is half an
hour. So a thread on each rank leaves a sign of life in the store that torchrun keeps, looks for the others', and ends
its process when one of them is missing. `torchrun --max-restarts` then starts all of them anew, and the run resumes.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from codmd.engine.ranks import Ranks

BEAT, PATIENCE = 1.0, 15.0
"""Seconds between two signs of life, and without one until a rank counts as dead."""
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
        # What broke here is told at once; the others need not find out by waiting.
        watch.leave(f"{type(error).__name__}: {error}")
        raise
    else:
        watch.leave("")


class Watch:
    """The signs of life of all ranks."""

    def __init__(self, ranks: Ranks, beat: float, patience: float) -> None:
        self.ranks, self.beat, self.patience = ranks, beat, patience
        # A connection of its own: the training may be waiting on the other.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.store = dist.PrefixStore(f"heartbeat {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self.store.set_timeout(timedelta(seconds=patience))
        self.store.set(f"name {ranks.rank}", ranks.name)
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

    def _run(self) -> None:
        others = [rank for rank in range(self.ranks.world) if rank != self.ranks.rank]
        last = dict.fromkeys(others, "")
        heard = dict.fromkeys(others, time.monotonic())
        count = 0
        while not self.ended.wait(self.beat):
            count += 1
            try:
                self.store.set(f"beat {self.ranks.rank}", str(count))
                for rank in others:
                    key = f"beat {rank}"
                    sign = self.store.get(key).decode() if self.store.check([key]) else ""
                    if sign != last[rank]:
                        last[rank], heard[rank] = sign, time.monotonic()
            except Exception as error:
                self._end(f"the store of all ranks is gone ({' '.join(str(error).split())[:100]})")
            for rank in others:
                if last[rank].startswith(GONE):
                    if len(last[rank]) > len(GONE):
                        self._end(f"{self._name(rank)} has ended: {last[rank][len(GONE) :]}")
                    continue
                silent = time.monotonic() - heard[rank]
                if silent > self.patience:
                    self._end(f"{self._name(rank)} has not been heard for {silent:.0f} seconds")

    def _name(self, rank: int) -> str:
        key = f"name {rank}"
        return self.store.get(key).decode() if self.store.check([key]) else f"rank {rank}"

    def _end(self, why: str) -> None:
        if self.ended.is_set():
            return
        print(
            f"error: {why}; {self.ranks.name} on {socket.gethostname()} ends too. The same command goes on from the "
            "newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST)  # the main thread may be waiting for ever

"""A store of one's own for each launch of some ranks.

torchrun keeps one store through all restarts, and in it the addresses of ranks that are dead: those that come back
would call them (pytorch/pytorch#135712). Its count of restarts is no remedy, since each machine has its own. So the
ranks agree on a name for this launch, with nothing to go by but a store that may be full of old answers.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from codmd.errors import UserError

PAUSE = 0.05
"""Seconds between two looks at the store."""


def meet(patience: timedelta) -> tuple[dist.Store, int, int]:
    """The corner of the launcher's store that is this launch's alone; this rank; and how many there are."""
    store, rank, world = next(dist.rendezvous("env://", timeout=patience))
    return dist.PrefixStore(agree(store, rank, world, patience), store), rank, world


def agree(store: dist.Store, rank: int, world: int, patience: timedelta) -> str:
    """A name that all ranks of this launch get, and that no launch before them had.

    The first rank proposes one, and waits until each of the others has answered that very proposal with a word of its
    own. What it then writes down holds all those words: whoever finds theirs in it knows that it is new.
    """
    mine, until = uuid.uuid4().hex, time.monotonic() + patience.total_seconds()
    if rank == 0:
        store.set("proposal", mine)
        words = [mine]
        for other in range(1, world):
            while not (answer := _read(store, f"answer {other}")).startswith(mine):
                _pause(until, f"rank {other} has not come")
            words.append(answer.removeprefix(mine))
        store.set("agreed", " ".join(words))
        return mine
    while mine not in (words := _read(store, "agreed").split()):
        store.set(f"answer {rank}", _read(store, "proposal") + mine)
        _pause(until, "rank 0, or another, has not come")
    return words[0]


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _pause(until: float, wrong: str) -> None:
    if time.monotonic() > until:
        raise UserError(f"the ranks did not find one another: {wrong}; start them all, within half an hour")
    time.sleep(PAUSE)

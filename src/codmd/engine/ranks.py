"""Where this process stands among the others, and the little that ranks tell one another.

Ranks form a mesh `replicate x shard x context`. Context ranks work on the same samples, each on a part of their
tokens; the other two dimensions together share out the samples, in rank order, so that sample ids rise with the data
rank. A process alone is the mesh 1 x 1 x 1, and needs no process group.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from codmd.config import ParallelConfig
from codmd.engine.meeting import meet
from codmd.errors import UserError

Item = TypeVar("Item")
DIMENSIONS = ("replicate", "shard", "context")
COLLECTIVE_LIMIT = timedelta(minutes=30)
"""How long a collective may take. A rank that died is noticed much earlier, see `engine.heartbeat`."""


class ToldByFirst(UserError):
    """An error that happened on the first rank, which prints it."""

    told = True


@dataclass(frozen=True)
class Ranks:
    """This process among `world`."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: default_device())
    mesh: DeviceMesh | None = None
    context_method: str = "ulysses"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({socket.gethostname()})"

    # ---- who has which samples ---------------------------------------------------------------------

    @cached_property
    def context(self) -> int:
        """How many ranks share a sample."""
        return 1 if self.mesh is None else self.mesh["context"].size()

    @cached_property
    def data_size(self) -> int:
        """How many parts a batch has."""
        return self.world // self.context

    @cached_property
    def data_rank(self) -> int:
        """Which of them is this rank's."""
        return self.rank // self.context

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """This rank's part of what the data ranks share out evenly."""
        each, rest = divmod(len(items), self.data_size)
        assert rest == 0, (len(items), self.data_size)
        return items[self.data_rank * each : (self.data_rank + 1) * each]

    # ---- meshes and groups -------------------------------------------------------------------------

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """Of the ranks that hold different samples, in the samples' order; None where one rank holds them all."""
        if self.mesh is None or self.data_size == 1:
            return None
        if self.context == 1:
            return dist.group.WORLD
        places = [range(c, self.world, self.context) for c in range(self.context)]
        groups = [dist.new_group(list(ranks)) for ranks in places]  # every rank takes part in making each
        return groups[self.rank % self.context]

    @cached_property
    def sharding_mesh(self) -> DeviceMesh:
        """What FSDP2 shards over: weights over shard and context ranks, copies over replicate ranks."""
        assert self.mesh is not None
        replicate, shard, context = self.mesh.mesh.shape
        if replicate == 1:
            return init_device_mesh(self.device.type, (shard * context,), mesh_dim_names=("shard",))
        names = ("replicate", "shard")
        return init_device_mesh(self.device.type, (replicate, shard * context), mesh_dim_names=names)

    @cached_property
    def context_mesh(self) -> DeviceMesh | None:
        """The ranks that share a sample, as diffusers wants them; one for all networks, since each new one takes
        memory for its messages."""
        if self.mesh is None or self.context == 1:
            return None
        degrees = (self.context, 1) if self.context_method == "ring" else (1, self.context)
        names = ("data", "ring", "ulysses")
        return init_device_mesh(self.device.type, (self.data_size, *degrees), mesh_dim_names=names)

    @cached_property
    def writing_group(self) -> dist.ProcessGroup | None:
        """For a checkpoint that is written while the training goes on: its messages are not mixed with others."""
        return None if self.mesh is None else dist.new_group(backend="gloo")

    # ---- what they tell one another ----------------------------------------------------------------

    def mean(self, values: dict[str, float]) -> dict[str, float]:
        """Each value's mean over all ranks: one that is not finite anywhere is so everywhere."""
        return self._reduced(values, dist.ReduceOp.SUM, 1 / self.world)

    def largest(self, values: dict[str, float]) -> dict[str, float]:
        """Each value's maximum over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX, 1.0)

    def _reduced(self, values: dict[str, float], operation: Any, scale: float) -> dict[str, float]:
        if self.mesh is None or not values:
            return values
        vector = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(vector, op=operation)
        return dict(zip(values, (vector * scale).tolist(), strict=True))

    def gather(self, item: Item, group: dist.ProcessGroup | None = None) -> list[Item]:
        """Every rank's item, in rank order; through `group` where others talk meanwhile."""
        if self.mesh is None:
            return [item]
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item, group=group)
        return items

    def on_first(self, do: Callable[[], Item]) -> Item:
        """What the first rank gets from `do`, which no other calls; an error there is an error everywhere."""
        if self.mesh is None:
            return do()
        told: list[Any] = [None, None]
        error: Exception | None = None
        if self.is_first:
            try:
                told[0] = do()
            except Exception as caught:
                error = caught
                told[1] = f"{type(caught).__name__}: {caught}"
        dist.broadcast_object_list(told, src=0)
        if error is not None:
            raise error
        if told[1] is not None:
            raise ToldByFirst(told[1])
        return told[0]

    def gather_on_first(self, item: Item) -> list[Item]:
        """Every rank's item, in rank order, on the first rank; nothing on the others."""
        if self.mesh is None:
            return [item]
        items: list[Any] | None = [None] * self.world if self.is_first else None
        dist.gather_object(item, items, dst=0)
        return items or []


def default_device() -> torch.device:
    """This process' own GPU, where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def launched(config: ParallelConfig) -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone. A process group that is there already is used."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mine = world > 1 and not dist.is_initialized()
    if not mine and not dist.is_initialized():
        config.degrees(1)
        yield Ranks()
        return
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if mine:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, rank, world = meet(COLLECTIVE_LIMIT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_LIMIT)
    try:
        yield meshed(config, device)
    finally:
        if mine:
            dist.destroy_process_group()


def meshed(config: ParallelConfig, device: torch.device) -> Ranks:
    """The mesh over the process group that is there."""
    world = dist.get_world_size()
    shape = config.degrees(world)
    if world == 1:
        return Ranks(device=device)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)
    ranks = Ranks(dist.get_rank(), world, device, mesh, config.context_method)
    # Groups are made by all ranks together, so now rather than when one of them needs its own.
    _ = ranks.data_group, ranks.sharding_mesh, ranks.context_mesh, ranks.writing_group
    return ranks

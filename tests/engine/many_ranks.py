"""Some processes that train together over gloo, one launch for many meshes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Job = Callable[..., Any]


def launch(world: int, job: Job, *args: Any) -> list[Any]:
    """What `job(rank, *args)` returns in each of `world` processes of one thread."""
    set_forkserver_preload(["torch", "diffusers", "codmd.engine.distill"])
    with tempfile.TemporaryDirectory(prefix="codmd-") as folder:
        mp.start_processes(_work, (job, folder, args), nprocs=world, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _work(rank: int, job: Job, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.save(job(rank, *args), Path(folder) / f"{rank}.pt")


def joined(rank: int, world: int, name: str, folder: str) -> None:
    """Joins the process group `name`; leave it with `dist.destroy_process_group`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(str(Path(folder) / f"store {name}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))

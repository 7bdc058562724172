"""What each of several processes does: `python -m codmd.selftest.work JOBS.json`, with RANK and WORLD_SIZE set.

Answers are written after each job, so that what was found before a crash or a hang is not lost.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from codmd.engine.ranks import DIMENSIONS, Ranks, default_device, meshed
from codmd.files import write_whole
from codmd.recipe import Recipe, load_recipe
from codmd.selftest.checks import resumed
from codmd.selftest.setting import figures, fp32_is_fp32, made, reproducible

PATIENCE = timedelta(seconds=60)
LENGTH = 1000
"""Numbers that each rank sends to each other one."""


def main(file: str) -> None:
    jobs = json.loads(Path(file).read_text(encoding="utf-8"))
    folder, rank, world = Path(file).parent, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fp32_is_fp32()
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    answers: dict[str, Any] = {}
    for name, job in jobs.items():
        print(f"---- {name}", flush=True)
        begun = time.monotonic()
        try:
            answers[name] = {"found": KINDS[job["kind"]](device, **job["given"])}
        except Exception as error:
            traceback.print_exc()
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
        print(f"     {time.monotonic() - begun:.1f} s", flush=True)
        write_whole(folder / f"rank-{rank}.json", json.dumps(answers).encode())
    dist.destroy_process_group()


# ---- the jobs ------------------------------------------------------------------------------------


def sums(device: torch.device, operation: str) -> float:
    """The largest error of a collective on whole numbers, which fp32 adds without rounding."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def sent(sender: int, receiver: int) -> Tensor:
        return torch.arange(LENGTH, device=device, dtype=torch.float32) + 1000 * sender + 100 * receiver

    mine = torch.cat([sent(rank, receiver) for receiver in range(world)])
    everybody = [torch.cat([sent(sender, receiver) for receiver in range(world)]) for sender in range(world)]
    got = torch.full_like(mine, torch.nan)
    if operation == "all_reduce":
        got, expected = mine.clone(), torch.stack(everybody).sum(0)
        dist.all_reduce(got)
    elif operation == "all_gather":
        got, expected = torch.full((world * len(mine),), torch.nan, device=device), torch.cat(everybody)
        dist.all_gather_into_tensor(got, mine)
    elif operation == "reduce_scatter":
        got, expected = got[:LENGTH].clone(), torch.stack([sent(sender, rank) for sender in range(world)]).sum(0)
        dist.reduce_scatter_tensor(got, mine)
    else:
        assert operation == "all_to_all", operation
        expected = torch.cat([sent(sender, rank) for sender in range(world)])
        dist.all_to_all_single(got, mine)
    return float((got - expected).abs().max())


def steps(device: torch.device, overrides: list[str]) -> list[dict[str, float]]:
    recipe, ranks = _spread(device, overrides)
    return figures(made(recipe, ranks))


def checkpoint(device: torch.device, overrides: list[str], run: str) -> int:
    recipe, ranks = _spread(device, overrides)
    with reproducible():
        return resumed(Path(run), made(recipe, ranks), made(recipe, ranks), asynchronous=True)


def _spread(device: torch.device, overrides: list[str]) -> tuple[Recipe, Ranks]:
    recipe = load_recipe("mini", overrides)
    if dist.get_world_size() > 1:
        return recipe, meshed(recipe.parallel, device)
    # A process alone needs no mesh. Here it gets one, so that a single GPU too runs what many run.
    return recipe, Ranks(0, 1, device, init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=DIMENSIONS))


KINDS: Mapping[str, Callable[..., Any]] = {"sums": sums, "steps": steps, "checkpoint": checkpoint}


if __name__ == "__main__":
    main(sys.argv[1])

"""What checkpoints cost that are written meanwhile, what a second rank is worth, and what adapters hold."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from bench.training import trainer
from codmd.engine import checkpoint
from codmd.engine.loop import Trainer
from codmd.models import Model, load_model
from codmd.networks.sharding import local

SAMPLING = {"kind": "student"}


def asynchronous_stall(base: Model, rounds: int) -> tuple[float, float]:
    """Seconds that training stands still for a checkpoint that is written meanwhile, and for one that isn't: medians,
    in turns. The networks are the miniature's, after an update of each."""
    one = trainer(base, "codmd", "train.batch=2")
    one.iterate()
    background = checkpoint.Background(one.ranks)
    stalls: list[float] = []
    saves: list[float] = []
    with tempfile.TemporaryDirectory(prefix="codmd-") as folder:
        for number in range(rounds + 1):
            begun = time.perf_counter()
            staged = checkpoint.stage(one, SAMPLING, None, copy=True)
            background.write(Path(folder) / f"meanwhile {number}", staged, lambda _: None)
            stalls.append(time.perf_counter() - begun)
            background.wait()
            begun = time.perf_counter()
            checkpoint.save(Path(folder) / f"at once {number}", one, SAMPLING, None)
            saves.append(time.perf_counter() - begun)
    return statistics.median(stalls[1:]), statistics.median(saves[1:])


def two_ranks_against_one(rounds: int) -> tuple[float, float]:
    """Seconds of a whole cycle of the miniature on one rank and on two, one thread each; medians of runs in turns."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for ranks in seconds:
            seconds[ranks].append(_cycle(ranks))
    return statistics.median(seconds[1]), statistics.median(seconds[2])


def _cycle(ranks: int) -> float:
    """A run of the command itself; its second cycle's seconds, the first one being for warming up."""
    with tempfile.TemporaryDirectory(prefix="codmd-") as folder:
        out = Path(folder) / "run"
        # Whole copies: at this size, gathering a block costs more than its memory is worth.
        copies = f"parallel.replicate={ranks}"
        keys = ("train.iterations=10", "validation.every=0", "train.checkpoint_every=0", "data.count=64", copies)
        many = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        command = [sys.executable, *(many if ranks > 1 else ()), "-m", "codmd", "distill", "mini", "--out", str(out)]
        command += [word for key in keys for word in ("--set", key)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return sum(record["seconds/step"] for record in records[5:])


def adapters_against_full(rank: int = 16) -> tuple[int, int]:
    """Bytes of weights, gradients and optimizer in the miniature, as adapters and as three networks; counted on the
    tensors of trainers that have made an update of each."""
    held = []
    for overrides in (("mode=adapter", f"adapter.rank={rank}", "train.precision=bf16"), ("train.precision=bf16",)):
        one = trainer(load_model("mini", "cpu"), "codmd", "train.batch=2", *overrides)
        one.iterate()
        held.append(_bytes(_held(one)))
    return held[0], held[1]


def _held(one: Trainer) -> Iterable[Tensor]:
    for network in (one.roles.student, one.roles.teacher.network, one.roles.fake):
        yield from network.transformer.parameters()
    for learner in (one.student, one.fake):
        yield from (torch.empty_like(parameter) for parameter in learner.parameters)  # a gradient each
        for state in learner.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of all memory behind the tensors; what several of them share counts once."""
    kept = list(tensors)  # so that no memory is given out twice
    return sum({local(t).untyped_storage().data_ptr(): local(t).untyped_storage().nbytes() for t in kept}.values())

"""A run of the command line that can be watched and harmed from outside, and what two such runs have in common.

Linux alone: it looks for torchrun's workers in /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from codmd.engine import checkpoint, shelf

LIMIT = 240.0
"""Seconds until a sitting counts as hanging."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


class Failed(Exception):
    """What is not as it was promised."""


class Sitting:
    """The command line, running: one process, torchrun with some, or ranks that were started by hand."""

    def __init__(
        self, out: Path, settings: Sequence[str], ranks: int, *, launcher: Sequence[str] | None = None
    ) -> None:
        """`launcher` is what to add to torchrun; None without it, where several ranks are then started by hand."""
        self.out = out
        self.said = out.with_name(f"{out.name}.{time.monotonic_ns()}.log")
        command = ["-m", "codmd", "distill", "mini", "--out", str(out)]
        command += [word for setting in settings for word in ("--set", setting)]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environments = [quiet]
        if ranks == 1 or launcher is None:
            command = [sys.executable, *command]
            if ranks > 1:
                environments = [quiet | place for place in places(ranks)]
        else:
            command = [*TORCHRUN, "--nproc-per-node", str(ranks), *launcher, *command]
        self.launched = ranks > 1 and launcher is not None
        with self.said.open("wb") as log:
            self.processes = [
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                for environment in environments
            ]

    def worker(self, rank: int) -> int:
        """The process of a rank."""
        if not self.launched:
            return self.processes[rank].pid
        found = [pid for pid in children(self.processes[0].pid) if environment(pid).get("RANK") == str(rank)]
        if not found:
            raise Failed(f"rank {rank} has no process")
        return found[0]

    def until(self, what: str, happened: Callable[[], bool]) -> None:
        """Waits for something while the run goes on."""
        began = time.monotonic()
        while not happened():
            if any(process.poll() is not None for process in self.processes):
                raise Failed(f"the run ended before {what}: {self.last_words()}")
            if time.monotonic() - began > LIMIT:
                raise Failed(f"no {what} after {LIMIT:.0f} s")
            time.sleep(0.005)

    def end(self) -> list[int]:
        """Exit codes, once all processes have ended by themselves."""
        began = time.monotonic()
        for process in self.processes:
            try:
                process.wait(max(LIMIT - (time.monotonic() - began), 0))
            except subprocess.TimeoutExpired:
                raise Failed(f"it hangs: {self.last_words()}") from None
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """All processes at once, the launcher first: nothing of it is left to say good-bye."""
        workers = [pid for process in self.processes for pid in children(process.pid)]
        for pid in (*(process.pid for process in self.processes if process.poll() is None), *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def words(self) -> str:
        """What all processes have said so far."""
        return self.said.read_text(encoding="utf-8", errors="replace")

    def went_on_from(self) -> int | None:
        """The step that it began at, where a run lay there already; the last one, where it was restarted."""
        steps = re.findall(r"going on from \S*step-(\d+)", self.words())
        return int(steps[-1]) if steps else None

    def last_words(self) -> str:
        """The line that says what went wrong, before torchrun's own many."""
        lines = [line for line in self.words().splitlines() if line.strip()]
        wrong = [
            line for line in lines if re.match(r"(\[rank\d+\]: ?)?(error:|[\w.]*(Error|Exception|Interrupt)\b)", line)
        ]
        return (wrong or lines[-1:] or ["it said nothing"])[0]

    def __enter__(self) -> Sitting:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def places(ranks: int) -> list[dict[str, str]]:
    """What torchrun would tell each of some ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    return [{**address, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(path.parent.name))
    return found


def environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return {name: value for name, _, value in (entry.partition("=") for entry in entries)}
    return {}


# ---- what a run left -----------------------------------------------------------------------------


def lines(out: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    path = out / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a line has to be the same: not how long it took."""
    kept = ("loss/", "gradient/", "residual/", "lr/", "t/", "exit", "student_updates", "fake_updates", "refused")
    return {name: value for name, value in record.items() if name.startswith(kept)}


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, whatever ranks wrote its parts."""
    found: dict[str, Tensor] = {}
    for part in ("student", "state"):
        entries = HuggingFaceStorageReader(str(folder / part)).read_metadata().state_dict_metadata
        read = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(dict(read), storage_reader=HuggingFaceStorageReader(str(folder / part)), no_dist=True)
        found |= {f"{part}/{name}": tensor for name, tensor in read.items()}
    return found


def same(ours: Path, theirs: Path) -> None:
    """Refuses two runs that differ in a single bit."""
    mine, other = ([numbers(line) for line in lines(run)] for run in (ours, theirs))
    if len(mine) != len(other) or not other:
        raise Failed(f"{len(mine)} lines of metrics, expected {len(other)}")
    for step, (one, two) in enumerate(zip(mine, other, strict=True)):
        differ = [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]
        if differ:
            name = min(differ)
            raise Failed(f"step {step}: {name} is {one.get(name)}, expected {two.get(name)}")
    folders = [shelf.folder_of(run, len(other)) for run in (ours, theirs)]
    left, right = map(tensors, folders)
    if left.keys() != right.keys():
        raise Failed(f"other tensors: {min(left.keys() ^ right.keys())}")
    differ = [name for name in left if not torch.equal(left[name], right[name])]
    if differ:
        raise Failed(f"{len(differ)} of {len(left)} tensors differ, the first is {differ[0]}")
    states = [checkpoint.read_state(folder) for folder in folders]
    if states[0] != states[1]:
        raise Failed(f"state.json is {states[0]}, expected {states[1]}")


NETWORKS = ("student/", "state/student.", "state/fake.", "state/ema.")


def close(ours: Path, theirs: Path, losses: float, weights: float) -> tuple[float, float]:
    """The largest relative difference of two runs' losses, and of their networks' weights; refuses larger ones."""
    mine, other = lines(ours), lines(theirs)
    if len(mine) != len(other) or not other:
        raise Failed(f"{len(mine)} lines of metrics, expected {len(other)}")
    both = [(one[name], two[name]) for one, two in zip(mine, other, strict=True) for name in LOSSES if name in two]
    loss = max(abs(one - two) / abs(two) for one, two in both)
    left, right = (tensors(shelf.folder_of(run, len(other))) for run in (ours, theirs))
    weight = 0.0
    for network in NETWORKS:
        names = [name for name in right if name.startswith(network)]
        if names:
            gap = norm(left[name].double() - right[name].double() for name in names)
            weight = max(weight, float(gap / norm(right[name] for name in names)))
    if not (loss <= losses and weight <= weights):
        raise Failed(f"losses differ by {loss:.1e} (allowed {losses:g}), weights by {weight:.1e} ({weights:g})")
    return loss, weight


LOSSES = ("loss/student", "loss/fake")
"""Whole losses: a part of one may be as good as nothing, and its own relative difference anything."""


def norm(some: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.double().norm() for tensor in some]).norm()

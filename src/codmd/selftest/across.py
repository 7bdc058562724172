"""The checks of several processes. One launch does them all; what each rank found comes back as JSON.

Each mesh of ranks trains the two steps that one process trains, and has to find the same.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codmd.selftest.checks import BF16_STEP, FP32, kernels
from codmd.selftest.setting import SMALL, Finding, Setting, Skipped, gap, totals

LIMIT = 180.0
"""Seconds that the ranks have for everything together; what still runs is then killed."""
GRACE = 10.0
"""Seconds that the others have once one has failed."""


def _least_divisor(world: int) -> int:
    return next((n for n in range(2, world + 1) if world % n == 0), 1)


# ---- which mesh, and what it is compared with ----------------------------------------------------


def sharded_mesh(setting: Setting) -> tuple[str, ...]:
    return (f"parallel.shard={setting.world}",)


def hybrid_mesh(setting: Setting) -> tuple[str, ...]:
    copies = _of_several(setting)
    return (f"parallel.replicate={copies}", f"parallel.shard={setting.world // copies}")


def ulysses_mesh(setting: Setting) -> tuple[str, ...]:
    degree = _of_several(setting)
    if 6 % degree:
        raise Skipped(f"needs a number of ranks that 2 or 3 divides, got {setting.world}")
    return (f"parallel.context={degree}", f"parallel.shard={setting.world // degree}")


def ring_mesh(setting: Setting) -> tuple[str, ...]:
    if setting.device.type != "cuda":
        raise Skipped("needs a GPU's attention kernels")
    return (*ulysses_mesh(setting), "parallel.context_method=ring")


def _of_several(setting: Setting) -> int:
    if setting.world == 1:
        raise Skipped(f"needs 2 {_what(setting)}")
    return _least_divisor(setting.world)


OFFLOADED = "compute.offload_teacher=true"
LARGE = ("train.precision=bf16", "compute.checkpointing=blocks", OFFLOADED)
"""How a large model is trained."""


@dataclass(frozen=True)
class Mesh:
    """Ranks that train the two steps, and what one process trains in comparison, in fp32."""

    degrees: Callable[[Setting], tuple[str, ...]]
    both: tuple[str, ...] = ()
    """What the recipe of either says."""
    own: tuple[str, ...] = ()
    """What that of the ranks says alone."""
    six_heads: bool = False

    @property
    def bf16(self) -> bool:
        return "train.precision=bf16" in self.own

    def alone(self, setting: Setting) -> tuple[str, ...]:
        base = (f'model.base="{setting.six_heads}"',) if self.six_heads else ()
        return (*self.both, *base)

    def overrides(self, setting: Setting) -> tuple[str, ...]:
        # FSDP2 offloads from an accelerator only.
        own = (one for one in self.own if one != OFFLOADED or setting.device.type == "cuda")
        return (*self.alone(setting), *own, *self.degrees(setting))


MESHES = {
    "sharded": Mesh(sharded_mesh),
    "large": Mesh(sharded_mesh, own=LARGE),
    "adapters": Mesh(sharded_mesh, both=("mode=adapter", "adapter.base_dtype=fp32")),
    "hybrid": Mesh(hybrid_mesh),
    "ulysses": Mesh(ulysses_mesh, six_heads=True),
    # The ring's attention kernel takes nothing finer than bf16.
    "ring": Mesh(ring_mesh, own=("train.precision=bf16",), six_heads=True),
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SAVED = "saved"


def jobs(setting: Setting) -> dict[str, dict[str, Any]]:
    """All that the ranks are to do on this machine."""
    found: dict[str, dict[str, Any]] = {}
    for operation in COLLECTIVES:
        found[operation] = {"kind": "sums", "given": {"operation": operation}}
    small = (*SMALL, f"train.batch={setting.batch}")
    for name, mesh in MESHES.items():
        try:
            found[name] = {"kind": "steps", "given": {"overrides": [*small, *mesh.overrides(setting)]}}
        except Skipped:
            continue
    overrides = [*small, *sharded_mesh(setting), "train.ema_decay=0.9"]
    found[SAVED] = {"kind": "checkpoint", "given": {"overrides": overrides, "run": str(setting.scratch / "run")}}
    return found


# ---- the launch ----------------------------------------------------------------------------------


def launched(setting: Setting) -> Finding:
    """Starts the ranks and waits for them."""
    folder, world = setting.scratch / "ranks", setting.world
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs(setting)), encoding="utf-8")
    setting.answers = []
    trouble = _run(setting, folder)
    files = [folder / f"rank-{rank}.json" for rank in range(world)]
    setting.answers = [json.loads(f.read_text(encoding="utf-8")) if f.is_file() else {} for f in files]
    kind = "NCCL" if setting.device.type == "cuda" else "gloo"
    note = f"ranks that did not end well, of {world} ({kind})"
    if trouble:
        note = f"{'; '.join(trouble)}; see ranks-*.log"
    return Finding(len(trouble), 0, note + _alone(setting))


def _run(setting: Setting, folder: Path) -> list[str]:
    """One word for each rank that did not end by itself, and well."""
    world = setting.world
    given = dict(os.environ)
    if setting.device.type == "cpu":
        given["CUDA_VISIBLE_DEVICES"] = ""
        given["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // world))
    logs = [(setting.out / f"ranks-{rank}.log").open("w", encoding="utf-8") for rank in range(world)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            command = [sys.executable, "-m", "codmd.selftest.work", str(folder / "jobs.json")]
            ranks.append(subprocess.Popen(command, env=given | own, stdout=log, stderr=subprocess.STDOUT))
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and any(one.poll() is None for one in ranks):
            if any(one.returncode for one in ranks):
                until = min(until, time.monotonic() + GRACE)
            time.sleep(0.1)
        codes = [one.poll() for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
        for log in logs:
            log.close()
    return [f"rank {rank}: {_ending(code, codes, setting.out)}" for rank, code in enumerate(codes) if code != 0]


def _ending(code: int | None, codes: Sequence[int | None], out: Path) -> str:
    if code is None:
        return "killed after another failed" if any(codes) else f"killed, its {LIMIT:g} s were over"
    said = (out / f"ranks-{codes.index(code)}.log").read_text(encoding="utf-8", errors="replace").split("\n")
    return f"exit code {code}, {next((line for line in reversed(said) if line.strip()), 'without a word')[:120]}"


def _answers(setting: Setting, name: str) -> list[Any]:
    """What each rank found."""
    if not setting.answers:
        raise RuntimeError("the ranks gave no answer; see their launch")
    for rank, answer in enumerate(setting.answers):
        if name not in answer:
            raise RuntimeError(f"rank {rank} gave no answer; see the launch")
        if "error" in answer[name]:
            raise RuntimeError(f"rank {rank}: {answer[name]['error']}")
    return [answer[name]["found"] for answer in setting.answers]


# ---- the checks ----------------------------------------------------------------------------------


def collective(setting: Setting, operation: str) -> Finding:
    errors = _answers(setting, operation)
    worst = max(errors) if all(map(math.isfinite, errors)) else math.inf
    return Finding(worst, 0, f"largest error on any rank{_alone(setting)}")


def trained(setting: Setting, name: str) -> Finding:
    """Any rank's losses and gradient norms against those of one process in fp32."""
    mesh = MESHES[name]
    said = ", ".join(one.partition(".")[2] or one for one in mesh.overrides(setting) if "model.base" not in one)
    compared = totals if mesh.bf16 else list
    alone = compared(setting.steps(*mesh.alone(setting)))
    worst = max(gap(compared(found), alone) for found in _answers(setting, name))
    what = "total losses of two steps against one process in fp32"
    if not mesh.bf16:
        what = "losses and gradient norms of two steps against one process"
    return Finding(worst, BF16_STEP if mesh.bf16 else FP32, f"{said}: {what}{_alone(setting)}")


def saved(setting: Setting) -> Finding:
    note = "losses and tensors that differ in the step after loading, written while training goes on"
    return Finding(sum(_answers(setting, SAVED)), 0, f"{note}{_alone(setting)}{kernels(setting)}")


def _alone(setting: Setting) -> str:
    if setting.world > 1:
        return ""
    return f"; what ranks exchange is not checked: needs 2 {_what(setting)}"


def _what(setting: Setting) -> str:
    return "GPUs" if setting.device.type == "cuda" else "ranks"

"""The checks of one process. Each gives a figure, the bound that it has to keep, and a word on what was measured."""

from __future__ import annotations

import gc
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from codmd.engine import checkpoint, shelf
from codmd.engine.loop import Trainer
from codmd.networks.adapters import AdapterNetwork, base_state
from codmd.rollout import rollout
from codmd.selftest.setting import (
    Finding,
    Setting,
    Skipped,
    captured,
    differing,
    distance,
    figures,
    gap,
    reproducible,
    state,
    totals,
)

FP32 = 1e-3
"""Same arithmetic in another order: rounding gives up to 1e-5 or so, a gradient's norm being what is left of a larger
sum; a wrong sum gives 1e-2 and more."""
BF16 = 0.03
"""One number is rounded by up to 0.4%, which five layers make 1%, and four of their calls 2%."""
BF16_STEP = 0.1
"""A few samples' loss at the end of all that: up to 5% was seen on one seed or another."""


# ---- bf16 against fp32 ---------------------------------------------------------------------------


def bf16_velocity(setting: Setting) -> Finding:
    low, high = (_velocity(setting.trainer(f"train.precision={p}")) for p in ("bf16", "fp32"))
    return Finding(distance({"v": low}, {"v": high}), BF16, "‖bf16 - fp32‖ / ‖fp32‖ of one forward")


def bf16_gradient(setting: Setting) -> Finding:
    low, high = (_gradient(setting.trainer(f"train.precision={p}")) for p in ("bf16", "fp32"))
    return Finding(distance(low, high), BF16, "the same of all weights' gradients of mean v²")


def bf16_rollout(setting: Setting) -> Finding:
    low, high = (_clip(setting.trainer(f"train.precision={p}")) for p in ("bf16", "fp32"))
    return Finding(distance({"x0": low}, {"x0": high}), 2 * BF16, "the same of x0 after the student's four steps")


def bf16_step(setting: Setting) -> Finding:
    low, high = (totals(setting.steps(*more)) for more in (("train.precision=bf16",), ()))
    return Finding(gap(low, high), BF16_STEP, "total losses of two training steps")


def _velocity(trainer: Trainer) -> Tensor:
    part = trainer.parts()[0]
    t = torch.linspace(0.3, 0.9, len(part.ids), device=trainer.device)
    return trainer.roles.student.velocity(part.draws.noise("x"), t, part.text)


def _gradient(trainer: Trainer) -> dict[str, Tensor]:
    _velocity(trainer).float().square().mean().backward()
    return {name: p.grad for name, p in trainer.roles.student.learned().items() if p.grad is not None}


@torch.no_grad()
def _clip(trainer: Trainer) -> Tensor:
    part = trainer.parts()[0]
    noise = part.draws.noise
    student = trainer.roles.student.x0
    steps = trainer.recipe.rollout.steps
    return rollout(student, noise("rollout 0"), part.text, steps, lambda j: noise(f"rollout {j}"))


# ---- what trades time against memory -------------------------------------------------------------


def recomputed_blocks(setting: Setting) -> Finding:
    return _recomputed(setting, "blocks")


def recomputed_all_but_attention(setting: Setting) -> Finding:
    return _recomputed(setting, "selective")


def _recomputed(setting: Setting, kept: str) -> Finding:
    ours, theirs = (captured(setting.trainer(f"compute.checkpointing={how}")) for how in (kept, "none"))
    return Finding(distance(ours, theirs), FP32, f'checkpointing = "{kept}": gradients of a step, student and fake')


def compiled_blocks(setting: Setting) -> Finding:
    missing = _missing_for_compile(setting.device)
    if missing:
        raise Skipped(f"needs {missing}")
    # One call of the student and one step, so that few graphs have to be made.
    short = ("rollout.steps=[1.0]", "train.iterations=1")
    try:
        ours = figures(setting.trainer("compute.compile=true", *short), 1)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch._dynamo.reset()
    note = f"torch.compile, {graphs} graphs: losses and gradient norms of a step"
    if not graphs:
        return Finding(math.inf, FP32, "nothing was compiled")
    return Finding(gap(ours, figures(setting.trainer(*short), 1)), FP32, note)


def _missing_for_compile(device: torch.device) -> str:
    """What torch.compile lacks on this machine; empty where it lacks nothing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("gcc") or shutil.which("clang")
        return "" if has_triton() and compiler else "triton and a C compiler"
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    return "" if compiler else "a C++ compiler"


def offloaded_teacher(setting: Setting) -> Finding:
    trainer = setting.trainer("compute.offload_teacher=true")
    ours = figures(trainer)
    waiting = {p.device.type for p in trainer.roles.teacher.network.parameters()}
    if waiting != {"cpu"}:
        return Finding(math.inf, FP32, f"the teacher is on {', '.join(sorted(waiting))} after a step, expected cpu")
    note = "losses and gradient norms of two steps"
    note += "; nothing moves on a CPU" if setting.device.type == "cpu" else ""
    return Finding(gap(ours, setting.steps()), FP32, note)


# ---- adapters, checkpoints, memory ---------------------------------------------------------------


def adapters(setting: Setting) -> Finding:
    trainer = setting.trainer("mode=adapter", "train.precision=bf16")
    teacher, part = trainer.roles.teacher, trainer.parts()[0]
    assert isinstance(teacher.network, AdapterNetwork)
    shared = base_state(teacher.network)
    x, t = part.draws.noise("x"), torch.full((len(part.ids),), 0.7, device=setting.device)

    @torch.no_grad()
    def answer() -> dict[str, Tensor]:
        weights = {name: tensor.clone() for name, tensor in shared.items()}
        return weights | {"its guided velocity": teacher.velocity(x, t, part.text)}

    before, learned = answer(), state(trainer)
    losses = figures(trainer)
    finite = all(math.isfinite(value) for record in losses for value in record.values())
    moved = differing(state(trainer), learned)
    if not (finite and moved):
        return Finding(math.inf, 0, f"losses finite: {finite}; {moved} of {len(learned)} tensors learned")
    note = f"tensors of the teacher, its answer too, that two steps changed, of {len(before)}; adapters learned"
    return Finding(differing(answer(), before), 0, note)


def checkpoint_at_once(setting: Setting) -> Finding:
    return _round_trip(setting, asynchronous=False)


def checkpoint_in_background(setting: Setting) -> Finding:
    return _round_trip(setting, asynchronous=True)


def _round_trip(setting: Setting, *, asynchronous: bool) -> Finding:
    with tempfile.TemporaryDirectory(dir=setting.scratch) as folder, reproducible():
        first, second = (setting.trainer("train.ema_decay=0.9") for _ in range(2))
        apart = resumed(Path(folder), first, second, asynchronous=asynchronous)
    note = "losses and tensors that differ in the step after loading"
    note += ", written while training goes on" if asynchronous else ""
    return Finding(apart, 0, note + kernels(setting))


def resumed(run: Path, first: Trainer, second: Trainer, *, asynchronous: bool) -> int:
    """Saves the first trainer after a step, loads the second from it, and counts what differs a step later."""
    first.iterate()
    about = {"kind": "student"}
    if asynchronous:
        background = checkpoint.Background(first.ranks)
        background.write(run, checkpoint.stage(first, about, None, copy=True), lambda folder: None)
        expected = figures(first, 1)
        background.wait()
    else:
        checkpoint.save(run, first, about, None)
        expected = figures(first, 1)
    start = shelf.newest_whole(run)
    assert start is not None, "no checkpoint was committed"
    checkpoint.load(start, second)
    found = figures(second, 1)
    losses = sum(found[0].get(name) != value for name, value in expected[0].items())
    return losses + differing(state(second), state(first))


def kernels(setting: Setting) -> str:
    return "; attention by its math kernel, reproducible" if setting.device.type == "cuda" else ""


def peak_memory(setting: Setting) -> Finding:
    """What stands there when the fake network's gradients are complete, against the most that was ever there."""
    if setting.device.type != "cuda":
        raise Skipped("needs a GPU, where torch counts memory")
    setting.trainer().iterate()  # cuBLAS takes its own memory at the first call
    gc.collect()
    before = torch.cuda.memory_allocated(setting.device)
    trainer = setting.trainer()
    trainer.iterate()  # AdamW's moments are there from the first update on
    torch.cuda.reset_peak_memory_stats(setting.device)
    trainer.iterate()
    peak = torch.cuda.max_memory_allocated(setting.device) - before
    learning = [p for role in (trainer.student, trainer.fake) for p in role.parameters]
    own = sum(p.numel() * p.element_size() for p in learning)
    count = own + sum(p.numel() * p.element_size() for p in trainer.roles.teacher.network.parameters()) + own + 2 * own
    note = f"count / peak: weights, gradients and moments {count / 1e6:.1f} MB, peak of a step {peak / 1e6:.1f} MB"
    return Finding(count / peak, 1, note)

"""`codmd selftest`: one check after the other, whatever becomes of each, then the report."""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import torch

from codmd.errors import UserError
from codmd.files import write_whole
from codmd.selftest import across, checks, machine
from codmd.selftest.report import Line, page
from codmd.selftest.setting import Finding, Setting, Skipped, fp32_is_fp32

FAILED = 1
Check = Callable[[Setting], Finding]
CHECKS: Mapping[str, Check] = {
    "bf16: velocity": checks.bf16_velocity,
    "bf16: gradient": checks.bf16_gradient,
    "bf16: rollout": checks.bf16_rollout,
    "bf16: training step": checks.bf16_step,
    "recomputed blocks": checks.recomputed_blocks,
    "recomputed, attention kept": checks.recomputed_all_but_attention,
    "compiled blocks": checks.compiled_blocks,
    "offloaded teacher": checks.offloaded_teacher,
    "adapters": checks.adapters,
    "checkpoint": checks.checkpoint_at_once,
    "checkpoint, asynchronous": checks.checkpoint_in_background,
    "peak memory": checks.peak_memory,
    "ranks: launch": across.launched,
    **{f"ranks: {name}": partial(across.collective, operation=name) for name in across.COLLECTIVES},
    "ranks: FSDP2": partial(across.trained, name="sharded"),
    "ranks: FSDP2, as for large models": partial(across.trained, name="large"),
    "ranks: FSDP2, adapters": partial(across.trained, name="adapters"),
    "ranks: HSDP": partial(across.trained, name="hybrid"),
    "ranks: context, ulysses": partial(across.trained, name="ulysses"),
    "ranks: context, ring": partial(across.trained, name="ring"),
    "ranks: checkpoint, asynchronous": across.saved,
}


def run(*, device: str | None = None, ranks: int | None = None, out: Path = Path("runs/selftest")) -> None:
    """Prints the report; exit code 1 if a check failed."""
    on = _device(device)
    world = _world(on, ranks)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file; --out needs a folder")
    out.mkdir(parents=True, exist_ok=True)
    fp32_is_fp32()
    facts = machine.facts(on, world)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="codmd-") as scratch, (out / "log.txt").open("w", encoding="utf-8") as log:
        setting = Setting(on, world, out, Path(scratch))
        for number, (name, check) in enumerate(CHECKS.items(), 1):
            print(f"[{number}/{len(CHECKS)}] {name} ... ", end="", file=sys.stderr, flush=True)
            lines.append(examined(name, check, setting, log))
            print(lines[-1].verdict, file=sys.stderr, flush=True)
            # After each: what was found is there even if the next one takes the process with it.
            write_whole(out / "report.md", page(facts, lines).encode())
    print(page(facts, lines), end="")
    failed = [line.name for line in lines if line.verdict == "FAIL"]
    if failed:
        print(f"failed: {', '.join(failed)}; details in {out}", file=sys.stderr)
        raise SystemExit(FAILED)


def examined(name: str, check: Check, setting: Setting, log: IO[str]) -> Line:
    """What becomes of one check. What it prints, and the traceback if it crashes, go to the log."""
    print(f"---- {name}", file=log, flush=True)
    begun = time.monotonic()
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            figure, bound, note = check(setting)
        line = Line(name, "PASS" if figure <= bound else "FAIL", time.monotonic() - begun, note, figure, bound)
    except Skipped as reason:
        line = Line(name, "SKIPPED", time.monotonic() - begun, f"not checked: {reason}")
    except Exception as error:
        traceback.print_exc(file=log)
        first = next(iter(str(error).strip().splitlines()), "")
        line = Line(name, "FAIL", time.monotonic() - begun, f"{type(error).__name__}: {first}")
    gc.collect()
    if setting.device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a device that a check has left in error says so in each check
            torch.cuda.empty_cache()
    log.flush()
    return line


def _device(asked: str | None) -> torch.device:
    if asked not in (None, "cpu", "cuda"):
        raise UserError(f'--device: expected cpu or cuda, got "{asked}"')
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device: torch {torch.__version__} finds no GPU here; --device cpu checks what it can")
    return torch.device("cuda", 0) if asked != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def _world(device: torch.device, asked: int | None) -> int:
    gpus = torch.cuda.device_count() if device.type == "cuda" else None
    if asked is None:
        return gpus or 2
    if asked < 1:
        raise UserError(f"--ranks: expected at least 1, got {asked}")
    if gpus is not None and asked > gpus:
        raise UserError(f"--ranks: each rank needs a GPU of its own, got {asked} ranks and {gpus} here")
    return asked

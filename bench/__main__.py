"""`python -m bench`: the ratios, as a table and as JSON, and on request as docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import codmd
from bench.denoising import student_against_teacher
from bench.memory import peak
from bench.scaling import adapters_against_full, asynchronous_stall, two_ranks_against_one
from bench.schedule import against_release, evaluations_of_both
from bench.timing import Ratio
from bench.training import codmd_against_dmd, step_against_passes, trainer
from codmd.errors import UserError
from codmd.files import write_whole
from codmd.models import load_model


@dataclass(frozen=True, kw_only=True)
class Line:
    """A ratio, and what it has to be. `must` holds or the command fails; `aim` is reported."""

    what: str
    value: float
    interval: tuple[float, float] | None = None
    at_least: float | None = None
    must: float | None = None
    aim: float | None = None
    aim_at_least: float | None = None
    spread: str = "exact"
    """What stands where there is no interval."""
    detail: str = ""

    @property
    def fails(self) -> bool:
        if self.at_least is not None and self.value < self.at_least:
            return True
        return self.must is not None and self.value > self.must

    def verdict(self) -> str:
        said = []
        if self.at_least is not None:
            said.append(f"must be ≥ {self.at_least:g}: {'yes' if self.value >= self.at_least else 'NO'}")
        if self.must is not None:
            said.append(f"must be ≤ {self.must:g}: {'yes' if self.value <= self.must else 'NO'}")
        if self.aim is not None:
            said.append(f"aim ≤ {self.aim:g}: {'yes' if self.value <= self.aim else 'no'}")
        if self.aim_at_least is not None:
            said.append(f"aim ≥ {self.aim_at_least:g}: {'yes' if self.value >= self.aim_at_least else 'no'}")
        return "; ".join(said)

    def cells(self) -> tuple[str, str, str, str, str]:
        interval = f"{self.interval[0]:.3f} to {self.interval[1]:.3f}" if self.interval else self.spread
        return self.what, f"{self.value:.3f}", interval, self.verdict(), self.detail


ROUNDS = {"denoise": 7, "step": 24, "bare": 12, "schedule": 6, "save": 7, "ranks": 3}
HEAD = ("ratio", "value", "interval", "required", "measured")


def timed(what: str, ratio: Ratio, **required: float) -> Line:
    a, b = ratio.seconds
    return Line(
        what=what,
        value=ratio.median,
        interval=(ratio.low, ratio.high),
        detail=f"{a:.3g} s against {b:.3g} s, {ratio.pairs} pairs",
        **required,  # type: ignore[arg-type]
    )


def measure(base: str, quick: bool, scale: float) -> list[Line]:
    """All of it. `quick` shows that everything runs, and proves nothing."""
    model = load_model(base)
    small = ("train.batch=2",) if quick else ()
    rounds = {name: max(2, round(scale * n)) for name, n in ROUNDS.items()}
    if quick:
        rounds = dict.fromkeys(rounds, 2)

    def say(what: str) -> None:
        print(f"measuring {what}", file=sys.stderr, flush=True)

    say("the teacher and a student")
    speed = student_against_teacher(model, rounds["denoise"], clips=2 if quick else 8, steps=5 if quick else None)
    say("steps of CoDMD and of DMD")
    steps = codmd_against_dmd(model, rounds["step"], *small)
    say("a step and its network passes")
    bare = step_against_passes(model, rounds["bare"], "codmd", *small)
    say("the authors' schedule")
    counted, release = evaluations_of_both(model)
    again, release_again = evaluations_of_both(model, "compute.checkpointing=blocks")
    parts, _ = evaluations_of_both(model, "train.micro_batch=1")
    schedule = against_release(model, rounds["schedule"], *small)
    say("checkpoints that are written meanwhile")
    stall, save = asynchronous_stall(model, rounds["save"])
    say("one rank and two")
    ranks = [] if quick else [two_ranks_against_one(rounds["ranks"])]
    say("adapters")
    adapters, full = adapters_against_full()
    say("memory")
    ours, theirs = (peak(trainer(model, method, *small)) for method in ("codmd", "dmd"))
    mib = 2**20
    return [
        timed("teacher / student, denoising only", speed["denoising"], at_least=20.0),
        timed("teacher / student, from text to pixels", speed["whole"]),
        timed("CoDMD / DMD, an iteration in which the student learns", steps["turn"], must=1.03, aim=1.01),
        timed("CoDMD / DMD, a cycle of iterations", steps["cycle"], must=1.03, aim=1.01),
        timed("training / bare network passes, a cycle of CoDMD", bare, aim=1.05),
        Line(
            what="network evaluations of a sample in five iterations",
            value=counted,
            must=32.5,
            detail="forwards; a backward is two",
        ),
        Line(what="the same, with recomputed blocks", value=again, must=38.5, detail="blocks that are computed again"),
        Line(what="the same, in two passes over parts of the batch", value=parts, must=33.5, detail="one forward more"),
        Line(what="network evaluations by the authors' schedule", value=release, detail="forwards; a backward is two"),
        Line(
            what="by the authors' schedule, with recomputed blocks",
            value=release_again,
            detail="blocks that are computed again",
        ),
        timed("our schedule / the authors', four times five iterations", schedule, aim=0.77),
        Line(
            what="stall for a checkpoint written meanwhile / a save at once",
            value=stall / save,
            aim=0.10,
            spread="medians",
            detail=f"{stall * 1000:.0f} ms against {save * 1000:.0f} ms",
        ),
        *(
            Line(
                what="one rank / two, a cycle of iterations, one thread each",
                value=alone / together,
                aim_at_least=1.7,
                spread="medians",
                detail=f"{alone:.3g} s against {together:.3g} s",
            )
            for alone, together in ranks
        ),
        Line(
            what="adapters of rank 16 / full, weights, gradients and optimizer",
            value=adapters / full,
            must=0.35,
            detail=f"{adapters / mib:.1f} MiB against {full / mib:.1f} MiB",
        ),
        Line(
            what="CoDMD / DMD, peak memory",
            value=ours.total / theirs.total,
            aim=1.01,
            detail=f"{ours.total / mib:.1f} MiB against {theirs.total / mib:.1f} MiB",
        ),
        Line(
            what="CoDMD / DMD, peak memory beyond weights and moments",
            value=ours.step / theirs.step,
            aim=1.01,
            detail=f"{ours.step / mib:.1f} MiB against {theirs.step / mib:.1f} MiB",
        ),
    ]


def facts(base: str) -> dict[str, str]:
    return {
        "model": base,
        "threads": str(torch.get_num_threads()),
        "machine": f"{os.cpu_count()} × {platform.machine()}",
        "load at the end": f"{os.getloadavg()[0]:.1f}",
        "codmd": codmd.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def markdown(lines: list[Line], about: dict[str, str], quick: bool, scale: float = 1.0) -> str:
    table = [HEAD, ("---", "---:", "---:", "---", "---"), *(line.cells() for line in lines)]
    rows = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    said = "\n".join(f"- {key}: {value}" for key, value in about.items())
    warning = "\n**A quick run: it shows that everything runs, and proves nothing.**\n" if quick else ""
    command = "python -m bench --report docs/benchmarks.md" + (f" --scale {scale:g}" if scale != 1 else "")
    return f"""# Speed and memory

Ratios, each measured in one run. Written by `{command}`.
{warning}
{rows}

{said}

How: two ways of doing something are timed in turns, with the same prompts, noise and exits, and the order changes from
round to round; the figure is the median of the paired ratios, with an interval from their order statistics (95% from
six pairs on). "Denoising only" leaves out text encoding and decoding. "Bare network passes" are the forwards and
backwards of an iteration on tensors of the same shapes, without noise, losses, clipping, optimizers or records: a
student's forward for each step before the exit and at it, guided teacher and fake network on its result, the fake
network's own forward, and the two backwards. The authors' schedule is that of their release: it simulates three steps
whatever the exit and then picks one, and rolls out anew for the fake network; networks, objective, optimizers and batch
are the same. Its evaluations and ours are counted as the networks are called, and both are timed, over iterations in
which every exit occurs equally often. Memory is the profiler's count of every allocation in an iteration in
which the student learns, beside the weights and the optimizers' moments; the count is exact and the same each time.
A stall is the time in which training stands still: copying what is to be saved, and starting to write it. Two ranks
are two processes with half of the batch each, FSDP2 over gloo, on one machine; each process is the command itself.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--base", default="mini", help='"mini" or a folder with a pipeline')
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for bench.json")
    parser.add_argument("--report", type=Path, help="also write this file, for example docs/benchmarks.md")
    parser.add_argument("--quick", action="store_true", help="shows that everything runs, proves nothing")
    parser.add_argument("--threads", type=int, help="of torch; by default its own choice")
    parser.add_argument("--scale", type=float, default=1.0, help="more rounds, or fewer")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        lines = measure(given.base, given.quick, given.scale)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = facts(given.base)
    cells = [HEAD, *(line.cells() for line in lines)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEAD))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    content = {"lines": [asdict(line) for line in lines], "facts": about, "quick": given.quick}
    write_whole(given.out / "bench.json", (json.dumps(content, indent=1) + "\n").encode())
    if given.report:
        write_whole(given.report, markdown(lines, about, given.quick, given.scale).encode())
    return 1 if not given.quick and any(line.fails for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())

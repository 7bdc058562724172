"""`python -m bench.chaos`: a run is killed, stopped, torn apart and starved, and must go on as if nothing had happened.

Each cell starts the real command on the shipped miniature, does it some harm from outside, runs the same command
again, and compares with a run that nobody disturbed: losses and gradient norms line by line, and every tensor of the
last checkpoint, which holds the student, the fake network, the average and the optimizers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bench.reliability import page
from bench.sitting import Failed, Sitting, close, lines, same
from codmd.engine import shelf
from codmd.engine.heartbeat import LOST, PATIENCE
from codmd.files import write_whole

ITERATIONS, EVERY = 8, 3
"""The student learns at steps 0, 3 and 6."""
AFTER, BETWEEN = 4, 5
"""Checkpoints to cut at: right after a student's update, and between two."""
SETTING = (
    "train.batch=4", f"train.iterations={ITERATIONS}", f"train.student_every={EVERY}", "train.checkpoint_every=1",
    "train.student_lr=1e-6", "train.fake_lr=1e-6", "train.ema_decay=0.9", "validation.every=0",
)  # fmt: skip
ADAPTER = ("mode=adapter", "adapter.rank=4", 'adapter.base_dtype="fp32"')
DISK = 480 * 2**20
"""Bytes of the disk that is filled: room for four checkpoints of the miniature."""
MODES: tuple[Literal["full", "adapter"], ...] = ("full", "adapter")
KILL, TORN, TERM, INTERRUPT, SCHEDULER, RESTART, LOST_FIRST, LOST_LAST, FROZEN, STARVED = (
    "SIGKILL",
    "SIGKILL in the middle of a checkpoint",
    "SIGTERM to one rank",
    "SIGINT to one rank",
    "SIGTERM to torchrun and each rank",
    "rank 1 killed, torchrun --max-restarts=1",
    "rank 0 killed, no torchrun",
    "rank 1 killed, no torchrun",
    "rank 1 frozen, no torchrun",
    "disk full for a while",
)
OTHER_RANKS: tuple[tuple[Literal["full", "adapter"], int, Literal["fp32", "fp64"]], ...] = (
    ("full", AFTER, "fp64"),
    ("full", BETWEEN, "fp32"),
    ("adapter", AFTER, "fp32"),
)
CLOSE = {"fp64": (1e-12, 1e-12), "fp32": (1e-5, 1e-6)}
"""How far runs on other numbers of ranks may be apart: losses relative, weights ‖Δ‖/‖θ‖ of each network.

A loss of the trained miniature magnifies fp32's rounding some ten times; fp64 shows that it is rounding and no more.
"""
TRIES = 3
"""A process is killed between two looks at its folder, so now and then a moment too late."""


class TooLate(Failed):
    """The run had gone on before it could be harmed where it was to be."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run, and what happens to it."""

    accident: str
    mode: Literal["full", "adapter"] = "full"
    ranks: int = 1
    then: int | None = None
    """Ranks of the second sitting, where it has others."""
    cut: int = AFTER
    """The checkpoint after which it happens."""
    asynchronous: bool = False
    precision: Literal["fp32", "fp64"] = "fp32"

    @property
    def name(self) -> str:
        ranks = f"{self.ranks}" if self.then is None else f"{self.ranks} to {self.then}"
        where = "after a student's update" if self.cut == AFTER else "between two"
        said = [self.mode, f"{ranks} rank{'s' * (ranks != '1')}", where, self.accident]
        return ", ".join(said + ["asynchronous"] * self.asynchronous + ["fp64"] * (self.precision == "fp64"))


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder for all runs, and those in it that nobody disturbed."""

    folder: Path
    more: tuple[str, ...] = ()
    """Settings beyond the matrix' own."""
    undisturbed: dict[tuple[str, int, str], Path] = field(default_factory=dict)

    def sitting(
        self, cell: Cell, out: Path, *, ranks: int | None = None, launcher: Sequence[str] | None = ()
    ) -> Sitting:
        settings = [
            *SETTING,
            *(ADAPTER if cell.mode == "adapter" else ()),
            f"train.precision={cell.precision}",
            *self.more,
        ]
        settings += ["train.asynchronous=true"] * cell.asynchronous
        return Sitting(out, settings, ranks or cell.ranks, launcher=launcher)

    def reference(self, cell: Cell) -> Path:
        """The same run undisturbed. It waits for each checkpoint, whatever the cell does."""
        key = cell.mode, cell.ranks, cell.precision
        if key not in self.undisturbed:
            out = self.folder / "-".join(["undisturbed", *map(str, key)])
            with self.sitting(replace(cell, asynchronous=False), out) as sitting:
                if any(sitting.end()):
                    raise Failed(f"undisturbed: {sitting.last_words()}")
            self.undisturbed[key] = out
        return self.undisturbed[key]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    cell: Cell
    told: str
    """What happened; of a cell that failed, what is wrong."""
    out: Path
    difference: str | None = None
    """From the undisturbed run. None: the cell failed."""

    @property
    def failed(self) -> bool:
        return self.difference is None

    def columns(self) -> tuple[str, str, str, str]:
        return self.cell.name, "FAILED" if self.failed else "passed", self.difference or "", self.told


def attempt(place: Place, cell: Cell) -> Outcome:
    """Harms a run, runs the same command again, compares."""
    try:
        reference = place.reference(cell)
        for left in reversed(range(TRIES)):
            out = Path(tempfile.mkdtemp(prefix="cell-", dir=place.folder)) / "run"
            try:
                told = ACCIDENTS[cell.accident](place, cell, out)
                break
            except TooLate:
                if not left:
                    raise
        with place.sitting(cell, out, ranks=cell.then) as sitting:
            if any(sitting.end()):
                raise Failed(f"the same command again: {sitting.last_words()}")
            step = sitting.went_on_from()
        if step is None:
            raise Failed("it began anew")
        if step < ITERATIONS:
            told = f"{told}; went on from step {step}".removeprefix("; ")
        if cell.then is None:
            same(out, reference)
            difference = "0 (bit for bit)"
        else:
            losses, weights = close(out, reference, *CLOSE[cell.precision])
            difference = f"losses {losses:.1e}, weights {weights:.1e}"
        return Outcome(cell=cell, told=told, out=out, difference=difference)
    except Failed as error:
        return Outcome(cell=cell, told=str(error), out=place.folder)


# ---- accidents -----------------------------------------------------------------------------------

Accident = Callable[[Place, Cell, Path], str]
"""Starts a run in a folder, harms it, and says what is to be told of it."""


def reached(out: Path, step: int) -> Callable[[], bool]:
    """Whether a step's line is written, and the checkpoint after it committed."""
    return lambda: len(lines(out)) >= step and shelf.folder_of(out, step).exists()


def killed(place: Place, cell: Cell, out: Path) -> str:
    with place.sitting(cell, out) as sitting:
        sitting.until(f"checkpoint {cell.cut}", reached(out, cell.cut))
        sitting.kill()
    newest = shelf.committed(out)[-1]
    if newest != shelf.folder_of(out, cell.cut):
        raise TooLate(f"killed after {newest.name}")
    return ""


def killed_while_writing(place: Place, cell: Cell, out: Path) -> str:
    aside = shelf.folder_of(out, cell.cut).with_name(f".step-{cell.cut:06d}.writing")
    with place.sitting(cell, out) as sitting:
        sitting.until(f"writing of checkpoint {cell.cut}", lambda: any((aside / "state").glob("*")))
        sitting.kill()
    if not aside.exists():
        raise TooLate(f"killed when {shelf.committed(out)[-1].name} was whole")
    return ""


def signalled(number: signal.Signals) -> Accident:
    """To the last rank; under torchrun nobody tells the others."""
    code = 128 + number

    def signalled(place: Place, cell: Cell, out: Path) -> str:
        with place.sitting(cell, out) as sitting:
            sitting.until(f"checkpoint {cell.cut}", reached(out, cell.cut))
            began = time.monotonic()
            os.kill(sitting.worker(cell.ranks - 1), number)
            codes = sitting.end()
            seconds = time.monotonic() - began
        if cell.ranks == 1 and codes != [code]:
            raise Failed(f"exit code {codes[0]}, expected {code}")
        if cell.ranks > 1 and re.findall(r"exitcode +: (-?\d+)", sitting.words()) != [str(code)] * cell.ranks:
            raise Failed(f"torchrun's report does not have exit code {code} for each rank: {sitting.last_words()}")
        done, newest = len(lines(out)), shelf.committed(out)[-1]
        # It falls into the step after the cut; where that one was over when it came, into the next.
        if newest != shelf.folder_of(out, done) or done > cell.cut + 2:
            raise Failed(f"{done} steps, and the newest checkpoint is {newest.name}")
        if shelf.damage(newest) is not None:
            raise Failed(f"{newest.name}: {shelf.damage(newest)}")
        return f"each rank: exit code {code}, {seconds:.1f} s later, at a checkpoint"

    return signalled


def told_twice(place: Place, cell: Cell, out: Path) -> str:
    """What a scheduler does; torchrun then passes its own on."""
    with place.sitting(cell, out) as sitting:
        sitting.until(f"checkpoint {cell.cut}", reached(out, cell.cut))
        for pid in (*map(sitting.worker, range(cell.ranks)), sitting.processes[0].pid):
            os.kill(pid, signal.SIGTERM)
        sitting.end()
    done = len(lines(out))
    if f"stopped after {done} iterations" not in sitting.words():
        raise Failed(f"it did not end by itself: {sitting.last_words()}")
    if shelf.committed(out)[-1] != shelf.folder_of(out, done):
        raise Failed(f"{done} steps, and the newest checkpoint is {shelf.committed(out)[-1].name}")
    return "it ended by itself, at a checkpoint"


def restarted(place: Place, cell: Cell, out: Path) -> str:
    with place.sitting(cell, out, launcher=("--max-restarts=1",)) as sitting:
        sitting.until(f"checkpoint {cell.cut}", reached(out, cell.cut))
        os.kill(sitting.worker(1), signal.SIGKILL)
        if any(sitting.end()) or sitting.went_on_from() is None:
            raise Failed(f"it was not restarted: {sitting.last_words()}")
        return f"torchrun started both anew, from step {sitting.went_on_from()}"


def lost(rank: int, number: signal.Signals) -> Accident:
    """Nobody starts, watches or ends the ranks but themselves."""

    def lost(place: Place, cell: Cell, out: Path) -> str:
        with place.sitting(cell, out, launcher=None) as sitting:
            sitting.until(f"checkpoint {cell.cut}", reached(out, cell.cut))
            began = time.monotonic()
            os.kill(sitting.worker(rank), number)
            try:
                code = sitting.processes[1 - rank].wait(2 * PATIENCE)
            except subprocess.TimeoutExpired:
                raise Failed("the other rank hangs") from None
            seconds = time.monotonic() - began
        said = [line for line in sitting.words().splitlines() if re.match(r"error:|.*Traceback", line)]
        if code != LOST or len(said) != 1 or f"error: rank {rank} " not in said[0]:
            raise Failed(f"exit code {code}, expected {LOST}; said: {' / '.join(said) or sitting.last_words()}")
        return f"the other rank named it and ended with code {code}, {seconds:.1f} s later"

    return lost


def starved(place: Place, cell: Cell, out: Path) -> str:
    """The folder is a small disk of its own."""
    disk = out.with_name("disk")
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        raise Failed(f"this cell needs the right to mount a disk: {mounted.stderr.strip()}")
    try:
        run, ballast = disk / "run", disk / "ballast"
        with place.sitting(cell, run) as sitting:
            sitting.until(f"checkpoint {cell.cut}", reached(run, cell.cut))
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**20))
            sitting.until("warning", lambda: "no checkpoint, the disk is full" in sitting.words())
            whole = [folder.name for folder in shelf.committed(run) if shelf.damage(folder) is None]
            if not whole:
                raise Failed("no whole checkpoint is left")
            ballast.unlink()
            if any(sitting.end()):
                raise Failed(sitting.last_words())
        times = sitting.words().count("no checkpoint, the disk is full")
        shutil.copytree(run, out, symlinks=True)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    return f"without {times} checkpoint{'s' * (times != 1)}, with {whole[-1]} kept, it went on to its end"


ACCIDENTS: dict[str, Accident] = {
    KILL: killed,
    TORN: killed_while_writing,
    TERM: signalled(signal.SIGTERM),
    INTERRUPT: signalled(signal.SIGINT),
    SCHEDULER: told_twice,
    RESTART: restarted,
    LOST_FIRST: lost(0, signal.SIGKILL),
    LOST_LAST: lost(1, signal.SIGKILL),
    FROZEN: lost(1, signal.SIGSTOP),
    STARVED: starved,
}


def matrix() -> list[Cell]:
    return [
        *(
            Cell(accident=KILL, mode=mode, ranks=ranks, cut=cut)
            for mode in MODES
            for ranks in (1, 2)
            for cut in (AFTER, BETWEEN)
        ),
        *(
            Cell(accident=KILL, mode=mode, ranks=ranks, then=3 - ranks, cut=cut, precision=precision)
            for mode, cut, precision in OTHER_RANKS
            for ranks in (1, 2)
        ),
        Cell(accident=TORN),
        Cell(accident=TORN, cut=BETWEEN, asynchronous=True),
        Cell(accident=TORN, ranks=2, asynchronous=True),
        Cell(accident=TORN, mode="adapter", ranks=2, cut=BETWEEN, asynchronous=True),
        Cell(accident=TERM, ranks=2),
        Cell(accident=TERM, mode="adapter", ranks=2, cut=BETWEEN, asynchronous=True),
        Cell(accident=INTERRUPT, cut=BETWEEN),
        Cell(accident=INTERRUPT, ranks=2, cut=BETWEEN),
        Cell(accident=SCHEDULER, ranks=2),
        Cell(accident=RESTART, ranks=2),
        Cell(accident=RESTART, mode="adapter", ranks=2, cut=BETWEEN, asynchronous=True),
        Cell(accident=LOST_FIRST, ranks=2, cut=BETWEEN),
        Cell(accident=LOST_LAST, ranks=2),
        Cell(accident=LOST_LAST, mode="adapter", ranks=2, asynchronous=True),
        Cell(accident=FROZEN, ranks=2),
        Cell(accident=STARVED),
        Cell(accident=STARVED, ranks=2, cut=BETWEEN, asynchronous=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--cell", action="append", default=[], help="only cells whose name holds this; again for more")
    parser.add_argument("--report", type=Path, help="also write this page, for example docs/reliability.md")
    parser.add_argument("--list", action="store_true", help="name the cells and stop")
    given = parser.parse_args()
    cells = [cell for cell in matrix() if not given.cell or any(part in cell.name for part in given.cell)]
    if not cells or (given.report and given.cell):
        parser.error("no cell has such a name: see --list" if not cells else "a report is of all cells: no --cell")
    if given.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        place = Place(folder=Path(folder))
        for cell in cells:
            outcomes.append(attempt(place, cell))
            print("  ".join(column for column in outcomes[-1].columns() if column), flush=True)
    if given.report:
        rows = [outcome.columns() for outcome in outcomes]
        about = f"settings: `{' '.join(SETTING)}`; for adapters also `{' '.join(ADAPTER)}`"
        write_whole(given.report, page(rows, about).encode())
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

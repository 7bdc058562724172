"""What a run says of itself: a line of JSON for each step, other trackers, seconds by phase."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from codmd.engine.ranks import Ranks
from codmd.errors import UserError
from codmd.files import write_whole
from codmd.relations import gather_samples, pool_samples, relation_matrix, relation_residual


@runtime_checkable
class Tracker(Protocol):
    """Something that takes numbers by name at each step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line. What is from step `start` on is dropped: a resumed run writes it again.

    What a full disk does not take is kept, and written before the next line.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        kept = [json.dumps(record) for record in read_json_lines(path) if record["step"] < start]
        write_whole(path, "".join(f"{line}\n" for line in kept).encode())
        self.file = path.open("ab", buffering=0)
        self.unwritten = b""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        line = json.dumps({"step": step, **{k: _plain(v) for k, v in values.items()}})
        self.unwritten += f"{line}\n".encode()
        self._write()

    def _write(self) -> None:
        while self.unwritten:
            self.unwritten = self.unwritten[self.file.write(self.unwritten) :]

    def close(self) -> None:
        with self.file:
            self._write()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; a last line that a crash cut off is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class TensorBoard:
    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=start)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in _numbers(values).items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path) -> None:
        import wandb

        # The folder is the run: going on with it goes on with its page.
        identity = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
        self.run = wandb.init(project="codmd", name=folder.name, dir=str(folder), id=identity, resume="allow")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(_numbers(values), step=step)

    def close(self) -> None:
        self.run.finish()


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Clock:
    """Seconds by phase: `with clock("rollout"): ...`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._seconds = device, defaultdict[str, float](float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = self._now()
        try:
            yield
        finally:
            self._seconds[phase] += self._now() - begun

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        return {f"seconds/{phase}": round(spent, 5) for phase, spent in self._seconds.items()}


def residuals(real: Tensor, fake: Tensor, ranks: Ranks, pool_grid: int = 1) -> dict[str, float]:
    """max |S_fake - S_real| between frames and between all samples: the paper says it is typically below 0.4."""
    pooled = (gather_samples(pool_samples(x, pool_grid), ranks.data_group) for x in (real, fake))
    S_real, S_fake = map(relation_matrix, pooled)
    frames = relation_residual(real, fake, pool_grid)
    largest = {"residual/frame": frames.max(), "residual/batch": (S_fake - S_real).abs().max()}
    return ranks.largest({name: float(value) for name, value in largest.items()})


TRACKERS = ("tensorboard", "wandb")


def check_trackers(names: Sequence[str]) -> None:
    """Refuses a tracker that is unknown, or whose package is not there, before a run begins."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f'unknown tracker "{name}", known: {", ".join(TRACKERS)}')
        if find_spec(name) is None:
            raise UserError(f'train.track: {name} is not installed: pip install "codmd[track]"')


def open_trackers(names: Sequence[str], folder: Path, start: int) -> list[Tracker]:
    """The trackers of these names, for a run in `folder` that goes on at step `start`."""
    known: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", start),
        "wandb": lambda: WeightsAndBiases(folder),
    }
    check_trackers(names)
    return [known[name]() for name in names]

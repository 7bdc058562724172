"""What the miniature's trainings share: a progress bar with time left, data in order, files to go on from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from codmd.errors import UserError
from codmd.files import replacing, sync

SAY_EVERY = 20  # steps


def progress(title: str, start: int, steps: int) -> Iterator[tuple[int, Callable[[str], None]]]:
    """Yield (step, say) with a bar on a terminal, or a line every few seconds where there is none."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        begun = last = time.monotonic()
        said = [""]
        for step in range(start, steps):
            yield step, said.append
            now = time.monotonic()
            if now - last > 20 or step + 1 == steps:
                last = now
                left = (now - begun) / (step + 1 - start) * (steps - step - 1)
                console.print(f"{title} {step + 1}/{steps}, {left / 60:.1f} min left, {said[-1]}", highlight=False)
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[said]}"), console=console) as bar:
        task = bar.add_task(title, total=steps, completed=start, said="")
        for step in range(start, steps):
            yield step, lambda text: bar.update(task, said=text)
            bar.advance(task)


def in_order(data: Dataset[Any], start: int, stop: int, device: torch.device) -> Iterator[Any]:
    """Items `start` to `stop` of a data set, on the device; a GPU, which is faster, gets processes that make them."""
    workers = 0 if device.type == "cpu" else max(1, min(12, (os.cpu_count() or 1) - 2))
    for item in DataLoader(data, batch_size=None, sampler=range(start, stop), num_workers=workers):
        yield tuple(t.to(device) for t in item) if isinstance(item, list | tuple) else item.to(device)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to save to, which becomes `folder` once all went well: where it is there, it is whole."""
    aside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    for path in (*aside.rglob("*"), aside):
        sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    sync(folder.parent)


class TrainingState:
    """Weights and optimizers of a training in one safetensors file that is replaced whole; its step in the header."""

    def __init__(
        self, folder: Path, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        self.file, self.modules, self.optimizers = folder / "state.safetensors", modules, optimizers

    def save(self, step: int) -> None:
        """Write aside, sync, rename: a crash leaves the old file or the new one."""
        tensors = {
            f"{name}|{key}": value.detach().clone(
                memory_format=torch.contiguous_format
            )  # tied weights may not share memory in the file
            for name, module in self.modules.items()
            for key, value in module.state_dict().items()
        }
        groups = {}
        for name, optimizer in self.optimizers.items():
            saved = optimizer.state_dict()
            groups[name] = saved["param_groups"]
            for index, entry in saved["state"].items():
                tensors |= {f"{name}|{index}|{k}": torch.as_tensor(v).contiguous() for k, v in entry.items()}
        with replacing(self.file) as aside:
            save_file(tensors, aside, metadata={"step": str(step), "groups": json.dumps(groups)})

    def save_every(self, interval: int, step: int, steps: int) -> None:
        if step % interval == 0 or step == steps:
            self.save(step)

    def resume(self) -> int:
        """Load the saved state where there is one; the number of steps it has done."""
        if not self.file.exists():
            return 0
        try:
            from safetensors import safe_open

            with safe_open(self.file, "pt") as handle:
                header = handle.metadata()
            tensors = load_file(self.file)
        except Exception as error:
            raise UserError(f"{self.file} cannot be read ({error}); delete it to start the training anew") from error
        for name, module in self.modules.items():
            prefix = f"{name}|"
            module.load_state_dict({k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)})
        groups = json.loads(header["groups"])
        for name, optimizer in self.optimizers.items():
            state: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in tensors.items():
                if key.startswith(f"{name}|"):
                    _, index, entry = key.split("|")
                    state.setdefault(int(index), {})[entry] = value
            optimizer.load_state_dict({"state": state, "param_groups": groups[name]})
        return int(header["step"])

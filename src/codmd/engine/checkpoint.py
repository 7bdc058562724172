"""Checkpoints that are whole or not there. Safetensors, JSON and TOML only; nothing in them is pickled.

A run folder holds `checkpoints/step-000200/`, and `latest`, a link to the newest. Each checkpoint is a
student that `codmd sample` loads, and all that the run needs to go on as if it had never stopped::

    student/                  the transformer in the diffusers layout, averaged where there is an EMA
    sampling.json             its step list, and the base pipeline that it goes with
    state/                    the rest, some files a rank: the fake network, AdamW's moments, averages, and the
                              weights that learn, where they are not those in student/
    state.json, recipe.toml   counters; the resolved recipe
    manifest.json             size and SHA-256 of every file above

It is written beside its place, synced, and renamed into it: a crash leaves the old checkpoints or one more. Any number
of ranks may read what any other number wrote: `state/` is PyTorch's distributed checkpoint in safetensors.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from codmd.engine.learner import Learner
from codmd.engine.loop import Trainer
from codmd.engine.ranks import Ranks
from codmd.engine.shelf import MANIFEST, as_json, fingerprint, folder_of, point, seal
from codmd.errors import UserError, explain
from codmd.files import sync
from codmd.networks import WanNetwork
from codmd.networks.sharding import detached_copy, read_into
from codmd.recipe import to_toml

FORMAT = 2
FILE_BYTES = 5_000_000_000
"""How large a file of student/ gets before another is begun."""
STATE_BYTES = 500_000_000
"""About how large a rank's files of state/ get."""
STOCK_NAME = "diffusion_pytorch_model"

Answer = TypeVar("Answer")


# ---- what is in it -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Staged:
    """One rank's part of a checkpoint that is to be written."""

    step: int
    student: Mapping[str, Mapping[str, Tensor]]
    """Whole tensors, by the file of student/ that this rank is to write."""
    state: Mapping[str, Tensor]
    """All of state/; sharded tensors know their own part."""
    texts: Mapping[str, str]
    """The small files, alike on all ranks."""


def stage(trainer: Trainer, sampling: Mapping[str, Any], init: str | None, *, copy: bool = False) -> Staged:
    """What `write` is to write. With `copy`, training may go on meanwhile. Every rank takes part."""
    network = trainer.roles.student
    with trainer.ema.applied() if trainer.ema is not None else contextlib.nullcontext():
        files, texts = _student_files(network, trainer.ranks)
    state: dict[str, Tensor] = {f"fake.{name}": p for name, p in trainer.roles.fake.learned().items()}
    if not _shown_is_raw(trainer):
        state |= {f"student.{name}": p for name, p in network.learned().items()}
    if trainer.ema is not None:
        state |= {f"ema.{name}": average for name, average in trainer.ema.average.items()}
    for role, learner in _learners(trainer).items():
        state |= {f"{role}_optimizer.{name}": moment for name, moment in _moments(learner).items()}
    counters = {"iteration": trainer.step, "student_updates": trainer.student.updates}
    about = {
        "format": FORMAT,
        "step": trainer.step,
        "student_updates": trainer.student.updates,
        "fake_updates": trainer.fake.updates,
        "refused_in_a_row": trainer.guard.in_a_row,
        "init": init,
    }
    texts["sampling.json"] = as_json({**sampling, **counters, "ema": trainer.ema is not None})
    texts["state.json"] = as_json(about)
    texts["recipe.toml"] = to_toml(trainer.recipe)
    keep = detached_copy if copy else torch.Tensor.detach
    return Staged(trainer.step, files, {name: keep(tensor) for name, tensor in state.items()}, texts)


def _shown_is_raw(trainer: Trainer) -> bool:
    """Whether the weights that learn are those in student/."""
    network = trainer.roles.student
    return trainer.ema is None and set(network.learned()) == set(network.stock_names())


def _student_files(network: WanNetwork, ranks: Ranks) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """student/ as diffusers writes it: whole tensors, gathered by all, each kept by the rank that writes its file."""
    sizes = network.stock_sizes()
    number, filled, place = 0, 0, {}
    for name, size in sizes.items():
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        place[name] = number
        filled += size
    count = number + 1
    names = [f"{STOCK_NAME}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = [f"{STOCK_NAME}.safetensors"]
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in network.stock_state():
        if place[name] % ranks.world == ranks.rank:
            files.setdefault(names[place[name]], {})[name] = tensor.to("cpu", copy=True).contiguous()
    # Sharding changes the class and its name; the file is to name the stock one.
    config = json.loads(network.transformer.to_json_string()) | {"_class_name": WanTransformer3DModel.__name__}
    texts = {"student/config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"}
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {n: names[i] for n, i in place.items()}}
        texts[f"student/{STOCK_NAME}.safetensors.index.json"] = as_json(index)
    return files, texts


def load(folder: Path, trainer: Trainer) -> None:
    """Puts the trainer where it was when the checkpoint was written, by however many ranks."""
    state = read_state(folder)
    there = HuggingFaceStorageReader(str(folder / "state")).read_metadata().state_dict_metadata
    wanted: dict[str, Tensor] = {f"fake.{name}": p for name, p in trainer.roles.fake.learned().items()}
    student = trainer.roles.student.learned()
    if _shown_is_raw(trainer):
        read_into({name: p.detach() for name, p in student.items()}, folder / "student")
    else:
        wanted |= {f"student.{name}": p for name, p in student.items()}
    if trainer.ema is not None:
        wanted |= {f"ema.{name}": average for name, average in trainer.ema.average.items()}
    for role, learner in _learners(trainer).items():
        learner.updates = state[f"{role}_updates"]
        prefix = f"{role}_optimizer."
        _prepare_moments(learner, {name.removeprefix(prefix) for name in there if name.startswith(prefix)})
        wanted |= {prefix + name: moment for name, moment in _moments(learner).items()}
    read_into({name: tensor.detach() for name, tensor in wanted.items()}, folder / "state")
    trainer.step, trainer.guard.in_a_row = state["step"], state["refused_in_a_row"]


def read_state(folder: Path) -> dict[str, Any]:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise UserError(f"{folder}: checkpoint format {state['format']}, this version reads {FORMAT}")
    return state


def _learners(trainer: Trainer) -> dict[str, Learner]:
    return {"student": trainer.student, "fake": trainer.fake}


MOMENTS = ("exp_avg", "exp_avg_sq")


def _moments(learner: Learner) -> dict[str, Tensor]:
    """AdamW's moments. Its own counts are the learner's updates, all alike, and not kept a second time."""
    found: dict[str, Tensor] = {}
    for name, parameter in zip(learner.names, learner.parameters, strict=True):
        entry = learner.optimizer.state.get(parameter)
        if entry:
            assert int(entry["step"]) == learner.updates, (name, entry["step"], learner.updates)
            found |= {f"{name}.{moment}": entry[moment] for moment in MOMENTS}
    return found


def _prepare_moments(learner: Learner, names: set[str]) -> None:
    """Gives the optimizer the state that is about to be read."""
    learner.optimizer.state.clear()
    for name, parameter in zip(learner.names, learner.parameters, strict=True):
        if f"{name}.{MOMENTS[0]}" in names:
            # fused AdamW wants its counts beside the weights
            step = torch.tensor(float(learner.updates), device=parameter.device)
            learner.optimizer.state[parameter] = {"step": step, **{m: torch.zeros_like(parameter) for m in MOMENTS}}


# ---- the commit ----------------------------------------------------------------------------------


def save(run: Path, trainer: Trainer, sampling: Mapping[str, Any], init: str | None) -> Path:
    """Commits the trainer's state, unless this step's is there already, and moves `latest` to it."""
    folder = folder_of(run, trainer.step)
    if not trainer.ranks.on_first(folder.exists):
        write(run, stage(trainer, sampling, init), trainer.ranks)
    trainer.ranks.on_first(lambda: point(run / "latest", folder))
    return folder


def write(run: Path, staged: Staged, ranks: Ranks) -> Path:
    """A folder that comes to be once all of it, from all ranks, is on disk, and is gone otherwise."""
    folder = folder_of(run, staged.step)
    aside = folder.with_name(f".{folder.name}.writing")

    def begin() -> None:
        if ranks.is_first:
            shutil.rmtree(aside, ignore_errors=True)
            for part in ("state", "student"):
                (aside / part).mkdir(parents=True)

    def finish() -> None:
        if ranks.is_first:
            seal(aside, files)
            for path in (aside / MANIFEST, aside / "state", aside / "student", aside):
                sync(path)
            aside.rename(folder)
            sync(folder.parent)

    try:
        _together(ranks, begin)
        parts = _together(ranks, lambda: _write_own(aside, staged, ranks))
        files = {name: taken for part in parts for name, taken in sorted(part.items())}
        _together(ranks, finish)
    finally:
        if ranks.is_first:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write_own(aside: Path, staged: Staged, ranks: Ranks) -> dict[str, Any]:
    """Writes and syncs this rank's files, and takes their fingerprints."""
    # First, since its own messages between ranks tell of a failure: nobody waits for a rank that has gone on.
    places = _files_of_state(staged.state, ranks)
    writer = HuggingFaceStorageWriter(str(aside / "state"), places, save_distributed=True)
    group = ranks.writing_group
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a process alone is alone
        try:
            dcp.save(dict(staged.state), storage_writer=writer, process_group=group, no_dist=group is None)
        except CheckpointException as error:  # no Exception, and names every rank's
            rank = ranks.rank if ranks.rank in error.failures else min(error.failures)
            wrong = error.failures[rank][0]
            message = explain(wrong) if isinstance(wrong, Exception) else None
            if rank == ranks.rank or message is None:
                raise wrong from error
            raise UserError(f"the checkpoint could not be written: rank {rank}: {message}") from error
    mine = [*(aside / "state").glob(f"shard-{ranks.rank + 1:05d}-*.safetensors")]
    for name, tensors in staged.student.items():
        save_file(dict(tensors), aside / "student" / name, metadata={"format": "pt"})
        mine.append(aside / "student" / name)
    if ranks.is_first:
        for name, text in staged.texts.items():
            (aside / name).write_text(text, encoding="utf-8")
            mine.append(aside / name)
    for path in mine:
        sync(path)
    return {path.relative_to(aside).as_posix(): fingerprint(path) for path in mine}


def _files_of_state(state: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """Which of a rank's files each tensor goes to: the writer makes one file at a time in memory, and holds up all
    of Python meanwhile."""
    places, filled = {}, 0
    for name, tensor in state.items():
        places[name] = 1 + filled // STATE_BYTES
        filled += tensor.numel() * tensor.element_size() // ranks.world
    return places


def _together(ranks: Ranks, do: Callable[[], Answer]) -> list[Answer]:
    """Every rank's answer. What goes wrong on one goes wrong on all, so that none waits for another."""
    answer: Any = None
    error: Exception | None = None
    try:
        answer = do()
    except Exception as caught:
        error = caught
    told = ranks.gather((answer, None if error is None else f"{ranks.name}: {error}"), ranks.writing_group)
    if error is not None:
        raise error
    for _, wrong in told:
        if wrong is not None:
            raise UserError(f"the checkpoint could not be written: {wrong}")
    return [answer for answer, _ in told]


class Background:
    """Writes one checkpoint at a time while training goes on; `then` runs after each commit."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, run: Path, staged: Staged, then: Callable[[Path], Any]) -> None:
        """Begins to write; waits first for the one before. What went wrong with that one is raised here."""
        self.wait()

        def work() -> None:
            try:
                then(write(run, staged, self.ranks))
            except Exception as error:
                self._error = error

        # A daemon: an interpreter that is ending must not wait for ranks that are gone.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

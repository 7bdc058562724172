"""From the MODEL that a person names to something that can be sampled.

MODEL is "mini", a folder with a diffusers Wan pipeline (a teacher), a folder with `sampling.json` and
`student/` (a student: a transformer in the diffusers layout that goes with a base pipeline), or the folder
of a run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from codmd.errors import UserError
from codmd.files import read_json_object
from codmd.networks import GuidedTeacher, Pipeline, TextCondition, WanNetwork, load_pipeline, quiet_loading
from codmd.networks.pipeline import FACTS, LoadNetwork
from codmd.schema import from_mapping

EXPECTED = (
    'expected "mini", a folder with a Wan pipeline (model_index.json), '
    "a student (sampling.json and student/), or the folder of a run"
)


SURROUNDINGS = ("scheduler", "text_encoder", "tokenizer", "vae")
"""What a pipeline folder holds beside its transformer."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """How a model is sampled when nobody says otherwise."""

    steps: int = 50
    guidance: float = 5.0  # w in u + w(c - u)
    frames: int = 81
    height: int = 480
    width: int = 832
    fps: float = 16
    negative_prompt: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A teacher or a student, ready to be sampled. `times` is a student's step list; a teacher has none."""

    ref: str
    kind: Literal["teacher", "student"]
    folder: Path
    pipeline: Pipeline
    network: WanNetwork
    defaults: Defaults
    times: tuple[float, ...] | None = None
    about: dict[str, Any] = field(default_factory=dict)  # iteration, student_updates, as the checkpoint says

    @cached_property
    def sha256(self) -> str:
        """One hash over every file that decides what it makes: its transformer, and its base's other parts."""
        digest = hashlib.sha256()
        for folder in (weights_folder(self.folder), *(self.pipeline.folder / part for part in SURROUNDINGS)):
            for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
                with path.open("rb") as handle:
                    content = hashlib.file_digest(handle, "sha256").hexdigest()
                digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()} {content}\n".encode())
        return digest.hexdigest()

    @property
    def device(self) -> torch.device:
        """Where it computes; a network's own weights may wait elsewhere."""
        return next(self.pipeline.codec.vae.parameters()).device

    def guided(self, scale: float, negative_prompt: str = "") -> GuidedTeacher:
        """The network with guidance around it; at scale 1 none is computed."""
        return GuidedTeacher(self.network, self.pipeline.text.encode([negative_prompt]), scale)

    def encode(self, prompts: list[str]) -> TextCondition:
        return self.pipeline.text.encode(prompts)


def load_model(ref: str | Path, device: str | None = None, *, network: LoadNetwork | None = None) -> Model:
    """The model that `ref` names, by default on a GPU where there is one; whatever is wrong with it is a one-line
    `UserError`. `network` makes a teacher's network from its folder, where it isn't to be loaded as a whole."""
    ref = str(ref)
    folder = resolve(ref)
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if (folder / "model_index.json").is_file():
        return _load_teacher(ref, folder, on, network)
    return _load_student(ref, folder, on)


def resolve(ref: str) -> Path:
    """The folder with `model_index.json`, or with `sampling.json`, that `ref` means."""
    if ref == "mini":
        from codmd import mini

        folder = Path(mini.path())
        if not (folder / "model_index.json").is_file():
            raise UserError(f"the miniature's weights are missing from {folder}: install the package again")
        return folder
    folder = Path(ref)
    if not folder.exists():
        raise UserError(f"{ref}: no such folder{_nearest_sibling(folder)}; {EXPECTED}")
    if not folder.is_dir():
        hint = f"; did you mean its folder, {folder.parent}?" if _is_model(folder.parent) else f"; {EXPECTED}"
        raise UserError(f"{ref}: a file, not a folder{hint}")
    if _is_model(folder):
        return folder
    checkpoint = _checkpoint_of_run(folder)
    if checkpoint is not None:
        return checkpoint
    near = _nearest_model(folder)
    raise UserError(f"{ref}: no model in this folder; " + (f"did you mean {near}?" if near else EXPECTED))


def student_weights(ref: str) -> Path:
    """The folder of a student's transformer; nothing is loaded."""
    folder = resolve(ref)
    if (folder / "model_index.json").is_file():
        raise UserError(f"{ref}: a teacher; expected a student, which has sampling.json and student/")
    check_weights(folder / "student")
    return weights_folder(folder)


def as_student(base: Model, times: tuple[float, ...], network: WanNetwork | None = None) -> Model:
    """The base's own network, or another of its kind, sampled as a student is: along `times`, without guidance."""
    defaults = replace(base.defaults, steps=len(times), guidance=1.0)
    return replace(base, kind="student", network=network or base.network, times=times, defaults=defaults)


def with_shift(model: Model, shift: float | None) -> Model:
    """A teacher whose own sampling has another time shift; the model as it is where none is asked for."""
    if shift is None:
        return model
    scheduler = model.pipeline.scheduler
    key = "flow_shift" if "flow_shift" in scheduler.config else "shift"
    scheduler = type(scheduler).from_config(scheduler.config, **{key: shift})
    return replace(model, pipeline=replace(model.pipeline, scheduler=scheduler))


def weights_folder(folder: Path) -> Path:
    """Where the transformer's own files lie."""
    return folder / ("transformer" if (folder / "model_index.json").is_file() else "student")


def check_weights(folder: Path) -> None:
    """Refuse missing and truncated safetensors files by name, from their headers alone."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; the model is not complete, copy it again")
    found = sorted(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        shards = set(read_json_object(index).get("weight_map", {}).values())
        for name in sorted(shards - {path.name for path in found}):
            raise UserError(f"{folder / name}: missing, though {index.name} lists it; copy the model again")
    if not found:
        raise UserError(f"{folder}: no .safetensors file in it; other formats are not read")
    for path in found:
        _check_safetensors(path)


# ---- kinds ---------------------------------------------------------------------------------------


def _load_teacher(ref: str, folder: Path, device: torch.device, network: LoadNetwork | None = None) -> Model:
    for name in ("transformer", "text_encoder", "vae"):
        check_weights(folder / name)
    pipeline = load_pipeline(folder, network)
    for module in (pipeline.text.model, pipeline.codec.vae, *(() if network else (pipeline.network,))):
        module.to(device)
    return Model(
        ref=ref,
        kind="teacher",
        folder=folder,
        pipeline=pipeline,
        network=pipeline.network,
        defaults=_defaults(pipeline),
    )


def _load_student(ref: str, folder: Path, device: torch.device) -> Model:
    from diffusers import WanTransformer3DModel

    file = folder / "sampling.json"
    facts = read_json_object(file)
    times, base = facts.get("steps") or [], facts.get("base")
    if facts.get("kind") != "student" or not _is_step_list(times) or not isinstance(base, str):
        raise UserError(
            f'{file}: expected {{"kind": "student", "base": a pipeline, "steps": falling times in (0, 1]}}, '
            f"got {json.dumps(facts)[:120]}"
        )
    check_weights(folder / "student")
    teacher = _load_base(file, base, device)
    try:
        with quiet_loading(folder / "student"):
            transformer = WanTransformer3DModel.from_pretrained(folder / "student", local_files_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder / 'student'} cannot be loaded as a WanTransformer3DModel: {reason}") from error
    transformer.eval().requires_grad_(False)
    of_base = teacher.network.transformer.config
    for name in ("in_channels", "patch_size", "text_dim"):
        ours, theirs = transformer.config[name], of_base[name]
        if tuple(ours) != tuple(theirs) if isinstance(ours, list | tuple) else ours != theirs:
            raise UserError(
                f"{folder}: its {name} is {ours}, its base {base} has {theirs}; name the right base in {file}"
            )
    own = {key: facts[key] for key in ("guidance", "frames", "height", "width") if facts.get(key) is not None}
    defaults = {**vars(teacher.defaults), "guidance": 1.0, "steps": len(times), **own}
    return Model(
        ref=ref,
        kind="student",
        folder=folder,
        pipeline=teacher.pipeline,
        network=WanNetwork(transformer).to(device),
        defaults=from_mapping(Defaults, defaults, str(file)),
        times=tuple(float(t) for t in times),
        about=facts,
    )


def _load_base(file: Path, base: str, device: torch.device) -> Model:
    """The pipeline that a student goes with; a relative path is looked up from here and from the student."""
    places = [base] if base == "mini" else [base, str(file.parent / base)]
    for place in places:
        if place == "mini" or (Path(place) / "model_index.json").is_file():
            return _load_teacher(place, resolve(place), device)
    raise UserError(f'{file}: its base {base} is no pipeline folder on this machine; set "base" to where it lies now')


def _defaults(pipeline: Pipeline) -> Defaults:
    """`codmd.json` in the folder may say how its model is sampled; without it, as Wan2.1 is."""
    frames, height, width = pipeline.size
    names = ("steps", "guidance", "fps", "negative_prompt")
    own = {name: pipeline.facts[name] for name in names if name in pipeline.facts}
    said = {"frames": frames, "height": height, "width": width, **own}
    return from_mapping(Defaults, said, str(pipeline.folder / FACTS))


# ---- looking around ------------------------------------------------------------------------------


def _is_model(folder: Path) -> bool:
    return (folder / "model_index.json").is_file() or (folder / "sampling.json").is_file()


def _nearest_sibling(folder: Path) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return ""
    names = [path.name for path in parent.iterdir() if path.is_dir()]
    close = get_close_matches(folder.name, [*names, "mini"], n=1)
    return f', did you mean "{close[0] if close[0] == "mini" else parent / close[0]}"?' if close else ""


def _nearest_model(folder: Path) -> Path | None:
    """A model just above or just below."""
    for near in (folder.parent, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if _is_model(near) or (near != folder.parent and (near / "chosen.json").is_file()):
            return near
    return None


def _is_step_list(times: object) -> bool:
    if not isinstance(times, list) or not times or not all(isinstance(t, int | float) for t in times):
        return False
    return all(0 < t <= 1 for t in times) and all(a > b for a, b in pairwise(times))


def _check_safetensors(path: Path) -> None:
    """The header says how long the file is: 8 bytes of length, the header, then the last tensor's end."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        try:
            if size < 8 or length > size - 8:
                raise ValueError
            header = json.loads(handle.read(length))
            end = max(
                (entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"),
                default=0,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}: {size} bytes, not a whole safetensors file; copy it again") from None
    if size != 8 + length + end:
        raise UserError(f"{path}: truncated, {size} bytes of {8 + length + end}; copy it again")


def _checkpoint_of_run(folder: Path) -> Path | None:
    """The checkpoint that a run has chosen, else its latest."""
    chosen = folder / "chosen.json"
    if chosen.is_file():
        names = [str(read_json_object(chosen).get("checkpoint", ""))]
    else:
        names = sorted((path.name for path in folder.glob("checkpoints/step-*")), reverse=True)
    found = [folder / "checkpoints" / Path(name).name for name in names]
    return next((path for path in found if (path / "sampling.json").is_file()), None)

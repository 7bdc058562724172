"""A small run for the engine's tests: a recipe over the tiny random pipeline."""

import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import tiny
import torch

from codmd.engine.assembly import assemble
from codmd.engine.loop import Trainer
from codmd.models import Model, load_model
from codmd.recipe import Recipe, parse_recipe

RECIPE = """
name = "tiny"
[model]
base = "{base}"
guidance_scale_standard = 3.5
teacher_steps = 2
[video]
frames = 5
height = 32
width = 32
[objective]
[rollout]
steps = [1.0, 0.9375, 0.8333, 0.625]
[renoise]
shift = 5.0
[train]
iterations = 6
batch = 3
student_every = 3
student_lr = 1e-3
fake_lr = 1e-3
precision = "fp32"
[data]
prompts = "{prompts}"
[validation]
"""
PROMPTS = (
    "a red circle moves left",
    "a blue square",
    "the green triangle spins",
    "a circle",
    "a square moves",
)


def numbers(record: Mapping[str, object]) -> dict[str, object]:
    """A record without its times, which no two runs share."""
    return {k: v for k, v in record.items() if not k.startswith(("seconds/", "tokens_per_second", "memory/", "mfu"))}


class TinyRuns:
    """Recipes and trainers over one tiny pipeline, in a folder that goes when the tests are done."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None:  # another process made it
            self.folder = folder

    @cached_property
    def folder(self) -> Path:
        self._kept = tempfile.TemporaryDirectory(prefix="codmd-")
        root = Path(self._kept.name)
        (root / "prompts.txt").write_text("\n".join(PROMPTS))
        return tiny.save_pipeline(root / "teacher")

    def base(self) -> Model:
        """A teacher of one's own: nothing that a test does to it is seen by another."""
        return load_model(self.folder)

    def recipe(self, *overrides: str) -> Recipe:
        text = RECIPE.format(base=self.folder, prompts=self.folder.parent / "prompts.txt")
        return parse_recipe(text, "tiny", overrides)

    def trainer(self, *overrides: str) -> Trainer:
        return assemble(self.recipe(*overrides), self.base())[0]

    @staticmethod
    def score(videos: np.ndarray, captions: list[str]) -> Mapping[str, float]:
        """Some numbers that depend on the videos."""
        pixels = videos.astype(np.float64) / 255
        moved = np.abs(np.diff(pixels, axis=1)).mean()
        return {"dynamic_degree": moved, "saturation": (pixels.max(-1) - pixels.min(-1)).mean()}


runs = TinyRuns()


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of all that a step may change."""
    state = {f"student.{k}": v for k, v in trainer.roles.student.state_dict().items()}
    state |= {f"fake.{k}": v for k, v in trainer.roles.fake.state_dict().items()}
    state |= {f"teacher.{k}": v for k, v in trainer.roles.teacher.network.state_dict().items()}
    if trainer.ema is not None:
        state |= {f"ema.{k}": v for k, v in trainer.ema.average.items()}
    for role, learner in (("student", trainer.student), ("fake", trainer.fake)):
        for i, entry in learner.optimizer.state_dict()["state"].items():
            state |= {f"{role}.optimizer.{i}.{k}": v for k, v in entry.items()}
    return {name: tensor.clone() for name, tensor in state.items()}

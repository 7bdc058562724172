"""What every check works with: the shipped miniature, trained for two small steps by the engine itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from codmd import mini
from codmd.engine.assembly import assemble, load_base
from codmd.engine.loop import Trainer
from codmd.engine.ranks import Ranks
from codmd.networks.sharding import local
from codmd.recipe import Recipe, load_recipe

Record = Mapping[str, float]
STEPS = 2
SMALL = (
    "video.frames=17",  # nine latent frames: 144 tokens, which two ranks or three can share
    "validation.every=0",
    f"train.iterations={STEPS}",
    "train.student_every=1",
    "train.student_lr=1e-5",  # AdamW's first steps have this length whatever the gradient: rounding must not grow
    "train.fake_lr=1e-5",
    "train.precision=fp32",
    "rollout.exit=per_sample",
)


class Finding(NamedTuple):
    """What a check measured. It passes if `figure` is at most `bound`."""

    figure: float
    bound: float
    note: str = ""


class Skipped(Exception):
    """Says why a check cannot be made on this machine."""


@dataclass
class Setting:
    """The machine that is checked, and what one check leaves for the next."""

    device: torch.device
    world: int
    """Processes of the checks that need several."""
    out: Path
    """Where logs go."""
    scratch: Path
    """A folder that is gone afterwards."""
    answers: list[dict[str, Any]] | None = None
    """What each rank found; none before they were launched."""
    _known: dict[tuple[str, ...], list[dict[str, float]]] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return max(4, 2 * self.world)

    def recipe(self, *overrides: str) -> Recipe:
        return load_recipe("mini", (*SMALL, f"train.batch={self.batch}", *overrides))

    def trainer(self, *overrides: str) -> Trainer:
        """A trainer of this process alone."""
        return made(self.recipe(*overrides), Ranks(device=self.device))

    def steps(self, *overrides: str) -> list[dict[str, float]]:
        """The figures of two steps in this process alone; they are computed once."""
        if overrides not in self._known:
            self._known[overrides] = figures(self.trainer(*overrides))
        return self._known[overrides]

    @cached_property
    def six_heads(self) -> Path:
        """The miniature with six heads of 32 instead of three of 64, so that two ranks can share them: the shapes of
        all weights are the same, and so are the weights."""
        folder = self.scratch / "six-heads"
        (folder / "transformer").mkdir(parents=True)
        for path in mini.path().iterdir():
            if path.name != "transformer":
                (folder / path.name).symlink_to(path)
        for path in (mini.path() / "transformer").iterdir():
            if path.name != "config.json":
                (folder / "transformer" / path.name).symlink_to(path)
        config = json.loads((mini.path() / "transformer" / "config.json").read_text(encoding="utf-8"))
        config |= {"num_attention_heads": 6, "attention_head_dim": 32}
        (folder / "transformer" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder


def made(recipe: Recipe, ranks: Ranks) -> Trainer:
    return assemble(recipe, load_base(recipe, ranks), ranks=ranks)[0]


def figures(trainer: Trainer, steps: int = STEPS) -> list[dict[str, float]]:
    """Losses, and norms of gradients, of a few steps."""
    kept = ("loss/", "gradient/")
    return [{k: v for k, v in trainer.iterate().items() if k.startswith(kept)} for _ in range(steps)]


def gap(ours: Sequence[Record], theirs: Sequence[Record]) -> float:
    """The largest relative difference of any figure in any step; infinite where one is missing or not finite.

    A relational loss can be small by cancellation, so it is measured against no less than 1% of the student's loss.
    """
    if len(ours) != len(theirs):
        return math.inf
    found = [0.0]
    for one, other in zip(ours, theirs, strict=True):
        if one.keys() != other.keys():
            return math.inf
        floor = 0.01 * abs(other["loss/student"])
        found += [abs(one[name] - value) / max(abs(value), floor) for name, value in other.items()]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def totals(records: Sequence[Record]) -> list[dict[str, float]]:
    """What bf16 is held to. The relational terms alone are differences of near-equal matrices, and a gradient's norm
    is what is left of a sum over all tokens: of single steps both can be rounding for the most part."""
    return [{name: record[name] for name in ("loss/student", "loss/fake")} for record in records]


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """‖ours - theirs‖ / ‖theirs‖ over all tensors together; infinite where it is not finite."""
    if ours.keys() != theirs.keys():
        return math.inf
    pairs = [(ours[name].detach().double(), tensor.detach().double()) for name, tensor in theirs.items()]
    apart = sum(float((one - other).square().sum()) for one, other in pairs)
    size = sum(float(other.square().sum()) for _, other in pairs)
    return math.sqrt(apart / size) if size > 0 and math.isfinite(apart / size) else math.inf


def captured(trainer: Trainer) -> dict[str, Tensor]:
    """The gradients that one step gives to the optimizers of student and fake network."""
    found: dict[str, Tensor] = {}

    def keep(role: str, names: Sequence[str], parameters: Sequence[Tensor]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for name, parameter in zip(names, parameters, strict=True):
                if parameter.grad is not None:
                    found[f"{role}.{name}"] = parameter.grad.detach().clone()

        return hook

    for role, learner in (("student", trainer.student), ("fake", trainer.fake)):
        learner.optimizer.register_step_pre_hook(keep(role, learner.names, learner.parameters))
    trainer.iterate()
    assert found, "no gradient reached an optimizer"
    return found


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of this rank's part of all that learns."""
    roles = {"student": trainer.roles.student.learned(), "fake": trainer.roles.fake.learned()}
    tensors: dict[str, Tensor] = {f"{role}.{name}": p for role, of in roles.items() for name, p in of.items()}
    if trainer.ema is not None:
        tensors |= {f"ema.{name}": average for name, average in trainer.ema.average.items()}
    return {name: local(tensor).detach().clone() for name, tensor in tensors.items()}


def differing(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> int:
    """How many tensors are not the same bit for bit."""
    names = ours.keys() | theirs.keys()
    return sum(not (n in ours and n in theirs and torch.equal(ours[n], theirs[n])) for n in names)


def fp32_is_fp32() -> None:
    """torch multiplies matrices on a GPU in full fp32 unless told otherwise, but lets cuDNN convolve in TF32. The
    patch embedding is a convolution: what two batch sizes make of it would differ by more than rounding."""
    torch.backends.cudnn.allow_tf32 = False


@contextmanager
def reproducible() -> Iterator[None]:
    """The kernels whose gradients are the same each time, for what has to agree bit for bit."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cudnn.deterministic = before

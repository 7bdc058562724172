"""The sections of a recipe that no single component owns.

Each is frozen and validates itself, so that a wrong value is refused wherever it comes from: a recipe,
`--set`, or Python. `objectives.ObjectiveConfig` lives with the objectives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from codmd.errors import UserError
from codmd.schema import check, check_number

FINAL_LAYER = "proj_out"  # of Wan's transformer; the output's norm before it has no weights


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The teacher, which is also where the student and the fake network start."""

    base: str  # "mini", or a folder with a diffusers pipeline
    guidance_scale_standard: float  # w in u + w(c - u); other releases write c + g(c - u), g = w - 1
    negative_prompt: str = ""
    teacher_steps: int = 50
    teacher_shift: float | None = None  # None: the base's own scheduler decides

    def __post_init__(self) -> None:
        check(bool(self.base.strip()), "base", '"mini" or a folder', self.base)
        check_number("guidance_scale_standard", self.guidance_scale_standard, at_least=0)
        check_number("teacher_steps", self.teacher_steps, at_least=1)
        if self.teacher_shift is not None:
            check_number("teacher_shift", self.teacher_shift, above=0)


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """The size of every clip that the run makes, in pixels and frames."""

    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        for key in ("frames", "height", "width"):
            check_number(key, getattr(self, key), at_least=1)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How the student makes a clip: the times of its steps, and where training stops the walk."""

    steps: tuple[float, ...]
    exit: Literal["shared", "per_sample"] = "shared"

    def __post_init__(self) -> None:
        check(bool(self.steps), "steps", "at least one time", self.steps)
        for t in self.steps:
            check_number("steps", t, above=0, at_most=1)
        check(self.steps[0] == 1, "steps", "a list that starts at 1.0 (pure noise)", self.steps)
        falling = all(a > b for a, b in zip(self.steps, self.steps[1:], strict=False))
        check(falling, "steps", "times that fall from one step to the next", self.steps)


@dataclass(frozen=True, kw_only=True)
class RenoiseConfig:
    """How t is drawn when the student's clip is noised for the teacher and the fake network."""

    shift: float
    low: float = 0.02
    high: float = 0.98
    mode: Literal["per_sample", "shared"] = "per_sample"

    def __post_init__(self) -> None:
        check_number("shift", self.shift, above=0)
        check_number("low", self.low, above=0, below=1)
        check_number("high", self.high, above=self.low, at_most=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length of the run, its optimizers, and what it keeps."""

    iterations: int
    batch: int  # over all ranks and all micro-batches
    student_lr: float
    fake_lr: float
    micro_batch: int | None = None  # samples that a rank works on at once; None: all of its share
    student_every: int = 5  # the fake network learns at every iteration
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    warmup: int = 0  # in updates of each network
    clip_norm: float = 10.0
    precision: Literal["fp64", "fp32", "bf16"] = "bf16"  # of the networks' arithmetic; weights are fp32, or fp64
    ema_decay: float = 0.0  # 0: off; counted in student updates
    ema_power: float = 0.0  # 0: off; gamma of a power schedule, which needs no decay
    ema_start: int = 0
    checkpoint_every: int = 0  # in iterations; 0: at the end only
    keep: int = 2
    asynchronous: bool = False  # checkpoints are written while the training goes on
    choose: str = "last"  # or "best:<metric>"
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()  # besides metrics.jsonl

    def __post_init__(self) -> None:
        for key in ("iterations", "batch", "student_every", "keep"):
            check_number(key, getattr(self, key), at_least=1)
        for key in ("warmup", "ema_start", "checkpoint_every", "weight_decay"):
            check_number(key, getattr(self, key), at_least=0)
        for key in ("student_lr", "fake_lr", "clip_norm"):
            check_number(key, getattr(self, key), above=0)
        for beta in self.betas:
            check_number("betas", beta, at_least=0, below=1)
        check_number("ema_decay", self.ema_decay, at_least=0, below=1)
        check_number("ema_power", self.ema_power, at_least=0)
        one = not (self.ema_decay and self.ema_power)
        check(one, "ema_power", "0 where ema_decay is set: an average has one schedule", self.ema_power)
        if self.micro_batch is not None:
            check_number("micro_batch", self.micro_batch, at_least=1)
            divides = self.batch % self.micro_batch == 0
            check(divides, "micro_batch", f"a divisor of batch = {self.batch}", self.micro_batch)
        rule = re.fullmatch(r"last|best:[a-z0-9_]+", self.choose)
        check(rule is not None, "choose", '"last" or "best:<metric>"', self.choose)

    @property
    def best_metric(self) -> str | None:
        """The metric by which the checkpoint is chosen; None when the last one is."""
        return self.choose.removeprefix("best:") if self.choose != "last" else None


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What student and fake network each add to the shared transformer, where `mode` is "adapter"."""

    rank: int = 16
    alpha: float = 16.0  # a layer becomes W + alpha/rank B A
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")  # ends of names
    final_layers: bool = False  # each of the two has a full copy of the output projection
    base_dtype: Literal["bf16", "fp32"] = "bf16"  # of the frozen weights; an adapter's are always fp32

    def __post_init__(self) -> None:
        check_number("rank", self.rank, at_least=1)
        check_number("alpha", self.alpha, above=0)
        check(bool(self.targets), "targets", "at least one name of a linear layer", self.targets)
        clash = self.final_layers and FINAL_LAYER in self.targets
        check(not clash, "targets", f"no {FINAL_LAYER} where final_layers copies it in full", self.targets)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks that torchrun started share the work: replicate x shard x context."""

    replicate: int = 1  # whole copies of all weights
    shard: int = 0  # ranks that share one copy; 0: the ranks that are left
    context: int = 1  # ranks that share each sample's tokens
    context_method: Literal["ulysses", "ring"] = "ulysses"

    def __post_init__(self) -> None:
        for key, least in (("replicate", 1), ("shard", 0), ("context", 1)):
            check_number(key, getattr(self, key), at_least=least)

    def degrees(self, world: int) -> tuple[int, int, int]:
        """The mesh over `world` ranks; refused where they don't fill it."""
        taken = self.replicate * self.context
        shard = self.shard or max(world // taken, 1)
        if taken * shard != world:
            raise UserError(
                f"parallel: {self.replicate} x {shard} x {self.context} (replicate x shard x context) ranks, and "
                f"{world} were started: start {taken * shard} with torchrun, or change the recipe's degrees"
            )
        return self.replicate, shard, self.context


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """What trades time against memory or repeatability, and changes what is computed by no more than rounding."""

    checkpointing: Literal["none", "blocks", "selective"] = "none"  # of activations, in student and fake network
    offload_teacher: bool = False  # its weights wait in the host's memory
    compile: bool = False  # each block, by torch.compile
    deterministic: bool = False  # on a GPU, only kernels whose results are the same each time


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the training prompts come from."""

    prompts: str  # "mini", or a file of prompts
    count: int | None = None  # None: all of a file's; of "mini" as many as the run needs, up to 4,096
    held_out_seed: int = 0  # draws the prompts that are never trained on

    def __post_init__(self) -> None:
        check(bool(self.prompts.strip()), "prompts", '"mini" or a file of prompts', self.prompts)
        if self.count is not None:
            check_number("count", self.count, at_least=1)
        check_number("held_out_seed", self.held_out_seed, at_least=0)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """The learning curve: a fixed set of held-out prompts, sampled and scored at intervals."""

    every: int = 0  # in iterations; 0: never
    prompts: int = 16
    seeds: int = 1
    warn_dynamic_drop: float = 0.2  # shares of the teacher's own figure
    warn_saturation_rise: float = 0.2

    def __post_init__(self) -> None:
        check_number("every", self.every, at_least=0)
        for key in ("prompts", "seeds"):
            check_number(key, getattr(self, key), at_least=1)
        for key in ("warn_dynamic_drop", "warn_saturation_rise"):
            check_number(key, getattr(self, key), at_least=0)

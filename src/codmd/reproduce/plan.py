"""Which runs there are: the paper's ablation and its sweep of λ, each with its seeds.

Runs of one seed are paired: prompts, noise, times and exits are keyed by the seed (see `data.streams`), so
that two variants of one seed differ in the objective alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from codmd.errors import UserError
from codmd.recipe import Recipe, load_recipe
from codmd.schema import nearest


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the tables: an objective, and how many seeds it gets when nobody says otherwise."""

    name: str
    title: str
    overrides: tuple[str, ...]
    seeds: int
    weight: float | None = None
    """λ where the variant is a point of the sweep."""


def _sweep(weight: float) -> Variant:
    return Variant(
        name=f"codmd-{weight}",
        title=f"CoDMD, λ = {weight}",
        overrides=(
            "objective.method=codmd", f"objective.batch_weight={weight}", f"objective.frame_weight={weight}"
        ),
        seeds=3,
        weight=weight,
    )  # fmt: skip


BASELINE = "dmd"
VARIANTS = (
    Variant(name="dmd", title="DMD", overrides=("objective.method=dmd",), seeds=5, weight=0.0),
    Variant(name="codmd", title="CoDMD", overrides=("objective.method=codmd",), seeds=5, weight=0.1),
    Variant(name="batch", title="DMD + batch", overrides=("objective.method=batch",), seeds=3),
    Variant(name="frame", title="DMD + frame", overrides=("objective.method=frame",), seeds=3),
    Variant(name="direct", title="DMD + direct", overrides=("objective.method=direct",), seeds=3),
    *(_sweep(weight) for weight in (0.2, 0.5, 1.0)),
)
ABLATION = ("dmd", "batch", "frame", "codmd", "direct")
SWEEP = tuple(v.name for v in sorted((v for v in VARIANTS if v.weight is not None), key=lambda v: v.weight or 0))
TITLES = {variant.name: variant.title for variant in VARIANTS}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One student."""

    variant: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All runs, and how each is scored."""

    only: tuple[str, ...] = ()
    """Variants by name; all when empty."""
    seeds: int | None = None
    """Seeds of every variant; each variant's own number when None."""
    overrides: tuple[str, ...] = ()
    """Of the recipe `mini`, for every run alike."""
    prompts: int = 48
    """Evaluation prompts."""
    clips: int = 2
    """Clips of each evaluation prompt."""
    checkpoints: int = 3
    """How many of a run's last checkpoints are scored, and averaged over."""

    def __post_init__(self) -> None:
        known = [variant.name for variant in VARIANTS]
        for name in self.only:
            if name not in known:
                raise UserError(f'--only: unknown variant "{name}", {nearest(name, known)}')
        for key in ("seeds", "prompts", "clips", "checkpoints"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"--{key}: expected at least 1, got {value}")
        varied = ("seed", "name", "objective.method", "objective.batch_weight", "objective.frame_weight")
        for override in self.overrides:
            if override.partition("=")[0].strip() in varied:
                raise UserError(f"--set {override}: the variants decide on this key; leave it out")

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(v for v in VARIANTS if not self.only or v.name in self.only)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Seed by seed, so that what an early stop leaves is paired."""
        counts = {v.name: v.seeds if self.seeds is None else self.seeds for v in self.variants}
        return tuple(
            self.run_of(variant, seed)
            for seed in range(max(counts.values(), default=0))
            for variant in self.variants
            if seed < counts[variant.name]
        )

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """A checkpoint at each point of the learning curve, and enough of them to average over."""
        every = load_recipe("mini", self.overrides).validation.every
        keep = f"train.keep={max(self.checkpoints, 2)}"
        return (keep, f"train.checkpoint_every={every}") if every else (keep,)

    def run_of(self, variant: Variant, seed: int) -> Run:
        given = [f"name={variant.name}", f"seed={seed}", *self.kept, *self.overrides, *variant.overrides]
        return Run(variant=variant.name, seed=seed, recipe=load_recipe("mini", given))

"""A recipe: one TOML file that holds all that a run needs to be made again.

This module only composes: each section is a dataclass that lives with its component and validates
itself. A recipe is read from a shipped name or a path, changed by `key=value` overrides, printed in
full, saved beside the run, and read back to an equal object.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from codmd.config import (
    AdapterConfig,
    ComputeConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RenoiseConfig,
    RolloutConfig,
    TrainConfig,
    ValidationConfig,
    VideoConfig,
)
from codmd.errors import UserError
from codmd.objectives import ObjectiveConfig
from codmd.schema import Difference, check, check_number, diff, from_mapping, nearest, to_toml

__all__ = ["Difference", "Recipe", "diff", "load_recipe", "parse_recipe", "shipped_recipes", "to_toml"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run."""

    name: str
    description: str = ""
    seed: int = 0
    mode: Literal["full", "adapter"] = "full"  # three networks, or one frozen base with two LoRA adapters
    model: ModelConfig
    video: VideoConfig
    objective: ObjectiveConfig
    rollout: RolloutConfig
    renoise: RenoiseConfig
    train: TrainConfig
    data: DataConfig
    validation: ValidationConfig
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def __post_init__(self) -> None:
        check(bool(self.name.strip()), "name", "a name", self.name)
        check_number("seed", self.seed, at_least=0, below=2**63)
        if self.train.precision == "fp64":
            check(self.validation.every == 0, "train.precision", '"fp32" or "bf16" with a learning curve', "fp64")
        ring = self.parallel.context > 1 and self.parallel.context_method == "ring"
        if ring and self.train.precision != "bf16":
            raise UserError('parallel.context_method: "ring" needs train.precision = "bf16", as its kernels do')
        if self.mode == "adapter":
            check(self.train.precision != "fp64", "mode", '"full" where train.precision is "fp64"', self.mode)
            waits = self.compute.offload_teacher
            check(not waits, "mode", '"full" where compute.offload_teacher is set: all share its weights', self.mode)
        if self.train.best_metric is not None and self.validation.every == 0:
            raise UserError(
                f'train.choose = "{self.train.choose}" needs a learning curve: set validation.every above 0'
            )


def shipped_recipes() -> tuple[str, ...]:
    """The names of the recipes that come with the package."""
    folder = resources.files("codmd") / "recipes"
    return tuple(sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")))


def load_recipe(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Reads a shipped recipe by its name, or any recipe by its path, and applies `key=value` overrides."""
    given = os.fspath(name_or_path)
    if given in shipped_recipes():
        text = (resources.files("codmd") / "recipes" / f"{given}.toml").read_text(encoding="utf-8")
        return parse_recipe(text, f"recipe {given}", overrides)
    if not given.endswith(".toml") and os.sep not in given:
        raise UserError(
            f'no recipe is called "{given}", {nearest(given, shipped_recipes())} (or give the path of a .toml file)'
        )
    try:
        text = Path(given).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{given}: no such file; give a recipe's path or a shipped name ({', '.join(shipped_recipes())})"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{given}: expected a TOML file in UTF-8, got other bytes") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{given}: the recipe cannot be read: {reason}") from None
    return parse_recipe(text, given, overrides)


def parse_recipe(text: str, where: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from TOML text; `where` names it in errors."""
    try:
        mapping = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid TOML: {error}") from None
    origins: dict[str, str] = {}
    for override in overrides:
        _apply(mapping, override, origins)
    return from_mapping(Recipe, mapping, where, origins=origins)


def _apply(mapping: dict[str, Any], override: str, origins: dict[str, str]) -> None:
    """Puts one `section.key=value` into `mapping` and remembers where the key came from."""
    key, equals, value = (part.strip() for part in override.partition("="))
    place = f"--set {' '.join(override.split())}"
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(f"{place}: expected section.key=value, for example train.iterations=100")
    for part in parts[:-1]:
        mapping = mapping.setdefault(part, {})
        if not isinstance(mapping, dict):
            raise UserError(f"{place}: {part} is a key, not a section")
    mapping[parts[-1]] = _value(value)
    for depth in range(1, len(parts) + 1):
        origins.setdefault(".".join(parts[:depth]), place)
    origins[key] = place


def _value(text: str) -> Any:
    """A TOML value; what isn't one is a string, so that words need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if set(parsed) == {"value"} else text

"""What a page shows, without a word on how it looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One model: how it was sampled, and what was measured. The first column of a page is the teacher."""

    key: str
    name: str
    role: str  # a few words: "50 steps, guidance 3.5"
    evaluations: int  # of the network, for one clip
    seconds_per_clip: float  # without decoding
    quality: float
    semantic: float
    total: float
    measures: Mapping[str, float | None]  # the sixteen, in [0, 1]; None where a measure applies to no clip
    extras: Mapping[str, float | None] = field(default_factory=dict)  # by the names in `tables.EXTRAS`
    updates: int | None = None  # of the student


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something that the prompt asked for, and whether the clip shows it."""

    asked: str
    met: bool


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One clip of one model."""

    prompt: str
    seed: int
    column: str  # a Column's key
    mp4: bytes
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A measure while the students learned; `level` is the teacher's."""

    title: str
    lines: Mapping[str, tuple[tuple[int, float], ...]]  # a Column's key: (student updates, value)
    level: float | None = None
    better: str = "more is better"


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Everything on the page."""

    columns: tuple[Column, ...]
    shots: tuple[Shot, ...]
    curves: tuple[Curve, ...]
    frames: int
    fps: float
    facts: Mapping[str, str]  # what was run: prompts, seeds, machine, versions
    commands: tuple[str, ...]
    recipe: str  # as TOML
    differences: str = ""  # in which the students' recipes differ
    quick: bool = False

    @property
    def teacher(self) -> Column:
        return self.columns[0]

    @property
    def students(self) -> tuple[Column, ...]:
        return self.columns[1:]

    def speedup(self, column: Column) -> float:
        """How many times as fast as the teacher."""
        return self.teacher.seconds_per_clip / max(column.seconds_per_clip, 1e-9)


def unique(items: Iterable[Item]) -> list[Item]:
    """Each item once, in order."""
    return list(dict.fromkeys(items))

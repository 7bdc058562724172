"""Scores of one model's clips: a value for each clip and measure, and what follows from them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codmd.errors import UserError
from codmd.evaluation.asked import Check
from codmd.evaluation.mini_measures import MEASURES, QUALITY, SEMANTIC, WEIGHTS

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class MiniScores:
    """What was measured on N clips, clip by clip, so that intervals can be drawn over prompts."""

    captions: tuple[str, ...]
    values: np.ndarray  # [N, 16] in the order of MEASURES; NaN where a measure does not apply
    saturation: np.ndarray  # [N] signed error of the objects' saturation, 0.1 is 10% too much
    moves_as_asked: np.ndarray  # [N] for captions that ask for movement: 1 where there is some; else NaN
    checks: tuple[tuple[Check, ...], ...]  # what each caption fixes, met or not
    attributes: tuple[Mapping[str, Sequence[str]], ...]  # what was read; one value for each object
    diversity: np.ndarray  # [N] open captions: share of open attributes in which clips of one caption differ
    pixel_diversity: np.ndarray  # [N] root mean square difference of their thumbnails
    sample_features: np.ndarray | None = None  # [N, C] latents pooled over frames and space
    frame_features: np.ndarray | None = None  # [N, F, C] latents pooled over space

    def __len__(self) -> int:
        return len(self.captions)

    def measures(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, float]:
        """Each measure's mean over the clips that it applies to; NaN where there is none."""
        values = self.values if rows is None else self.values[np.asarray(rows)]
        return dict(zip(MEASURES, _means(values), strict=True))

    def summary(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, float]:
        """The measures, their groups and total, and what else is known of the model on its own."""
        keep = slice(None) if rows is None else np.asarray(rows)
        measures = self.measures(rows)
        alone = {
            "saturation error": self.saturation,
            "dynamic where asked": self.moves_as_asked,
            "diversity": self.diversity,
            "pixel diversity": self.pixel_diversity,
        }
        return measures | totals(measures) | {n: float(_means(v[keep, None])[0]) for n, v in alone.items()}

    def shares_met(self) -> dict[str, float]:
        """Of all that the captions ask for, the share that the clips show, attribute by attribute."""
        met: dict[str, list[bool]] = {}
        for one in (c for checks in self.checks for c in checks):
            met.setdefault(one.attribute, []).append(one.met)
        return {name: sum(values) / len(values) for name, values in met.items()}

    def interval(self, draws: int = 1000, level: float = 0.95, seed: int = 0) -> dict[str, tuple[float, float]]:
        """Bootstrap intervals of `summary`, over prompts: clips of one caption stay together."""
        rng = np.random.default_rng(seed)
        names = list(dict.fromkeys(self.captions))
        rows = [np.flatnonzero(np.array([c == name for c in self.captions])) for name in names]
        drawn = []
        for _ in range(draws):
            picked = np.concatenate([rows[i] for i in rng.integers(0, len(rows), len(rows))])
            drawn.append(list(self.summary(picked).values()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # measures that never apply stay NaN
            low, high = np.nanquantile(np.array(drawn), [(1 - level) / 2, (1 + level) / 2], axis=0)
        return {n: (float(a), float(b)) for n, a, b in zip(self.summary(), low, high, strict=True)}

    def absent(self) -> tuple[str, ...]:
        """Measures that apply to none of the clips, and are left out of the means."""
        return tuple(n for n, v in self.measures().items() if math.isnan(v))

    def save(self, path: Path | str) -> None:
        """Write as JSON."""
        fields = {
            "version": VERSION,
            "measures": list(MEASURES),
            "summary": self.summary(),
            "captions": self.captions,
            "values": self.values,
            "saturation": self.saturation,
            "moves_as_asked": self.moves_as_asked,
            "checks": [[asdict(c) for c in checks] for checks in self.checks],
            "attributes": self.attributes,
            "diversity": self.diversity,
            "pixel_diversity": self.pixel_diversity,
            "sample_features": self.sample_features,
            "frame_features": self.frame_features,
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(plain(fields), allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> MiniScores:
        """Read what `save` wrote."""
        try:
            fields = json.loads(Path(path).read_text())
            same = fields["version"] == VERSION and fields["measures"] == list(MEASURES)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} holds no scores ({error}): give a file that `evaluate mini` wrote") from error
        if not same:
            raise UserError(f"{path} was written by another version: evaluate the model again")
        arrays = ("saturation", "moves_as_asked", "diversity", "pixel_diversity")
        return cls(
            captions=tuple(fields["captions"]),
            values=_array(fields["values"]).reshape(-1, len(MEASURES)),
            checks=tuple(tuple(Check(**c) for c in checks) for checks in fields["checks"]),
            attributes=tuple(fields["attributes"]),
            **{name: _array(fields[name]) for name in arrays},
            sample_features=_maybe(fields["sample_features"]),
            frame_features=_maybe(fields["frame_features"]),
        )


def totals(measures: Mapping[str, float]) -> dict[str, float]:
    """Quality, semantic and total with VBench's weights, without its normalisation; NaN is left out."""
    quality = [(measures[n], WEIGHTS[n]) for n in QUALITY if not math.isnan(measures[n])]
    semantic = [measures[n] for n in SEMANTIC if not math.isnan(measures[n])]
    q = sum(v * w for v, w in quality) / sum(w for _, w in quality) if quality else math.nan
    s = sum(semantic) / len(semantic) if semantic else math.nan
    return {"quality": q, "semantic": s, "total": (4 * q + s) / 5}


def plain(value: Any) -> Any:
    """The value as JSON can hold it: lists, and None for NaN."""
    if isinstance(value, np.ndarray):
        return plain(np.round(value.astype(float), 6).tolist())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _array(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)  # None becomes NaN


def _maybe(values: Any) -> np.ndarray | None:
    return None if values is None else _array(values)


def _means(values: np.ndarray) -> list[float]:
    known = np.isfinite(values)
    number = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return [float(s / n) if n else math.nan for s, n in zip(sums, number, strict=True)]

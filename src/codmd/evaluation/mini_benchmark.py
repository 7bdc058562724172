"""The miniature's benchmark: clips and captions in, scores out; and a student held against its teacher."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from codmd.errors import UserError
from codmd.evaluation.asked import check
from codmd.evaluation.mini_measures import measure, saturation_error
from codmd.evaluation.mini_scores import MiniScores
from codmd.mini.captions import Asked, read
from codmd.mini.oracle import Reading, read_clip, to_unit
from codmd.relations import pairwise_diversity, pool_frames, pool_samples, relation_matrix

THUMBNAIL = 8  # pixels a side


def score(
    videos: Any,
    captions: Sequence[str],
    latents: torch.Tensor | None = None,
    on_clip: Callable[[], None] | None = None,
) -> MiniScores:
    """Score clips `[N, F, H, W, 3]` (floats in [-1, 1] or uint8) against their captions.

    `latents` `[N, C, F, H, W]`, where given, let `compare` measure the relational gap. `on_clip` hears of
    each clip.
    """
    if len(videos) != len(captions) or (latents is not None and len(latents) != len(captions)):
        raise UserError(f"score: {len(videos)} clips for {len(captions)} captions: give each clip its caption")
    asked = [read(caption) for caption in captions]
    values, checks, readings, thumbnails = [], [], [], []
    for video, wants in zip(videos, asked, strict=True):
        pixels = to_unit(video)
        reading = read_clip(video)
        met = check(wants, reading)
        values.append(measure(wants, reading, met, pixels))
        checks.append(met)
        thumbnails.append(_thumbnail(pixels))
        readings.append(_Facts(reading))
        if on_clip is not None:
            on_clip()
    attributes = tuple(r.attributes for r in readings)
    by_attribute, by_pixel = _diversity(captions, asked, attributes, thumbnails)
    moving = [w.moving or w.motion not in (None, "still") for w in asked]
    return MiniScores(
        captions=tuple(captions),
        values=np.array(values).reshape(len(captions), -1),
        saturation=np.array([r.saturation for r in readings]),
        moves_as_asked=np.array([float(r.moving) if m else math.nan for r, m in zip(readings, moving, strict=True)]),
        checks=tuple(checks),
        attributes=attributes,
        diversity=by_attribute,
        pixel_diversity=by_pixel,
        sample_features=None if latents is None else pool_samples(latents.detach().cpu()).numpy(),
        frame_features=None if latents is None else pool_frames(latents.detach().cpu()).numpy(),
    )


class _Facts:
    """What is kept of a reading; the rest holds the whole clip in memory."""

    def __init__(self, reading: Reading) -> None:
        self.saturation = saturation_error(reading)
        self.moving = any(o.motion.amount > 0.5 for o in reading.objects)
        self.attributes = {
            "shape": sorted(str(o.shape) for o in reading.objects),
            "colour": sorted(str(o.colour) for o in reading.objects),
            "motion": [str(reading.motion)],
            "camera": [str(reading.camera)],
            "background": [reading.background],
            "style": [str(reading.style)],
            "relation": [str(reading.relation)] if reading.count == 2 else [],
        }


def is_open(asked: Asked) -> bool:
    """A caption that leaves at least half of the attributes to chance that an oracle can read."""
    readable = 5 if asked.count == 1 else 6
    return 2 * len(asked.open_attributes()) >= readable


def _thumbnail(pixels: np.ndarray) -> np.ndarray:
    frames, height, width, _ = pixels.shape
    cells = pixels.reshape(frames, THUMBNAIL, height // THUMBNAIL, THUMBNAIL, width // THUMBNAIL, 3)
    return cells.mean(axis=(2, 4))


def _diversity(
    captions: Sequence[str],
    asked: Sequence[Asked],
    attributes: Sequence[dict[str, list[str]]],
    thumbnails: Sequence[np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """How far each clip of an open caption lies, on average, from that caption's other clips."""
    by_attribute, by_pixel = np.full(len(captions), np.nan), np.full(len(captions), np.nan)
    for i, caption in enumerate(captions):
        others = [j for j, c in enumerate(captions) if c == caption and j != i]
        if not others or not is_open(asked[i]):
            continue
        names = asked[i].open_attributes()
        differ = [[attributes[i][n] != attributes[j][n] for n in names] for j in others]
        by_attribute[i] = np.mean(differ)
        by_pixel[i] = np.mean([np.sqrt(np.mean((thumbnails[i] - thumbnails[j]) ** 2)) for j in others])
    return by_attribute, by_pixel


def compare(student: MiniScores, teacher: MiniScores, seed: int = 0) -> dict[str, float]:
    """A student held against its teacher, on the same captions in the same order.

    Gaps are 0 for equals; differences are student minus teacher, but for Proposition 3's; what can't be had is NaN.
    With finitely many clips two equals have a mode coverage above 0 too: `mode coverage of equals` is what chance
    alone would give.
    """
    if student.captions != teacher.captions:
        raise UserError("compare: the two were scored on different captions: score both on the same ones, in order")
    mine, theirs = student.summary(), teacher.summary()
    covered, by_chance = _mode_coverage(student, teacher, seed)
    result = {
        "total difference": mine["total"] - theirs["total"],
        "dynamic difference": mine["dynamic degree"] - theirs["dynamic degree"],
        "saturation difference": mine["saturation error"] - theirs["saturation error"],
        "diversity ratio": _ratio(mine["diversity"], theirs["diversity"]),
        "pixel diversity ratio": _ratio(mine["pixel diversity"], theirs["pixel diversity"]),
        "mode coverage": covered,
        "mode coverage of equals": by_chance,
    }
    return result | _relational_gap(student, teacher)


def _ratio(mine: float, theirs: float) -> float:
    return mine / theirs if theirs else math.nan


def _mode_coverage(student: MiniScores, teacher: MiniScores, seed: int, draws: int = 200) -> tuple[float, float]:
    """Total variation between two models' attribute distributions over open captions, averaged over
    attributes.

    Also its mean where the clips of both are dealt out to the two at random.
    """
    asked = [read(c) for c in student.captions]
    rng = np.random.default_rng(seed)
    measured, dealt = [], []
    for name in ("shape", "colour", "motion", "background", "style", "relation"):
        rows = [i for i, a in enumerate(asked) if is_open(a) and name in a.open_attributes()]
        lists = [[scores.attributes[i][name] for i in rows] for scores in (student, teacher)]
        options = {v: k for k, v in enumerate(sorted({v for side in lists for values in side for v in values}))}
        if not options:
            continue
        counts = np.zeros((2, len(rows), len(options)))
        for side, values in enumerate(lists):
            for row, found in enumerate(values):
                for value in found:
                    counts[side, row, options[value]] += 1
        measured.append(_variation(counts))
        swaps = rng.random((draws, len(rows))) < 0.5  # whose clip is whose, caption by caption
        dealt.append(np.mean([_variation(np.where(s[None, :, None], counts[::-1], counts)) for s in swaps]))
    if not measured:
        return math.nan, math.nan
    return float(np.mean(measured)), float(np.mean(dealt))


def _variation(counts: np.ndarray) -> float:
    totals = counts.sum(axis=1)
    shares = totals / np.maximum(totals.sum(axis=1, keepdims=True), 1)
    return float(0.5 * np.abs(shares[0] - shares[1]).sum())


def _relational_gap(student: MiniScores, teacher: MiniScores) -> dict[str, float]:
    """Mean absolute difference of the similarity matrices' entries off the diagonal, and D(P) - D(Q)
    of Proposition 3, where P is the teacher: above 0 where the student has lost diversity.

    The frame matrices are compared clip by clip, the batch matrix over all clips.
    """
    pairs = [
        (student.frame_features, teacher.frame_features),
        (student.sample_features, teacher.sample_features),
    ]
    gaps = []
    for mine, theirs in pairs:
        if mine is None or theirs is None or mine.shape != theirs.shape or mine.shape[-2] < 2:
            gaps.append(math.nan)
            continue
        apart = (relation_matrix(torch.tensor(mine)) - relation_matrix(torch.tensor(theirs))).abs()
        n = mine.shape[-2]
        gaps.append(float(apart.sum(dim=(-2, -1)).mean() / (n * (n - 1))))
    diversity = math.nan
    if student.sample_features is not None and teacher.sample_features is not None:
        spread = [pairwise_diversity(torch.tensor(s.sample_features)) for s in (student, teacher)]
        diversity = float(spread[1] - spread[0])
    return {
        "frame relation gap": gaps[0],
        "batch relation gap": gaps[1],
        "pairwise diversity difference": diversity,
    }

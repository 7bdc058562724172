"""The oracle's third step: which shape a mask is, and how far it is turned.

Each frame's mask is resampled to a common size (its area as that of a disc of radius 1) and compared with
every shape at every angle in one matrix product. The score is the Tanimoto index, ``<a, b> / (<a, a> + <b, b>
- <a, b>)``: the intersection over the union when the masks are 0 and 1, and as good for soft edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from codmd.mini.world import SHAPES, shape_distance

REACH, GRID = 1.7, 27  # the resampled window: that many radii to each side, that many points a side
STEP = math.radians(5)
SYMMETRY = {"circle": STEP, "square": math.pi / 2, "triangle": 2 * math.pi / 3, "cross": math.pi / 2}
TURNS = np.radians(np.arange(-270, 271, 15))  # over the whole clip


@dataclass(frozen=True, kw_only=True)
class Match:
    """The shape that fits a track best over all frames."""

    shape: str
    scores: dict[str, float]  # each shape's mean Tanimoto index
    per_frame: np.ndarray  # [F] the index of the best shape at the fitted angles
    turn: float  # radians that it turns over the clip, 0 if it doesn't
    angles: np.ndarray  # [F]
    turn_gain: float  # how much better the turning shape fits than a resting one


@cache
def templates() -> tuple[np.ndarray, dict[str, slice]]:
    """Masks of all shapes at all angles, `[T, GRID * GRID]`, and where each shape's lie."""
    axis = np.linspace(-REACH, REACH, GRID)
    x, y = np.meshgrid(axis, axis)
    rows: list[np.ndarray] = []
    where: dict[str, slice] = {}
    for shape in SHAPES:
        angles = np.arange(0, SYMMETRY[shape] - 1e-6, STEP)
        where[shape] = slice(len(rows), len(rows) + len(angles))
        for angle in angles:
            cos, sin = math.cos(angle), math.sin(angle)
            distance = shape_distance(shape, cos * x + sin * y, -sin * x + cos * y, 1.0)
            # Edges about as soft as those of a small object.
            rows.append(np.clip(0.5 - distance * 6, 0, 1).ravel())
    return np.stack(rows).astype(np.float32), where


def resample(
    cover: np.ndarray, x: np.ndarray, y: np.ndarray, radius: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Masks `[F, H, W]` on the common grid, `[F, GRID * GRID]`, and which points of it lie in view."""
    frames, height, width = cover.shape
    axis = np.linspace(-REACH, REACH, GRID, dtype=np.float32)
    px = (x[:, None] + radius[:, None] * axis - 0.5).astype(np.float32)  # [F, GRID] pixel indices
    py = (y[:, None] + radius[:, None] * axis - 0.5).astype(np.float32)
    inside_x, inside_y = (px > -0.5) & (px < width - 0.5), (py > -0.5) & (py < height - 0.5)
    px, py = np.clip(px, 0, width - 1.001), np.clip(py, 0, height - 1.001)
    x0, y0 = px.astype(np.int32), py.astype(np.int32)
    fx, fy = (px - x0)[:, None, :], (py - y0)[:, :, None]
    f = np.arange(frames)[:, None, None]
    left, upper = x0[:, None, :], y0[:, :, None]
    top = cover[f, upper, left] * (1 - fx) + cover[f, upper, left + 1] * fx
    low = cover[f, upper + 1, left] * (1 - fx) + cover[f, upper + 1, left + 1] * fx
    seen = inside_y[:, :, None] & inside_x[:, None, :]
    return ((top * (1 - fy) + low * fy) * seen).reshape(frames, -1), seen.reshape(frames, -1)


def match(cover: np.ndarray, x: np.ndarray, y: np.ndarray, radius: np.ndarray, time: np.ndarray) -> Match:
    """Find the shape and its turning from soft masks and from where they lie."""
    masks, seen = resample(cover, x, y, radius)
    forms, where = templates()
    product = masks @ forms.T
    own = (masks**2).sum(axis=1)[:, None]
    table = product / (own + seen.astype(np.float32) @ (forms**2).T - product + 1e-6)  # [F, T]

    best: dict[str, tuple[float, float, float, np.ndarray]] = {}
    for shape in SHAPES:
        scores = table[:, where[shape]]  # [F, A]
        steps = scores.shape[1]
        turns = np.zeros(1) if shape == "circle" else TURNS
        starts = np.arange(steps)
        index = starts[None, :, None] + turns[:, None, None] * (time - 0.5) / STEP  # [turns, starts, F]
        low = np.floor(index).astype(np.int32)
        part = (index - low).astype(np.float32)
        frames = np.arange(len(time))
        along = scores[frames, low % steps] * (1 - part) + scores[frames, (low + 1) % steps] * part
        total = along.mean(axis=-1)
        i, j = np.unravel_index(int(total.argmax()), total.shape)
        rest = float(total[np.abs(turns) < 1e-6].max())
        angles = starts[j] * STEP + turns[i] * (time - 0.5)
        best[shape] = (float(total[i, j]), rest, float(turns[i]), angles)
    # A turning shape must fit clearly better than a resting one to be preferred: it has more freedom.
    ranked = {s: (b[0] if b[0] > b[1] + 0.03 else b[1]) for s, b in best.items()}
    shape = max(ranked, key=lambda s: ranked[s])
    score, rest, turn, angles = best[shape]
    if score <= rest + 0.03:
        resting = table[:, where[shape]].mean(axis=0).argmax()
        turn, angles = 0.0, np.full_like(time, float(resting) * STEP)
    column = np.round(angles / STEP).astype(int) % (where[shape].stop - where[shape].start)
    return Match(
        shape=shape, scores=ranked, per_frame=table[np.arange(len(time)), where[shape].start + column],
        turn=turn, angles=angles, turn_gain=score - rest,
    )  # fmt: skip

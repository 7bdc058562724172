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
BLURS = (0.06, 0.18, 0.3, 0.42)  # in radii: an autoencoder's blur rounds a small shape's corners off
UPRIGHT = math.radians(10)
TURNING, TILTED = 0.015, 0.05  # by how much more a shape must fit that turns, or is tilted from the first
ROUND = 0.018  # by how much more a circle must fit: lost corners make circles, and nothing makes corners
TURNS = np.radians(np.arange(-270, 271, 15))  # over the whole clip


@dataclass(frozen=True, kw_only=True)
class Match:
    """The shape that fits a track best over all frames."""

    shape: str
    scores: dict[str, float]  # each shape's mean Tanimoto index, turned as fits it
    per_frame: np.ndarray  # [F] the index of the best shape at the fitted angles
    turn: float  # radians that it turns over the clip, 0 if it doesn't
    angles: np.ndarray  # [F]


@cache
def templates() -> tuple[np.ndarray, dict[str, slice]]:
    """Masks of all shapes at all angles and softnesses, `[S, T, GRID * GRID]`, and where each shape's lie in T."""
    axis = np.linspace(-REACH, REACH, GRID)
    x, y = (v.ravel() for v in np.meshgrid(axis, axis))
    rows: list[np.ndarray] = []
    where: dict[str, slice] = {}
    for shape in SHAPES:
        angles = np.arange(0, SYMMETRY[shape] - 1e-6, STEP)
        where[shape] = slice(len(rows), len(rows) + len(angles))
        soft = [_soft_shape(shape, blur) for blur in BLURS]
        for angle in angles:
            cos, sin = math.cos(angle), math.sin(angle)
            rows.append(np.stack([_look_up(m, cos * x + sin * y, -sin * x + cos * y) for m in soft]))
    return np.stack(rows, axis=1).astype(np.float32), where


def _soft_shape(shape: str, blur: float, step: float = 0.05, reach: float = 3.0) -> tuple[np.ndarray, float, float]:
    """An upright shape, blurred, with the contrast of measured masks, and how to look it up at area pi."""
    axis = np.arange(-reach, reach + step / 2, step)
    x, y = np.meshgrid(axis, axis)
    mask = np.clip(0.5 - shape_distance(shape, x, y, 1.0) / step, 0, 1)
    kernel = np.exp(-0.5 * (axis / blur) ** 2)
    kernel /= kernel.sum()
    for _ in range(2):
        mask = np.stack([np.convolve(row, kernel, mode="same") for row in mask]).T
    mask = contrast(mask)
    return mask, math.sqrt(mask.sum() * step**2 / math.pi) / step, reach / step


def _look_up(soft: tuple[np.ndarray, float, float], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    mask, scale, middle = soft
    px, py = x * scale + middle, y * scale + middle
    return mask[np.round(py).astype(int), np.round(px).astype(int)]


def contrast(cover: np.ndarray) -> np.ndarray:
    """Pull the ends of a measured share apart, both alike, against noise."""
    return np.clip((cover - 0.15) / 0.7, 0.0, 1.0)


def resample(cover: np.ndarray, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    own = (masks**2).sum(axis=1)[:, None]
    table = np.zeros((len(masks), forms.shape[1]), dtype=np.float32)
    for form in forms:  # of each softness
        product = masks @ form.T
        index = product / (own + seen.astype(np.float32) @ (form**2).T - product + 1e-6)  # [F, T]
        table = np.maximum(table, index)

    scores: dict[str, float] = {}
    best: tuple[float, str, float, np.ndarray] | None = None
    for shape in SHAPES:
        along = table[:, where[shape]]  # [F, A]
        steps = along.shape[1]
        turns = np.zeros(1) if shape == "circle" else TURNS
        starts = np.arange(steps)
        index = starts[None, :, None] + turns[:, None, None] * time / STEP  # [turns, starts, F]
        low = np.floor(index).astype(np.int32)
        part = (index - low).astype(np.float32)
        frames = np.arange(len(time))
        mean = (along[frames, low % steps] * (1 - part) + along[frames, (low + 1) % steps] * part).mean(-1)
        # Things stand upright at first, and most do so to the end. Others must fit clearly better: what is blurred
        # in the corners may look like another shape that is tilted.
        tilted = np.minimum(starts, steps - starts) * STEP > UPRIGHT
        fair = mean - np.maximum(TURNING * (np.abs(turns) > 1e-6)[:, None], TILTED * tilted)
        fair = fair - ROUND * (shape == "circle")
        i, j = np.unravel_index(int(fair.argmax()), fair.shape)
        scores[shape] = float(mean[i, j])
        if best is None or fair[i, j] > best[0]:
            best = (float(fair[i, j]), shape, float(turns[i]), starts[j] * STEP + turns[i] * time)
    assert best is not None
    _, shape, turn, angles = best
    column = np.round(angles / STEP).astype(int) % (where[shape].stop - where[shape].start)
    return Match(
        shape=shape, scores=scores, per_frame=table[np.arange(len(time)), where[shape].start + column],
        turn=turn, angles=angles,
    )  # fmt: skip

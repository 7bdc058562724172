"""The oracle's second step: find the objects in front of the background and follow them through the frames.

What differs from the background is an object. Objects are told apart by hue, which neither shading nor a
blend with a grey background alters. Each object's colours are measured, and give the share of every pixel
that it covers; areas and centres are sums over these shares, so that blur doesn't bias them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from codmd.mini.background import Background
from codmd.mini.matching import contrast
from codmd.mini.world import COLOURS, SHADE

APART = 0.16  # a pixel this far (in RGB) from the background is not background
FEWEST = 12  # interior pixels without which a frame holds no object
NAMES = tuple(COLOURS)
_OPPONENT = np.array([[1.0, -0.5, -0.5], [0.0, math.sqrt(3) / 2, -math.sqrt(3) / 2]], dtype=np.float32).T
PLANE = np.asarray(list(COLOURS.values()), dtype=np.float32) @ _OPPONENT  # [6, 2]
HUES = PLANE / np.linalg.norm(PLANE, axis=1, keepdims=True)
# The light of a shaded object falls by 0.45 SHADE over a radius, from 1 - SHADE / 2 at its centre: by 0.26 of that.
# Blur takes away from the fall more than it ever adds, so that the border lies below the middle.
SHADED_BELOW = -0.3 * (0.45 * SHADE) / (1 - SHADE / 2)
GREY = 0.3  # an object with less than this share of its colour's chroma has no colour


@dataclass(frozen=True, kw_only=True)
class Track:
    """One object through the frames, on the screen. NaN where it is not to be seen."""

    colour: str | None
    style: str
    slope: float  # how the light falls from the centre, per radius, as a share of the light at the centre
    saturation: float  # chroma relative to that of the true colour, 1 is right
    frame_colours: np.ndarray  # [F, 3]
    cover: np.ndarray  # [F, H, W] the share of each pixel that it covers
    area: np.ndarray  # [F]
    x: np.ndarray  # [F]
    y: np.ndarray  # [F]

    @property
    def radius(self) -> np.ndarray:
        """Of the disc with the same area."""
        return np.sqrt(self.area / math.pi)

    @property
    def seen(self) -> np.ndarray:
        return np.isfinite(self.x)


@dataclass(frozen=True, kw_only=True)
class _Points:
    """The pixels that are not background: coordinates, colours, hue class, and whether all around are too."""

    frame: np.ndarray
    y: np.ndarray
    x: np.ndarray
    colour: np.ndarray  # [N, 3]
    hue: np.ndarray
    inner: np.ndarray

    def __getitem__(self, keep: np.ndarray) -> _Points:
        return _Points(**{name: values[keep] for name, values in vars(self).items()})


def find_tracks(video: np.ndarray, background: Background) -> list[Track]:
    """The clip's one or two objects, the larger first; none if nothing stands before the background."""
    frames = len(video)
    apart = video - background.row[:, None]
    points = _foreground(video, apart)
    groups = _group(points, frames)
    if not groups:
        return []
    middles = [_middle(g, frames) for g in groups]
    return [_measure(i, groups, middles, points, apart, background, frames) for i in range(len(groups))]


def _foreground(video: np.ndarray, apart: np.ndarray) -> _Points:
    mask = np.einsum("fhwc,fhwc->fhw", apart, apart) > APART**2
    padded = np.pad(mask, ((0, 0), (1, 1), (1, 1)), mode="edge").astype(np.uint8)
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    around = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    frame, y, x = np.nonzero(mask & (around >= 4))  # lone pixels are noise
    colour = video[frame, y, x]
    hue = (colour @ _OPPONENT @ HUES.T).argmax(axis=1)
    return _Points(frame=frame, y=y + 0.5, x=x + 0.5, colour=colour, hue=hue, inner=around[frame, y, x] >= 8)


def _group(points: _Points, frames: int) -> list[_Points]:
    """The interior points of each object."""
    inner = points[points.inner]
    counts = np.zeros((frames, len(NAMES)), dtype=int)
    np.add.at(counts, (inner.frame, inner.hue), 1)
    first = int(counts.sum(axis=0).argmax())
    if counts.max(initial=0) < FEWEST:
        return []
    both = (np.sort(counts, axis=1)[:, -2] >= 2 * FEWEST).mean() > 0.5
    if both:
        second = int(np.where(np.arange(len(NAMES)) == first, -1, counts.sum(axis=0)).argmax())
        return [inner[inner.hue == first], inner[inner.hue == second]]
    # Frames that lack the main hue count with what they have: an object may change its colour.
    lacks = counts[:, first] < FEWEST
    single = inner[(inner.hue == first) | lacks[inner.frame]]
    halves = _split(single, frames)
    return halves if halves else [single]


def _split(points: _Points, frames: int) -> list[_Points]:
    """Two objects of one colour, if the points spread far wider than one object of their number would."""
    x, y = _middle(points, frames)
    dx, dy = points.x - x[points.frame], points.y - y[points.frame]
    number = np.bincount(points.frame, minlength=frames)
    some = number >= 2 * FEWEST
    if not some.any():
        return []
    mean = lambda v: np.bincount(points.frame, v, minlength=frames) / np.maximum(number, 1)  # noqa: E731
    cx, cy = mean(dx), mean(dy)
    dx, dy = dx - cx[points.frame], dy - cy[points.frame]
    xx, yy, xy = mean(dx * dx), mean(dy * dy), mean(dx * dy)
    if float(np.median((xx + yy)[some] / (number[some] / (2 * math.pi)))) < 2.2:
        return []
    axis = 0.5 * math.atan2(2 * float(np.median(xy[some])), float(np.median((xx - yy)[some])))
    side = math.cos(axis) * dx + math.sin(axis) * dy > 0
    share = float(side.mean())
    return [points[side], points[~side]] if 0.2 < share < 0.8 else []


def _middle(points: _Points, frames: int) -> tuple[np.ndarray, np.ndarray]:
    """The median position in each frame; NaN where there are too few points."""
    x, y = np.full(frames, np.nan), np.full(frames, np.nan)
    edges = np.searchsorted(points.frame, np.arange(frames + 1))
    for f, (low, high) in enumerate(pairwise(edges)):
        if high - low >= FEWEST // 2:
            x[f], y[f] = np.median(points.x[low:high]), np.median(points.y[low:high])
    return x, y


def _measure(
    which: int,
    groups: list[_Points],
    middles: list[tuple[np.ndarray, np.ndarray]],
    points: _Points,
    apart: np.ndarray,
    background: Background,
    frames: int,
) -> Track:
    x, y = middles[which]
    height, width = apart.shape[1:3]
    # A first radius from the points nearest to this object, and then its colour against height above its
    # middle.
    mine = _nearest(points.x, points.y, points.frame, which, middles)
    near = points[mine]
    rough = np.sqrt(np.bincount(near.frame, minlength=frames) / math.pi)
    reach = 2.0 * max(float(np.median(rough[rough > 0])), 4.0) if (rough > 0).any() else 8.0
    own = groups[which]
    own = own[np.hypot(own.x - x[own.frame], own.y - y[own.frame]) < reach]
    level = (own.y - y[own.frame]) / np.maximum(rough[own.frame], 2)
    level_mean, colour_mean = level.mean(), own.colour.mean(axis=0)
    centred = level - level_mean
    gradient = (centred[:, None] * (own.colour - colour_mean)).sum(axis=0) / max(float((centred**2).sum()), 1e-6)
    colour = colour_mean - gradient * level_mean

    # The share of each pixel that the object covers: its place between the background and the object's
    # colour.
    px, py = np.arange(width) + 0.5, np.arange(height) + 0.5
    level = np.clip((py[None] - y[:, None]) / np.maximum(rough[:, None], 2), -1.2, 1.2)
    level = np.nan_to_num(level).astype(np.float32)
    paint = (colour + gradient * level[..., None]).astype(np.float32)  # [F, H, 3]
    span = paint[:, :, None] - background.row[:, None]  # [F, H, W, 3]
    cover = np.einsum("fhwc,fhwc->fhw", apart, span) / (np.einsum("fhwc,fhwc->fhw", span, span) + 1e-3)
    cover = contrast(cover)
    grid_x, grid_y = np.broadcast_to(px, cover.shape), np.broadcast_to(py[:, None], cover.shape)
    frame = np.broadcast_to(np.arange(frames)[:, None, None], cover.shape)
    far = (grid_x - np.nan_to_num(x)[:, None, None]) ** 2 + (grid_y - np.nan_to_num(y)[:, None, None]) ** 2
    keep = far < (np.maximum(1.9 * rough, 5.0) ** 2)[:, None, None]
    if len(groups) > 1:
        keep &= _nearest(grid_x, grid_y, frame, which, middles)
    cover *= keep & np.isfinite(x)[:, None, None]

    area = cover.sum(axis=(1, 2)).astype(float)
    some = np.where(area > 8, area, np.nan)
    frame_colours = np.full((frames, 3), np.nan)
    number = np.bincount(own.frame, minlength=frames)
    flat = own.colour - gradient * ((own.y - y[own.frame]) / np.maximum(rough[own.frame], 2))[:, None]
    enough = np.where(number > 3, number, np.nan)
    for c in range(3):
        frame_colours[:, c] = np.bincount(own.frame, flat[:, c], minlength=frames) / enough
    slope = float(gradient @ colour / max(float(colour @ colour), 1e-6))
    name, saturation, style = name_colour(colour, slope)
    return Track(
        colour=name, style=style, slope=slope, saturation=saturation,
        frame_colours=frame_colours, cover=cover, area=some,
        x=np.einsum("fhw,w->f", cover, px) / some,
        y=np.einsum("fhw,h->f", cover, py) / some,
    )  # fmt: skip


def name_colour(colour: np.ndarray, slope: float) -> tuple[str | None, float, str]:
    """A colour's name (None where it has hardly any), its saturation against the true one, and the style."""
    style = "shaded" if slope < SHADED_BELOW else "flat"
    plane = colour @ _OPPONENT
    hue = int((HUES @ plane).argmax())
    light = 1 - SHADE / 2 if style == "shaded" else 1.0
    saturation = float(np.linalg.norm(plane) / (np.linalg.norm(PLANE[hue]) * light))
    return (NAMES[hue] if saturation > GREY else None), saturation, style


def _nearest(
    x: np.ndarray, y: np.ndarray, frame: np.ndarray, which: int, middles: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Which points lie nearer to this object than to any other."""
    squares = [np.nan_to_num((x - mx[frame]) ** 2 + (y - my[frame]) ** 2, nan=1e6) for mx, my in middles]
    return np.logical_and.reduce([squares[which] <= s for s in squares]) & (squares[which] < 1e6)

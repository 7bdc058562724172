"""The oracle's fourth step: which of the world's motions a path is.

Each motion is a family of curves that is linear in its parameters; all are fitted to the path by least
squares. A motion counts if it is at least half as large as the renderer's and explains the path; among those
that do, the one that leaves least unexplained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from codmd.mini.background import line
from codmd.mini.world import GROWTH, HOP_HEIGHT, HOPS, ORBIT_RADIUS, SPIN_ANGLE, TRAVEL

SLOWEST = TRAVEL["slow"][0]
FAST_FROM = (TRAVEL["slow"][1] + TRAVEL["fast"][0]) / 2
GROWTH_LOG = math.log(GROWTH[1] / GROWTH[0])
ASTRAY = 2.5  # pixels: a path this far from every motion is none of them


@dataclass(frozen=True, kw_only=True)
class Motion:
    """A path's motion. `amount` is its size relative to the least that the renderer makes."""

    name: str | None  # None: moves in a way that has no name here
    speed: str | None
    amount: float
    residual: float  # root mean square distance in pixels from the nearest named motion
    fitted_x: np.ndarray  # [F] the motion that fits best, whether or not it is named
    fitted_y: np.ndarray
    fitted_radius: np.ndarray


def name_motion(x: np.ndarray, y: np.ndarray, radius: np.ndarray, turn: float, time: np.ndarray) -> Motion:
    """Name a path in world coordinates (the camera's motion taken out); all are `[F]` and finite."""
    rest_x, rest_y = x - np.median(x), y - np.median(y)
    rest = float(np.sqrt(np.mean(rest_x**2 + rest_y**2)))

    one, zero = np.ones_like(time), np.zeros_like(time)
    hop = -np.abs(np.sin(HOPS * math.pi * time))
    cos, sin = np.cos(2 * math.pi * time), np.sin(2 * math.pi * time)
    # Columns of x and of y that share their parameter; the first two are where the path lies.
    line_fit = _fit(x, y, ((one, zero), (zero, one), (time, zero), (zero, time)))
    hops = _fit(x, y, ((one, zero), (zero, one), (zero, hop)))
    circles = [_fit(x, y, ((one, zero), (zero, one), (cos, s * sin), (-s * sin, cos))) for s in (1, -1)]
    circle = min(circles, key=lambda fit: fit[0])

    dx, dy = float(line_fit[1][2]), float(line_fit[1][3])
    small, large = sorted((abs(dx), abs(dy)))
    if small > math.tan(math.pi / 8) * large:
        direction, travel = "diagonal", math.hypot(dx, dy) / math.hypot(0.75, 0.75)
    elif abs(dx) > abs(dy):
        direction, travel = ("right" if dx > 0 else "left"), abs(dx)
    else:
        direction, travel = ("down" if dy > 0 else "up"), abs(dy)
    candidates = [
        (line_fit, direction, travel / SLOWEST),
        (hops, "bounce", float(hops[1][2]) / HOP_HEIGHT),
        (circle, "orbit", float(np.hypot(*circle[1][2:])) / ORBIT_RADIUS),
    ]
    if len(time) < 6:  # too few frames to tell a hop or an orbit
        candidates = candidates[:1] if len(time) > 1 else []
    large_enough = [c for c in candidates if c[2] > 0.5]
    fit, name, amount = min(large_enough, key=lambda c: c[0][0]) if large_enough else (line_fit, "still", 0.0)
    residual = math.sqrt(fit[0])
    if name != "still" and residual > max(ASTRAY, 0.5 * rest):
        name = "none"
    if name == "still" and rest > ASTRAY:
        name = "none"

    growth, _ = line(time, np.log(radius))
    wider, middle = line(time, radius)
    bigger = abs(growth) / GROWTH_LOG
    turned = abs(turn) / SPIN_ANGLE
    if bigger > max(0.5, amount if name != "none" else 0.5):
        name, amount = ("grow" if growth > 0 else "shrink"), bigger
    if turned > max(0.5, amount if name != "none" else 0.5) - 1e-6:
        name, amount = "spin", turned
    # Even without order it moves: by deviation, these are 1 for the slowest translation and for a growth.
    strays = math.sqrt(12) * rest / SLOWEST
    swells = math.sqrt(12) * float(np.std(np.log(radius))) / GROWTH_LOG
    amount = max(amount, bigger, turned, strays, swells)
    translates = name == direction and name != "none"
    return Motion(
        name=None if name == "none" else name,
        speed=("fast" if travel > FAST_FROM else "slow") if translates else None,
        amount=amount, residual=residual, fitted_x=fit[2], fitted_y=fit[3],
        fitted_radius=middle + wider * (time - 0.5),
    )  # fmt: skip


def _fit(
    x: np.ndarray, y: np.ndarray, columns: tuple[tuple[np.ndarray, np.ndarray], ...]
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Least squares over both coordinates: mean square error, parameters, fitted x and y."""
    design = np.stack([np.concatenate(c) for c in columns], axis=1)
    target = np.concatenate([x, y])
    parameters = np.linalg.lstsq(design, target, rcond=None)[0]
    fitted = design @ parameters
    error = float(((fitted - target) ** 2).sum()) / len(x)
    return error, parameters, fitted[: len(x)], fitted[len(x) :]

"""The oracle's first step: the striped background, and through it the camera.

Every column of the background has one colour, so a column's median over rows sees through the objects. The
columns follow ``colour + amplitude * cos(2 pi (x - centre) / (16 zoom) + phase)``, with the zoom and the
phase of each frame to be found. A pan is a drift of the phase, a zoom a change of the period.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from codmd.mini.world import BACKGROUNDS, PAN, STRIPE_PERIOD, ZOOM

ZOOMS = np.linspace(0.9, 1.65, 26)
FAINT = 0.02  # stripes below this amplitude (a quarter of the renderer's) tell nothing of the camera


@dataclass(frozen=True, kw_only=True)
class Background:
    """What lies behind the objects in each frame. Colours are in [0, 1]."""

    name: str
    camera: str | None  # None: the stripes are too faint, or move as no camera of this world does
    colours: np.ndarray  # [F, 3] stripes averaged out
    stripes: np.ndarray  # [F, W]
    phase: np.ndarray  # [F] of the stripes at the middle of the frame
    shift: np.ndarray  # [F] pixels, the steady pan that fits best
    zoom: np.ndarray  # [F]

    @property
    def row(self) -> np.ndarray:
        """Each frame's columns, `[F, W, 3]`."""
        return self.colours[:, None, :] + self.stripes[:, :, None]


def fit_background(video: np.ndarray, time: np.ndarray) -> Background:
    """Fit the background of a clip `[F, H, W, 3]` in [0, 1]."""
    columns = np.median(video, axis=1)  # [F, W, 3]
    colours = np.median(columns, axis=1)  # [F, 3]
    grey = (columns - colours[:, None]).mean(axis=-1)
    # Columns in which objects outweigh the background stand out in colour, where stripes are grey.
    tint = np.abs(columns - colours[:, None] - grey[..., None]).max(axis=-1)
    weights = 1 / (1 + (tint / 0.04) ** 2) / (1 + (grey / 0.15) ** 4)

    zoom = np.ones_like(time)
    amplitude = np.ones_like(time)
    for _ in range(2):  # the second time with the columns that the first could not explain weighted down
        zoom, wave, offset, _, amplitude = _fit_stripes(grey, weights, np.tile(ZOOMS, (len(time), 1)))
        weights = weights / (1 + ((grey - offset[:, None] - wave) / 0.03) ** 2)
    slope, middle = line(time, zoom, amplitude)
    zooms = abs(slope) > (ZOOM - 1) / 2
    path = np.clip(middle + slope * (time - 0.5), ZOOMS[0], ZOOMS[-1]) if zooms else np.ones_like(time)
    _, wave, offset, phase, amplitude = _fit_stripes(grey, weights, path[:, None])
    phase = np.unwrap(phase)
    drift, middle = line(time, phase, amplitude)
    pan = drift * STRIPE_PERIOD / (2 * math.pi)

    camera: str | None = None
    astray = np.abs(phase - middle - drift * (time - 0.5))
    if float(np.median(amplitude)) > FAINT and float(astray.mean()) < 0.8:
        camera = "still"
        if zooms:
            camera = "zoom in" if slope > 0 else "zoom out"
        elif abs(pan) > PAN / 2:
            camera = "pan right" if pan > 0 else "pan left"
    colours = colours + offset[:, None]
    centre = np.median(colours, axis=0)
    return Background(
        name=min(BACKGROUNDS, key=lambda b: float(np.sum((np.asarray(BACKGROUNDS[b]) - centre) ** 2))),
        camera=camera,
        colours=colours.astype(np.float32),
        stripes=wave.astype(np.float32),
        phase=phase,
        shift=pan * time if camera in ("pan left", "pan right") else np.zeros_like(time),
        zoom=path if camera in ("zoom in", "zoom out") else np.ones_like(time),
    )


def line(time: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float]:
    """Slope over the clip, and value at its middle, of a line that outliers hardly move."""
    weights = np.ones_like(time) if weights is None else weights
    slope, middle = 0.0, float(np.median(values))
    if len(time) < 3:
        return slope, middle
    robust = weights + 1e-9
    for _ in range(4):
        mean_t = float((robust * time).sum() / robust.sum())
        mean_v = float((robust * values).sum() / robust.sum())
        spread = float((robust * (time - mean_t) ** 2).sum())
        slope = float((robust * (time - mean_t) * (values - mean_v)).sum()) / max(spread, 1e-9)
        middle = mean_v + slope * (0.5 - mean_t)
        error = np.abs(values - middle - slope * (time - 0.5))
        robust = (weights + 1e-9) / (1 + (error / (1.5 * float(np.median(error)) + 1e-6)) ** 2)
    return slope, middle


def _fit_stripes(
    grey: np.ndarray, weights: np.ndarray, zooms: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Weighted least squares of ``offset + a cos + b sin`` to `[F, W]`, with each frame's best of `[F, K]`
    zooms.

    Gives zoom, wave `[F, W]`, offset, phase and amplitude of each frame.
    """
    width = grey.shape[1]
    angle = 2 * math.pi * (np.arange(width) + 0.5 - width / 2) / STRIPE_PERIOD / zooms[..., None]  # [F, K, W]
    basis = np.stack([np.ones_like(angle), np.cos(angle), np.sin(angle)], axis=2)  # [F, K, 3, W]
    weighted = basis * weights[:, None, None, :]
    normal = weighted @ basis.swapaxes(-1, -2) + 1e-4 * np.eye(3)
    right = weighted @ grey[:, None, :, None]
    solution = np.linalg.solve(normal, right)
    best = (solution * right).sum(axis=(2, 3)).argmax(axis=1)  # explains the most
    frames = np.arange(len(grey))
    offset, a, b = solution[frames, best, :, 0].T
    wave = a[:, None] * basis[frames, best, 1] + b[:, None] * basis[frames, best, 2]
    return zooms[frames, best], wave, offset, np.arctan2(-b, a), np.hypot(a, b)

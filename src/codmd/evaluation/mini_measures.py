"""The sixteen measures of one clip of the miniature, each in [0, 1]; NaN where a measure does not apply.

Named after VBench's dimensions. The quality group looks at the clip alone, the semantic group holds what was
read from it against its caption. `ABOUT` says of each what it is and what it stands for.
"""

from __future__ import annotations

import math

import numpy as np

from codmd.evaluation.asked import Check
from codmd.mini.captions import Asked
from codmd.mini.oracle import Reading, Seen
from codmd.mini.world import CROSS_LENGTH, SQUARE_HALF, TRIANGLE_INRADIUS

QUALITY = (
    "subject consistency", "background consistency", "temporal flickering", "motion smoothness",
    "dynamic degree", "aesthetic quality", "imaging quality",
)  # fmt: skip
SEMANTIC = (
    "object class", "multiple objects", "human action", "color", "spatial relationship", "scene",
    "appearance style", "temporal style", "overall consistency",
)  # fmt: skip
MEASURES = QUALITY + SEMANTIC
WEIGHTS = {name: 0.5 if name == "dynamic degree" else 1.0 for name in QUALITY}  # VBench's

# Of a shape whose area is that of a disc of radius 1.
PERIMETER = {
    "circle": 2 * math.pi, "square": 8 * SQUARE_HALF, "triangle": 6 * math.sqrt(3) * TRIANGLE_INRADIUS,
    "cross": 8 * CROSS_LENGTH,
}  # fmt: skip
# The most of cover × (1 − cover) that the renderer's edges have for each pixel of their length.
SOFT_EDGE = 0.25 * 0.7

# Each measure: the formula, and what it stands for.
ABOUT = {
    "subject consistency": (
        "mean over objects and frames of (Tanimoto index of the mask and the clip's one shape, turned as "
        "fitted) × (1 − distance of the frame's colour from the clip's / 0.5); 0 in frames without the object",
        "the object stays the same thing",
    ),
    "background consistency": (
        "1 − mean distance of background pixels from one colour and stripes for the whole clip / 0.15",
        "what lies behind stays the same",
    ),
    "temporal flickering": (
        "1 − mean change, from frame to frame, of what the re-drawn reading leaves unexplained / 0.1",
        "brightness and texture don't flicker, motion apart",
    ),
    "motion smoothness": (
        "1 − mean second difference of position and radius about the motion that fits best / 4 pixels",
        "things move without jerks",
    ),
    "dynamic degree": (
        "1 if an object's motion is at least half of the least that the renderer makes, or the camera moves",
        "something moves (as in VBench, over all prompts, whatever they ask)",
    ),
    "aesthetic quality": (
        "1 − mean distance of the clip from its re-drawn reading (half objects, half background) / 0.2",
        "closeness to the renderer's own look",
    ),
    "imaging quality": (
        "√(the renderer's width of edges / the clip's) × (1 − noise of the background / 0.1)",
        "sharp and free of noise",
    ),
    "object class": ("the single object has the shape asked for", "the right thing is there"),
    "multiple objects": ("two objects are there, of the shapes asked for", "both things are there at once"),
    "human action": ("the motion asked for is the motion read", "the motion asked for"),
    "color": ("share of the colours asked for that are read", "the colours asked for"),
    "spatial relationship": ("the relation asked for, by mean centres", "the first lies where it should"),
    "scene": ("the background asked for is the nearest one", "the background asked for"),
    "appearance style": ("flat or shaded, by how the light falls over the objects", "the style asked for"),
    "temporal style": ("share met of the camera and the speed asked for", "camera and speed as asked for"),
    "overall consistency": ("share met of all that the caption fixes", "the caption as a whole"),
}  # fmt: skip


def measure(asked: Asked, reading: Reading, checks: tuple[Check, ...], pixels: np.ndarray) -> np.ndarray:
    """All measures of one clip `[F, H, W, 3]` in [0, 1], in the order of `MEASURES`."""
    single = asked.count == 1
    values = {
        "subject consistency": _subject(reading),
        "background consistency": _background(reading, pixels),
        "temporal flickering": _flickering(reading, pixels),
        "motion smoothness": _smoothness(reading),
        "dynamic degree": float(is_dynamic(reading)),
        "aesthetic quality": _aesthetic(reading),
        "imaging quality": _imaging(reading, pixels),
        "object class": _share(checks, "shape") if single else math.nan,
        "multiple objects": math.nan if single else float(_all(checks, "count", "shape")),
        "human action": _share(checks, "motion"),
        "color": _share(checks, "colour"),
        "spatial relationship": _share(checks, "relation"),
        "scene": _share(checks, "background"),
        "appearance style": _share(checks, "style"),
        "temporal style": _share(checks, "camera", "speed"),
        "overall consistency": _share(checks, *{c.attribute for c in checks}),
    }
    return np.array([values[name] for name in MEASURES])


def is_dynamic(reading: Reading) -> bool:
    """Whether anything moves: an object in the world, or the camera."""
    return any(o.motion.amount > 0.5 for o in reading.objects) or reading.camera not in (None, "still")


def saturation_error(reading: Reading) -> float:
    """How much more saturated objects are than their true colours: 0.1 is 10% too much; NaN without any."""
    coloured = [o.saturation - 1 for o in reading.objects if o.colour]
    return float(np.mean(coloured)) if coloured else math.nan


def _share(checks: tuple[Check, ...], *attributes: str) -> float:
    met = [c.met for c in checks if c.attribute in attributes]
    return float(np.mean(met)) if met else math.nan


def _all(checks: tuple[Check, ...], *attributes: str) -> bool:
    return all(c.met for c in checks if c.attribute in attributes)


def _fall(distance: float, whole: float) -> float:
    """1 at no distance, 0 from `whole` on."""
    return float(np.clip(1 - distance / whole, 0.0, 1.0))


def _subject(reading: Reading) -> float:
    return float(np.mean([_steadiness(o) for o in reading.objects])) if reading.objects else 0.0


def _steadiness(seen: Seen) -> float:
    known = np.isfinite(seen.colours).all(axis=1)
    if not known.any():
        return 0.0
    astray = np.linalg.norm(seen.colours - np.median(seen.colours[known], axis=0), axis=1)
    alike = np.where(known, np.clip(1 - np.nan_to_num(astray) / 0.5, 0, 1), 0.0)
    return float(np.mean(np.clip(seen.shape_fit, 0, 1) * alike))


def _background(reading: Reading, pixels: np.ndarray) -> float:
    behind = reading.behind
    row = np.median(behind.colours, axis=0) + behind.stripes[:, :, None]
    apart = np.abs(pixels - row[:, None]).mean(axis=-1)
    bare = _bare(reading)
    return _fall(float((apart * bare).sum() / max(float(bare.sum()), 1.0)), 0.15)


def _flickering(reading: Reading, pixels: np.ndarray) -> float:
    if len(pixels) < 2:
        return 1.0
    return _fall(float(np.abs(np.diff(pixels - reading.drawn, axis=0)).mean()), 0.1)


def _smoothness(reading: Reading) -> float:
    if not reading.objects:
        return 0.0
    if len(reading.residual) < 3:
        return 1.0
    jerks = []
    for o in reading.objects:
        path = (
            o.world_x - o.motion.fitted_x,
            o.world_y - o.motion.fitted_y,
            o.world_radius - o.motion.fitted_radius,
        )
        jerks.append(float(np.sqrt(sum(np.diff(p, n=2) ** 2 for p in path)).mean()))
    return _fall(float(np.mean(jerks)), 4.0)


def _aesthetic(reading: Reading) -> float:
    if not reading.objects:
        return _fall(float(reading.residual.mean()), 0.2) / 2
    mask = reading.mask > 0.05
    on, off = float(reading.residual[mask].mean()), float(reading.residual[~mask].mean())
    return _fall((on + off) / 2, 0.2)


def _imaging(reading: Reading, pixels: np.ndarray) -> float:
    """Stripes are upright, so that what differs from row to row of the background is noise."""
    if not reading.objects:
        return 0.0
    bare = _bare(reading)
    pairs = bare[:, 1:] * bare[:, :-1]
    steps = ((pixels[:, 1:] - pixels[:, :-1]) ** 2).mean(axis=-1)
    noise = math.sqrt(float((steps * pairs).sum()) / max(float(pairs.sum()), 1.0) / 2)
    edges = soft = 0.0
    for o in reading.objects:
        edges += SOFT_EDGE * PERIMETER[o.form] * float(o.radius[np.isfinite(o.area)].sum())
        soft += float((o.cover * (1 - o.cover)).sum())
    return min(1.0, math.sqrt(edges / max(soft, 1e-6))) * _fall(noise, 0.1)


def _bare(reading: Reading) -> np.ndarray:
    """1 where there is nothing but background, well away from objects."""
    mask = reading.mask > 0.02
    for axis in (1, 2):
        mask = (
            mask | np.roll(mask, 1, axis) | np.roll(mask, -1, axis) | np.roll(mask, 2, axis) | np.roll(mask, -2, axis)
        )
    return (~mask).astype(np.float32)


__all__ = [
    "ABOUT", "MEASURES", "QUALITY", "SEMANTIC", "WEIGHTS", "is_dynamic", "measure", "saturation_error",
]  # fmt: skip

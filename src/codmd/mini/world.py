"""The miniature's world: moving shapes on a striped background, with every attribute known.

A `Scene` is the full truth of one clip; `render` draws it, `sample_scene` draws a scene from the world's prior,
given the attributes that a caption fixes. Nothing here is learned. Pixels are in [-1, 1], x grows to the right
and y grows downwards, one unit is one pixel, and clip time runs from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FRAMES, SIZE = 17, 64

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.12, 0.12),
    "green": (0.10, 0.70, 0.20),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.65, 0.15, 0.80),
    "cyan": (0.10, 0.80, 0.90),
}
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (0.10, 0.10, 0.10),
    "gray": (0.50, 0.50, 0.50),
    "white": (0.90, 0.90, 0.90),
    "brown": (0.38, 0.24, 0.14),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
STYLES = ("flat", "shaded")
TRANSLATIONS = ("left", "right", "up", "down", "diagonal")
MOTIONS = ("still", *TRANSLATIONS, "spin", "grow", "shrink", "bounce", "orbit")
PAIR_MOTIONS = ("still", "left", "right", "up", "down")
SPEEDS = ("slow", "fast")
CAMERAS = ("still", "pan left", "pan right", "zoom in", "zoom out")
RELATIONS = ("left of", "right of", "above", "below")

# Every shape of radius r has the area of a disc of radius r, so that size does not depend on shape.
SQUARE_HALF = math.sqrt(math.pi) / 2
TRIANGLE_INRADIUS = math.sqrt(math.pi / (3 * math.sqrt(3)))
CROSS_LENGTH = math.sqrt(math.pi / (8 / 3 - 4 / 9))
SHADE = 0.45  # how much darker the bottom of a shaded shape is than its top

STRIPE_PERIOD, STRIPE_AMPLITUDE = 16.0, 0.08
ZOOM, PAN = 1.5, 18.0
TRAVEL = {"slow": (12.0, 14.0), "fast": (26.0, 29.0)}
RADIUS = {"small": (7.5, 8.5), "large": (11.0, 12.5)}
PAIR_RADIUS = (7.5, 8.5)
CHANGING_RADIUS = (9.0, 10.0)  # grow and shrink
ZOOMED_RADIUS = (8.0, 9.0)
GROWTH = (0.6, 1.3)
HOP_HEIGHT, HOPS = 16.0, 2
ORBIT_RADIUS = 10.0
SPIN_ANGLE = math.pi


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One object: what it is, and where its path starts (world coordinates, pixels)."""

    shape: str
    colour: str
    radius: float
    start: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The full truth of one clip. `size` and `speed` are None where they mean nothing."""

    things: tuple[Thing, ...]
    motion: str
    camera: str
    background: str
    style: str
    size: str | None = None
    speed: str | None = None
    relation: str | None = None
    travel: float = 0.0  # length of a translation in pixels
    direction: tuple[int, int] = (1, 1)  # signs: of a diagonal, a spin, an orbit
    stripe_phase: float = 0.0


# ------------------------------------------------------------------------------------------------ rendering


def shape_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray | float) -> np.ndarray:
    """Signed distance (negative inside) of an upright shape whose area is that of a disc of this radius."""
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - SQUARE_HALF * radius
    if shape == "triangle":
        slope = math.cos(math.pi / 6) * np.abs(x) - 0.5 * y
        return np.maximum(y, slope) - TRIANGLE_INRADIUS * radius
    if shape == "cross":
        ax, ay, arm = np.abs(x), np.abs(y), CROSS_LENGTH * radius
        return np.minimum(np.maximum(ax - arm, ay - arm / 3), np.maximum(ax - arm / 3, ay - arm))
    raise ValueError(f"unknown shape {shape!r}, expected one of {SHAPES}")


def object_path(scene: Scene, thing: Thing, time: np.ndarray) -> tuple[np.ndarray, ...]:
    """World x, y, radius and angle of a thing at each clip time."""
    x, y = np.full_like(time, thing.start[0]), np.full_like(time, thing.start[1])
    radius, angle = np.full_like(time, thing.radius), np.zeros_like(time)
    sx, sy = scene.direction
    match scene.motion:
        case "left":
            x = x - scene.travel * time
        case "right":
            x = x + scene.travel * time
        case "up":
            y = y - scene.travel * time
        case "down":
            y = y + scene.travel * time
        case "diagonal":
            x, y = x + sx * scene.travel * 0.75 * time, y + sy * scene.travel * 0.75 * time
        case "spin":
            angle = sx * SPIN_ANGLE * time
        case "grow":
            radius = radius * (GROWTH[0] + (GROWTH[1] - GROWTH[0]) * time)
        case "shrink":
            radius = radius * (GROWTH[1] - (GROWTH[1] - GROWTH[0]) * time)
        case "bounce":
            y = y - HOP_HEIGHT * np.abs(np.sin(HOPS * math.pi * time))
        case "orbit":
            turn = sx * 2 * math.pi * time
            x, y = x + ORBIT_RADIUS * np.cos(turn), y + ORBIT_RADIUS * np.sin(turn)
    return x, y, radius, angle


def camera_path(camera: str, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Horizontal shift and zoom of the view: screen = zoom * (world - centre) + centre - shift."""
    shift, zoom = np.zeros_like(time), np.ones_like(time)
    match camera:
        case "pan left":
            shift = -PAN * time
        case "pan right":
            shift = PAN * time
        case "zoom in":
            zoom = 1 + (ZOOM - 1) * time
        case "zoom out":
            zoom = ZOOM - (ZOOM - 1) * time
    return shift, zoom


def render(scene: Scene, frames: int = FRAMES, size: int = SIZE) -> np.ndarray:
    """Draw a scene: float32 `[frames, size, size, 3]` in [-1, 1], edges smoothed over one pixel."""
    time = np.linspace(0.0, 1.0, frames)
    shift, zoom = camera_path(scene.camera, time)
    pixel = np.arange(size) + 0.5
    centre = size / 2
    world_x = (pixel[None, :] - centre + shift[:, None]) / zoom[:, None] + centre  # [frames, size]
    world_y = (pixel[None, :] - centre) / zoom[:, None] + centre

    stripes = STRIPE_AMPLITUDE * np.cos(2 * math.pi * world_x / STRIPE_PERIOD + scene.stripe_phase)
    background = np.asarray(BACKGROUNDS[scene.background])
    row = background + stripes[:, None, :, None]
    image = np.broadcast_to(row, (frames, size, size, 3)).copy()

    for thing in scene.things:
        x, y, radius, angle = (v[:, None, None] for v in object_path(scene, thing, time))
        dx, dy = world_x[:, None, :] - x, world_y[:, :, None] - y
        cos, sin = np.cos(angle), np.sin(angle)
        distance = shape_distance(thing.shape, cos * dx + sin * dy, -sin * dx + cos * dy, radius)
        distance = distance * zoom[:, None, None]
        cover = np.clip(0.5 - distance, 0.0, 1.0)[..., None]
        light = np.ones_like(dy)
        if scene.style == "shaded":  # lit from above, whatever the angle of the shape
            light = 1 - SHADE * np.clip(0.5 + 0.45 * dy / radius, 0.0, 1.0)
        image += cover * (np.asarray(COLOURS[thing.colour]) * light[..., None] - image)
    return (image * 2 - 1).astype(np.float32)


# ------------------------------------------------------------------------------------------------ the prior


def sample_scene(fixed: Mapping[str, object], rng: np.random.Generator) -> Scene:
    """A scene from the world's prior, given fixed attributes.

    `fixed` may hold `count`, `motion` (or `moving=True`), `speed`, `camera`, `background`, `style`, `size`,
    `relation` and, for each object in turn, `shape` and `colour` as tuples with None where open.
    What is not fixed is uniform over what the rest allows; a circle never spins (it could not be seen).
    """
    count = int(fixed.get("count") or 1)  # type: ignore[call-overload]
    shapes = tuple(fixed.get("shape") or (None,) * count)  # type: ignore[arg-type]
    colours = tuple(fixed.get("colour") or (None,) * count)  # type: ignore[arg-type]

    def pick(name: str, options: tuple[str, ...]) -> str:
        value = fixed.get(name)
        return str(value) if value is not None else str(rng.choice(options))

    camera = fixed.get("camera")
    wants_motion = fixed.get("moving") or fixed.get("motion") not in (None, "still")
    if camera is None:
        # A moving camera is one clip in three, and only over a single object that rests in the world.
        moves = count == 1 and not wants_motion and rng.random() < 1 / 3
        # Nor does it zoom, nor the object grow, where a size is asked for: it would have none.
        camera = str(rng.choice(CAMERAS[1:3] if fixed.get("size") else CAMERAS[1:])) if moves else "still"
    options: tuple[str, ...] = ("still",) if camera != "still" else PAIR_MOTIONS if count == 2 else MOTIONS
    if fixed.get("moving"):
        options = tuple(m for m in options if m != "still")
    if shapes[0] == "circle":
        options = tuple(m for m in options if m != "spin")
    if fixed.get("size"):
        options = tuple(m for m in options if m not in ("grow", "shrink"))
    motion = pick("motion", options)

    speed = pick("speed", SPEEDS) if motion in TRANSLATIONS and count == 1 else None
    if count == 2 and motion != "still":
        speed = "slow"
    travel = float(rng.uniform(*TRAVEL[speed])) if speed else 0.0
    sized = count == 1 and motion not in ("grow", "shrink") and not str(camera).startswith("zoom")
    size = pick("size", SIZES) if sized else None

    things: list[Thing] = []
    relation = None
    if count == 2:
        relation = pick("relation", RELATIONS)
        first_colour = colours[0] or str(rng.choice([c for c in COLOURS if c != colours[1]]))
        second_colour = colours[1] or str(rng.choice([c for c in COLOURS if c != first_colour]))
        starts = _pair_starts(relation, motion, travel, rng)
        for shape, colour, start in zip(shapes, (first_colour, second_colour), starts, strict=True):
            kind = shape or str(rng.choice(SHAPES))
            things.append(Thing(shape=kind, colour=colour, radius=float(rng.uniform(*PAIR_RADIUS)), start=start))
        direction = (1, 1)
    else:
        shape = shapes[0] or str(rng.choice(SHAPES[1:] if motion == "spin" else SHAPES))
        direction = (int(rng.choice((-1, 1))), int(rng.choice((-1, 1))))
        span = RADIUS[size] if size else CHANGING_RADIUS if motion in ("grow", "shrink") else ZOOMED_RADIUS
        radius = float(rng.uniform(*span))
        start = _single_start(motion, str(camera), travel, direction, radius, rng)
        colour = colours[0] or str(rng.choice(list(COLOURS)))
        things.append(Thing(shape=shape, colour=colour, radius=radius, start=start))

    return Scene(
        things=tuple(things), motion=motion, camera=str(camera), size=size, speed=speed, relation=relation,
        background=pick("background", tuple(BACKGROUNDS)), style=pick("style", STYLES),
        travel=travel, direction=direction, stripe_phase=float(rng.uniform(0, 2 * math.pi)),
    )  # fmt: skip


def _reach(motion: str, camera: str, travel: float, direction: tuple[int, int]) -> tuple[float, float, float, float]:
    """How far a path goes left, right, up and down of its start, on the screen."""
    sx, sy = direction
    step = 0.75 * travel
    left = right = up = down = 0.0
    match motion:
        case "left":
            left = travel
        case "right":
            right = travel
        case "up":
            up = travel
        case "down":
            down = travel
        case "diagonal":
            left, right = (step, 0.0) if sx < 0 else (0.0, step)
            up, down = (step, 0.0) if sy < 0 else (0.0, step)
        case "bounce":
            up = HOP_HEIGHT
        case "orbit":
            left = right = up = down = ORBIT_RADIUS
    if camera == "pan right":
        left += PAN
    elif camera == "pan left":
        right += PAN
    return left, right, up, down


def _single_start(
    motion: str, camera: str, travel: float, direction: tuple[int, int], radius: float, rng: np.random.Generator
) -> tuple[float, float]:
    """A start from which the whole path stays in view (but for the tips of the largest shapes)."""
    left, right, up, down = _reach(motion, camera, travel, direction)
    grow = GROWTH[1] if motion in ("grow", "shrink") else 1.0
    margin = 1.25 * radius * grow
    x = _between(margin + left, SIZE - margin - right, rng)
    y = _between(margin + up, SIZE - margin - down, rng)
    if camera.startswith("zoom"):  # keep it in view when it is magnified about the centre
        x, y = SIZE / 2 + (x - SIZE / 2) / ZOOM, SIZE / 2 + (y - SIZE / 2) / ZOOM
    return x, y


def _pair_starts(
    relation: str, motion: str, travel: float, rng: np.random.Generator
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Starts of two objects, the first in this relation to the second, apart and in view all along."""
    apart, aside = float(rng.uniform(25, 28)), float(rng.uniform(-5, 5))
    dx, dy = (apart, aside) if relation in ("left of", "right of") else (aside, apart)
    if relation in ("left of", "above"):
        dx, dy = -dx, -dy
    left, right, up, down = _reach(motion, "still", travel, (1, 1))
    margin = 10.0
    x = _between(margin + left + abs(dx) / 2, SIZE - margin - right - abs(dx) / 2, rng)
    y = _between(margin + up + abs(dy) / 2, SIZE - margin - down - abs(dy) / 2, rng)
    return (x + dx / 2, y + dy / 2), (x - dx / 2, y - dy / 2)


def _between(low: float, high: float, rng: np.random.Generator) -> float:
    return float(rng.uniform(low, high)) if low < high else (low + high) / 2

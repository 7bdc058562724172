"""What is to be seen in a clip of the miniature's world: an analytic reader, with no learned part.

`read_clip` fits the background and the camera (`background`), finds and follows the objects (`tracking`),
tells their shapes (`matching`) and their motion (`motion`), and draws the scene that it read, so that what it
could not explain can be measured. It knows the renderer's rules and nothing of captions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from codmd.errors import UserError
from codmd.mini.background import Background, fit_background
from codmd.mini.matching import Match, match
from codmd.mini.motion import Motion, name_motion
from codmd.mini.tracking import SHADED_BELOW, Track, find_tracks
from codmd.mini.world import BACKGROUNDS, COLOURS, RADIUS, SHADE, SIZE, STRIPE_AMPLITUDE, shape_distance

SHAPELESS = 0.6  # a mask that fits its best shape less well than this has none
LARGE_FROM = (RADIUS["small"][1] + RADIUS["large"][0]) / 2


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One object as it was read. Positions and radii are on the screen, in pixels, for every frame."""

    shape: str | None  # None: like no shape of this world
    form: str  # the shape that fits best, however badly
    colour: str | None  # None: as good as grey
    size: str
    style: str
    saturation: float  # relative to the true colour's, 1 is right
    motion: Motion
    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray
    area: np.ndarray  # NaN where it is not to be seen
    angle: np.ndarray
    world_x: np.ndarray  # without the camera's motion
    world_y: np.ndarray
    world_radius: np.ndarray
    colours: np.ndarray  # [F, 3]
    shape_fit: np.ndarray  # [F] how well the shape fits the mask (0 where it is not to be seen)
    shape_scores: dict[str, float]
    light_slope: float
    cover: np.ndarray  # [F, H, W] the share of each pixel that it covers

    @property
    def presence(self) -> float:
        return float(np.isfinite(self.area).mean())


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All that was read from one clip; None where nothing could be."""

    objects: tuple[Seen, ...]
    motion: str | None
    moving: bool
    speed: str | None
    camera: str | None
    background: str
    style: str | None
    relation: str | None  # of the first object to the second
    behind: Background
    drawn: np.ndarray  # [F, H, W, 3] in [0, 1]: the scene as read, in the renderer's own colours
    residual: np.ndarray  # [F, H, W] mean absolute difference over channels between clip and `drawn`

    @property
    def count(self) -> int:
        return len(self.objects)

    @property
    def mask(self) -> np.ndarray:
        """`[F, H, W]`, the share of each pixel that objects cover."""
        empty = np.zeros(self.residual.shape, dtype=np.float32)
        return np.clip(sum((o.cover for o in self.objects), empty), 0, 1)


def read_clips(videos: Iterable[Any]) -> list[Reading]:
    """Read each clip of `[N, F, H, W, 3]`."""
    return [read_clip(video) for video in videos]


def read_clip(video: Any) -> Reading:
    """Read one clip: `[F, H, W, 3]`, an array or a tensor, floats in [-1, 1] or uint8."""
    pixels = to_unit(video)
    time = np.linspace(0.0, 1.0, len(pixels))
    behind = fit_background(pixels, time)
    tracks = [t for t in find_tracks(pixels, behind) if t.seen.any()]
    objects = tuple(_see(track, behind, time) for track in tracks)
    drawn = _draw(objects, behind)
    motions = {o.motion.name for o in objects}
    speeds = {o.motion.speed for o in objects}
    return Reading(
        objects=objects,
        motion=motions.pop() if len(motions) == 1 else None,
        moving=bool(objects) and all(o.motion.name != "still" for o in objects),
        speed=speeds.pop() if len(speeds) == 1 else None,
        camera=behind.camera,
        background=behind.name,
        style=_style(objects),
        relation=relation_between(objects[0], objects[1]) if len(objects) == 2 else None,
        behind=behind,
        drawn=drawn,
        residual=np.abs(pixels - drawn).mean(axis=-1),
    )


def _style(objects: tuple[Seen, ...]) -> str | None:
    """One style for the clip, by how the light falls over all its objects."""
    if not objects:
        return None
    return "shaded" if float(np.mean([o.light_slope for o in objects])) < SHADED_BELOW else "flat"


def to_unit(video: Any) -> np.ndarray:
    """A clip as float32 in [0, 1]."""
    if hasattr(video, "detach"):
        video = video.detach().cpu().float().numpy() if video.is_floating_point() else video.cpu().numpy()
    pixels = np.asarray(video)
    if pixels.ndim != 4 or pixels.shape[1:] != (SIZE, SIZE, 3) or not len(pixels):
        raise UserError(
            f"oracle: a clip of shape {tuple(pixels.shape)}, expected [frames, {SIZE}, {SIZE}, 3]: "
            "it reads the miniature's videos only"
        )
    if pixels.dtype == np.uint8:
        return pixels.astype(np.float32) / 255
    unit = (pixels.astype(np.float32) + 1) / 2
    return np.clip(np.nan_to_num(unit), 0, 1)


def relation_between(first: Seen, second: Seen) -> str:
    """Where the first lies from the second, by their mean positions."""
    dx, dy = float(np.mean(first.x - second.x)), float(np.mean(first.y - second.y))
    if abs(dx) > abs(dy):
        return "right of" if dx > 0 else "left of"
    return "below" if dy > 0 else "above"


def _see(track: Track, behind: Background, time: np.ndarray) -> Seen:
    x, y, radius = (_bridge(v, time) for v in (track.x, track.y, track.radius))
    found = match(track.cover, x, y, radius, time)
    if _cut(x, y, radius).any():
        x, y, radius = _complete(track, found, x, y, radius)
        found = match(track.cover, x, y, radius, time)
    centre = SIZE / 2
    world_x = (x - centre + behind.shift) / behind.zoom + centre
    world_y = (y - centre) / behind.zoom + centre
    world_radius = radius / behind.zoom
    return Seen(
        shape=found.shape if found.scores[found.shape] > SHAPELESS else None,
        form=found.shape,
        colour=track.colour,
        style=track.style,
        saturation=track.saturation,
        size="large" if float(np.median(world_radius)) > LARGE_FROM else "small",
        motion=name_motion(world_x, world_y, world_radius, found.turn, time),
        x=x,
        y=y,
        radius=radius,
        area=track.area,
        angle=found.angles,
        world_x=world_x,
        world_y=world_y,
        world_radius=world_radius,
        colours=track.frame_colours,
        shape_fit=np.where(track.seen, found.per_frame, 0.0),
        shape_scores=found.scores,
        light_slope=track.slope,
        cover=track.cover,
    )


def _bridge(values: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Fill the frames in which an object is not to be seen from those before and after."""
    seen = np.isfinite(values)
    return np.interp(time, time[seen], values[seen])


def _cut(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """In which frames the edge of the view may cut the object."""
    reach = 1.6 * radius
    return (x < reach) | (y < reach) | (x > SIZE - reach) | (y > SIZE - reach)


def _complete(
    track: Track, found: Match, x: np.ndarray, y: np.ndarray, radius: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centre and radius of the whole object where the edge of the view cuts it.

    The shape is drawn where it seems to lie, cut as the view cuts it; by how much its visible centre and area
    then miss the measured ones, by so much it is moved and resized.
    """
    cx, cy, area = (np.where(track.seen, v, np.nan) for v in (track.x, track.y, track.area))
    for _ in range(3):
        mask = shape_cover(found.shape, x, y, radius, found.angles)
        total = np.maximum(mask.sum(axis=(1, 2)), 1.0)
        pixel = np.arange(SIZE) + 0.5
        x = x + np.nan_to_num(cx - np.einsum("fhw,w->f", mask, pixel) / total)
        y = y + np.nan_to_num(cy - np.einsum("fhw,h->f", mask, pixel) / total)
        radius = radius * np.clip(np.sqrt(np.nan_to_num(area / total, nan=1.0)), 0.7, 1.4)
    return x, y, radius


def shape_cover(shape: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """The renderer's soft mask of a shape, `[F, H, W]`."""
    pixel = np.arange(SIZE) + 0.5
    dx = (pixel - x[:, None])[:, None, :]
    dy = (pixel - y[:, None])[:, :, None]
    cos, sin = np.cos(angle)[:, None, None], np.sin(angle)[:, None, None]
    return np.clip(0.5 - shape_distance(shape, cos * dx + sin * dy, cos * dy - sin * dx, radius[:, None, None]), 0, 1)


def _draw(objects: tuple[Seen, ...], behind: Background) -> np.ndarray:
    """The scene as read, in the true colours and lights and with stripes of the true strength."""
    strength = np.sqrt(2 * np.mean(behind.stripes**2, axis=1, keepdims=True)) + 1e-6
    stripes = behind.stripes * np.minimum(STRIPE_AMPLITUDE / strength, 4)
    row = np.asarray(BACKGROUNDS[behind.name], dtype=np.float32) + stripes[..., None]
    image = np.repeat(row[:, None].astype(np.float32), SIZE, axis=1)
    for seen in objects:
        cover = shape_cover(seen.form, seen.x, seen.y, seen.radius, seen.angle)[..., None].astype(np.float32)
        cover *= np.isfinite(seen.area)[:, None, None, None]
        colour = np.asarray(COLOURS[seen.colour]) if seen.colour else np.nanmean(seen.colours, axis=0)
        light = np.ones((len(row), SIZE))
        if seen.style == "shaded":
            height = (np.arange(SIZE) + 0.5 - seen.y[:, None]) / seen.radius[:, None]
            light = 1 - SHADE * np.clip(0.5 + 0.45 * height, 0.0, 1.0)
        image += cover * ((light[..., None] * colour).astype(np.float32)[:, :, None] - image)
    return image

"""Ways to spoil a clip of the miniature, each in one respect: they show that the measures measure.

A corruption gets a scene, its clip (float32 `[F, H, W, 3]` in [-1, 1]) and a generator, and gives the spoilt
clip. Where one attribute is to be wrong, the scene is drawn anew with that attribute altered; where the
picture is to be worse, its pixels are altered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from codmd.mini.world import (
    BACKGROUNDS,
    CAMERAS,
    COLOURS,
    FRAMES,
    MOTIONS,
    PAIR_MOTIONS,
    SHAPES,
    SIZE,
    SPEEDS,
    STYLES,
    Scene,
    render,
    sample_scene,
)  # fmt: skip

Corruption = Callable[[Scene, np.ndarray, np.random.Generator], np.ndarray]

GRADUAL = 3  # frames over which a change in mid-clip happens


# ---------------------------------------------------------------------------------------- one wrong attribute


def _other(options: Iterable[str], *taken: str | None) -> list[str]:
    return [o for o in options if o not in taken]


def _redraw(scene: Scene, rng: np.random.Generator, **changes: object) -> np.ndarray:
    """Another scene with the same attributes but for these; positions are drawn anew, to stay in view."""
    frames = int(str(changes.pop("frames", FRAMES)))
    fixed: dict[str, object] = {
        "count": len(scene.things),
        "shape": tuple(t.shape for t in scene.things),
        "colour": tuple(t.colour for t in scene.things),
        "motion": scene.motion, "camera": scene.camera, "background": scene.background, "style": scene.style,
        "size": scene.size, "speed": scene.speed, "relation": scene.relation,
    }  # fmt: skip
    return render(sample_scene(fixed | changes, rng), frames)


def _swapped_shapes(scene: Scene, rng: np.random.Generator) -> Scene:
    none = ("circle",) if scene.motion == "spin" else ()
    things = [replace(t, shape=str(rng.choice(_other(SHAPES, t.shape, *none)))) for t in scene.things]
    return replace(scene, things=tuple(things))


def _recoloured(scene: Scene, rng: np.random.Generator) -> Scene:
    names = rng.permutation(_other(COLOURS, *(t.colour for t in scene.things)))
    things = [replace(t, colour=str(name)) for t, name in zip(scene.things, names, strict=False)]
    return replace(scene, things=tuple(things))


def _elsewhere(scene: Scene, rng: np.random.Generator) -> Scene:
    return replace(scene, background=str(rng.choice(_other(tuple(BACKGROUNDS), scene.background))))


def swap_shape(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return render(_swapped_shapes(scene, rng), len(clip))


def recolour(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return render(_recoloured(scene, rng), len(clip))


def change_background(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return render(_elsewhere(scene, rng), len(clip))


def change_style(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return render(replace(scene, style=_other(STYLES, scene.style)[0]), len(clip))


def change_motion(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another motion, in a clip that is otherwise as asked."""
    pair = len(scene.things) == 2
    round_ = not pair and scene.things[0].shape == "circle"
    options = PAIR_MOTIONS if pair else MOTIONS
    motion = str(rng.choice(_other(options, scene.motion, "spin" if round_ else None)))
    if scene.camera != "still":
        return render(replace(scene, motion="bounce"), len(clip))
    return _redraw(scene, rng, motion=motion, frames=len(clip))


def change_speed(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if scene.speed is None or len(scene.things) == 2:
        return clip
    return _redraw(scene, rng, speed=_other(SPEEDS, scene.speed)[0], frames=len(clip))


def change_camera(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another camera over the same things."""
    return render(replace(scene, camera=str(rng.choice(_other(CAMERAS, scene.camera)))), len(clip))


def swap_relation(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The two objects in each other's places."""
    if len(scene.things) < 2:
        return clip
    first, second = scene.things
    swapped = (replace(first, start=second.start), replace(second, start=first.start))
    return render(replace(scene, things=swapped), len(clip))


def drop_object(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The last object is missing."""
    return render(replace(scene, things=scene.things[:-1]), len(clip))


# -------------------------------------------------------------------------------------------- changes in time


def freeze(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.repeat(clip[:1], len(clip), axis=0)


def reverse(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return clip[::-1].copy()


def shuffle(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return clip[rng.permutation(len(clip))]


def jitter(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each frame moved by up to two pixels."""
    moves = rng.integers(-2, 3, (len(clip), 2))
    padded = np.pad(clip, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="edge")
    return np.stack([f[2 + y : 2 + y + SIZE, 2 + x : 2 + x + SIZE] for f, (y, x) in zip(padded, moves, strict=True)])


def flicker(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each frame brighter or darker."""
    return clip + rng.uniform(-0.15, 0.15, (len(clip), 1, 1, 1)).astype(np.float32)


def _midway(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """One clip turning into another in mid-clip."""
    middle = (len(before) - 1) / 2
    share = np.clip((np.arange(len(before)) - middle) / GRADUAL + 0.5, 0, 1).astype(np.float32)
    return before + share[:, None, None, None] * (after - before)


def morph(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The objects take another shape and colour in mid-clip."""
    return _midway(clip, render(_recoloured(_swapped_shapes(scene, rng), rng), len(clip)))


def shift_background(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another background in mid-clip."""
    return _midway(clip, render(_elsewhere(scene, rng), len(clip)))


# -------------------------------------------------------------------------------------------- worse pictures


def blur(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return gaussian_blur(clip, 1.5)


def noise(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return clip + rng.normal(0, 0.08, clip.shape).astype(np.float32)


def saturate(scene: Scene, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return saturation_gain(clip, 1.4)


def gaussian_blur(clip: np.ndarray, sigma: float) -> np.ndarray:
    """Blur each frame in space."""
    reach = max(1, int(np.ceil(3 * sigma)))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2).astype(np.float32)
    kernel /= kernel.sum()
    for axis in (1, 2):
        widths = [(reach, reach) if a == axis else (0, 0) for a in range(4)]
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(clip, widths, mode="edge"), len(kernel), axis)
        clip = windows @ kernel
    return clip


def saturation_gain(clip: np.ndarray, gain: float) -> np.ndarray:
    """Move every pixel away from its own grey."""
    grey = clip.mean(axis=-1, keepdims=True)
    return np.clip(grey + gain * (clip - grey), -1, 1)


CORRUPTIONS: dict[str, Corruption] = {
    "swap the shape": swap_shape,
    "recolour": recolour,
    "change the background": change_background,
    "change the style": change_style,
    "change the motion": change_motion,
    "change the speed": change_speed,
    "change the camera": change_camera,
    "swap the relation": swap_relation,
    "drop an object": drop_object,
    "freeze": freeze,
    "reverse": reverse,
    "shuffle frames": shuffle,
    "jitter": jitter,
    "flicker": flicker,
    "morph in mid-clip": morph,
    "other background in mid-clip": shift_background,
    "blur": blur,
    "noise": noise,
    "saturate": saturate,
}

"""The prompts that the miniature is evaluated with: held out from training, balanced, the same every time.

Any prefix of `evaluation_prompts` is balanced as far as it goes: of eight in a row four ask for one object in
full, two for two objects, one for a camera's motion, and one leaves most things open.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle

import numpy as np

from codmd.errors import UserError
from codmd.evaluation.mini_benchmark import is_open
from codmd.mini.captions import Asked, held_out, write
from codmd.mini.world import CAMERAS, COLOURS, MOTIONS, PAIR_MOTIONS, RELATIONS, SHAPES, Scene, sample_scene

PATTERN = ("single", "pair", "single", "camera", "single", "pair", "single", "open")
SEED = 2


def evaluation_prompts(n: int = 48, seed: int = SEED) -> list[str]:
    """The first `n` evaluation prompts."""
    if n < 1:
        raise UserError(f"evaluation prompts: {n} asked for, expected 1 or more")
    streams = {kind: _distinct(_MAKERS[kind](np.random.default_rng((seed, i)))) for i, kind in enumerate(_MAKERS)}
    return [next(streams[kind]) for kind, _ in zip(cycle(PATTERN), range(n), strict=False)]


def open_prompts(n: int, seed: int = SEED) -> list[str]:
    """Prompts that leave most to chance ("a circle moves"); `evaluation_prompts` uses the first of them."""
    stream = _distinct(_open(np.random.default_rng((seed, list(_MAKERS).index("open")))))
    return [next(stream) for _ in range(n)]


def _distinct(asked: Iterator[Asked], patience: int = 20_000) -> Iterator[str]:
    """Held-out captions, each once."""
    told: set[str] = set()
    since = 0
    for one in asked:
        caption, since = write(one), since + 1
        if held_out(caption) and caption not in told:
            told.add(caption)
            since = 0
            yield caption
        if since > patience:
            raise UserError(
                f"evaluation prompts: there are only {len(told)} held-out captions of a kind: ask for fewer"
            )


def _say(scene: Scene, *said: str) -> Asked:
    """What a caption fixes that says these attributes of a scene, and all shapes, colours and its motion."""
    return Asked(
        count=len(scene.things),
        shape=tuple(t.shape for t in scene.things),
        colour=tuple(t.colour for t in scene.things),
        motion=scene.motion,
        **{name: getattr(scene, name) for name in said},  # type: ignore[arg-type]
    )


def _some(rng: np.random.Generator, **chances: float) -> list[str]:
    return [name for name, chance in chances.items() if rng.random() < chance]


def _held_out_of_each(options: tuple[str, ...], make: object, rng: np.random.Generator) -> Iterator[Asked]:
    """For each option in turn, a caption that is held out."""
    for option in cycle(rng.permutation(options)):
        yield next(a for a in (make(str(option)) for _ in count()) if held_out(write(a)))  # type: ignore[operator]


def _single(rng: np.random.Generator) -> Iterator[Asked]:
    def make(motion: str) -> Asked:
        scene = sample_scene({"motion": motion, "camera": "still"}, rng)
        said = _some(rng, size=0.5, speed=0.75, style=0.5, camera=0.25)
        return _say(scene, "background", *([s for s in said if s != "speed" or scene.speed]))

    return _held_out_of_each(MOTIONS, make, rng)


def _pair(rng: np.random.Generator) -> Iterator[Asked]:
    relations = cycle(rng.permutation(RELATIONS))

    def make(motion: str) -> Asked:
        scene = sample_scene({"count": 2, "motion": motion, "relation": str(next(relations))}, rng)
        return _say(scene, "relation", "background", *_some(rng, style=0.5))

    return _held_out_of_each(PAIR_MOTIONS, make, rng)


def _camera(rng: np.random.Generator) -> Iterator[Asked]:
    def make(camera: str) -> Asked:
        scene = sample_scene({"motion": "still", "camera": camera}, rng)
        return _say(scene, "camera", "background", *_some(rng, style=0.5))

    return _held_out_of_each(CAMERAS[1:], make, rng)


def _open(rng: np.random.Generator) -> Iterator[Asked]:
    while True:
        pair = rng.random() < 0.25
        number = 2 if pair else 1
        shapes = tuple(str(rng.choice(SHAPES)) if rng.random() < 0.5 else None for _ in range(number))
        colours = tuple(str(rng.choice(list(COLOURS))) if rng.random() < 0.3 else None for _ in range(number))
        if number == 2 and colours[0] is not None and colours[0] == colours[1]:
            continue
        motion = str(rng.choice(PAIR_MOTIONS if pair else MOTIONS)) if rng.random() < 0.3 else None
        if motion == "spin" and shapes[0] == "circle":
            continue
        moving = motion is None and bool(rng.random() < 0.7)
        asked = Asked(count=number, shape=shapes, colour=colours, motion=motion, moving=moving)
        if is_open(asked):
            yield asked


_MAKERS = {"single": _single, "pair": _pair, "camera": _camera, "open": _open}

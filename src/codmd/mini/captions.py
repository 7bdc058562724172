"""The miniature's small English: what a caption may say, how it is read back, and which captions are held out.

A caption fixes some attributes and leaves the rest open ("a circle moves"), so that a distribution of clips, not
one clip, is right for it. `Asked` holds what it fixes. Captions are split by a hash of their text: training never
sees an evaluation caption.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import numpy as np

from codmd.mini.world import (
    BACKGROUNDS,
    CAMERAS,
    COLOURS,
    PAIR_MOTIONS,
    RELATIONS,
    SHAPES,
    SIZES,
    SPEEDS,
    STYLES,
    TRANSLATIONS,
    Scene,
)  # fmt: skip

MOTION_PHRASES = {
    "still": "stays still", "left": "moves left", "right": "moves right", "up": "moves up", "down": "moves down",
    "diagonal": "moves diagonally", "spin": "spins", "grow": "grows", "shrink": "shrinks", "bounce": "bounces",
    "orbit": "orbits",
}  # fmt: skip
PAIR_PHRASES = {
    "still": "both stay still", "left": "both move left", "right": "both move right", "up": "both move up",
    "down": "both move down",
}  # fmt: skip
CAMERA_PHRASES = {
    "still": "the camera stays fixed", "pan left": "the camera pans left", "pan right": "the camera pans right",
    "zoom in": "the camera zooms in", "zoom out": "the camera zooms out",
}  # fmt: skip
SPEED_WORDS = {"slow": "slowly", "fast": "quickly"}

# How often a training caption says each attribute.
SAYS = {
    "shape": 0.85, "colour": 0.85, "size": 0.5, "motion": 0.85, "speed": 0.6, "camera": 0.6, "background": 0.75,
    "style": 0.6, "relation": 0.85,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a caption fixes; None (or False) is open. `shape` and `colour` hold one entry for each object."""

    count: int = 1
    shape: tuple[str | None, ...] = (None,)
    colour: tuple[str | None, ...] = (None,)
    size: str | None = None
    motion: str | None = None
    moving: bool = False  # "moves": any motion but stillness
    speed: str | None = None
    camera: str | None = None
    background: str | None = None
    style: str | None = None
    relation: str | None = None

    def fixed(self) -> dict[str, object]:
        """The mapping that `world.sample_scene` takes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def open_attributes(self) -> tuple[str, ...]:
        """Names of the attributes that this caption leaves to chance and that an oracle can read."""
        names = [n for n in ("shape", "colour") if None in getattr(self, n)]
        names += [n for n in ("background", "style") if getattr(self, n) is None]
        if self.motion is None:
            names.append("motion")
        if self.count == 2 and self.relation is None:
            names.append("relation")
        return tuple(names)


def write(asked: Asked) -> str:
    """The caption that says exactly this."""
    nouns = [
        " ".join(w for w in (asked.size if asked.count == 1 else None, colour, shape or "shape") if w)
        for shape, colour in zip(asked.shape, asked.colour, strict=True)
    ]
    nouns = [f"{'an' if n[0] in 'aeiou' else 'a'} {n}" for n in nouns]
    speed = f" {SPEED_WORDS[asked.speed]}" if asked.speed else ""
    if asked.count == 2:
        head = f" {asked.relation or 'and'} ".join(nouns)
        motion = PAIR_PHRASES[asked.motion] if asked.motion else "both move" if asked.moving else ""
        clauses = [head, motion]
    else:
        motion = MOTION_PHRASES[asked.motion] if asked.motion else "moves" if asked.moving else ""
        clauses = [f"{nouns[0]} {motion}".rstrip() + (speed if motion else "")]
    clauses.append(CAMERA_PHRASES[asked.camera] if asked.camera else "")
    clauses.append(f"{asked.background} background" if asked.background else "")
    clauses.append(f"{asked.style} style" if asked.style else "")
    return ", ".join(c for c in clauses if c)


def read(caption: str) -> Asked:
    """What a caption fixes: the inverse of `write`, and forgiving about order and filler words."""
    text = " ".join(caption.lower().replace(",", " , ").split())
    parts = [p.strip() for p in text.split(" , ")]
    found: dict[str, object] = {}
    for part in parts:
        words = part.split()
        if "camera" in words:
            found["camera"] = next((c for c, phrase in CAMERA_PHRASES.items() if phrase in part), None)
        elif "background" in words:
            found["background"] = next((b for b in BACKGROUNDS if b in words), None)
        elif "style" in words:
            found["style"] = next((s for s in STYLES if s in words), None)
        elif words and words[0] == "both":
            found["motion"] = next((m for m, phrase in PAIR_PHRASES.items() if phrase in part), None)
            found["moving"] = found["motion"] is None and "move" in words
        elif words and "count" not in found:
            found |= _read_head(part)
    return Asked(**found)  # type: ignore[arg-type]


def _read_head(part: str) -> dict[str, object]:
    words = part.split()
    nouns = [w for w in words if w in SHAPES or w == "shape"]
    if len(nouns) >= 2:
        relation = next((r for r in RELATIONS if f" {r} " in part), None)
        split = next((i for i, w in enumerate(words) if w in SHAPES or w == "shape"), 0) + 1
        halves = (words[:split], words[split:])
        return {
            "count": 2,
            "relation": relation,
            "shape": tuple(next((w for w in half if w in SHAPES), None) for half in halves),
            "colour": tuple(next((w for w in half if w in COLOURS), None) for half in halves),
        }
    motion = next((m for m, phrase in MOTION_PHRASES.items() if phrase in part), None)
    return {
        "count": 1,
        "shape": (next((w for w in words if w in SHAPES), None),),
        "colour": (next((w for w in words if w in COLOURS), None),),
        "size": next((w for w in words if w in SIZES), None),
        "motion": motion,
        "moving": motion is None and "moves" in words,
        "speed": next((s for s, word in SPEED_WORDS.items() if word in words), None),
    }


def describe(scene: Scene, rng: np.random.Generator) -> Asked:
    """A caption's content for a scene, saying each attribute with the frequency in `SAYS`."""

    def says(name: str) -> bool:
        return bool(rng.random() < SAYS[name])

    said_motion = scene.motion if says("motion") else None
    moving = said_motion is None and scene.motion != "still" and bool(rng.random() < 0.5)
    single = len(scene.things) == 1
    phrase = said_motion in TRANSLATIONS or (moving and scene.motion in TRANSLATIONS)
    return Asked(
        count=len(scene.things),
        shape=tuple(t.shape if says("shape") else None for t in scene.things),
        colour=tuple(t.colour if says("colour") else None for t in scene.things),
        size=scene.size if says("size") else None,
        motion=said_motion,
        moving=moving,
        speed=scene.speed if single and said_motion is not None and phrase and says("speed") else None,
        camera=scene.camera if single and says("camera") else None,
        background=scene.background if says("background") else None,
        style=scene.style if says("style") else None,
        relation=scene.relation if says("relation") else None,
    )


def held_out(caption: str) -> bool:
    """True for one caption in eight: these are for evaluation, the others for training."""
    return hashlib.blake2b(caption.encode(), digest_size=4).digest()[0] < 32


def sample_prior(rng: np.random.Generator, pair_share: float = 0.35) -> dict[str, object]:
    """Attributes that fix nothing but how many objects there are, and, evenly, the motion or the camera."""
    if rng.random() < pair_share:
        return {"count": 2, "shape": (None, None), "colour": (None, None), "motion": str(rng.choice(PAIR_MOTIONS))}
    if rng.random() < 0.25:
        return {"count": 1, "camera": str(rng.choice(CAMERAS[1:])), "motion": "still"}
    return {"count": 1, "camera": "still"}


__all__ = ["SPEEDS", "Asked", "describe", "held_out", "read", "sample_prior", "write"]

"""What a caption asks for, held against what was read: one check for each thing that it fixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

from codmd.mini.captions import CAMERA_PHRASES, MOTION_PHRASES, PAIR_PHRASES, SPEED_WORDS, Asked
from codmd.mini.oracle import Reading, Seen, relation_between

Objects = tuple[Seen | None, ...]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that a caption fixes: which attribute, in words, and whether the clip shows it."""

    attribute: str
    asked: str
    met: bool


def check(asked: Asked, reading: Reading) -> tuple[Check, ...]:
    """All that a caption fixes, met or not. Objects are paired with those asked for to the best effect."""
    found: list[Seen | None] = list(reading.objects)
    found += [None] * (asked.count - len(found))
    pairings = [tuple(p) for p in permutations(found, asked.count)]
    return max(
        (_checks(asked, reading, objects) for objects in pairings),
        key=lambda checks: sum(c.met for c in checks),
    )


def _checks(asked: Asked, reading: Reading, objects: Objects) -> tuple[Check, ...]:
    checks = [Check(attribute="count", asked=f"{asked.count} in view", met=reading.count == asked.count)]

    def ask(attribute: str, value: str | None, words: str, met: Callable[[], bool]) -> None:
        if value is not None:
            checks.append(Check(attribute=attribute, asked=words, met=None not in objects and met()))

    for shape, colour, seen in zip(asked.shape, asked.colour, objects, strict=True):
        if colour is not None:
            checks.append(Check(attribute="colour", asked=colour, met=seen is not None and seen.colour == colour))
        if shape is not None:
            checks.append(Check(attribute="shape", asked=shape, met=seen is not None and seen.shape == shape))
    present = [o for o in objects if o is not None]
    phrases = PAIR_PHRASES if asked.count == 2 else MOTION_PHRASES
    ask("size", asked.size, str(asked.size), lambda: present[0].size == asked.size)
    if asked.motion is not None:
        ask(
            "motion", asked.motion, phrases[asked.motion],
            lambda: all(o.motion.name == asked.motion for o in present),
        )  # fmt: skip
    elif asked.moving:
        ask("motion", "moves", "moves", lambda: all(o.motion.name != "still" for o in present))
    ask(
        "speed", asked.speed, SPEED_WORDS.get(asked.speed or "", ""),
        lambda: all(o.motion.speed == asked.speed for o in present),
    )  # fmt: skip
    for attribute, value, words, seen_value in (
        ("camera", asked.camera, CAMERA_PHRASES.get(asked.camera or "", ""), reading.camera),
        ("background", asked.background, f"{asked.background} background", reading.background),
    ):
        if value is not None:
            checks.append(Check(attribute=attribute, asked=words, met=seen_value == value))
    ask("style", asked.style, f"{asked.style} style", lambda: reading.style == asked.style)
    if asked.count == 2:
        ask(
            "relation", asked.relation, str(asked.relation),
            lambda: relation_between(present[0], present[1]) == asked.relation,
        )  # fmt: skip
    return tuple(checks)

"""How much of the truth the oracle reads."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from codmd.mini.oracle import read_clip, relation_between
from codmd.mini.world import Scene


def shares_read_right(scenes: Sequence[Scene], clips: Iterable[np.ndarray]) -> dict[str, float]:
    """For each attribute, the share of clips in which it is read as it is."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()

    def note(name: str, want: object, got: object) -> None:
        total[name] += 1
        right[name] += want == got

    for scene, clip in zip(scenes, clips, strict=True):
        reading = read_clip(clip)
        seen = list(reading.objects) + [None] * (len(scene.things) - reading.count)
        if len(seen) > 1 and (seen[0] is None or seen[0].colour != scene.things[0].colour):
            seen = seen[1::-1]
        note("count", len(scene.things), reading.count)
        for thing, one in zip(scene.things, seen, strict=False):
            note("shape", thing.shape, one and one.shape)
            note("colour", thing.colour, one and one.colour)
        for name in ("motion", "camera", "background", "style"):
            note(name, getattr(scene, name), getattr(reading, name))
        if scene.relation:
            note("relation", scene.relation, None not in seen and relation_between(seen[0], seen[1]))
        if scene.size:
            note("size", scene.size, seen[0] and seen[0].size)
        if scene.speed:
            note("speed", scene.speed, reading.speed)
    return {name: right[name] / total[name] for name in total}

"""Laws of the miniature's world and of its captions."""

import math
from dataclasses import replace

import numpy as np
import pytest

from codmd.mini import world
from codmd.mini.captions import Asked, describe, held_out, read, sample_prior, write
from codmd.mini.oracle import shape_cover
from codmd.mini.world import COLOURS, MOTIONS, SHAPES, Scene, Thing, object_path, render, sample_scene


def scenes(n: int, seed: int = 0) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [sample_scene(sample_prior(rng), rng) for _ in range(n)]


def test_reading_a_caption_inverts_writing_it():
    rng = np.random.default_rng(0)
    for scene in scenes(500):
        asked = describe(scene, rng)
        assert read(write(asked)) == asked, write(asked)


def test_a_caption_is_read_in_any_order_and_case():
    assert read("Flat style, a Red circle moves left slowly , gray background") == Asked(
        shape=("circle",), colour=("red",), motion="left", speed="slow", background="gray", style="flat"
    )


def test_what_a_caption_fixes_is_what_the_scene_has():
    rng = np.random.default_rng(1)
    for scene in scenes(200, seed=1):
        asked = describe(scene, rng)
        drawn = sample_scene(asked.fixed(), rng)
        for name in ("motion", "camera", "background", "style", "size", "relation"):
            assert getattr(asked, name) in (None, getattr(drawn, name)), (name, write(asked))
        for shape, colour, thing in zip(asked.shape, asked.colour, drawn.things, strict=True):
            assert shape in (None, thing.shape) and colour in (None, thing.colour)
        assert not (asked.moving and drawn.motion == "still")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [6.5, 11.0])
def test_a_shape_has_the_area_of_its_disc(shape: str, radius: float):
    middle, angle = np.full(1, 32.0), np.full(1, 0.4)
    area = shape_cover(shape, middle, middle, np.full(1, radius), angle).sum()
    assert area == pytest.approx(math.pi * radius**2, rel=0.02)


def test_objects_stay_in_view():
    """Their middles always do, and all but tips of the largest do."""
    time = np.linspace(0, 1, world.FRAMES)
    for scene in scenes(300, seed=2):
        shift, zoom = world.camera_path(scene.camera, time)
        for thing in scene.things:
            x, y, radius, angle = object_path(scene, thing, time)
            x, y = (x - 32) * zoom + 32 - shift, (y - 32) * zoom + 32
            assert ((x > 4) & (x < 60) & (y > 4) & (y < 60)).all(), scene
            shown = shape_cover(thing.shape, x, y, radius * zoom, angle).sum(axis=(1, 2))
            assert (shown > 0.85 * math.pi * (radius * zoom) ** 2).all(), scene


def test_attributes_are_drawn_as_asked():
    thing = Thing(shape="square", colour="red", radius=10.0, start=(32.0, 32.0))
    scene = Scene(things=(thing,), motion="still", camera="still", background="gray", style="flat")
    clip = (render(scene) + 1) / 2
    assert clip.shape == (17, 64, 64, 3) and clip.dtype == np.float32
    np.testing.assert_allclose(clip[:, 32, 32], np.tile(COLOURS["red"], (17, 1)), atol=1e-6)
    # A whole number of stripes' periods, free of the object, averages to the background's colour.
    np.testing.assert_allclose(clip[:, 2].mean(axis=1), 0.5, atol=1e-3)
    shaded = (render(replace(scene, style="shaded")) + 1) / 2
    assert (np.diff(shaded[0, 25:40, 32, 0]) < 0).all()
    moved = (render(replace(scene, motion="right", travel=14.0)) + 1) / 2
    np.testing.assert_allclose(moved[-1, :, 14:], clip[0, :, : 64 - 14], atol=0.2)  # but for the stripes
    panned = render(replace(scene, camera="pan right"), frames=10)  # 2 pixels a frame
    np.testing.assert_allclose(panned[1, :, :-2], panned[0, :, 2:], atol=1e-5)


def test_motions_do_what_they_say():
    time = np.linspace(0, 1, 33)
    thing = Thing(shape="cross", colour="blue", radius=8.0, start=(32.0, 32.0))
    paths = {}
    for motion in MOTIONS:
        scene = Scene(things=(thing,), motion=motion, camera="still", background="gray", style="flat", travel=14.0)
        paths[motion] = object_path(scene, thing, time)
    x, y, radius, angle = 0, 1, 2, 3
    assert all(np.ptp(p) == 0 for p in paths["still"])
    for motion, axis, sign in (("left", x, -1), ("right", x, 1), ("up", y, -1), ("down", y, 1)):
        assert paths[motion][axis][-1] - paths[motion][axis][0] == pytest.approx(sign * 14)
    assert np.ptp(paths["spin"][angle]) == pytest.approx(math.pi)
    assert (np.diff(paths["grow"][radius]) > 0).all() and (np.diff(paths["shrink"][radius]) < 0).all()
    assert (paths["bounce"][y] <= 32 + 1e-9).all() and np.ptp(paths["bounce"][y]) > 15
    np.testing.assert_allclose(np.hypot(paths["orbit"][x] - 32, paths["orbit"][y] - 32), world.ORBIT_RADIUS)


def test_the_same_seed_gives_the_same_scene():
    assert scenes(20, seed=3) == scenes(20, seed=3) != scenes(20, seed=4)


def test_one_caption_in_eight_is_held_out():
    rng = np.random.default_rng(0)
    captions = {write(describe(scene, rng)) for scene in scenes(2000, seed=5)}
    assert np.mean([held_out(c) for c in captions]) == pytest.approx(1 / 8, abs=0.03)

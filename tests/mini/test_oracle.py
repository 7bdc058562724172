"""The oracle reads what was drawn, also through blur, noise and too much colour, and fails softly on the rest."""

import numpy as np
import pytest
import torch
from reading_shares import shares_read_right

from codmd.errors import UserError
from codmd.mini import corruptions
from codmd.mini.captions import sample_prior
from codmd.mini.oracle import read_clip, read_clips
from codmd.mini.world import Scene, Thing, camera_path, object_path, render, sample_scene


def worn(clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A clip as an autoencoder might give it back."""
    clip = corruptions.saturation_gain(corruptions.gaussian_blur(clip, 0.7), 1.12)
    return np.clip(clip + rng.normal(0, 0.03, clip.shape), -1, 1).astype(np.float32)


def accuracy(clips: int, seed: int, wear: bool) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    scenes = [sample_scene(sample_prior(rng), rng) for _ in range(clips)]
    return shares_read_right(scenes, (worn(render(s), rng) if wear else render(s) for s in scenes))


def test_reads_the_truth():
    shares = accuracy(300, seed=11, wear=False)
    assert len(shares) == 10 and min(shares.values()) >= 0.99, shares


def test_reads_worn_clips():
    shares = accuracy(120, seed=12, wear=True)
    assert min(shares.values()) >= 0.97, shares


def test_measures_where_things_are():
    rng = np.random.default_rng(13)
    time = np.linspace(0, 1, 17)
    for _ in range(30):
        scene = sample_scene({"count": 1}, rng)
        (seen,) = read_clip(render(scene)).objects
        x, y, radius, _ = object_path(scene, scene.things[0], time)
        shift, zoom = camera_path(scene.camera, time)
        np.testing.assert_allclose(seen.x, (x - 32) * zoom + 32 - shift, atol=0.6)
        np.testing.assert_allclose(seen.y, (y - 32) * zoom + 32, atol=0.6)
        np.testing.assert_allclose(seen.radius, radius * zoom, rtol=0.06)


def test_explains_what_it_reads():
    """The re-drawn reading differs from the clip in edges alone; a spoilt clip is not explained."""
    rng = np.random.default_rng(14)
    for _ in range(20):
        scene = sample_scene(sample_prior(rng), rng)
        clip = render(scene)
        assert read_clip(clip).residual.mean() < 0.01
        assert read_clip(corruptions.noise(scene, clip, rng)).residual.mean() > 0.02


def test_any_kind_of_clip():
    scene = sample_scene({"motion": "left", "camera": "still"}, np.random.default_rng(0))
    clip = render(scene)
    as_bytes = ((clip + 1) * 127.5).round().astype(np.uint8)
    kinds = [clip, as_bytes, torch.tensor(clip), torch.tensor(as_bytes), torch.tensor(clip).bfloat16()]
    assert [r.motion for r in read_clips(kinds)] == ["left"] * 5
    for frames in (2, 5, 9, 33):
        assert read_clip(render(scene, frames)).motion == "left"
    assert read_clip(clip[:1]).motion == "still"
    with pytest.raises(UserError, match=r"expected \[frames, 64, 64, 3\]"):
        read_clip(clip[:, :32])


@pytest.mark.filterwarnings("error")
def test_clips_of_nothing_are_read_as_nothing():
    rng = np.random.default_rng(0)
    shape = (17, 64, 64, 3)
    for blank in (np.zeros(shape), np.full(shape, np.nan), np.ones(shape)):
        reading = read_clip(blank.astype(np.float32))
        assert reading.count == 0 and reading.motion is None and reading.camera is None
    for static in (rng.normal(0, 1, shape), rng.uniform(-1, 1, shape)):
        reading = read_clip(static.astype(np.float32))
        assert all(o.shape is None for o in reading.objects) and reading.camera is None


def test_an_object_that_goes_away_is_missed():
    thing = Thing(shape="square", colour="red", radius=9.0, start=(20.0, 32.0))
    scene = Scene(things=(thing,), motion="right", camera="still", background="gray", style="flat", travel=20.0)
    clip = render(scene)
    clip[6:12] = render(Scene(things=(), motion="still", camera="still", background="gray", style="flat"))[6:12]
    (seen,) = read_clip(clip).objects
    assert seen.presence == pytest.approx(11 / 17) and seen.motion.name == "right"


def test_two_things_of_one_colour_are_two():
    things = tuple(
        Thing(shape=s, colour="green", radius=7.0, start=(x, 32.0)) for s, x in (("circle", 19.0), ("square", 45.0))
    )
    scene = Scene(things=things, motion="still", camera="still", background="black", style="flat")
    reading = read_clip(render(scene))
    assert sorted(str(o.shape) for o in reading.objects) == ["circle", "square"]

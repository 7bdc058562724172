"""The benchmark gives truth its due, and takes away for each fault what that fault deserves."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from codmd.errors import UserError
from codmd.evaluation import (
    MEASURES,
    SEMANTIC,
    MiniScores,
    compare,
    evaluation_prompts,
    is_open,
    open_prompts,
    report,
    score,
    table,
    totals,
)  # fmt: skip
from codmd.evaluation.benchmark_page import SPOILED_BY, spoiled, truth
from codmd.evaluation.mini_measures import ABOUT
from codmd.mini.captions import held_out, read
from codmd.mini.world import render, sample_scene

PROMPTS = 16

# Faults of a single attribute, and the measures besides "overall consistency" that may notice them.
ALONE = {
    "swap the shape": {"object class", "multiple objects"},
    "recolour": {"color"},
    "change the background": {"scene"},
    "change the style": {"appearance style"},
    "change the speed": {"temporal style"},
    "swap the relation": {"spatial relationship"},
    "jitter": {"motion smoothness"},
    "saturate": {"aesthetic quality"},
}


@cache
def on_truth() -> MiniScores:
    captions, _, clips = truth(PROMPTS, seeds=1)
    return score(clips, captions)


@cache
def after(corruption: str) -> MiniScores:
    captions, scenes, clips = truth(PROMPTS, seeds=1)
    return score(spoiled(corruption, scenes, clips), captions)


def test_truth_scores_full_marks():
    measures = on_truth().measures()
    for name, value in measures.items():
        if name != "dynamic degree":
            assert value > (0.99 if name in SEMANTIC else 0.95), name
    summary = on_truth().summary()
    assert abs(summary["saturation error"]) < 0.02
    assert summary["dynamic where asked"] == 1


def test_every_measure_is_described_and_falls():
    assert set(ABOUT) == set(MEASURES) == set(SPOILED_BY)
    assert len(MEASURES) == 16


@pytest.mark.parametrize(("measure", "corruption"), [(m, c) for m, names in SPOILED_BY.items() for c in names], ids=str)
def test_a_measure_falls_when_its_attribute_is_spoilt(measure: str, corruption: str):
    before, now = on_truth().measures()[measure], after(corruption).measures()[measure]
    assert 0 <= now < before - 0.1


@pytest.mark.parametrize("corruption", ALONE)
def test_other_measures_hardly_notice(corruption: str):
    before, now = on_truth().measures(), after(corruption).measures()
    others = set(MEASURES) - ALONE[corruption] - {"overall consistency"}
    fallen = {m: (before[m], now[m]) for m in others if before[m] - now[m] > 0.05}
    assert not fallen


def test_saturation_error_is_signed():
    assert after("saturate").summary()["saturation error"] > 0.1
    assert after("blur").summary()["saturation error"] < -0.05


def test_totals_follow_vbench():
    measures = dict.fromkeys(MEASURES, 1.0) | {"dynamic degree": 0.0, "scene": 0.1}
    t = totals(measures)
    assert t["quality"] == pytest.approx(6 / 6.5)
    assert t["semantic"] == pytest.approx(8.1 / 9)
    assert t["total"] == pytest.approx((4 * t["quality"] + t["semantic"]) / 5)


def test_a_measure_without_clips_is_left_out_and_named():
    captions, _, clips = truth(1)
    scores = score(clips[:1], captions[:1])
    assert "multiple objects" in scores.absent() and math.isnan(scores.measures()["multiple objects"])
    assert scores.summary()["semantic"] == pytest.approx(1)
    assert "–" in table({"one": scores})


def test_prompts_are_held_out_balanced_and_fixed():
    prompts = evaluation_prompts(48)
    assert prompts == evaluation_prompts(48) and prompts[:16] == evaluation_prompts(16)
    assert prompts != evaluation_prompts(48, seed=3)
    assert len(set(prompts)) == 48 and all(held_out(p) for p in prompts)
    asked = [read(p) for p in prompts]
    assert sum(is_open(a) for a in asked) == 6
    assert sum(a.camera not in (None, "still") for a in asked) == 6
    assert {a.motion for a in asked if a.count == 1 and not is_open(a)} >= {
        "still", "left", "right", "up", "down", "diagonal", "spin", "grow", "shrink", "bounce", "orbit",
    }  # fmt: skip
    some = open_prompts(12)
    assert some[:6] == [p for p in prompts if is_open(read(p))] and all(map(is_open, map(read, some)))


def test_equals_have_no_gap():
    rng = np.random.default_rng(0)
    captions = [p for p in open_prompts(4) for _ in range(2)]
    scores = score([render(sample_scene(read(c).fixed(), rng)) for c in captions], captions)
    result = compare(scores, scores)
    assert result["total difference"] == 0 and result["diversity ratio"] == 1 and result["mode coverage"] == 0


def test_collapse_shows():
    """A model with one clip for each caption: diversity goes, and so do modes."""
    captions = [p for p in open_prompts(6) for _ in range(6)]

    def model(seed: int) -> MiniScores:
        rng = np.random.default_rng(seed)
        return score([render(sample_scene(read(c).fixed(), rng)) for c in captions], captions)

    teacher, equal = model(0), model(1)
    clip = {}
    rng = np.random.default_rng(2)
    for caption in dict.fromkeys(captions):
        clip[caption] = render(sample_scene({**read(caption).fixed(), "background": "black"}, rng))
    collapsed = score([clip[c] for c in captions], captions)
    fair, poor = compare(equal, teacher), compare(collapsed, teacher)
    assert 0.8 < fair["diversity ratio"] < 1.25 and poor["diversity ratio"] == 0
    assert poor["pixel diversity ratio"] == 0
    assert poor["mode coverage"] > 1.5 * fair["mode coverage"]
    assert fair["mode coverage"] == pytest.approx(fair["mode coverage of equals"], abs=0.08)


def test_relational_gap_from_latents():
    captions, _, clips = truth(3)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(len(captions), 8, 9, 4, 4, generator=generator)
    one = score(clips, captions, latents)
    other = score(clips, captions, latents + torch.randn(latents.shape, generator=generator))
    same = score(clips, captions, 3 * latents)  # cosines know no scale
    gaps = ("frame relation gap", "batch relation gap")
    assert all(compare(same, one)[g] < 1e-5 for g in gaps)
    assert all(compare(other, one)[g] > 0.05 for g in gaps)
    flat = score(clips, captions, torch.ones_like(latents))
    assert compare(flat, one)["pairwise diversity difference"] > 0.3  # all alike: D(Q) is 0
    assert math.isnan(compare(score(clips, captions), one)["frame relation gap"])


def test_scores_survive_a_file(tmp_path: Path):
    captions, _, clips = truth(2)
    scores = score(clips, captions, torch.randn(4, 3, 2, 2, 2, generator=torch.Generator().manual_seed(0)))
    scores.save(tmp_path / "scores.json")
    loaded = MiniScores.load(tmp_path / "scores.json")
    np.testing.assert_allclose(loaded.values, scores.values, atol=1e-6)
    np.testing.assert_allclose(loaded.frame_features, scores.frame_features, atol=1e-6)
    assert loaded.checks == scores.checks and loaded.captions == scores.captions
    assert loaded.attributes == scores.attributes
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "missing.json"):
        with pytest.raises(UserError, match=name):
            MiniScores.load(tmp_path / name)


def test_intervals_cover_the_mean():
    scores = on_truth()
    low, high = scores.interval(draws=100)["dynamic degree"]
    assert low <= scores.summary()["dynamic degree"] <= high and high - low < 0.6


def test_report_writes_what_it_prints(tmp_path: Path):
    captions, _, clips = truth(2)
    scores = score(clips, captions)
    console = Console(record=True, width=100)
    report({"teacher": scores, "student": scores}, tmp_path, console)
    assert "imaging quality" in console.export_text()
    assert "| measure | teacher | student |" in (tmp_path / "scores.md").read_text()
    assert json.loads((tmp_path / "scores.json").read_text())["student"]["total difference"] == 0
    assert MiniScores.load(tmp_path / "scores" / "student.json").captions == scores.captions


def test_mismatches_are_named():
    captions, _, clips = truth(2)
    with pytest.raises(UserError, match="4 clips for 3 captions"):
        score(clips, captions[:3])
    with pytest.raises(UserError, match="different captions"):
        compare(score(clips[:2], captions[:2]), score(clips[2:], captions[2:]))

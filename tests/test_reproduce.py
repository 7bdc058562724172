"""The reproduction: paired runs that can be stopped and shared, statistics that hold, a report that says no more."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from codmd.data.streams import Draws, prompt_indices, sample_ids
from codmd.errors import UserError
from codmd.evaluation import MEASURES, totals
from codmd.recipe import diff
from codmd.reproduce import VARIANTS, Plan, run, work
from codmd.reproduce.figures import CURVES
from codmd.reproduce.statistics import bootstrap_total, over_seeds, t_quantile, total_of

QUICK = (
    "train.iterations=2", "train.student_every=1", "train.batch=2", "validation.every=1", "validation.prompts=2",
    "model.teacher_steps=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save_pipeline(tmp_path_factory.mktemp("reproduce") / "teacher")
    facts = {"size": [17, 64, 64], "steps": 2, "guidance": 3.5, "fps": 8}
    (folder / "codmd.json").write_text(json.dumps(facts))
    return folder


# ---- the plan ------------------------------------------------------------------------------------


def test_the_plan_is_that_of_the_paper_and_runs_nothing_twice() -> None:
    runs = Plan().runs
    assert len({r.name for r in runs}) == len(runs) == 2 * 5 + 6 * 3
    objectives = {(r.recipe.objective, r.seed) for r in runs}
    assert len(objectives) == len(runs)
    swept = {v.weight for v in VARIANTS if v.weight is not None}
    assert swept == {0.0, 0.1, 0.2, 0.5, 1.0}
    for one in runs:
        variant = next(v for v in VARIANTS if v.name == one.variant)
        if variant.weight:
            assert one.recipe.objective.batch_weight == one.recipe.objective.frame_weight == variant.weight


def test_runs_of_one_seed_are_paired_and_those_of_another_are_not() -> None:
    runs = {(r.variant, r.seed): r.recipe for r in Plan().runs}
    changed = {c.key for c in diff(runs["dmd", 1], runs["codmd", 1])}
    assert changed == {"name", "objective.method"}
    ids = sample_ids(3, 4)

    def draws(seed: int) -> list[float]:
        these = Draws(seed, 3, ids, (2,), torch.device("cpu"))
        numbers = [these.noise("rollout 0"), these.uniform("t student"), these.exits(4, shared=True).float()]
        return [*prompt_indices(seed, ids, 1000), *(float(v) for n in numbers for v in n.flatten())]

    same = draws(runs["dmd", 1].seed)
    assert same == draws(runs["codmd", 1].seed) and same != draws(runs["dmd", 2].seed)


def test_seed_after_seed_so_that_what_an_early_stop_leaves_is_paired() -> None:
    seeds = [r.seed for r in Plan().runs]
    assert seeds == sorted(seeds)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"only": ("cdmd",)}, 'unknown variant "cdmd".*codmd'),
        ({"seeds": 0}, "--seeds"),
        ({"overrides": ("objective.method=mse",)}, "leave it out"),
    ],
)
def test_a_plan_refuses_in_one_line(given: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Plan(**given)


# ---- the statistics ------------------------------------------------------------------------------


def test_quantiles_of_t_go_on_where_the_table_ends() -> None:
    assert t_quantile(4) == 2.7764
    assert math.isclose(t_quantile(11), 2.200985, rel_tol=1e-4)
    assert math.isclose(t_quantile(30), 2.042272, rel_tol=1e-5)


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    estimates = [over_seeds(rng.normal(0.3, 2.0, 5).tolist()) for _ in range(4000)]
    covered = np.mean([e.low <= 0.3 <= e.high for e in estimates])  # type: ignore[operator]
    assert abs(covered - 0.95) < 0.012


def test_one_seed_has_no_interval_and_nothing_is_made_of_nan() -> None:
    one = over_seeds([0.5, math.nan])
    assert (one.mean, one.low, one.count, one.leaves_out_zero) == (0.5, None, 1, False)
    assert over_seeds([]).count == 0


def clips(rng: np.random.Generator, prompts: int = 12, each: int = 2) -> tuple[np.ndarray, list[str]]:
    values = rng.random((prompts * each, len(MEASURES)))
    values[::3, MEASURES.index("multiple objects")] = np.nan
    values[:, MEASURES.index("scene")] = np.nan  # applies to no clip
    return values, [f"prompt {i // each}" for i in range(prompts * each)]


def test_the_weighted_total_is_the_benchmarks_own() -> None:
    values, _ = clips(np.random.default_rng(0))
    rows = np.array([0, 0, 3, 5, 7])
    weights = np.bincount(rows, minlength=len(values))[None].astype(float)
    with np.errstate(all="ignore"):
        means = {n: float(np.nanmean(values[rows, i])) if n != "scene" else math.nan for i, n in enumerate(MEASURES)}
    assert math.isclose(float(total_of(values, weights)[0]), totals(means)["total"], rel_tol=1e-12)


def test_the_bootstrap_pairs_prompts() -> None:
    rng = np.random.default_rng(1)
    values, captions = clips(rng)
    shifted = bootstrap_total([(values + 0.1, values), (values + 0.1, values)], captions)
    # What is the same on every prompt and seed has no spread, however much the prompts differ.
    assert all(math.isclose(v, 0.1, rel_tol=1e-9) for v in (shifted.mean, shifted.low, shifted.high))
    noisy = bootstrap_total([(clips(rng)[0], values), (clips(rng)[0], values)], captions)
    assert noisy.low < noisy.mean < noisy.high  # type: ignore[operator]


# ---- the command ---------------------------------------------------------------------------------


def test_a_part_is_run_reported_as_a_part_and_gone_on_with(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "out", tmp_path / "docs" / "mini.md"
    how = {
        "out": out, "report": report, "prompts": 2, "clips": 1, "checkpoints": 2,
        "overrides": (*QUICK, f"model.base={teacher}"),
    }  # fmt: skip
    run(**how, only=("dmd", "codmd"), seeds=1)
    text = report.read_text()
    assert "2 of 28 runs are done" in text and "**Not all of the plan was run**" in text
    assert "| teacher |" in text and "| a student before it learns |" in text
    assert "(one seed)" in text and "| DMD + batch |" in text
    assert "Conclusions" not in text
    results = json.loads((out / "results" / "dmd-seed0.json").read_text())
    assert [c["step"] for c in results["checkpoints"]] == [1, 2]
    assert len(results["curve"]) == 3 and results["student_updates"] == 2
    assert {"total", "dynamic_degree", "imaging_quality"} <= set(CURVES) & set(results["curve"][0])
    # At equal weights DMD's and CoDMD's first steps see the same student: what is paired starts as one.
    first = {v: (out / "runs" / f"{v}-seed0" / "metrics.jsonl").read_text() for v in ("dmd", "codmd")}
    at_start = {v: json.loads(t.splitlines()[0]) for v, t in first.items()}
    assert at_start["dmd"]["loss/dmd"] == at_start["codmd"]["loss/dmd"]
    assert at_start["dmd"]["loss/student"] != at_start["codmd"]["loss/student"]

    before = {p: p.stat().st_mtime_ns for p in (out / "results").iterdir()}
    (report.parent / "mini-notes.md").write_text("Nothing can be said yet.\n")
    run(**how, only=("dmd", "codmd"), seeds=2)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    text = report.read_text()
    assert "4 of 28 runs are done" in text and "Nothing can be said yet." in text
    assert (report.parent / "mini-curves.svg").is_file() and (report.parent / "mini-lambda.svg").is_file()
    assert len(json.loads((report.parent / "mini.json").read_text())["runs"]) == 4
    assert "--set model.base" in text

    capsys.readouterr()
    run(**how, budget=0, report_only=False)
    assert "4 of 28 runs are done" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"that run was another \(train.batch: 2 -> 3\)"):
        run(**{**how, "overrides": (*how["overrides"], "train.batch=3")}, seeds=1, only=("dmd",))
    with pytest.raises(UserError, match=r"that run was another \(prompts: 2 -> 1\)"):  # though batch has none yet
        run(**{**how, "prompts": 1}, only=("batch",), seeds=1)
    assert not (out / "runs" / "batch-seed0").exists()
    facts = json.loads((out / "teacher.json").read_text())
    (out / "teacher.json").write_text(json.dumps({**facts, "sha256": "of other weights"}))
    with pytest.raises(UserError, match="another teacher"):
        run(**how, only=("dmd",), seeds=1)


def test_a_lock_lets_one_in(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "a"
    with work.lock(path) as first, work.lock(path) as second:
        assert first and not second
    with work.lock(path) as again:
        assert again


def test_wrong_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--workers"):
        run(out=tmp_path, report=tmp_path / "x.md", workers=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file"):
        run(out=tmp_path / "file", report=tmp_path / "x.md")

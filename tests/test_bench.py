"""The benchmark measures what it says, and fails where a promise is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from bench import timing
from bench.__main__ import Line, markdown, measure
from bench.memory import peak
from bench.timing import median_interval, paired_ratio, ratio_of
from bench.training import trainer
from codmd.models import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_pipeline(tmp_path_factory.mktemp("bench") / "teacher")


def test_every_ratio_is_measured_and_reported(folder: Path) -> None:
    lines = measure(str(folder), quick=True, scale=1.0)
    assert len({line.what for line in lines}) == len(lines) == 7
    assert all(line.value > 0 for line in lines)
    assert [line.what for line in lines if line.must or line.at_least] == [
        "teacher / student, denoising only",
        "CoDMD / DMD, an iteration in which the student learns",
        "CoDMD / DMD, a cycle of iterations",
    ]
    page = markdown(lines, {"threads": "2"}, quick=True)
    assert "proves nothing" in page and all(line.what in page for line in lines)


def test_a_broken_promise_fails_and_a_missed_aim_does_not() -> None:
    assert Line(what="a", value=19.9, at_least=20).fails and not Line(what="a", value=20.1, at_least=20).fails
    assert Line(what="b", value=1.04, must=1.03).fails and not Line(what="b", value=1.02, must=1.03).fails
    missed = Line(what="c", value=1.2, aim=1.05)
    assert not missed.fails and missed.verdict().endswith("no")


def test_paired_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    ratio = ratio_of([(2.0, 1.0), (6.0, 2.0), (4.0, 1.0)])
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == (3.0, 2.0, 4.0, 3)
    assert median_interval(100) == (40, 59)
    order: list[str] = []
    now = 0.0

    def timed(name: str, seconds: float) -> Callable[[int], Callable[[], None]]:
        def work() -> None:
            nonlocal now
            now += seconds
            order.append(name)

        return lambda number: work

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert paired_ratio(timed("a", 3.0), timed("b", 1.5), 3).median == 2.0
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]  # each begins in turn, after a round that isn't timed


def test_memory_is_counted_exactly(folder: Path) -> None:
    """Three networks of fp32 weights and two with two moments each; the count is the same each time."""
    model = load_model(str(folder))
    first, again = (peak(trainer(model, "dmd", "train.batch=2")) for _ in range(2))
    weights = sum(p.numel() for p in model.network.parameters()) * 4
    moments = 2 * 2 * weights
    counts = 2 * 4 * len(list(model.network.parameters()))
    buffers = 3 * sum(b.untyped_storage().nbytes() for b in model.network.buffers())
    assert first == again and first.step > weights
    assert first.standing == 3 * weights + moments + counts + buffers

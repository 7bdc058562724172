"""The benchmark measures what it says, and fails where a promise is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch

from bench import timing
from bench.__main__ import Line, markdown, measure
from bench.memory import peak
from bench.schedule import Release, balanced, evaluations_of_both
from bench.timing import median_interval, paired_ratio, ratio_of
from bench.training import trainer
from codmd.data.streams import Draws
from codmd.models import load_model
from codmd.rollout import rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_pipeline(tmp_path_factory.mktemp("bench") / "teacher")


def test_every_ratio_is_measured_and_reported(folder: Path) -> None:
    lines = measure(str(folder), quick=True, scale=1.0)
    assert len({line.what for line in lines}) == len(lines) == 15
    assert all(line.value > 0 for line in lines)
    assert [line.what for line in lines if line.must or line.at_least] == [
        "teacher / student, denoising only",
        "CoDMD / DMD, an iteration in which the student learns",
        "CoDMD / DMD, a cycle of iterations",
        "network evaluations of a sample in five iterations",
        "the same, with recomputed blocks",
        "the same, in two passes over parts of the batch",
        "adapters of rank 16 / full, weights, gradients and optimizer",
    ]
    counted = {line.what: line.value for line in lines if "schedule" in line.what or "the same" in line.what}
    # Exact, whatever the machine: 32.5 has a line of its own.
    assert list(counted.values())[:4] == [38.5, 33.5, 44, 50]
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


def test_a_round_in_parts_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 0.0, list[int]()

    def taking(*seconds: float) -> Callable[[int], Callable[[], None]]:
        def make(number: int) -> Callable[[], None]:
            asked.append(number)

            def work() -> None:
                nonlocal now
                now += seconds[number % len(seconds)]

            return work

        return make

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    ratio = paired_ratio(taking(1.0, 8.0), taking(2.0, 4.0), 3, parts=2)  # part by part the ratios are ½ and 2
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs, ratio.seconds) == (1.5, 1.5, 1.5, 3, (9.0, 6.0))
    assert asked[2::2] == [0, 1, 2, 3, 4, 5]


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


# ---- the schedules ---------------------------------------------------------------------------------------------------


def test_evaluations_of_five_iterations_are_counted_as_they_happen(folder: Path) -> None:
    assert evaluations_of_both(load_model(str(folder))) == (32.5, 44.0)


def test_recomputed_activations_cost_both_a_forward_an_update(folder: Path) -> None:
    assert evaluations_of_both(load_model(str(folder)), "compute.checkpointing=blocks") == (38.5, 50.0)


def test_without_guidance_the_teacher_is_called_once(folder: Path) -> None:
    ours, theirs = evaluations_of_both(load_model(str(folder)), "model.guidance_scale_standard=1.0")
    assert (ours, theirs) == (31.5, 43.0)


@pytest.mark.parametrize(("every", "steps"), [(5, 4), (3, 2), (1, 4)])
def test_balanced_iterations_hold_every_exit_alike(folder: Path, every: int, steps: int) -> None:
    times = [1.0, 0.9, 0.8, 0.7][:steps]
    given = (f"train.student_every={every}", f"rollout.steps={times}")
    recipe = trainer(load_model(str(folder)), "dmd", *given).recipe
    found = balanced(recipe)
    kinds = [
        (step % every == 0, int(Draws(recipe.seed, step, (0,), (1,), torch.device("cpu")).exits(steps, shared=True)))
        for step in found
    ]
    assert len(set(found)) == every * steps
    for exit in range(steps):
        assert (kinds.count((True, exit)), kinds.count((False, exit))) == (1, every - 1)


def test_the_release_makes_the_same_clips_from_the_same_noise(folder: Path) -> None:
    """It differs in what it evaluates on the way, not in what comes out."""
    one = Release(trainer(load_model(str(folder)), "dmd", "train.batch=4", "rollout.exit=per_sample"))
    draws = Draws(0, 7, (0, 1, 2, 3), one.latent_shape, one.device)
    text, steps, exits = one.prompts.select([3, 1, 2, 0]), one.recipe.rollout.steps, torch.tensor([2, 0, 3, 1])
    mine = rollout(one.roles.student.x0, draws.noise("some 0"), text, steps, lambda j: draws.noise(f"some {j}"), exits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draws, "exits", lambda self, count, shared: exits)
        theirs = one.generate(text, draws, "some")
    torch.testing.assert_close(theirs, mine)


def test_the_release_moves_the_student_in_its_turns_and_the_fake_network_always(folder: Path) -> None:
    one = Release(trainer(load_model(str(folder)), "codmd", "train.batch=2"))

    def weights() -> dict[str, torch.Tensor]:
        networks = {"student": one.roles.student, "fake": one.roles.fake, "teacher": one.roles.teacher.network}
        return {name: torch.cat([p.detach().flatten() for p in n.parameters()]) for name, n in networks.items()}

    for step in range(6):
        before = weights()
        one.iterate()
        moved = {name for name, value in weights().items() if not torch.equal(value, before[name])}
        assert moved == ({"student", "fake"} if step % 5 == 0 else {"fake"})

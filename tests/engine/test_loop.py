"""An iteration: what it computes, what it changes, and what it costs."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_runs import runs, snapshot
from torch import Tensor

from codmd import flow
from codmd.data.streams import Draws, prompt_indices, sample_ids
from codmd.engine.loop import Trainer
from codmd.objectives import METHODS, Predictions, build, total


@contextmanager
def counted(trainer: Trainer) -> Iterator[dict[str, float]]:
    """Forward-equivalents of each role: a forward 1, a backward 2, relative to one whole batch."""
    batch, spent = trainer.recipe.train.batch, {}
    roles = trainer.roles
    hooks = []
    for name, network in (
        ("student", roles.student),
        ("teacher", roles.teacher.network),
        ("fake", roles.fake),
    ):
        spent[name] = 0.0

        def count(module: object, args: tuple, kwargs: dict, name: str = name) -> None:
            cost = 3 if torch.is_grad_enabled() else 1
            spent[name] += cost * len(kwargs["hidden_states"]) / batch

        hooks.append(network.transformer.register_forward_pre_hook(count, with_kwargs=True))
    yield spent
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("exits", ["shared", "per_sample"])
def test_no_evaluation_can_be_left_out_and_codmd_costs_what_dmd_costs(exits: str) -> None:
    costs: dict[str, list[tuple[bool, int, dict[str, float]]]] = {}
    for method in ("dmd", "codmd"):
        trainer = runs.trainer(f"objective.method={method}", "train.student_every=2", f"rollout.exit={exits}")
        costs[method] = []
        for step in range(12):
            draws = Draws(0, step, sample_ids(step, 3), trainer.latent_shape, trainer.device)
            latest = int(draws.exits(4, shared=exits == "shared").max())
            with counted(trainer) as spent:
                trainer.iterate()
            costs[method].append((step % 2 == 0, latest, dict(spent)))
    assert costs["dmd"] == costs["codmd"]
    for is_student_turn, latest, spent in costs["codmd"]:
        simulated = latest  # forwards without gradient before the last
        if is_student_turn:
            assert spent == {"student": simulated + 3, "teacher": 2, "fake": 1 + 3}
        else:
            assert spent == {"student": simulated + 1, "teacher": 0, "fake": 3}
    assert {latest for _, latest, _ in costs["codmd"]} >= {0, 3} or exits == "per_sample"


def test_forward_equivalents_average_10_5_and_5_5() -> None:
    """With the exit uniform over four steps, from the costs that the test above counts at each exit."""
    student_turn = sum(e + 3 + 2 + 4 for e in range(4)) / 4
    other = sum(e + 1 + 3 for e in range(4)) / 4
    assert (student_turn, other, student_turn + 4 * other) == (10.5, 5.5, 32.5)
    draws = [Draws(0, step, (0,), (1,), torch.device("cpu")).exits(4, shared=True) for step in range(2000)]
    shares = torch.cat(draws).bincount(minlength=4) / 2000
    torch.testing.assert_close(shares, torch.full((4,), 0.25), rtol=0, atol=0.04)


def test_an_iteration_is_algorithm_1() -> None:
    """Against a restatement with plain loops, one sample at a time, and a stock AdamW."""
    trainer = runs.trainer("train.clip_norm=1e9")
    student, fake = copy.deepcopy(trainer.roles.student), copy.deepcopy(trainer.roles.fake)
    teacher = trainer.roles.teacher
    optimizers = [torch.optim.AdamW(n.parameters(), lr=1e-3, weight_decay=0.01) for n in (student, fake)]
    for step in range(4):
        ids = sample_ids(step, 3)
        draws = Draws(0, step, ids, trainer.latent_shape, trainer.device)
        last = int(draws.exits(4, shared=True)[0])
        t_list, rows, parts = trainer.recipe.rollout.steps, [], []
        u, t_fake = draws.uniform("t student"), flow.renoise_times(draws.uniform("t fake"), 5.0)
        for row, place in enumerate(prompt_indices(0, ids, len(trainer.prompts))):
            text, one = trainer.prompts.select([place]), slice(row, row + 1)
            y = draws.noise("rollout 0")[one]
            for j in range(last):
                with torch.no_grad():
                    clean = student.x0(y, torch.tensor([t_list[j]]), text)
                y = (1 - t_list[j + 1]) * clean + t_list[j + 1] * draws.noise(f"rollout {j + 1}")[one]
            x = student.x0(y, torch.tensor([t_list[last]]), text)
            t = (5 * u[one] / (1 + 4 * u[one])).clamp(0.02, 0.98)
            x_t = ((1 - t) * x + t * draws.noise("renoise student")[one]).detach()
            with torch.no_grad():
                real, seen = teacher.x0(x_t, t, text), fake.x0(x_t, t, text)
            parts.append(Predictions(x=x, x_t=x_t, t=t, real=real, fake=seen))
            eps, at = draws.noise("renoise fake")[one], t_fake[one]
            noisy = (1 - at) * x.detach() + at * eps
            rows.append((fake.velocity(noisy, at, text) - (eps - x.detach())).square().mean())
        networks = [fake]
        torch.stack(rows).mean().backward()
        if step % 3 == 0:
            total(build(trainer.recipe.objective)(Predictions.join(parts))).backward()
            networks.append(student)
        for network, optimizer in zip((student, fake), optimizers, strict=True):
            if network in networks:
                optimizer.step()
            optimizer.zero_grad()
        trainer.iterate()
        for ours, plain in ((trainer.roles.student, student), (trainer.roles.fake, fake)):
            for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
                # A tenth of one update at this rate: Adam magnifies rounding where a gradient is nearly 0.
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_only_a_students_turn_moves_the_student_and_nothing_moves_the_teacher() -> None:
    trainer = runs.trainer("train.ema_decay=0.9")
    for step in range(5):
        before = snapshot(trainer)
        trainer.iterate()
        after = snapshot(trainer)
        moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
        assert moved == ({"student", "fake", "ema"} if step % 3 == 0 else {"fake"})
    assert (trainer.student.updates, trainer.fake.updates) == (2, 5)


@pytest.mark.parametrize("method", METHODS)
def test_every_objective_trains(method: str) -> None:
    overrides = (f"objective.method={method}", "renoise.mode=shared", "rollout.exit=per_sample")
    trainer = runs.trainer(*overrides, "train.student_every=1")
    records = [trainer.iterate() for _ in range(2)]
    assert all(record["refused"] is None for record in records)
    terms = {"dmd"} | ({"batch"} if method in ("batch", "codmd", "direct", "mse") else set())
    terms |= {"frame"} if method in ("frame", "codmd", "direct", "mse") else set()
    assert {name[5:] for name in records[1] if name.startswith("loss/")} == terms | {"student", "fake"}


def test_under_autocast_gradients_reach_the_student_as_in_fp32() -> None:
    norms: dict[str, list[float]] = {}
    for precision in ("fp32", "bf16"):
        trainer = runs.trainer(f"train.precision={precision}", "train.student_every=1", "train.student_lr=1e-9")
        norms[precision] = [trainer.iterate()["gradient/student"] for _ in range(4)][1:]
        assert all(p.dtype == torch.float32 for p in trainer.roles.student.parameters())
    for exact, rounded in zip(norms["fp32"], norms["bf16"], strict=True):
        assert exact > 0 and 0.5 < rounded / exact < 2


def test_the_rate_rises_over_the_warm_up_and_then_stays() -> None:
    trainer = runs.trainer("train.warmup=4", "train.student_every=1")
    rates = [trainer.iterate()["lr/student"] for _ in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_clipping_bounds_the_gradient_and_reports_what_it_was() -> None:
    trainer = runs.trainer("train.clip_norm=0.01")
    seen: list[Tensor] = []
    update = trainer.fake.update
    trainer.fake.update = lambda: (seen.extend(p.grad for p in trainer.fake.parameters), update())
    record = trainer.iterate()
    assert record["gradient/fake"] > 0.01
    assert torch.stack([g.norm() for g in seen]).norm().item() == pytest.approx(0.01, rel=1e-3)

"""A step that is not finite changes nothing, whatever the objective and wherever it went wrong."""

import math

import pytest
import torch
from engine_runs import runs, snapshot

from codmd.engine.guard import Guard
from codmd.errors import NonFiniteError
from codmd.objectives import METHODS


def spoil(trainer, place: str, value: float) -> None:
    """Makes one network's outputs, or one gradient, not finite."""

    def spoiled_output(module, args, output):
        bad = output[0].clone()
        bad[-1, 0, 0, 0, 0] = value
        return (bad,)

    if place == "gradient":
        parameter = next(trainer.roles.fake.parameters())
        parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
    else:
        network = trainer.roles.teacher.network if place == "teacher" else getattr(trainer.roles, place)
        network.transformer.register_forward_hook(spoiled_output)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("place", "value"),
    [("teacher", math.inf), ("fake", math.nan), ("student", -math.inf), ("gradient", math.nan)],
)
def test_nothing_changes(method: str, place: str, value: float) -> None:
    trainer = runs.trainer(f"objective.method={method}", "train.student_every=1", "train.ema_decay=0.9")
    trainer.iterate()
    before = snapshot(trainer)
    spoil(trainer, place, value)
    record = trainer.iterate()
    whose = "samples 3 to 5" if place == "gradient" else "samples 5 "  # the last of its batch
    assert "step 1" in record["refused"] and whose in record["refused"] and "seed 0" in record["refused"]
    assert record["refused_samples"] == ([3, 4, 5] if place == "gradient" else [5])
    after = snapshot(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (trainer.student.updates, trainer.fake.updates, trainer.step) == (1, 1, 2)
    assert all(p.grad is None for p in trainer.student.parameters + trainer.fake.parameters)


def test_it_ends_the_run_after_too_many_in_a_row_and_names_the_step() -> None:
    guard = Guard(limit=3)
    for step, value in enumerate([math.nan, math.inf, 1.0, math.nan, math.nan]):
        refusal = guard.refusal(step, {"loss/fake": value, "loss/dmd": 0.5}, lambda: [8, 11])
        assert (refusal is None) == math.isfinite(value)
        said = refusal.refused if refusal is not None else "loss/fake 8, 11"
        assert "loss/fake" in said and "8, 11" in said and "dmd" not in said
    with pytest.raises(NonFiniteError, match=r"step 5.*3 steps in a row"):
        guard.refusal(5, {"loss/fake": math.nan}, lambda: range(40, 44))

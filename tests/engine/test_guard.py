"""A step that is not finite changes nothing, whatever the objective and wherever it went wrong."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_runs import TinyRuns, runs, snapshot
from many_ranks import joined, launch

from codmd.config import ParallelConfig
from codmd.engine.assembly import assemble, load_base
from codmd.engine.distill import distill
from codmd.engine.guard import LIMIT, Guard
from codmd.engine.ranks import meshed
from codmd.engine.tracking import read_json_lines
from codmd.errors import NonFiniteError
from codmd.networks.sharding import local
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


def test_a_run_that_it_ends_has_written_down_every_refusal(tmp_path: Path) -> None:
    recipe = runs.recipe("train.iterations=20", "train.student_lr=1e30", "seed=7")
    with pytest.raises(NonFiniteError, match=f"{LIMIT} steps in a row"):
        distill(recipe, tmp_path / "run")
    refused = [line for line in read_json_lines(tmp_path / "run/metrics.jsonl") if line["refused"]]
    assert [line["step"] for line in refused] == list(range(refused[0]["step"], refused[0]["step"] + LIMIT))
    for line in refused:
        first = 3 * line["step"]
        assert line["refused_samples"] == [first, first + 1, first + 2] and line["seed"] == 7


# ---- on one of two ranks -------------------------------------------------------------------------

PLACES = ("loss", "gradient", "teacher", "fake")
VALUES = ("nan", "inf")  # by name: a NaN is no key


def refusals(rank: int, folder: str, teacher: Path) -> dict:
    """What each rank's record says, and whether anything changed, where rank 1 alone goes wrong."""
    runs = TinyRuns(teacher)
    joined(rank, 2, "guard", folder)
    found = {}
    for method in METHODS:
        recipe = runs.recipe(
            f"objective.method={method}", "train.student_every=1", "train.ema_decay=0.9", "train.batch=4"
        )
        ranks = meshed(ParallelConfig(**vars(recipe.parallel)), torch.device("cpu"))
        trainer, _ = assemble(recipe, load_base(recipe, ranks), ranks=ranks)
        trainer.iterate()
        for place in PLACES:
            for value in VALUES:
                before = {name: local(tensor).clone() for name, tensor in learned(trainer).items()}
                updates = (trainer.student.updates, trainer.fake.updates)
                undo = spoil_rank(trainer, place, float(value)) if rank == 1 else lambda: None
                record = trainer.iterate()
                undo()
                after = learned(trainer)
                found[method, place, value] = {
                    "refused": record["refused"],
                    "samples": record.get("refused_samples"),
                    "first": 4 * record["step"],
                    "same": all(torch.equal(local(after[name]), tensor) for name, tensor in before.items()),
                    "updates": (trainer.student.updates, trainer.fake.updates) == updates,
                }
            fine = trainer.iterate()
            assert fine["refused"] is None and math.isfinite(fine["loss/student"]), (method, place)
    dist.destroy_process_group()
    return found


def learned(trainer) -> dict[str, torch.Tensor]:
    """All that an update would change; a copy of its own is the caller's to make."""
    state = {f"student.{name}": p.detach() for name, p in trainer.roles.student.learned().items()}
    state |= {f"fake.{name}": p.detach() for name, p in trainer.roles.fake.learned().items()}
    state |= {f"ema.{name}": average for name, average in trainer.ema.average.items()}
    for role, learner in (("student", trainer.student), ("fake", trainer.fake)):
        for i, entry in learner.optimizer.state_dict()["state"].items():
            state |= {f"{role}.optimizer.{i}.{name}": moment for name, moment in entry.items()}
    return state


def spoil_rank(trainer, place: str, value: float):
    """Spoils this rank's part of a step; what is returned mends it."""
    if place == "loss":
        whole = trainer.objective

        def spoiled(*args, **named):
            first, *rest = whole(*args, **named)
            return (replace(first, values=first.values * value), *rest)

        trainer.objective = spoiled
        return lambda: setattr(trainer, "objective", whole)

    def spoiled_output(module, args, output):
        bad = output[0].clone()
        if place != "gradient":
            bad[-1, 0, 0, 0, 0] = value
        elif bad.requires_grad:
            bad.register_hook(lambda gradient: gradient * value)
        return (bad,)

    roles = trainer.roles
    network = {"teacher": roles.teacher.network, "fake": roles.fake, "gradient": roles.student}[place]
    return network.transformer.register_forward_hook(spoiled_output).remove


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return launch(2, refusals, str(tmp_path_factory.mktemp("stores")), runs.folder)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_what_goes_wrong_on_one_rank_changes_nothing_on_any(
    on_two_ranks: list[dict], method: str, place: str, value: str
) -> None:
    one, other = (of_rank[method, place, value] for of_rank in on_two_ranks)
    assert one == other
    assert one["refused"] is not None and one["same"] and one["updates"]
    ids = [one["first"] + i for i in range(4)]
    # Of a network's output it is known which sample it was of: the last one of rank 1.
    assert one["samples"] == (ids[3:] if place in ("teacher", "fake") else ids)

"""Adapter mode in the engine: what may change, what may not, and exact resume."""

from pathlib import Path

import pytest
import torch
from engine_runs import numbers, runs

from codmd.engine import checkpoint
from codmd.engine.assembly import assemble, load_base
from codmd.engine.ranks import Ranks
from codmd.errors import UserError
from codmd.models import load_model
from codmd.networks.adapters import base_state, merged_state

ADAPTERS = ("mode=adapter", "adapter.rank=2", "train.precision=bf16", "train.ema_decay=0.9")


def trainer(*overrides: str):
    recipe = runs.recipe(*ADAPTERS, *overrides)
    return assemble(recipe, load_base(recipe, Ranks(device=torch.device("cpu"))))[0]


def test_the_teacher_answers_as_the_base_at_every_step_and_the_base_never_changes() -> None:
    ours = trainer("train.batch=4", "train.micro_batch=2")
    before = {name: tensor.clone() for name, tensor in base_state(ours.roles.student).items()}
    part = ours.parts()[0]
    alone = runs.base()
    with torch.autocast("cpu", torch.bfloat16):
        expected = alone.network.velocity(part.draws.noise("x"), torch.tensor([0.9, 0.4]), part.text)
    for _ in range(5):
        ours.iterate()
        seen = ours.roles.teacher.network.velocity(part.draws.noise("x"), torch.tensor([0.9, 0.4]), part.text)
        # The noise is that of step 0: `draws` of a part stay what they were.
        assert torch.equal(seen, expected)
    after = base_state(ours.roles.student)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (ours.student.updates, ours.fake.updates) == (2, 5)


def test_a_base_that_is_given_stays_as_it_is() -> None:
    """Also where `assemble` is called without `load_base`: the mode is the recipe's, whoever brings the base."""
    base = runs.base()
    before = {name: tensor.clone() for name, tensor in base.network.transformer.state_dict().items()}
    ours = assemble(runs.recipe(*ADAPTERS), base)[0]
    ours.iterate()
    assert ours.student.names and all("lora_" in name for name in ours.student.names)
    after = base.network.transformer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_accumulation_and_recomputation_change_nothing() -> None:
    """In one process and fp32: the same run in parts of two, of one, and with recomputed blocks."""
    fp32 = ("train.precision=fp32", 'adapter.base_dtype="fp32"', "train.batch=4", "train.ema_decay=0")
    plain, *others = (
        trainer(*fp32, *more)
        for more in ((), ("train.micro_batch=2",), ("train.micro_batch=1",), ("compute.checkpointing=blocks",))
    )
    for _ in range(4):
        expected = plain.iterate()
        for other in others:
            record = other.iterate()
            for name in ("loss/fake", "gradient/fake", "loss/student", "gradient/student"):
                if name in expected:
                    assert record[name] == pytest.approx(expected[name], rel=2e-4)


@pytest.mark.parametrize("cut", [1, 2, 3])  # after a student's turn, between two, before the next
def test_a_resumed_run_is_the_run_bit_for_bit(tmp_path: Path, cut: int) -> None:
    whole = trainer()
    records = [numbers(whole.iterate()) for _ in range(5)]
    first = trainer()
    for _ in range(cut):
        first.iterate()
    folder = checkpoint.save(tmp_path, first, {"kind": "student"}, None)
    second = trainer()
    checkpoint.load(folder, second)
    assert [numbers(second.iterate()) for _ in range(5 - cut)] == records[cut:]
    for ours, theirs in ((second.roles.student, whole.roles.student), (second.roles.fake, whole.roles.fake)):
        ours, theirs = ours.learned(), theirs.learned()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(second.ema.average[name], average) for name, average in whole.ema.average.items())


def test_a_checkpoint_holds_the_merged_student_and_no_base(tmp_path: Path) -> None:
    ours = trainer("train.ema_decay=0")
    for _ in range(4):
        ours.iterate()
    about = {"kind": "student", "steps": [1.0, 0.5], "base": str(runs.folder)}
    folder = checkpoint.save(tmp_path, ours, about, None)
    sampled = load_model(folder)
    merged = merged_state(ours.roles.student)
    for name, weight in sampled.network.transformer.named_parameters():
        assert torch.equal(weight, merged[name])
    names = checkpoint.HuggingFaceStorageReader(str(folder / "state")).read_metadata().state_dict_metadata
    assert names and all("lora_" in name for name in names)


def test_what_adapters_cannot_do_is_said(tmp_path: Path) -> None:
    for overrides, says in (
        (["train.precision=fp64"], "mode"),
        (["compute.offload_teacher=true"], "offload_teacher"),
        (["adapter.rank=0"], "rank"),
        (['adapter.targets=["nowhere"]'], "nowhere"),
    ):
        with pytest.raises(UserError, match=says):
            trainer(*overrides)
    recipe = runs.recipe(*ADAPTERS)
    with pytest.raises(UserError, match="--init"):
        assemble(recipe, runs.base(), init=str(tmp_path))

"""Twenty losses in float64, as they were. Whoever changes them on purpose writes the file anew:

python tests/engine/test_golden.py
"""

import json
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("golden_losses.json")
SETTING = ("train.precision=fp64", "train.batch=4", "train.micro_batch=2", "train.student_every=2")


def losses(*more: str) -> list[dict[str, float]]:
    from engine_runs import runs

    trainer = runs.trainer(*SETTING, *more)
    records = [trainer.iterate() for _ in range(20)]
    assert next(trainer.roles.student.parameters()).dtype.itemsize == 8
    return [{name: value for name, value in record.items() if name.startswith("loss/")} for record in records]


def test_the_losses_are_what_they_were() -> None:
    golden, ours = json.loads(FILE.read_text()), losses()
    assert len(golden) == len(ours) == 20
    for step, (expected, found) in enumerate(zip(golden, ours, strict=True)):
        assert found == pytest.approx(expected, rel=1e-9), step


@pytest.mark.parametrize("more", ["train.micro_batch=4", "train.micro_batch=1", "compute.checkpointing=selective"])
def test_how_the_work_is_done_changes_rounding_alone(more: str) -> None:
    """What is left in fp64 is 10^-12, so that what is left in fp32 is fp32's."""
    for expected, found in zip(losses(), losses(more), strict=True):
        assert found == pytest.approx(expected, rel=1e-11)


if __name__ == "__main__":
    sys.path[:0] = [str(FILE.parent), str(FILE.parent.parent)]
    FILE.write_text("[\n" + ",\n".join(json.dumps(record) for record in losses()) + "\n]\n")

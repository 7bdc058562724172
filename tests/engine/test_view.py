"""What a person sees of a run."""

import io
import re

import pytest
from engine_runs import runs
from rich.console import Console

from codmd.engine import view
from codmd.engine.view import numbers, phases, summary, watch_run


def test_the_summary_names_what_is_there() -> None:
    assert summary({"loss/fake": 0.51234, "step": 3}) == "fake 0.512"


def test_a_terminal_shows_every_loss_the_speed_the_phases_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = runs.trainer()
    screen = io.StringIO()
    made = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(view, "Console", lambda stderr: made)
    with watch_run("tiny", 6, 0) as show:
        for _ in range(2):
            show(trainer.iterate())
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    last = shown[shown.rindex("tiny") :]  # what stays when the run is over
    for word in (
        "2/6",
        "left",
        "batch relations",
        "fake's loss",
        "tokens a second",
        "peak memory",
        "ΔS between frames",
    ):
        assert word in last, word
    assert "rollout" in last and "optimizer" in last and "%" in last


def test_a_record_of_any_kind_is_shown() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=100)
    console.print(numbers({"loss/fake": float("nan"), "tokens_per_second": 123456.7, "student_updates": 3}))
    assert "nan" in screen.getvalue() and "123,457" in screen.getvalue()
    assert phases({"step": 1}) == ""

"""What a run says of itself."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from codmd.engine import tracking
from codmd.engine.ranks import Ranks
from codmd.engine.tracking import Clock, JsonLines, open_trackers, read_json_lines, residuals
from codmd.errors import UserError


def test_lines_are_json_and_those_of_a_lost_future_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    for step in range(4):
        log.log(step, {"loss": math.nan if step == 1 else step / 3, "refused": None})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # a crash in the middle of a line
    assert [r["step"] for r in read_json_lines(path)] == [0, 1, 2, 3]
    assert json.loads(path.read_text().splitlines()[1])["loss"] == "nan"
    again = JsonLines(path, start=2)
    again.log(2, {"loss": 2 / 3})
    again.close()
    assert [(r["step"], r["loss"]) for r in read_json_lines(path)] == [(0, 0.0), (1, "nan"), (2, 2 / 3)]


def test_residuals_vanish_where_fake_and_teacher_agree_and_stay_below_two() -> None:
    real, fake = torch.randn(3, 4, 5, 2, 2), torch.randn(3, 4, 5, 2, 2)
    same, other = residuals(real, 3 * real, Ranks()), residuals(real, -fake, Ranks())
    assert all(abs(value) < 1e-6 for value in same.values())
    assert same.keys() == {"residual/frame", "residual/batch"}
    assert all(0.1 < value <= 2 for value in other.values())


def test_a_clock_adds_up_by_phase() -> None:
    clock = Clock(torch.device("cpu"))
    for phase in ("rollout", "fake", "rollout"):
        with clock(phase):
            pass
    assert list(clock.seconds) == ["seconds/rollout", "seconds/fake"]


def test_tensorboard_gets_the_numbers_and_a_resumed_run_writes_over_what_it_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, value in ((0, 1.0), (2, 2.0)):
        (tracker,) = open_trackers(["tensorboard"], tmp_path, start)
        for step in range(start, 4):
            tracker.log(step, {"loss/fake": value, "refused": None, "exit": 3, "word": "no"})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss/fake", "exit"}
    assert [(e.step, e.value) for e in events.Scalars("loss/fake")] == [(0, 1), (1, 1), (2, 2), (3, 2)]


def test_wandb_gets_the_numbers_and_a_folder_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package wants an account, so that a stand-in listens; by hand it was run with WANDB_MODE=offline."""
    begun: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            logged.append((step, values))

        def finish(self) -> None:
            logged.append((-1, {}))

    def init(**given: Any) -> Run:
        begun.append(given)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(tracking, "find_spec", lambda name: name)
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tracker,) = open_trackers(["wandb"], tmp_path / folder, 0)
        tracker.log(0, {"loss/fake": 0.5, "refused": None})
        tracker.close()
    assert begun[0] == begun[1] and begun[0]["resume"] == "allow"
    assert begun[0]["id"] != begun[2]["id"]
    assert logged[:2] == [(0, {"loss/fake": 0.5}), (-1, {})]


def test_a_tracker_that_is_not_there_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    for name in ("wandb", "tensorboard"):
        with pytest.raises(UserError, match=rf"{name} is not installed: pip install \"codmd\[track\]\""):
            open_trackers([name], tmp_path, 0)
    with pytest.raises(UserError, match="known: tensorboard, wandb"):
        open_trackers(["mlflow"], tmp_path, 0)

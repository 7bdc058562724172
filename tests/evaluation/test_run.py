"""`codmd evaluate mini`: both models sampled, measured and tabled; a second call computes nothing."""

import json
from pathlib import Path

import pytest
import tiny

from codmd.errors import UserError
from codmd.evaluation import run_mini
from codmd.evaluation.run import beside


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save_pipeline(tmp_path_factory.mktemp("evaluate") / "teacher")
    (folder / "codmd.json").write_text('{"size": [17, 64, 64], "steps": 2, "guidance": 3.5, "fps": 8}')
    return folder


def test_a_model_against_itself_differs_in_nothing(teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    scores = run_mini(str(teacher), against=str(teacher), out=out, prompts=2, seeds=1)
    assert list(scores) == ["teacher", "teacher (evaluated)"]
    saved = json.loads((out / "scores.json").read_text())
    assert saved["teacher (evaluated)"]["total difference"] == 0.0
    assert saved["teacher (evaluated)"]["total"] == saved["teacher"]["total"]
    assert "| total |" in (out / "scores.md").read_text()
    (clips,) = (out / "cache").iterdir()  # the same model, so the same scores, sampled once
    before = clips.stat().st_mtime_ns
    run_mini(str(teacher), against=str(teacher), out=out, prompts=2, seeds=1)
    assert clips.stat().st_mtime_ns == before


def test_scores_lie_with_the_run_and_never_in_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    step = run / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    (run / "latest").symlink_to("checkpoints/step-000002")

    def place(ref: Path) -> Path:
        return beside(str(ref))

    assert place(run) == run / "evaluation"
    assert place(step) == place(run / "latest") == run / "evaluation" / "step-000002"
    assert place(tmp_path / "pipeline") == tmp_path / "pipeline-evaluation"


def test_what_is_wrong_is_said_before_anything_is_sampled(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seeds: expected at least 1"):
        run_mini(str(teacher), against=str(teacher), out=tmp_path, seeds=0)
    with pytest.raises(UserError, match="no such folder"):
        run_mini(str(tmp_path / "nothing"), against=str(teacher), out=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file"):
        run_mini(str(teacher), against=str(teacher), out=tmp_path / "file")

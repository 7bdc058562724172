"""`codmd evaluate mini`: both models sampled, measured and tabled; a second call computes nothing."""

import json
from pathlib import Path

import pytest
import tiny

from codmd.errors import UserError
from codmd.evaluation import run_mini


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


def test_what_is_wrong_is_said_before_anything_is_sampled(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seeds: expected at least 1"):
        run_mini(str(teacher), against=str(teacher), out=tmp_path, seeds=0)
    with pytest.raises(UserError, match="no such folder"):
        run_mini(str(tmp_path / "nothing"), against=str(teacher), out=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file"):
        run_mini(str(teacher), against=str(teacher), out=tmp_path / "file")

"""The demo, from a tiny random teacher to the page; a second run does nothing again."""

import json
from pathlib import Path

import pytest
import tiny

from codmd import demo
from codmd.errors import UserError


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save_pipeline(tmp_path_factory.mktemp("demo") / "teacher")
    facts = {"size": [17, 64, 64], "steps": 4, "guidance": 3.5, "fps": 8}
    (folder / "codmd.json").write_text(json.dumps(facts))
    return folder


def test_a_quick_demo_makes_a_page_and_a_second_one_makes_nothing_again(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    page = demo.run(out=out, quick=True, seed=3, base=str(teacher))
    assert page == out / "index.html"
    text = page.read_text()
    assert text.count("<video") == 4 * 3 and "A quick run" in text and "://" not in text
    results = json.loads((out / "results.json").read_text())
    assert [c["name"] for c in results["columns"]] == ["Teacher", "DMD", "CoDMD"]
    assert [c["evaluations"] for c in results["columns"]] == [8, 4, 4]
    assert [c["updates"] for c in results["columns"]] == [None, 2, 2]
    assert {c["title"] for c in results["curves"]} >= {"Total", "Dynamic degree", "Imaging quality"}
    assert all(len(points) == 3 for c in results["curves"] for points in c["lines"].values())
    said = capsys.readouterr().out
    assert "[1/6]" in said and "[6/6]" in said and "left in all" in said and str(page.resolve()) in said

    kept = [*out.rglob("*.safetensors"), *(out / "scores").iterdir(), *(out / "reference").iterdir()]
    before = {p: p.stat().st_mtime_ns for p in kept}
    assert len(before) > 6
    demo.run(out=out, quick=True, seed=3, base=str(teacher))
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_times_add_up_over_sittings_and_what_was_there_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(demo.time, "monotonic", lambda: now)

    def take(parts: demo.Parts, name: str, seconds: float, *, interrupted: bool = False) -> None:
        nonlocal now
        with parts.part(name, name):
            now += seconds
            if interrupted:
                raise KeyboardInterrupt

    first = demo.Parts(tmp_path, seed=0, quick=False)
    take(first, "teacher", 150)
    with pytest.raises(KeyboardInterrupt):
        take(first, "dmd", 100, interrupted=True)
    again = demo.Parts(tmp_path, seed=0, quick=False)
    take(again, "teacher", 1)  # its clips were read from disk
    take(again, "dmd", 170)
    assert again.took == {"teacher": 150, "dmd": 270}
    # This machine is twice as slow as guessed: what is left takes twice its guess.
    capsys.readouterr()
    take(again, "codmd", 1)
    left = 2 * sum(seconds for name, seconds in demo.GUESS.items() if name not in ("teacher", "dmd"))
    assert f"(about {demo.clock(left)} left in all)" in capsys.readouterr().out
    other = demo.Parts(tmp_path, seed=1, quick=False)
    take(other, "teacher", 1)  # the clips are all seeds'
    assert other.took == {"teacher": 150}
    assert demo.Parts(tmp_path, seed=0, quick=True).took == {}


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file"):
        demo.run(out=tmp_path / "file", quick=True)

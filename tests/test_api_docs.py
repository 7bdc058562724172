"""docs/api.md: every block runs, in order, on a tiny random pipeline in the miniature's place."""

import json
import re
from pathlib import Path

import pytest
import tiny

from codmd import mini

DOCS = Path(__file__).parent.parent / "docs" / "api.md"


def test_every_block_of_the_api_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save_pipeline(tmp_path / "mini")
    facts = {"size": [17, 64, 64], "steps": 4, "guidance": 3.5, "fps": 8}
    (folder / "codmd.json").write_text(json.dumps(facts))
    monkeypatch.setattr(mini, "path", lambda: folder)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{DOCS.name}, block {number + 1}", "exec"), names)
    assert len(list((tmp_path / "runs" / "clips").glob("*.mp4"))) == 2

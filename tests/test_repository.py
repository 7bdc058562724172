"""What the repository promises to somebody who has just cloned it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
MODULES = {"imageio-ffmpeg": "imageio_ffmpeg"}


def declared(*groups: str) -> list[Requirement]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][group] for group in groups)]
    return [Requirement(line) for requirements in lists for line in requirements]


def test_every_dependency_is_pinned_within_its_range() -> None:
    for requirement in declared("test", "dev"):
        pin = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} does not hold {pin}"
    assert PINS["torch"] == "2.13.0"


def test_every_import_is_declared() -> None:
    known = {MODULES.get(r.name, r.name) for r in declared("track")} | {"codmd", *sys.stdlib_module_names}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.partition(".")[0] in known, f"{path}:{node.lineno} imports {name}"


def test_every_folder_of_modules_is_a_package() -> None:
    for path in (ROOT / "src" / "codmd").rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), f"{path.parent} would be missing from the wheel"


@pytest.mark.parametrize("target", ["demo", "test", "check", "bench", "chaos"])
def test_each_target_installs_when_and_only_when_it_must(target: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def installs() -> bool:
        command = ["make", "-n", target, "VENV=here"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return "pip install" in done.stdout

    assert installs()
    stamp = tmp_path / "here" / ".installed"
    stamp.parent.mkdir()
    stamp.touch()
    assert not installs()
    later = stamp.stat().st_mtime + 10
    os.utime(tmp_path / "pyproject.toml", (later, later))
    assert installs()


def test_continuous_integration_starts_from_an_empty_environment() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines.index("rm -rf .ci-venv") < lines.index("make check VENV=.ci-venv") == len(lines) - 1
    assert "/.ci-venv/" in (ROOT / ".gitignore").read_text().split()

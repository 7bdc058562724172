"""The built wheel, in an environment that holds nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).parents[1]
CLUTTER = shutil.ignore_patterns("__pycache__", "*.egg-info")


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command far from the checkout; its output, or a failure that shows it."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build in the checkout would pick up what an earlier one left there."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", source / "src", ignore=CLUTTER)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    out = source / "out"
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, source, cwd=source)
    (built,) = out.glob("codmd-*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package(wheel: Path, tmp_path: Path) -> None:
    clean = shutil.copytree(ROOT / "src" / "codmd", tmp_path / "codmd", ignore=CLUTTER)
    files = {str(path.relative_to(tmp_path)) for path in clean.rglob("*") if path.is_file()}
    assert files - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_the_wheel_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    constraints = ROOT / "constraints.txt"
    run(venv / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", constraints, wheel, cwd=tmp_path)
    # Each command here runs as somebody would who has installed the wheel and nothing else.
    codmd = venv / "bin" / "codmd"
    assert "distill" in run(codmd, "--help", cwd=tmp_path)
    assert Path(run(codmd, "mini", "path", cwd=tmp_path).strip()).is_relative_to(venv)
    run(codmd, "demo", "--quick", "--out", tmp_path / "demo", cwd=tmp_path)
    assert (tmp_path / "demo" / "index.html").exists()

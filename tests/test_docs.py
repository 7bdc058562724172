"""The documentation's commands are the program's, its Python runs, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from codmd import cli, commands

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.S)


def in_blocks(text: str) -> Iterator[str]:
    for language, block in BLOCK.findall(text):
        if language in ("", "sh"):
            yield from block.splitlines()


def in_text(text: str) -> Iterator[str]:
    """Commands quoted in a sentence, which may leave arguments out."""
    yield from re.findall(r"`((?:codmd|make) [^`\n]+)`", BLOCK.sub("", text))


def words(program: str, lines_of: Callable[[str], Iterator[str]]) -> list[tuple[str, ...]]:
    """Every command of a program in the documentation, without its name."""
    lines = [line for page in PAGES for line in lines_of(page.read_text(encoding="utf-8"))]
    split = [shlex.split(line, comments=True) for line in lines if line.startswith(program)]
    return sorted({tuple(args[1:]) for args in split if args[0] == program})


@pytest.mark.parametrize("args", words("codmd", in_text), ids=" ".join)
def test_every_command_that_is_spoken_of_exists(args: tuple[str, ...]) -> None:
    assert cli.check_names(list(args)).startswith("codmd")


@pytest.mark.parametrize("args", words("codmd", in_blocks), ids=" ".join)
def test_every_command_is_understood(args: tuple[str, ...]) -> None:
    try:
        command = cli.parse(list(args))
    except SystemExit as stop:  # --help
        assert stop.code == 0
        return
    if isinstance(command, commands.Distill):
        assert cli.main([*args, "--dry-run"]) == 0


@pytest.mark.parametrize("args", words("torchrun", in_blocks), ids=" ".join)
def test_every_command_for_many_ranks_is_understood(args: tuple[str, ...]) -> None:
    module = args.index("-m")
    assert args[module + 1] == "codmd"
    assert cli.main([*args[module + 2 :], "--dry-run"]) == 0


@pytest.mark.parametrize("args", words("make", in_blocks) + words("make", in_text), ids=" ".join)
def test_every_target_exists(args: tuple[str, ...]) -> None:
    subprocess.run(["make", "-n", *args], cwd=ROOT, check=True, capture_output=True)


def test_the_three_lines_of_the_readme_run() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    x = torch.randn(3, 4, 5, 2, 2, requires_grad=True)
    names = {"x": x, "real": torch.randn(x.shape), "fake": torch.randn(x.shape), "dmd_loss": x.square().mean()}
    exec(compile(block, "README.md", "exec"), names)
    assert x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert not [t for t in targets if "://" not in t and not (page.parent / t).exists()]

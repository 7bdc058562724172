"""The command line: light to start, and one line for every mistake that a person can mend."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from codmd import __version__, commands
from codmd.cli import GROUPS, main, parse
from codmd.errors import UserError
from codmd.recipe import load_recipe, parse_recipe


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error that was printed: one line, on stderr alone."""
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("distil mini", 'codmd: unknown command "distil", did you mean "distill"?'),
        ("mini pth", 'codmd mini: unknown command "pth", did you mean "path"?'),
        ("mini", "codmd mini: expected one of path, train-teacher"),
        ("distill mini --dryrun", 'codmd distill: unknown option "--dryrun", did you mean "--dry-run"?'),
        ("sample mini --promt=x", 'unknown option "--promt", did you mean "--prompt"?'),
        ("distill", "RECIPE"),
        ("sample mini --seeds", "--seeds"),
        ("sample mini --seeds many", 'error: --seeds: expected a whole number, got "many"; see codmd sample --help'),
        ("sample mini --guidance abc", 'error: --guidance: expected a number, got "abc"; see codmd sample --help'),
        ("reproduce --budget=x", 'error: --budget: expected a number, got "x"; see codmd reproduce --help'),
        ("sample mini --steps 2.5", 'error: --steps: expected a whole number, got "2.5"; see codmd sample --help'),
        ("sample mini and", "error: Unrecognized options: and; see codmd sample --help"),
        ("distill mimi --dry-run", 'no recipe is called "mimi", did you mean "mini"?'),
        ("distill none.toml --dry-run", "none.toml: no such file"),
        ("distill mini --dry-run --set train.batch=0", "--set train.batch=0: expected"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args.split()) == 2
    assert message in one_line(capsys)


def test_help_needs_no_torch_and_names_every_command() -> None:
    code = "import sys; from codmd.cli import main; main(sys.argv[1:])"
    check = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", check, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert all(name in done.stdout for name in GROUPS)


def test_the_process_ends_with_the_code_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "codmd", "distill", str(tmp_path / "none.toml"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_dry_run_prints_the_recipe_that_would_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["objective.method=dmd", "train.iterations=3"]
    assert main(["distill", "mini", "--dry-run", "--set", changes[0], "--set", changes[1]]) == 0
    assert parse_recipe(capsys.readouterr().out, "printed") == load_recipe("mini", changes)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"codmd {__version__}\n"


def test_repeated_options_are_collected() -> None:
    command = parse(["sample", "mini", "--prompt", "a b", "--prompt=-c", "--seeds", "2"])
    assert command == commands.Sample(model="mini", prompt=("a b", "-c"), seeds=2)


@pytest.mark.parametrize(
    ("args", "module", "function"),
    [
        ("demo", "codmd.demo", "run"),
        ("distill mini", "codmd.engine.distill", "run"),
        ("sample mini --prompt x", "codmd.sampling", "run"),
        ("evaluate mini runs/student", "codmd.evaluation", "run_mini"),
        ("reproduce", "codmd.reproduce", "run"),
        ("mini path", "codmd.mini", "path"),
        ("mini train-teacher", "codmd.mini.train_teacher", "run"),
    ],
)
def test_each_command_makes_one_call_that_its_function_takes(
    args: str, module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = importlib.import_module(module)
    call = create_autospec(getattr(target, function))  # refuses arguments that the function doesn't take
    monkeypatch.setattr(target, function, call)
    assert main(args.split()) == 0
    call.assert_called_once()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("two\nlines\u2028of it"), 2, "error: two lines of it\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "x.mp4"),
            2,
            "error: the disk is full (x.mp4): free",
        ),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            2,
            "error: the disk is full: free",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "runs"),
            2,
            "error: no permission to read or write (runs)",
        ),
        (
            NotADirectoryError(errno.ENOTDIR, "Not a directory", "README.md/x"),
            2,
            "error: a file where a folder should be, or the other way round (README.md/x): choose",
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long", "xx"), 2, "error: a name that is too long"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_what_a_person_can_mend_ends_with_its_code(
    error: BaseException,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: object) -> None:
        raise error

    monkeypatch.setattr(commands.Demo, "run", fail)
    assert main(["demo"]) == code
    printed = capsys.readouterr().err
    assert printed.startswith(message) and printed.count("\n") == 1
    monkeypatch.setenv("CODMD_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(["demo"])


@pytest.mark.parametrize("lines", [1, 10_000])
def test_a_reader_that_has_read_enough_ends_the_command_without_a_word(lines: int) -> None:
    program = "import sys; from codmd import cli, commands\n"
    program += f"commands.MiniPath.run = lambda self: [print('x' * 1000) for _ in range({lines})]\n"
    program += "sys.stdin.read(); sys.exit(cli.main(['mini', 'path']))"
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    made = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=plain,
    )
    assert made.stdin is not None and made.stdout is not None and made.stderr is not None
    made.stdout.close()
    made.stdin.close()  # only now does it begin
    assert made.stderr.read() == b"" and made.wait() == 128 + signal.SIGPIPE


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(commands.Demo, "run", fail)
    with pytest.raises(ValueError, match="a bug"):
        main(["demo"])

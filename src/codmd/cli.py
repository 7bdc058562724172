"""The command line: parse, run, and turn what a person can mend into one line.

Exit codes: 0 done; 2 something the person can mend (one line on stderr, no traceback); 3 a training whose losses or
gradients stayed non-finite; 4 another rank is lost; 130 interrupted, 141 nobody read on, 143 terminated; 1 a check of
`codmd selftest` failed, or a mistake of ours, with its traceback. CODMD_TRACEBACK=1 shows the traceback in every case.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from tyro.extras import SubcommandApp

from codmd import __version__, commands
from codmd.errors import UserError, exit_code, explain

DONE, INTERRUPTED, UNREAD = 0, 130, 141

GROUPS: dict[str, Any] = {
    "demo": commands.Demo,
    "distill": commands.Distill,
    "sample": commands.Sample,
    "evaluate": {"mini": commands.EvaluateMini},
    "reproduce": commands.Reproduce,
    "selftest": commands.Selftest,
    "mini": {"path": commands.MiniPath, "train-teacher": commands.MiniTrainTeacher},
}
SUMMARIES = {
    "evaluate": "Measure a model.",
    "mini": "The miniature Wan2.1 that comes with the package.",
}
DESCRIPTION = "Distil a many-step, guided video diffusion model into a 4-step one. Version: codmd --version"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args == ["--version"]:
            print(f"codmd {__version__}")
        else:
            parse(args).run()
        sys.stdout.flush()  # so that a reader that is gone is noticed here
        return DONE
    except KeyboardInterrupt:
        if os.environ.get("CODMD_TRACEBACK") == "1":
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except Exception as error:
        message = explain(error)
        if message is None or os.environ.get("CODMD_TRACEBACK") == "1":
            raise
        if not getattr(error, "told", False):
            print(f"error: {message}", file=sys.stderr)
        return exit_code(error)


# ---- parsing -------------------------------------------------------------------------------------


def parse(args: list[str]) -> Any:
    """The command that `args` name. A mistake is one line, where tyro would draw a box."""
    if not args:
        args = ["--help"]
    path = check_names(args)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return _app(GROUPS).cli(prog="codmd", description=DESCRIPTION, args=args)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(f"{_one_line(complaint.getvalue())}; see {path} --help") from None


def _one_line(box: str) -> str:
    """What tyro says inside its box, without frame, title and footer."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    # The frame is drawn with lines, or with ASCII where the terminal cannot show them.
    plain = re.sub(r"^[╭│╰+|]|[╮│╯+|]$|[─-]{5,}", " ", plain, flags=re.MULTILINE)
    _, _, body = plain.strip().partition("\n")
    body = " ".join(re.split(r"Argument helptext|For full helptext", body)[0].split()).rstrip(".")
    not_a_number = re.search(r"(?:literal for int\(\) with base 10|string to float): '([^']*)'", body)
    if not_a_number:
        flag = body.removeprefix("Error parsing ").partition(":")[0]
        expected = "a whole number" if "int()" in not_a_number[0] else "a number"
        return f'{flag}: expected {expected}, got "{not_a_number[1]}"'
    return body or "the command line was not understood"


def _app(group: dict[str, Any]) -> SubcommandApp:
    app = SubcommandApp()
    for name, target in group.items():
        if isinstance(target, dict):
            app.command(_app(target), name=name, help=SUMMARIES[name])
        else:
            app.command(target, name=name)
    return app


def check_names(args: list[str]) -> str:
    """The command that is meant. An unknown command or flag is refused, and the nearest known one named."""
    group: Any = GROUPS
    path = "codmd"
    rest = list(args)
    while isinstance(group, dict):
        if not rest:
            raise UserError(f"{path}: expected one of {', '.join(group)}")
        name = rest.pop(0)
        if name in ("-h", "--help") or name.startswith("--tyro-"):
            return path
        if name not in group:
            raise UserError(f'{path}: unknown command "{name}", {_nearest(name, list(group))}')
        group, path = group[name], f"{path} {name}"
    names = [{"overrides": "set"}.get(field.name, field.name) for field in fields(group)]
    flags = ["--help", *(f"--{name.replace('_', '-')}" for name in names)]
    for token in rest:
        flag = token.partition("=")[0].replace("_", "-")
        if re.match(r"--[a-z]", flag) and flag not in flags:
            raise UserError(f'{path}: unknown option "{flag}", {_nearest(flag, flags)}')
    return path


def _nearest(word: str, known: list[str]) -> str:
    close = get_close_matches(word, known, n=1)
    return f'did you mean "{close[0]}"?' if close else f"known: {', '.join(known)}"

"""The command line: parse, run, and turn what a person can mend into one line.

Exit codes: 0 done; 2 something the person can mend (one line on stderr, no traceback); 130 interrupted;
1 a mistake of ours, with its traceback. CODMD_TRACEBACK=1 shows the traceback in every case.
"""

from __future__ import annotations

import contextlib
import errno
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
from codmd.errors import UserError

DONE, FAULT, INTERRUPTED = 0, 2, 130

GROUPS: dict[str, Any] = {
    "demo": commands.Demo,
    "distill": commands.Distill,
    "sample": commands.Sample,
    "evaluate": {"mini": commands.EvaluateMini},
    "reproduce": commands.Reproduce,
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
            return DONE
        parse(args).run()
        return DONE
    except KeyboardInterrupt:
        if os.environ.get("CODMD_TRACEBACK") == "1":
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        message = explain(error)
        if message is None or os.environ.get("CODMD_TRACEBACK") == "1":
            raise
        print(f"error: {message}", file=sys.stderr)
        return FAULT


def explain(error: Exception) -> str | None:
    """One line for what a person can mend; None for what is a mistake of ours."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk is full{place}: free some space, then run the same command again"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"no permission to read or write{place}: choose another folder, or change its permissions"
    if "No space left on device" in str(error):  # what safetensors makes of ENOSPC
        return "the disk is full: free some space, then run the same command again"
    return None


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
    body = re.split(r"Argument helptext|For full helptext", body)[0]
    return " ".join(body.split()).rstrip(".") or "the command line was not understood"


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

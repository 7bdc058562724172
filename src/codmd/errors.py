"""The exceptions that are meant for people, and what they can mend of the others."""

from __future__ import annotations

import errno

FAULT, NON_FINITE = 2, 3


class UserError(ValueError):
    """Something the person can mend: one line that says what, where, expected, got, and how to mend it.

    The command line prints it without a traceback and exits with code 2.
    """


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite. The command line exits with code 3."""


def exit_code(error: Exception) -> int:
    """Of an error that `explain` can explain."""
    return NON_FINITE if isinstance(error, NonFiniteError) else FAULT


def explain(error: Exception) -> str | None:
    """One line for what a person can mend; None for what is a mistake of ours."""
    if isinstance(error, UserError | NonFiniteError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk is full{place}: free some space, then run the same command again"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"no permission to read or write{place}: choose another folder, or change its permissions"
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
            return f"a file where a folder should be, or the other way round{place}: choose another path"
        if error.errno == errno.ENAMETOOLONG:
            return f"a name that is too long for this disk{place}: choose a shorter one"
        if error.errno == errno.EIO:
            return f"the disk cannot be read or written{place}: look at its health, then run the same command again"
    if "No space left on device" in str(error):  # what safetensors makes of ENOSPC
        return "the disk is full: free some space, then run the same command again"
    return None

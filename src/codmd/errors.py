"""The one exception that is meant for people."""


class UserError(ValueError):
    """Something the person can mend: one line that says what, where, expected, got, and how to mend it.

    The command line prints it without a traceback and exits with code 2.
    """

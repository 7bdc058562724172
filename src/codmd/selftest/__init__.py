"""What continuous integration cannot check, for it has no GPU: `codmd selftest`, in minutes, on the machine at hand.

`checks` and `across` are the checks, of one process and of several; `work` is what each of several processes does.
"""

from codmd.selftest.command import run

__all__ = ["run"]

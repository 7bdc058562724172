"""Every update passes here: a step with a non-finite loss or gradient changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from codmd.errors import NonFiniteError

LIMIT = 5


class Guard:
    """Decides whether a step may change the networks, and ends the run after `limit` refusals in a row.

    It looks at losses and gradient norms as they come out of the backward passes, whatever objective they are
    of: no objective can bypass it, and none has to think of it.
    """

    def __init__(self, limit: int = LIMIT, in_a_row: int = 0) -> None:
        self.limit, self.in_a_row = limit, in_a_row

    def refusal(self, step: int, ids: Sequence[int], values: Mapping[str, float]) -> str | None:
        """None when all `values` are finite; else what is wrong, with the step and its samples."""
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if not bad:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        message = f"step {step}: non-finite {', '.join(bad)}; nothing was updated; samples {_span(ids)}"
        if self.in_a_row >= self.limit:
            raise NonFiniteError(
                f"{message}; that is {self.in_a_row} steps in a row: lower the learning rates, "
                "or look at the prompts of these samples"
            )
        return message


def _span(ids: Sequence[int]) -> str:
    """Sample ids, shortened where they are consecutive."""
    if len(ids) > 2 and list(ids) == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]} to {ids[-1]}"
    return ", ".join(map(str, ids))

"""Every update passes here: a step with a non-finite loss or gradient changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from codmd.engine.ranks import Ranks
from codmd.errors import NonFiniteError

LIMIT = 5


@dataclass(frozen=True)
class Refusal:
    """A step that changes nothing: what is wrong with it, as a line and as what a record holds."""

    refused: str
    refused_samples: list[int]
    seed: int


class TooManyRefusals(NonFiniteError):
    """Carries the last refusal, which no record holds any more."""

    def __init__(self, message: str, refusal: Refusal) -> None:
        super().__init__(message)
        self.refusal = refusal


class Guard:
    """Decides whether a step may change the networks, and ends the run after `limit` refusals in a row.

    It looks at losses and gradient norms as they come out of the backward passes, whatever objective they are
    of: no objective can bypass it, and none has to think of it. They are means over all ranks, so that all ranks
    decide alike.
    """

    def __init__(self, limit: int = LIMIT, in_a_row: int = 0, seed: int = 0) -> None:
        self.limit, self.in_a_row, self.seed = limit, in_a_row, seed

    def refusal(self, step: int, values: Mapping[str, float], samples: Callable[[], Sequence[int]]) -> Refusal | None:
        """None when all `values` are finite; else what is wrong. `samples` finds out whose fault it is."""
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if not bad:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        ids = sorted(samples())
        message = (
            f"step {step}: non-finite {', '.join(bad)}; nothing was updated; samples {_span(ids)} of seed {self.seed}"
        )
        refusal = Refusal(message, ids, self.seed)
        if self.in_a_row >= self.limit:
            raise TooManyRefusals(
                f"{message}; that is {self.in_a_row} steps in a row: lower the learning rates, "
                "or look at the prompts of these samples",
                refusal,
            )
        return refusal


def spoiled(ranks: Ranks, ids: Sequence[int], watched: Mapping[str, Tensor]) -> list[int]:
    """The samples, of all ranks, of which some watched tensor (a row a sample) is not finite."""
    mine = set()
    for values in watched.values():
        fine = values.flatten(1).isfinite().all(dim=1) if values.ndim > 1 else values.isfinite()
        mine |= {i for i, good in zip(ids, fine.tolist(), strict=True) if not good}
    return sorted(set().union(*ranks.gather(mine)))


def _span(ids: Sequence[int]) -> str:
    """Sample ids, shortened where they are consecutive."""
    if len(ids) > 2 and list(ids) == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]} to {ids[-1]}"
    return ", ".join(map(str, ids))

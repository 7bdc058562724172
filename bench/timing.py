"""Two ways of doing something, timed in turns, so that whatever the machine does meanwhile meets both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import torch


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of paired ratios, with a 95% interval that supposes nothing of their distribution."""

    median: float
    low: float
    high: float
    pairs: int
    seconds: tuple[float, float]
    """Median seconds of the two."""


Timed = Callable[[], None]


def paired_ratio(
    first: Callable[[int], Timed], second: Callable[[int], Timed], rounds: int, *, parts: int = 1
) -> Ratio:
    """Seconds of `first` over seconds of `second`, round by round.

    Each takes the round's number and gives what is timed, so that what comes before it is not. Who begins
    changes from round to round. One untimed round goes before. A round may have `parts`, numbered through all
    rounds and timed in turns as rounds are; its seconds are their sums.
    """
    times: list[tuple[float, float]] = []
    for number in range(-1, rounds * parts):
        pair = [0.0, 0.0]
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            work = (first, second)[which](max(number, 0))
            _wait()
            begun = time.perf_counter()
            work()
            _wait()
            pair[which] = time.perf_counter() - begun
        if number >= 0:
            times.append((pair[0], pair[1]))
    whole = [times[i : i + parts] for i in range(0, len(times), parts)]
    return ratio_of([(sum(a for a, _ in part), sum(b for _, b in part)) for part in whole])


def ratio_of(times: Sequence[tuple[float, float]]) -> Ratio:
    ratios = sorted(a / b for a, b in times)
    low, high = median_interval(len(ratios))
    seconds = (median(a for a, _ in times), median(b for _, b in times))
    return Ratio(median=median(ratios), low=ratios[low], high=ratios[high], pairs=len(ratios), seconds=seconds)


def median_interval(count: int) -> tuple[int, int]:
    """Places, in sorted order, of the ends of a 95% interval of the median (binomial, normal approximation)."""
    reach = NormalDist().inv_cdf(0.975) * count**0.5 / 2
    return max(0, int(count / 2 - reach)), min(count - 1, int(count / 2 + reach))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""Means and intervals of paired differences.

Two intervals, for two questions. The t-interval over seeds: would other seeds, on these prompts, say the same?
The bootstrap over seeds and prompts: and on other prompts? With three seeds the second is too narrow, since
three seeds drawn from three repeat themselves; with any number both rest on the seeds there are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np

from codmd.evaluation import MEASURES, QUALITY, SEMANTIC, MiniScores
from codmd.evaluation.mini_measures import WEIGHTS

# The 97.5% quantile of Student's t with 1, 2, … degrees of freedom.
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds, with a 95% interval where there are two seeds or more."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def leaves_out_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def t_quantile(freedom: int) -> float:
    """97.5% of Student's t; beyond the table by its expansion in 1/freedom (Cornish-Fisher)."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean, and its t-interval; what is NaN is left out."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return Estimate(mean=math.nan, low=None, high=None, count=0)
    mean = fmean(known)
    if len(known) < 2:
        return Estimate(mean=mean, low=None, high=None, count=1)
    reach = t_quantile(len(known) - 1) * stdev(known) / math.sqrt(len(known))
    return Estimate(mean=mean, low=mean - reach, high=mean + reach, count=len(known))


def by_clip(checkpoints: Sequence[MiniScores]) -> np.ndarray:
    """Each clip's sixteen measures `[N, 16]`, averaged over a run's checkpoints."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a measure that never applies to a clip stays NaN
        return np.nanmean(np.stack([scores.values for scores in checkpoints]), axis=0)


def total_of(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Totals `[D]` of clips' measures `[N, 16]` under D weightings of the clips `[D, N]`."""
    known = np.isfinite(values)
    number = weights @ known
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(number > 0, (weights @ np.where(known, values, 0.0)) / number, np.nan)

    def group(names: Sequence[str], share: dict[str, float]) -> np.ndarray:
        columns = [MEASURES.index(name) for name in names]
        part = np.array([share.get(name, 1.0) for name in names]) * np.isfinite(means[:, columns])
        return (np.nan_to_num(means[:, columns]) * part).sum(axis=1) / part.sum(axis=1)

    return (4 * group(QUALITY, WEIGHTS) + group(SEMANTIC, {})) / 5


def bootstrap_total(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], captions: Sequence[str], *, draws: int = 2000, seed: int = 0
) -> Estimate:
    """The difference in total, first minus second of each pair, with a percentile bootstrap interval.

    `pairs` holds one pair of `[N, 16]` for each seed. A draw takes seeds and prompts anew, with replacement;
    the clips of a prompt stay together, and both of a pair meet the same prompts.
    """
    if not pairs:
        return Estimate(mean=math.nan, low=None, high=None, count=0)
    whole = np.ones((1, len(captions)))
    mean = fmean(float((total_of(a, whole) - total_of(b, whole))[0]) for a, b in pairs)
    rng = np.random.default_rng(seed)
    names = list(dict.fromkeys(captions))
    prompt_of = np.array([names.index(caption) for caption in captions])
    picked = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    weights = picked[:, prompt_of].astype(float)
    differences = np.stack([total_of(a, weights) - total_of(b, weights) for a, b in pairs])  # [seeds, draws]
    seeds = rng.multinomial(len(pairs), np.full(len(pairs), 1 / len(pairs)), size=draws)  # [draws, seeds]
    drawn = (seeds.T * differences).sum(axis=0) / len(pairs)
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Estimate(mean=mean, low=float(low), high=float(high), count=len(pairs))

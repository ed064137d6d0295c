"""Paired effects over blocks and the exact test against a margin.

The test is Wilcoxon's signed-rank test in Walsh form: T = #{i ≤ j : (d_i + d_j)/2 > 0}.  Averages that are exactly 0
or undefined (+∞ with −∞) count against the claim, so ties and zeros can only make it harder: breaking them at random
would give T its exact null distribution, and T without them is never larger.  The same order statistics of the Walsh
averages give the interval that inverts the test (Hollander, Wolfe & Chicken, *Nonparametric Statistical Methods*, 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

ALPHA = 0.025  # one-sided


def log_value(value: float) -> float:
    """log with log 0 = −∞: a measured zero is legal, a negative or NaN value is not."""
    if not value >= 0:
        raise ValueError(f"a metric cannot be {value!r}")
    return math.log(value) if value > 0 else -math.inf


def block_effect(base: float, twin: float, candidate: float, *, direction: str, additive: bool = False) -> float:
    """The candidate's effect in one block: log B − mean(log A, log A'), or the plain difference if ``additive``.

    Equal zeros are an effect of 0.  If only one of A and A' is 0, the base is the better of the two (``direction``
    "up": the larger), so that half a failed base cannot become a gain.
    """
    if additive:
        return candidate - (base + twin) / 2
    if (base == 0) != (twin == 0):
        reference = log_value(max(base, twin) if direction == "up" else min(base, twin))
    else:
        reference = (log_value(base) + log_value(twin)) / 2
    top = log_value(candidate)
    return 0.0 if top == reference else top - reference


def aa_effect(base: float, twin: float, *, additive: bool = False) -> float:
    """The A/A effect of one block: log A' − log A, or the difference if ``additive``."""
    return block_effect(base, base, twin, direction="up", additive=additive)


def threshold(direction: str, margin: float, *, additive: bool, harm: bool) -> float:
    """The value on the effect's own scale that it is tested against.

    ``harm`` False: the improvement that must be exceeded; ``harm`` True: the worsening that must not be reached.
    """
    step = margin if (direction == "up") != harm else -margin
    return step if additive else math.log1p(step)


@lru_cache(maxsize=64)
def null_survival(n: int) -> Any:
    """P(T ≥ t) for t = 0 … n(n+1)/2 under the null, by adding ranks 1 … n with either sign (float64 array)."""
    mass = np.zeros(n * (n + 1) // 2 + 1)
    mass[0] = 1.0
    for rank in range(1, n + 1):
        mass = (mass + np.concatenate((np.zeros(rank), mass[:-rank]))) / 2
    return np.minimum(np.cumsum(mass[::-1])[::-1], 1.0)


def walsh(effects: Any) -> Any:
    """All n(n+1)/2 averages (d_i + d_j)/2 with i ≤ j, over the last axis; NaN where +∞ meets −∞.

    Raises ``ValueError`` on NaN input.
    """
    d = np.asarray(effects, dtype=float)
    if np.isnan(d).any():
        raise ValueError("an effect is NaN")
    i, j = np.triu_indices(d.shape[-1])
    with np.errstate(invalid="ignore"):
        return (d[..., i] + d[..., j]) / 2


def p_above(effects: Sequence[float], limit: float) -> float:
    """One-sided p-value of "the effect exceeds ``limit``"; effects may be ±∞, an empty sample gives 1."""
    return float(null_survival(len(effects))[int((walsh(effects) > limit).sum())])


def p_below(effects: Sequence[float], limit: float) -> float:
    """One-sided p-value of "the effect lies below ``limit``"."""
    return p_above([-effect for effect in effects], -limit)


def lower_limits(effects: Any, alpha: float = ALPHA) -> Any:
    """The lower end of :func:`interval` for every row of ``effects`` (float array [trials, blocks])."""
    averages = walsh(effects)
    needed = int(np.searchsorted(-null_survival(np.shape(effects)[-1]), -alpha))  # smallest T that rejects
    at = averages.shape[-1] - needed
    if at < 0:
        return np.full(len(averages), -np.inf)
    return np.partition(np.where(np.isnan(averages), -np.inf, averages), at, axis=-1)[:, at]


def interval(effects: Sequence[float], alpha: float = ALPHA) -> tuple[float, float]:
    """The limits x that neither one-sided test at ``alpha`` rejects; ±∞ where no sample of this size can close it."""
    low, high = lower_limits(np.multiply.outer((1.0, -1.0), np.asarray(effects, dtype=float)), alpha)
    return float(low), -float(high)


def estimate(effects: Sequence[float]) -> float | None:
    """Hodges–Lehmann: the median of the Walsh averages; None if it is undefined."""
    averages = walsh(effects)
    middle = median(averages[~np.isnan(averages)].tolist() or [math.nan])
    return None if math.isnan(middle) else middle


def two_sided(effects: Sequence[float]) -> float:
    """Two-sided p-value against 0: twice the smaller one-sided one."""
    return min(1.0, 2 * min(p_above(effects, 0.0), p_below(effects, 0.0)))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjusted p-values, in the order given; valid for any dependence between the tests."""
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(order))
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return tuple(adjusted.tolist())


@lru_cache(maxsize=128)
def needed_effects(blocks: int) -> Any:
    """Per simulated schedule, sorted: the log effect per unit of noise that the direct test would just have found.

    Normal noise of one unit in every run, so √1.5 in an effect.
    """
    trials = min(4000, 40_000_000 // (blocks * blocks))  # memory: a trial has blocks²/2 averages
    effects = np.random.default_rng([1, blocks]).standard_normal((trials, blocks)) * math.sqrt(1.5)
    return np.sort(-lower_limits(effects))


def detectable_effect(noise_sd: float, blocks: int) -> float:
    """The smallest improvement beyond the margin (ratio − 1) that ``blocks`` blocks find with a power of 80 %.

    ``noise_sd`` is the standard deviation of the log of one run; simulated, seeded, within about 3 % of itself.
    """
    return math.expm1(noise_sd * float(np.quantile(needed_effects(blocks), 0.8, method="higher")))

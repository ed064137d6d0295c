"""Paired effects over blocks and the exact test against a margin.

The test is Wilcoxon's signed-rank test in Walsh form: T = #{i ≤ j : (d_i + d_j)/2 > 0}.  Averages that are exactly 0
or undefined (+∞ with −∞) count against the claim, so ties and zeros can only make it harder: breaking them at random
would give T its exact null distribution, and T without them is never larger.  The same order statistics of the Walsh
averages give the interval that inverts the test (Hollander, Wolfe & Chicken, *Nonparametric Statistical Methods*, 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

ALPHA = 0.025  # one-sided
_TRIALS = 4000


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
    if additive:
        return twin - base
    return 0.0 if base == twin else log_value(twin) - log_value(base)


def goodness(direction: str) -> int:
    """+1 where larger is better, −1 where smaller is."""
    return 1 if direction == "up" else -1


def threshold(direction: str, margin: float, *, additive: bool, harm: bool) -> float:
    """The value on the effect's own scale that it is tested against.

    ``harm`` False: the improvement that must be exceeded; ``harm`` True: the worsening that must not be reached.
    """
    step = goodness(direction) * (-margin if harm else margin)
    return step if additive else math.log1p(step)


@lru_cache(maxsize=64)
def null_survival(n: int) -> Any:
    """P(T ≥ t) for t = 0 … n(n+1)/2 under the null, by adding ranks 1 … n with either sign (float64 array)."""
    mass = np.zeros(n * (n + 1) // 2 + 1)
    mass[0] = 1.0
    for rank in range(1, n + 1):
        shifted = np.concatenate((np.zeros(rank), mass[:-rank]))
        mass = (mass + shifted) / 2
    return np.minimum(np.cumsum(mass[::-1])[::-1], 1.0)


def walsh(effects: Sequence[float]) -> Any:
    """All n(n+1)/2 averages (d_i + d_j)/2 with i ≤ j; NaN where +∞ meets −∞.  Raises ``ValueError`` on NaN input."""
    d = np.asarray(effects, dtype=float)
    if np.isnan(d).any():
        raise ValueError("an effect is NaN")
    i, j = np.triu_indices(len(d))
    with np.errstate(invalid="ignore"):
        return np.where(d[i] == d[j], d[i], d[i] / 2 + d[j] / 2)


def p_above(effects: Sequence[float], limit: float) -> float:
    """One-sided p-value of "the effect exceeds ``limit``"; effects may be ±∞, an empty sample gives 1."""
    return float(null_survival(len(effects))[int((walsh(effects) > limit).sum())])


def p_below(effects: Sequence[float], limit: float) -> float:
    """One-sided p-value of "the effect lies below ``limit``"."""
    return p_above([-effect for effect in effects], -limit)


def interval(effects: Sequence[float], alpha: float = ALPHA) -> tuple[float, float]:
    """The limits x that neither one-sided test at ``alpha`` rejects; ±∞ where no sample of this size can close it."""
    averages = walsh(effects)
    needed = int(np.searchsorted(-null_survival(len(effects)), -alpha))  # smallest T that rejects
    if needed >= len(averages) + 1:
        return -math.inf, math.inf
    low = np.sort(np.where(np.isnan(averages), -np.inf, averages))
    high = np.sort(np.where(np.isnan(averages), np.inf, averages))
    return float(low[len(averages) - needed]), float(high[needed - 1])


def estimate(effects: Sequence[float]) -> float | None:
    """Hodges–Lehmann: the median of the Walsh averages; None if it is undefined."""
    averages = walsh(effects)
    known = np.sort(averages[~np.isnan(averages)])
    if not known.size:
        return None
    low, high = float(known[(known.size - 1) // 2]), float(known[known.size // 2])
    return low if low == high else None if math.isinf(low) and math.isinf(high) else low / 2 + high / 2


def two_sided(effects: Sequence[float]) -> float:
    """Two-sided p-value against 0: twice the smaller one-sided one."""
    return min(1.0, 2 * min(p_above(effects, 0.0), p_below(effects, 0.0)))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjusted p-values, in the order given; valid for any dependence between the tests."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, floor = [0.0] * len(p_values), 0.0
    for done, index in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) - done) * p_values[index]))
        adjusted[index] = floor
    return tuple(adjusted)


@dataclass(frozen=True, slots=True)
class Power:
    """How often the direct test finds an effect; one simulation per sample size, reused for every effect."""

    lower: Any  # sorted distances of the lower limit below the true log effect, per unit of noise

    def of(self, effect: float, noise_sd: float) -> float:
        """The share of schedules that find ``effect`` (ratio − 1 above the margin) at ``noise_sd`` per run."""
        return float(np.searchsorted(self.lower, math.log1p(effect) / noise_sd, side="left") / len(self.lower))

    def detectable(self, noise_sd: float, power: float) -> float:
        """The smallest effect (ratio − 1) that is found with probability ``power``."""
        return math.expm1(float(np.quantile(self.lower, power, method="higher")) * noise_sd)


@lru_cache(maxsize=128)
def power_curve(blocks: int, alpha: float = ALPHA, seed: int = 1, trials: int = _TRIALS) -> Power:
    """Simulated schedules of ``blocks`` blocks with normal noise of one unit in every run (so √1.5 in an effect)."""
    rng = np.random.default_rng([seed, blocks])
    effects = rng.standard_normal((trials, blocks)) * math.sqrt(1.5)
    return Power(np.sort(-lower_limits(effects, alpha)))


def lower_limits(effects: Any, alpha: float = ALPHA) -> Any:
    """The lower end of :func:`interval` for every row of ``effects`` (finite float array [trials, blocks])."""
    blocks = effects.shape[1]
    needed = int(np.searchsorted(-null_survival(blocks), -alpha))
    i, j = np.triu_indices(blocks)
    if needed > len(i):
        return np.full(len(effects), -np.inf)
    averages = (effects[:, i] + effects[:, j]) / 2
    at = len(i) - needed
    return np.partition(averages, at, axis=1)[:, at]


def detectable_effect(noise_sd: float, blocks: int, alpha: float = ALPHA, power: float = 0.8) -> float:
    """The smallest improvement beyond the margin (ratio − 1) that ``blocks`` blocks find with ``power``.

    ``noise_sd`` is the standard deviation of the log of one run; simulated, seeded, within about 3 % of itself.
    """
    return power_curve(blocks, alpha).detectable(noise_sd, power)


def blocks_needed(noise_sd: float, effect: float, alpha: float = ALPHA, power: float = 0.8) -> int | None:
    """The fewest blocks that find ``effect`` with ``power``; None above 100.  Bisection: power grows with blocks."""
    low, high = 6, 100
    if power_curve(high, alpha).of(effect, noise_sd) < power:
        return None
    while low < high:
        middle = (low + high) // 2
        if power_curve(middle, alpha).of(effect, noise_sd) >= power:
            high = middle
        else:
            low = middle + 1
    return low

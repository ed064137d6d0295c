"""The exact test, its interval, Holm and power."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_engram import stats

EFFECT = st.one_of(st.floats(-5, 5, allow_nan=False), st.sampled_from([0.0, 0.5, -0.5, math.inf, -math.inf]))
SAMPLES = st.lists(EFFECT, min_size=1, max_size=8)


def _flipped(effects):
    """The test statistic under every assignment of signs: what the exact null distribution bounds."""
    size = [abs(effect) for effect in effects]
    for signs in itertools.product((1, -1), repeat=len(effects)):
        values = [sign * one for sign, one in zip(signs, size, strict=True)]
        yield int((stats.walsh(values) > 0).sum())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SAMPLES)
def test_p_value_bounds_the_sign_flip_enumeration(effects):
    """The p-value is never below the brute-force share of sign flips that look at least as good; ties only raise it."""
    seen = int((stats.walsh(effects) > 0).sum())
    enumerated = np.mean([other >= seen for other in _flipped(effects)])
    assert stats.p_above(effects, 0.0) >= enumerated - 1e-12


@pytest.mark.parametrize("n", [5, 6, 8, 12, 25])
def test_p_value_is_wilcoxons_without_ties(n):
    """Without ties the p-value is SciPy's exact one-sided signed-rank p-value."""
    from scipy.stats import wilcoxon  # a second of imports that only this test needs

    effects = np.random.default_rng(n).normal(0.3, 1, n)
    expected = wilcoxon(effects, alternative="greater", method="exact").pvalue
    assert stats.p_above(effects, 0.0) == pytest.approx(expected)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(EFFECT, min_size=1, max_size=10), st.floats(-3, 3))
def test_interval_inverts_the_test(effects, limit):
    """A limit lies outside the interval exactly when one of the one-sided tests rejects it."""
    low, high = stats.interval(effects)
    assert (limit < low) == (stats.p_above(effects, limit) <= stats.ALPHA)
    assert (limit > high) == (stats.p_below(effects, limit) <= stats.ALPHA)


def test_five_blocks_can_never_decide_and_six_can():
    """Five equal effects reach 1/32 only; six are the hard minimum at 2.5 %."""
    assert stats.p_above([1.0] * 5, 0.0) == 1 / 32 > stats.ALPHA
    assert stats.p_above([1.0] * 6, 0.0) == 1 / 64 < stats.ALPHA
    assert stats.interval([1.0] * 5) == (-math.inf, math.inf)


def test_not_a_number_is_refused():
    """A NaN never reaches a rank."""
    with pytest.raises(ValueError, match="NaN"):
        stats.p_above([0.1, math.nan], 0.0)
    with pytest.raises(ValueError, match="cannot be"):
        stats.log_value(-1.0)


def test_no_effects_show_nothing():
    """An empty sample has p-value 1 and no estimate."""
    assert stats.p_above([], 0.0) == 1.0
    assert stats.estimate([]) is None


@pytest.mark.parametrize(
    ("values", "direction", "expected"),
    [
        ((4.0, 4.0, 8.0), "up", math.log(2)),
        ((2.0, 8.0, 4.0), "up", 0.0),
        ((0.0, 0.0, 0.0), "up", 0.0),
        ((0.0, 0.0, 3.0), "up", math.inf),
        ((3.0, 3.0, 0.0), "up", -math.inf),
        ((0.0, 6.0, 6.0), "up", 0.0),  # the better base counts: half a failed base is no gain
        ((0.0, 6.0, 0.0), "down", 0.0),
    ],
)
def test_block_effects_and_measured_zeros(values, direction, expected):
    """An effect is log B − mean(log A, log A'); zeros are legal and never turn into NaN or into an easy gain."""
    assert stats.block_effect(*values, direction=direction) == pytest.approx(expected)


def test_additive_effects_are_differences():
    """A rejection rate is compared by difference, zeros included."""
    assert stats.block_effect(0.0, 0.02, 0.05, direction="down", additive=True) == pytest.approx(0.04)
    assert stats.aa_effect(0.0, 0.02, additive=True) == pytest.approx(0.02)


def test_thresholds_point_the_right_way():
    """An improvement must exceed its margin, harm must not reach it, whatever direction is good."""
    assert stats.threshold("up", 0.02, additive=False, harm=False) == pytest.approx(math.log(1.02))
    assert stats.threshold("down", 0.02, additive=False, harm=False) == pytest.approx(math.log(0.98))
    assert stats.threshold("up", 0.02, additive=False, harm=True) == pytest.approx(math.log(0.98))
    assert stats.threshold("down", 0.01, additive=True, harm=True) == pytest.approx(0.01)


def test_holm_steps_down():
    """Holm multiplies the smallest p by all tests, the next by one fewer, and keeps the order."""
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx((0.03, 0.06, 0.06))
    assert stats.holm([]) == ()


def test_infinite_effects_keep_a_one_sided_interval():
    """Blocks in which the base measured 0 count as the largest gain and leave the interval open above."""
    low, high = stats.interval([math.inf] * 3 + [0.1, 0.2, 0.3, 0.4, 0.5])
    assert low > 0
    assert high == math.inf
    assert stats.estimate([math.inf, -math.inf]) is None


def test_power_agrees_with_the_published_figures():
    """Eight blocks find +2 % in 95 % of cases at 1 % noise and in 22 % at 3 % noise, where 31 blocks are needed."""
    needed = stats.needed_effects(8)
    assert (needed < math.log(1.02) / 0.01).mean() == pytest.approx(0.95, abs=0.015)
    assert (needed < math.log(1.02) / 0.03).mean() == pytest.approx(0.22, abs=0.02)
    assert stats.detectable_effect(0.01, 8) == pytest.approx(0.0152, rel=0.05)
    assert stats.detectable_effect(0.03, 34) <= 0.02 < stats.detectable_effect(0.03, 26)
    assert stats.detectable_effect(0.5, 100) > 0.001


def test_lower_limits_are_the_interval_row_by_row():
    """The vectorised limit is the one of the gates."""
    rows = np.random.default_rng(3).normal(size=(20, 9))
    assert stats.lower_limits(rows) == pytest.approx([stats.interval(row)[0] for row in rows])


def test_many_blocks_do_not_ask_for_the_memory_of_the_machine():
    """A thousand blocks are simulated in as many schedules as fit; the figure goes on falling with √blocks."""
    assert len(stats.needed_effects(1000)) < 100 < len(stats.needed_effects(100)) == 4000
    assert 1.3 < stats.detectable_effect(0.01, 500) / stats.detectable_effect(0.01, 1000) < 1.5

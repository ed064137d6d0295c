"""Comparisons with their p-values, and what they amount to.

Multiplicity: where any one of several tests may carry a gate (candidates; the metrics of gate 2) their p-values are
adjusted by Holm.  Where all of several tests must hold (gate 3, guards, several end-to-end metrics) the claim is an
intersection: it is wrong only if one of its parts is, so each is tested at the full level without adjustment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pytest_engram import stats
from pytest_engram.gates.case import Comparison
from pytest_engram.gates.reasons import REASONS, Finding
from pytest_engram.model import Effect, MetricRule, Status


@dataclass(frozen=True, slots=True)
class Tested:
    """A comparison with its p-value after adjustment."""

    comparison: Comparison
    p_value: float
    alpha: float

    @property
    def shown(self) -> bool:
        """The claim is shown."""
        return self.p_value <= self.alpha

    @property
    def refuted(self) -> bool:
        """The opposite of the claim is shown."""
        return self.comparison.p_against <= self.alpha

    @property
    def effect(self) -> Effect:
        """The record for files and people."""
        adjusted = self.p_value > self.comparison.p_for
        return self.comparison.effect(self.alpha, f"Holm-adjusted p = {self.p_value:.3g}" if adjusted else "")


def holm(found: Sequence[Comparison], alpha: float) -> list[Tested]:
    """Every p-value adjusted for all of them."""
    adjusted = stats.holm([one.p_for for one in found])
    return [Tested(one, p_value, alpha) for one, p_value in zip(found, adjusted, strict=True)]


def within(found: Sequence[Comparison], alpha: float) -> list[Tested]:
    """Per metric, adjusted over the candidates: any of them may carry the gate, by keeping every rule."""
    names = dict.fromkeys(one.rule.metric for one in found)
    return [tested for name in names for tested in holm([one for one in found if one.rule.metric == name], alpha)]


def all_shown(tested: Iterable[Tested], arms: Sequence[str]) -> tuple[str, ...]:
    """The arms of which every test is shown."""
    lacking = {one.comparison.arm for one in tested if not one.shown}
    return tuple(arm for arm in arms if arm not in lacking)


def open_or(tested: Sequence[Tested], arms: Sequence[str], refuted: str, unclear: str) -> str:
    """``refuted`` if the opposite is shown for every candidate that was still in, else ``unclear``."""
    lost = {one.comparison.arm for one in tested if one.refuted}
    return refuted if set(arms) <= lost else unclear


def finding_of(reason: str, tested: Sequence[Tested], wanted: str, passed: tuple[str, ...]) -> Finding:
    """The gate's finding, with the effects and what the blocks could resolve."""
    several = len({one.comparison.arm for one in tested}) > 1
    observed = ", ".join(_words(one, arm=several) for one in tested)
    return Finding(
        reason=reason, observed=observed, threshold=wanted, effects=tuple(one.effect for one in tested), passed=passed,
        notes=tuple(_resolution(tested)) if REASONS[reason][0] is Status.INCONCLUSIVE else (),
    )  # fmt: skip


def _resolution(tested: Iterable[Tested]) -> Iterator[str]:
    """What the blocks can find at the noise that A/A shows: an open result without it reads like "no effect"."""
    for metric, one in {one.comparison.rule.metric: one.comparison for one in tested if not one.shown}.items():
        noise = float(np.std(one.aa, ddof=1)) / math.sqrt(2)
        if math.isfinite(noise) and noise > 0 and not one.metric.additive:
            least = stats.detectable_effect(noise, len(one.aa))
            yield f"{metric}: noise {noise:.1%} per run; {len(one.aa)} blocks find {percent(least)} with 80 % power"


def _words(tested: Tested, *, arm: bool) -> str:
    effect, head = tested.effect, f"{tested.comparison.arm}: " if arm else ""
    unit = "pp" if tested.comparison.metric.additive else "%"
    size = "undefined" if effect.estimate is None else percent(effect.estimate, unit)
    return f"{head}{effect.metric} {size} (p = {tested.p_value:.3g})"


def wanted(rules: Iterable[MetricRule], *, harm: bool) -> str:
    """The rules as a person reads them."""
    return ", ".join(_rule_words(rule, harm=harm) for rule in rules)


def _rule_words(rule: MetricRule, *, harm: bool) -> str:
    if harm:
        return f"{rule.metric} at most {rule.margin:.1%} worse"
    return f"{rule.metric} {rule.direction} by more than {rule.margin:.1%}"


def percent(ratio: float, unit: str = "%") -> str:
    """``+19.8 %``, with the true minus sign."""
    return f"{100 * ratio:+.1f} {unit}".replace("-", "−")

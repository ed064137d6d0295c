"""The evidence of one experiment, arranged for the gates: arms, complete blocks, comparisons over them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pytest_engram import metrics, schedule, stats
from pytest_engram.model import Effect, Evidence, Experiment, MetricRule, Plan, RunRecord


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one candidate against A and A' over the complete blocks; ``absent`` says why there is none."""

    rule: MetricRule
    arm: str
    harm: bool
    effects: tuple[float, ...] = ()
    aa: tuple[float, ...] = ()
    absent: str = ""
    empty_blocks: int = 0  # blocks in which every arm measured 0

    @property
    def metric(self) -> metrics.Metric:
        """The metric's row in the table."""
        return metrics.find(self.rule.metric)

    @property
    def limit(self) -> float:
        """The margin on the scale of the effects."""
        return stats.threshold(self.rule.direction, self.rule.margin, additive=self.metric.additive, harm=self.harm)

    @property
    def p_for(self) -> float:
        """P-value of the claim: better than the margin, or not worse than it where harm is tested."""
        test = stats.p_above if self.rule.direction == "up" else stats.p_below
        return test(self.effects, self.limit)

    @property
    def p_against(self) -> float:
        """P-value of the opposite of the claim."""
        test = stats.p_below if self.rule.direction == "up" else stats.p_above
        return test(self.effects, self.limit)

    def effect(self, alpha: float, note: str = "") -> Effect:
        """For people and files: ratio − 1 (difference if additive); an infinite end is None, said in ``note``."""
        if self.absent:
            return Effect(
                metric=self.rule.metric, arm=self.arm, estimate=None, low=None, high=None, p_value=None, blocks=0,
                note=self.absent,
            )  # fmt: skip
        low, high = stats.interval(self.effects, alpha)
        if low == math.inf:  # bounded from below by the largest gain that has a size
            low = max((effect for effect in self.effects if math.isfinite(effect)), default=math.inf)
        zeros = self.effects.count(math.inf)
        note = "; ".join(filter(None, (note, f"A measured 0 in {zeros} blocks" if zeros else "")))
        return Effect(
            metric=self.rule.metric, arm=self.arm, estimate=self._shown(stats.estimate(self.effects)),
            low=self._shown(low), high=self._shown(high), p_value=self.p_for, blocks=len(self.effects),
            per_block=tuple(self._shown(effect) for effect in self.effects), note=note,
        )  # fmt: skip

    def _shown(self, effect: float | None) -> float | None:
        if effect is None or effect == math.inf:
            return None
        if self.metric.additive:
            return effect if math.isfinite(effect) else None
        return math.expm1(effect)


class Case:
    """One evaluation's view of the evidence; nothing here changes it."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    @property
    def plan(self) -> Plan:
        """What was asked for."""
        return self.evidence.plan

    @property
    def experiment(self) -> Experiment:
        """The rules that were hashed before the first sample."""
        return self.evidence.plan.experiment

    @cached_property
    def arms(self) -> tuple[str, ...]:
        """A, A' and the candidates."""
        return schedule.block_arms(self.experiment)

    @cached_property
    def candidates(self) -> tuple[str, ...]:
        """Every arm that is compared with A."""
        return schedule.candidates(self.experiment)

    @cached_property
    def runs(self) -> dict[tuple[int, str], RunRecord]:
        """(block, arm) -> run without a problem."""
        return {(run.block, run.arm): run for run in self.evidence.runs if not run.problems}

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks in which every arm has a sound run."""
        return schedule.complete_blocks(self.runs, self.arms)

    def of(self, arm: str) -> list[RunRecord]:
        """The sound runs of one arm, in order of their index."""
        found = [run for (_, name), run in self.runs.items() if name == arm]
        return sorted(found, key=lambda run: run.index)

    def compare(self, rule: MetricRule, arm: str, *, harm: bool = False) -> Comparison:
        """``arm`` against A and A' block by block; absent if one run of a complete block lacks the metric."""
        metric, effects, aa, empty = metrics.find(rule.metric), [], [], 0
        for block in self.blocks:
            readings = [metrics.measure(self.runs[block, name], rule.metric) for name in ("A", "A'", arm)]
            values = [
                reading.value for reading in readings if reading.value is not None and 0 <= reading.value < math.inf
            ]
            if len(values) < 3:
                reason = next((r.reason for r in readings if r.value is None), "an impossible value")
                return Comparison(rule, arm, harm, absent=f"{reason or 'not recorded'} (block {block})")
            effects.append(stats.block_effect(*values, direction=rule.direction, additive=metric.additive))
            aa.append(stats.aa_effect(*values[:2], additive=metric.additive))
            empty += not any(values)
        if not self.blocks:
            return Comparison(rule, arm, harm, absent="no complete block")
        return Comparison(rule, arm, harm, tuple(effects), tuple(aa), empty_blocks=empty)

    def compare_all(self, rules: Iterable[MetricRule], arms: Iterable[str], *, harm: bool = False) -> list[Comparison]:
        """Rule by rule, and within a rule arm by arm."""
        arms = tuple(arms)
        return [self.compare(rule, arm, harm=harm) for rule in rules for arm in arms]

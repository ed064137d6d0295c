"""The evidence of one experiment as arms, complete blocks and comparisons over them, and what these amount to.

Multiplicity: where any one of several tests may carry a gate (candidates; the metrics of gate 2) their p-values are
adjusted by Holm.  Where all of several tests must hold (gate 3, guards, several end-to-end metrics) the claim is an
intersection: it is wrong only if one of its parts is, so each is tested at the full level without adjustment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pytest_engram import codec, metrics, schedule, stats
from pytest_engram.gates.reasons import REASONS, Finding
from pytest_engram.model import Effect, Evidence, MetricRule, RunRecord, Status, Timeline, Topology, Verdict

ENGINE_MODULES = "engine modules"  # what the receipt of an engine's own modules says under ``subject``
REPEATED = ", repeated rows: the gain may be cache"  # behind every subject of such a workload


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one candidate against A and A' over the complete blocks; ``absent`` says why there is none.

    The claim is "better than the margin", or "not worse than it" where ``harm`` is tested.
    """

    rule: MetricRule
    arm: str
    alpha: float
    harm: bool
    additive: bool  # effects are differences
    effects: tuple[float, ...] = ()
    aa: tuple[float, ...] = ()
    absent: str = ""
    empty_blocks: int = 0  # blocks in which every arm measured 0
    p_value: float = 1.0  # of the claim, adjusted; set by :func:`holm`

    def p(self, *, claim: bool = True) -> float:
        """The unadjusted p-value of the claim, or of its opposite."""
        limit = stats.threshold(self.rule.direction, self.rule.margin, additive=self.additive, harm=self.harm)
        return (stats.p_above if (self.rule.direction == "up") == claim else stats.p_below)(self.effects, limit)

    @property
    def claim(self) -> str:
        """The rule as a person reads it."""
        margin = f"{self.rule.margin:.1%}"
        better = f"{self.rule.metric} {self.rule.direction} by more than {margin}"
        return f"{self.rule.metric} at most {margin} worse" if self.harm else better

    @property
    def shown(self) -> bool:
        """The claim is shown."""
        return self.p_value <= self.alpha

    @property
    def refuted(self) -> bool:
        """The opposite of the claim is shown."""
        return self.p(claim=False) <= self.alpha

    @property
    def effect(self) -> Effect:
        """For people and files: ratio − 1 (difference if additive); an infinite end is None, said in ``note``."""
        low, high = stats.interval(self.effects, self.alpha)
        if low == math.inf:  # bounded from below by the largest gain that has a size
            low = max((effect for effect in self.effects if math.isfinite(effect)), default=math.inf)
        zeros, p_value = self.effects.count(math.inf), self.p()
        notes = [f"Holm-adjusted p = {self.p_value:.3g}"] if self.p_value > p_value else []
        notes += [f"A measured 0 in {zeros} blocks"] if zeros else []
        middle = stats.estimate(self.effects)
        estimate, low_end, high_end, *blocks = map(self._shown, (middle, low, high, *self.effects))
        return Effect(
            metric=self.rule.metric, arm=self.arm, estimate=estimate, low=low_end, high=high_end, p_value=p_value,
            blocks=len(blocks), per_block=tuple(blocks), note="; ".join(notes),
        )  # fmt: skip

    def _shown(self, effect: float | None) -> float | None:
        if effect is None or effect == math.inf or (self.additive and effect == -math.inf):
            return None
        return effect if self.additive else math.expm1(effect)

    def words(self, *, arm: bool) -> str:
        """``B: lookup −3.1 %``."""
        return f"{self.arm + ': ' if arm else ''}{self.rule.metric} {self.size(self.effects)}"

    def size(self, effects: Sequence[float], digits: int = 1) -> str:
        """Their Hodges–Lehmann estimate for a person."""
        return percent(self._shown(stats.estimate(effects)), "undefined", " pp" if self.additive else " %", digits)


class Case:
    """One evaluation's view of the evidence, which nothing here changes.

    ``arms`` are A, A' and the ``candidates``; ``runs`` maps (block, arm) to its run without a problem; ``blocks`` are
    those in which every arm has one.  ``treated`` are the candidates that gate 1 let in, which share one level;
    ``left`` those that are still in.  ``prior`` are verdicts that ``requires`` may name.
    """

    def __init__(self, evidence: Evidence, prior: Sequence[Verdict] = ()) -> None:
        self.evidence, self.plan, self.experiment = evidence, evidence.plan, evidence.plan.experiment
        self.arms, self.candidates = schedule.block_arms(self.experiment), schedule.candidates(self.experiment)
        self.prior, self.treated, self.left = prior, self.candidates, self.candidates
        sound = sorted((run for run in evidence.runs if not run.problems), key=lambda run: run.index)
        self.runs = {(run.block, run.arm): run for run in sound if run.arm in self.arms}
        self.blocks = schedule.complete_blocks(self.runs, self.arms)

    @cached_property
    def topology(self) -> Topology | None:
        """The machine in ``provenance["topology"]``, if it is on record."""
        tree = (self.evidence.provenance.get("topology") or {}).get("value")
        return codec.from_builtins(tree, Topology, source="provenance.topology") if tree else None

    @property
    def subject(self) -> str:
        """What the arms ran: "engine modules" where every receipt says so, else what the experiment names."""
        said = {run.fingerprint.get("backend.subject") for run in self.runs.values()}
        name = ENGINE_MODULES if said == {ENGINE_MODULES} else self.experiment.subject
        return name + REPEATED * (self.experiment.workload.reuse == "repeated")

    def of(self, arm: str) -> list[RunRecord]:
        """The sound runs of one arm, in order of their index."""
        return [run for (_, name), run in self.runs.items() if name == arm]

    def launches(self, arm: str) -> frozenset[tuple[int, int, int, int]]:
        """(rank, layer, rows, grid) of everything that ran in marked steps."""
        found = marked_steps(self.of(arm))
        return frozenset((line.rank, mark.layer, mark.rows, mark.grid) for _, line in found for mark in line.lookups)

    def compare(self, rule: MetricRule, arm: str, *, harm: bool = False) -> Comparison:
        """``arm`` against A and A' block by block; absent if one run of a complete block lacks the metric."""
        additive, effects, aa, empty = metrics.find(rule.metric).additive, [], [], 0
        found = Comparison(rule, arm, self.experiment.alpha, harm, additive, absent="no complete block")
        for block in self.blocks:
            readings = [metrics.measure(self.runs[block, name], rule.metric) for name in (*self.arms[:2], arm)]
            values = [r.value for r in readings if r.value is not None and 0 <= r.value < math.inf]
            if len(values) < 3:
                reason = next((r.reason for r in readings if r.value is None), "an impossible value")
                return replace(found, absent=f"{reason} (block {block})")
            effects.append(stats.block_effect(*values, direction=rule.direction, additive=additive))
            aa.append(stats.aa_effect(*values[:2], additive=additive))
            empty += not any(values)
        return replace(found, effects=tuple(effects), aa=tuple(aa), empty_blocks=empty, absent="") if effects else found

    def compare_all(self, rules: Iterable[MetricRule], arms: Sequence[str], *, harm: bool = False) -> list[Comparison]:
        """Rule by rule, and within a rule arm by arm."""
        return [self.compare(rule, arm, harm=harm) for rule in rules for arm in arms]


def marked_steps(runs: Iterable[RunRecord]) -> Iterator[tuple[int, Timeline]]:
    """(the timer's resolution, timeline) of every marked step with a lookup, at the workload's own batch size."""
    return ((one.resolution_ns, line) for run in runs for one in run.overlap for line in one.timelines if line.lookups)


def holm(found: Sequence[Comparison]) -> list[Comparison]:
    """Every p-value adjusted for all of them."""
    adjusted = stats.holm([one.p() for one in found])
    return [replace(one, p_value=p_value) for one, p_value in zip(found, adjusted, strict=True)]


def within(found: Sequence[Comparison]) -> list[Comparison]:
    """Per metric, adjusted over the candidates: any of them may carry the gate, by keeping every rule."""
    names = dict.fromkeys(one.rule.metric for one in found)
    return [tested for name in names for tested in holm([one for one in found if one.rule.metric == name])]


def all_shown(tested: Iterable[Comparison], arms: Sequence[str]) -> tuple[str, ...]:
    """The arms of which every test is shown."""
    lacking = {one.arm for one in tested if not one.shown}
    return tuple(arm for arm in arms if arm not in lacking)


def open_or(tested: Sequence[Comparison], arms: Sequence[str], refuted: str, unclear: str) -> str:
    """``refuted`` if the opposite is shown for every candidate that was still in, else ``unclear``."""
    return refuted if set(arms) <= {one.arm for one in tested if one.refuted} else unclear


def finding_of(
    reason: str, tested: Sequence[Comparison], passed: tuple[str, ...], limits: str = "", notes: Iterable[str] = ()
) -> Finding:
    """The gate's finding, with the effects and what the blocks could resolve; ``limits`` are by default the claims."""
    several = len({one.arm for one in tested}) > 1
    observed = ", ".join(f"{one.words(arm=several)} (p = {one.p_value:.3g})" for one in tested)
    limits = limits or ", ".join(dict.fromkeys(one.claim for one in tested))
    resolved = _resolution(tested) if REASONS[reason][0] is Status.INCONCLUSIVE else ()
    return Finding(reason, observed, limits, passed, tuple(one.effect for one in tested), (*resolved, *notes))


def _resolution(tested: Iterable[Comparison]) -> Iterator[str]:
    """What the blocks can find at the noise that A/A shows: an open result without it reads like "no effect"."""
    for metric, one in {one.rule.metric: one for one in tested if not one.shown and not one.additive}.items():
        noise = float(np.std(one.aa, ddof=1)) / math.sqrt(2) if all(map(math.isfinite, one.aa)) else 0.0
        if noise > 0:
            least = stats.detectable_effect(noise, len(one.aa))
            yield f"{metric}: noise {noise:.1%} per run; {len(one.aa)} blocks find {percent(least)} with 80 % power"


def unusable(found: Sequence[Comparison], level: float) -> Iterator[Finding]:
    """An absent metric (or no metric at all), or an A/A difference.

    A/A can only invalidate: two-sided, per metric, at the declared level or the least that the blocks can reach.
    """
    if not found or any(one.absent for one in found):
        seen = next((f"{one.rule.metric}: {one.absent}" for one in found if one.absent), "no applicable metric")
        yield Finding("metric-absent", seen, "in every run of every complete block")
    for metric, one in {one.rule.metric: one for one in found}.items():
        p_value, reachable = stats.two_sided(one.aa), max(level, 2.0 ** (1 - len(one.aa)))
        if p_value <= reachable:
            seen = f"{metric}: A' differs from A by {one.size(one.aa, 2)}"
            yield Finding("aa-differs", f"{seen}, p = {p_value:.3g}", f"p > {reachable:.3g}")


def interval(effect: Effect) -> str:
    """``[−4.0, −2.2]``, open where the test closed no end."""
    return f"[{percent(effect.low, '−∞', '')}, {percent(effect.high, '+∞', '')}]"


def percent(ratio: float | None, otherwise: str = "", unit: str = " %", digits: int = 1) -> str:
    """``+19.8 %``, with the true minus sign; ``otherwise`` for None."""
    return otherwise if ratio is None else f"{100 * ratio:+.{digits}f}{unit}".replace("-", "−")

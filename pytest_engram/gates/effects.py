"""Gates 2 to 4: the mechanism moved, the main path did not pay, the end-to-end metric improved.

Multiplicity: where any one of several tests may carry a gate (candidates; the metrics of gate 2) their p-values are
adjusted by Holm.  Where all of several tests must hold (gate 3, guards, several end-to-end metrics) the claim is an
intersection: it is wrong only if one of its parts is, so each is tested at the full level without adjustment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_engram import stats
from pytest_engram.gates import distances, timing
from pytest_engram.gates.case import Case, Comparison
from pytest_engram.gates.reasons import Finding
from pytest_engram.model import Effect, MetricRule, Status, Verdict


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


def mechanism(case: Case, arms: Sequence[str]) -> Finding:
    """Gate 2: timing may be judged, and lookup or wait moved as predicted."""
    invalid = timing.validity(case)
    if invalid is not None:
        return invalid
    return _per_rank(case, arms) if case.experiment.variable == "policy" else _any_metric(case, arms)


def _any_metric(case: Case, arms: Sequence[str]) -> Finding:
    rules = case.experiment.mechanism
    found = case.compare_all(rules, arms)
    disturbed = timing.same_arms(found[:: len(arms)], case.experiment.aa_level)
    if disturbed is not None:
        return disturbed
    usable = [one for one in found if not one.absent]
    if not usable:
        return _absent(found)
    tested = _holm(usable, case.experiment.alpha)
    passed = tuple(arm for arm in arms if any(one.shown for one in tested if one.comparison.arm == arm))
    refuted = all(one.refuted for one in tested)
    reason = "moved-as-predicted" if passed else "mechanism-refuted" if refuted else "mechanism-not-shown"
    return _finding(reason, tested, "one of: " + _wanted(rules, harm=False), passed)


def _per_rank(case: Case, arms: Sequence[str]) -> Finding:
    """Placement: a rank that comes nearer gains, one that moves away loses, by lookup or wait (Holm over both)."""
    passed: list[str] = []
    everything: list[Tested] = []
    predicted: list[str] = []
    for arm in arms:
        ways = {rank: distances.prediction(case, arm, rank) for rank in range(case.experiment.ranks)}
        unknown = [rank for rank, way in ways.items() if way is None]
        if unknown:
            return Finding(reason="distance-unknown", observed=f"rank {unknown[0]}", threshold="every rank's distance")
        predicted += [f"rank {rank} {_WAYS[way or '']} in {arm}" for rank, way in ways.items()]
        held = []
        for rank, way in ((rank, way) for rank, way in ways.items() if way):
            tested = _rank_tests(case, arm, rank, way)
            if isinstance(tested, Finding):
                return tested
            everything += tested
            held.append(any(one.shown for one in tested))
        if held and all(held):
            passed.append(arm)
    return _of_ranks(everything, predicted, tuple(passed))


_WAYS = {"down": "nearer", "up": "farther", "": "as far as before"}


def _rank_tests(case: Case, arm: str, rank: int, way: str) -> list[Tested] | Finding:
    rules = [
        replace(rule, metric=f"{rule.metric}@{rank}", direction=way)
        for rule in case.experiment.mechanism
        if "@" not in rule.metric
    ]
    found = case.compare_all(rules, [arm])
    usable = [one for one in found if not one.absent]
    return timing.same_arms(usable, case.experiment.aa_level) or _holm(usable, case.experiment.alpha) or _absent(found)


def _of_ranks(tested: list[Tested], predicted: list[str], passed: tuple[str, ...]) -> Finding:
    ways = ", ".join(predicted)
    if not tested:
        return Finding(reason="no-predicted-change", observed=ways, threshold="a rank that comes nearer")
    refuted = not passed and all(one.refuted for one in tested)
    reason = "moved-as-predicted" if passed else "mechanism-refuted" if refuted else "mechanism-not-shown"
    symmetric = "nearer" in ways and "farther" in ways
    notes = ("some ranks come nearer and some farther: there is no winner to expect",) if symmetric else ()
    finding = _finding(reason, tested, f"as predicted: {ways}", passed)
    return replace(finding, notes=notes)


def no_offset(case: Case, arms: Sequence[str]) -> Finding:
    """Gate 3: main compute and communication are not worse than their margins, in unmarked runs."""
    rules = [rule for rule in case.experiment.no_offset if not _not_applicable(case, rule)]
    skipped = [rule.metric for rule in case.experiment.no_offset if rule not in rules]
    found = case.compare_all(rules, arms, harm=True)
    problem = _unusable(case, found, arms)
    if problem is not None:
        return problem
    tested = _within(found, case.experiment.alpha)
    passed = _all_shown(tested, arms)
    reason = "not-slowed" if passed else _open_or(tested, arms, "slowed", "slowing-not-excluded")
    notes = tuple(f"{metric}: not applicable, {_reason(case, metric)}" for metric in skipped)
    return replace(_finding(reason, tested, _wanted(rules, harm=True), passed), notes=notes)


def _not_applicable(case: Case, rule: MetricRule) -> bool:
    """One rank, and the suite loop's replicas, have no collectives; elsewhere a silent absence stays an absence."""
    found = case.compare(rule, "A", harm=True)
    alone = case.experiment.ranks == 1 or case.experiment.subject == "suite loop"
    return found.metric.peers and alone and bool(found.absent) and bool(_reason(case, rule.metric))


def _reason(case: Case, metric: str) -> str:
    return case.compare(MetricRule(metric=metric, direction="down"), "A").absent


def end_to_end(case: Case, arms: Sequence[str], prior: Sequence[Verdict]) -> Finding:
    """Gate 4: goodput at the fixed load and limits improved beyond the margin, and no guard is broken."""
    unmet = _unmet(case, prior)
    if unmet:
        return Finding(reason="requires-unmet", observed=unmet, threshold="PASS")
    failed = _failed_requests(case)
    if failed:
        return Finding(reason="failed-requests", observed=failed, threshold="none", always_judged=True)
    alpha = case.experiment.alpha
    gains = case.compare_all(case.experiment.end_to_end, arms)
    guards = case.compare_all(case.experiment.guards, arms, harm=True)
    problem = _unusable(case, gains, arms) or next((_absent(guards) for one in guards if one.absent), None)
    if problem is not None:
        return problem
    empty = sum(one.empty_blocks for one in gains)
    if empty:
        return Finding(reason="no-successful-requests", observed=f"{empty} blocks without one", threshold="none empty")
    improved, kept = _within(gains, alpha), _within(guards, alpha)
    better, safe = _all_shown(improved, arms), _all_shown(kept, arms)
    passed = tuple(arm for arm in better if arm in safe)
    wanted = f"{_wanted(case.experiment.end_to_end, harm=False)}; {_wanted(case.experiment.guards, harm=True)}"
    return _finding(_end_reason(improved, kept, better, passed, arms), [*improved, *kept], wanted, passed)


def _end_reason(
    improved: list[Tested], kept: list[Tested], better: Sequence[str], passed: Sequence[str], arms: Sequence[str]
) -> str:
    if passed:
        return "improved"
    if not better:
        return _open_or(improved, arms, "not-improved", "improvement-not-shown")
    return _open_or(kept, better, "guard-broken", "guard-not-shown")


def _unmet(case: Case, prior: Sequence[Verdict]) -> str:
    status = {verdict.experiment: verdict.status for verdict in prior}
    lacking = [name for name in case.experiment.requires if status.get(name) is not Status.PASS]
    return ", ".join(f"{name} {status[name].value if name in status else 'not measured'}" for name in lacking)


def _failed_requests(case: Case) -> str:
    for run in case.runs.values():
        count = sum(request.status == "failed" for sample in run.serving for request in sample.requests)
        if count:
            return f"{count} in arm {run.arm}, run {run.index}"
    return ""


def _unusable(case: Case, found: list[Comparison], arms: Sequence[str]) -> Finding | None:
    """An absent metric, or an A/A difference in one of the metrics that carry the gate."""
    if not found or any(one.absent for one in found):
        return _absent(found)
    return timing.same_arms(found[:: len(arms)], case.experiment.aa_level)


def _absent(found: Sequence[Comparison]) -> Finding:
    lacking = next((one for one in found if one.absent), None)
    seen = f"{lacking.rule.metric}: {lacking.absent}" if lacking else "no applicable metric"
    return Finding(reason="metric-absent", observed=seen, threshold="in every run of every complete block")


def _holm(found: Sequence[Comparison], alpha: float) -> list[Tested]:
    adjusted = stats.holm([one.p_for for one in found])
    return [Tested(one, p_value, alpha) for one, p_value in zip(found, adjusted, strict=True)]


def _within(found: Sequence[Comparison], alpha: float) -> list[Tested]:
    """Per metric, adjusted over the candidates: any of them may carry the gate, but each must keep every rule."""
    names = dict.fromkeys(one.rule.metric for one in found)
    return [tested for name in names for tested in _holm([one for one in found if one.rule.metric == name], alpha)]


def _all_shown(tested: Iterable[Tested], arms: Sequence[str]) -> tuple[str, ...]:
    lacking = {one.comparison.arm for one in tested if not one.shown}
    return tuple(arm for arm in arms if arm not in lacking)


def _open_or(tested: Sequence[Tested], arms: Sequence[str], refuted: str, unclear: str) -> str:
    """``refuted`` if the opposite is shown for every candidate that was still in, else ``unclear``."""
    lost = {one.comparison.arm for one in tested if one.refuted}
    return refuted if set(arms) <= lost else unclear


def _finding(reason: str, tested: Sequence[Tested], wanted: str, passed: tuple[str, ...]) -> Finding:
    several = len({one.comparison.arm for one in tested}) > 1
    observed = ", ".join(_words(one, arm=several) for one in tested)
    return Finding(
        reason=reason, observed=observed, threshold=wanted, effects=tuple(one.effect for one in tested), passed=passed
    )


def _words(tested: Tested, *, arm: bool) -> str:
    effect, head = tested.effect, f"{tested.comparison.arm}: " if arm else ""
    size = "undefined" if effect.estimate is None else percent(effect.estimate)
    return f"{head}{effect.metric} {size} (p = {tested.p_value:.3g})"


def _wanted(rules: Iterable[MetricRule], *, harm: bool) -> str:
    return ", ".join(_rule_words(rule, harm=harm) for rule in rules)


def _rule_words(rule: MetricRule, *, harm: bool) -> str:
    if harm:
        return f"{rule.metric} at most {rule.margin:.1%} worse"
    return f"{rule.metric} {rule.direction} by more than {rule.margin:.1%}"


def percent(ratio: float) -> str:
    """``+19.8 %``, with the true minus sign."""
    return f"{100 * ratio:+.1f} %".replace("-", "−")

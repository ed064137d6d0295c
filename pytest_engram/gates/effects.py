"""Gates 2 to 4: the mechanism moved, the main path did not pay, the end-to-end metric improved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_engram.gates.case import Case, Comparison
from pytest_engram.gates.distances import prediction
from pytest_engram.gates.reasons import Finding
from pytest_engram.gates.tested import Tested, all_shown, finding_of, holm, open_or, wanted, within
from pytest_engram.gates.timing import same_arms, validity
from pytest_engram.model import MetricRule, Status, Verdict


def mechanism(case: Case, arms: Sequence[str]) -> Finding:
    """Gate 2: timing may be judged, and lookup or wait moved as predicted."""
    invalid = validity(case)
    if invalid is not None:
        return invalid
    return _per_rank(case, arms) if case.experiment.variable == "policy" else _any_metric(case, arms)


def _any_metric(case: Case, arms: Sequence[str]) -> Finding:
    rules = case.experiment.mechanism
    found = case.compare_all(rules, arms)
    disturbed = same_arms(found[:: len(arms)], case.experiment.aa_level)
    if disturbed is not None:
        return disturbed
    usable = [one for one in found if not one.absent]
    if not usable:
        return _absent(found)
    tested = holm(usable, case.experiment.alpha)
    passed = tuple(arm for arm in arms if any(one.shown for one in tested if one.comparison.arm == arm))
    refuted = all(one.refuted for one in tested)
    reason = "moved-as-predicted" if passed else "mechanism-refuted" if refuted else "mechanism-not-shown"
    return finding_of(reason, tested, "one of: " + wanted(rules, harm=False), passed)


def _per_rank(case: Case, arms: Sequence[str]) -> Finding:
    """Placement: a rank that comes nearer gains, one that moves away loses, by lookup or wait (Holm over both)."""
    passed: list[str] = []
    everything: list[Tested] = []
    predicted: list[str] = []
    for arm in arms:
        ways = {rank: prediction(case, arm, rank) for rank in range(case.experiment.ranks)}
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
    return same_arms(usable, case.experiment.aa_level) or holm(usable, case.experiment.alpha) or _absent(found)


def _of_ranks(tested: list[Tested], predicted: list[str], passed: tuple[str, ...]) -> Finding:
    ways = ", ".join(predicted)
    if not tested:
        return Finding(reason="no-predicted-change", observed=ways, threshold="a rank that comes nearer")
    refuted = not passed and all(one.refuted for one in tested)
    reason = "moved-as-predicted" if passed else "mechanism-refuted" if refuted else "mechanism-not-shown"
    symmetric = "nearer" in ways and "farther" in ways
    notes = ("some ranks come nearer and some farther: there is no winner to expect",) if symmetric else ()
    finding = finding_of(reason, tested, f"as predicted: {ways}", passed)
    return replace(finding, notes=finding.notes + notes)


def no_offset(case: Case, treated: Sequence[str], arms: Sequence[str]) -> Finding:
    """Gate 3: main compute and communication are not worse than their margins, in unmarked runs.

    ``treated`` are the candidates that gate 1 let in, all of which share one level; ``arms`` those still in.
    """
    rules = [rule for rule in case.experiment.no_offset if not _not_applicable(case, rule)]
    skipped = [rule.metric for rule in case.experiment.no_offset if rule not in rules]
    found = case.compare_all(rules, treated, harm=True)
    problem = _unusable(case, found, treated)
    if problem is not None:
        return problem
    tested = within(found, case.experiment.alpha)
    passed = all_shown(tested, arms)
    reason = "not-slowed" if passed else open_or(tested, arms, "slowed", "slowing-not-excluded")
    notes = tuple(f"{metric}: not applicable, {_reason(case, metric)}" for metric in skipped)
    finding = finding_of(reason, tested, wanted(rules, harm=True), passed)
    return replace(finding, notes=finding.notes + notes)


def _not_applicable(case: Case, rule: MetricRule) -> bool:
    """One rank, and the suite loop's replicas, have no collectives; elsewhere a silent absence stays an absence."""
    found = case.compare(rule, "A", harm=True)
    alone = case.experiment.ranks == 1 or case.experiment.subject == "suite loop"
    return found.metric.peers and alone and bool(found.absent) and bool(_reason(case, rule.metric))


def _reason(case: Case, metric: str) -> str:
    return case.compare(MetricRule(metric=metric, direction="down"), "A").absent


def end_to_end(case: Case, treated: Sequence[str], arms: Sequence[str], prior: Sequence[Verdict]) -> Finding:
    """Gate 4: goodput at the fixed load and limits improved beyond the margin, and no guard is broken."""
    unmet = _unmet(case, prior)
    if unmet:
        return Finding(reason="requires-unmet", observed=unmet, threshold="PASS")
    failed = _failed_requests(case)
    if failed:
        return Finding(reason="failed-requests", observed=failed, threshold="none", always_judged=True)
    alpha = case.experiment.alpha
    gains = case.compare_all(case.experiment.end_to_end, treated)
    guards = case.compare_all(case.experiment.guards, treated, harm=True)
    problem = _unusable(case, gains, treated) or next((_absent(guards) for one in guards if one.absent), None)
    if problem is not None:
        return problem
    empty = sum(one.empty_blocks for one in gains)
    if empty:
        return Finding(reason="no-successful-requests", observed=f"{empty} blocks without one", threshold="none empty")
    improved, kept = within(gains, alpha), within(guards, alpha)
    better, safe = all_shown(improved, arms), all_shown(kept, arms)
    passed = tuple(arm for arm in better if arm in safe)
    limits = f"{wanted(case.experiment.end_to_end, harm=False)}; {wanted(case.experiment.guards, harm=True)}"
    return finding_of(_end_reason(improved, kept, better, passed, arms), [*improved, *kept], limits, passed)


def _end_reason(
    improved: list[Tested], kept: list[Tested], better: Sequence[str], passed: Sequence[str], arms: Sequence[str]
) -> str:
    if passed:
        return "improved"
    if not better:
        return open_or(improved, arms, "not-improved", "improvement-not-shown")
    return open_or(kept, better, "guard-broken", "guard-not-shown")


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
    return same_arms(found[:: len(arms)], case.experiment.aa_level)


def _absent(found: Sequence[Comparison]) -> Finding:
    lacking = next((one for one in found if one.absent), None)
    seen = f"{lacking.rule.metric}: {lacking.absent}" if lacking else "no applicable metric"
    return Finding(reason="metric-absent", observed=seen, threshold="in every run of every complete block")

"""Gates 2 to 4: the mechanism moved, the main path did not pay, the end-to-end metric improved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from pytest_engram import metrics
from pytest_engram.experiment_rules import places
from pytest_engram.gates.comparison import Case, Comparison, all_shown, finding_of, holm, open_or, unusable, within
from pytest_engram.gates.placement import WAYS, prediction
from pytest_engram.gates.reasons import Finding
from pytest_engram.gates.timing import validity
from pytest_engram.model import MetricRule, Status


def mechanism(case: Case) -> Iterator[Finding]:
    """Gate 2: timing may be judged, and lookup or wait moved as predicted."""
    yield from validity(case)
    if places(case.experiment):
        yield from _per_rank(case)
    else:
        yield from _moved(case, [case.compare_all(case.experiment.mechanism, case.left)])


def _per_rank(case: Case) -> Iterator[Finding]:
    """Placement: a rank that comes nearer gains, one that moves away loses, by lookup or wait (Holm over both)."""
    ways = {(arm, rank): prediction(case, arm, rank) for arm in case.left for rank in range(case.experiment.ranks)}
    families: dict[int, list[Comparison]] = {}
    for (arm, rank), way in ways.items():
        if way is None:
            yield Finding("distance-unknown", f"rank {rank}", "every rank's distance")
        if way:
            pooled = [rule for rule in case.experiment.mechanism if "@" not in rule.metric]
            rules = [replace(rule, metric=f"{rule.metric}@{rank}", direction=way) for rule in pooled]
            families.setdefault(rank, []).extend(case.compare_all(rules, [arm]))
    predicted = ", ".join(f"rank {rank} {WAYS[way]} in {arm}" for (arm, rank), way in ways.items())
    if not families:
        yield Finding("no-predicted-change", predicted, "a rank that comes nearer")
    note = "some ranks come nearer and some farther: there is no winner to expect"
    notes = (note,) if {"down", "up"} <= set(ways.values()) else ()
    yield from _moved(case, families.values(), f"as predicted: {predicted}", notes)


def _moved(
    case: Case, families: Collection[list[Comparison]], limits: str = "", notes: Sequence[str] = ()
) -> Iterator[Finding]:
    """One test of each family must be shown for an arm: the families are ranks, or there is only one."""
    tested = [holm([one for one in family if not one.absent]) for family in families]
    every = [*chain.from_iterable(tested)]
    yield from unusable(every if all(tested) else [*chain.from_iterable(families)], case.experiment.aa_level)
    lost = {one.arm for group in tested for one in group if not any(o.shown for o in group if o.arm == one.arm)}
    passed = tuple(arm for arm in case.left if arm not in lost and arm in {one.arm for one in every})
    reason = "mechanism-refuted" if all(one.refuted for one in every) else "mechanism-not-shown"
    limits = limits or f"one of: {', '.join(dict.fromkeys(one.claim for one in every))}"
    yield finding_of("moved-as-predicted" if passed else reason, every, passed, limits, notes)


def no_offset(case: Case) -> Iterator[Finding]:
    """Gate 3: main compute and communication are not worse than their margins, in unmarked runs.

    One rank, and replicas, have no collectives; where ranks share the heads a silent absence stays an absence.
    """
    chosen = case.experiment
    alone = not chosen.workload.tensor_parallel
    peers = [rule for rule in chosen.no_offset if alone and metrics.find(rule.metric).peers]
    recorded = {rule for rule in peers for run in case.runs.values() if metrics.value(run, rule.metric) is not None}
    lacking = {rule: case.compare(rule, "A").absent for rule in peers if rule not in recorded}
    rules = [rule for rule in chosen.no_offset if rule not in lacking]
    found = case.compare_all(rules, case.treated, harm=True)
    yield from unusable(found, chosen.aa_level)
    tested = within(found)
    passed = all_shown(tested, case.left)
    reason = "not-slowed" if passed else open_or(tested, case.left, "slowed", "slowing-not-excluded")
    notes = [f"{rule.metric}: not applicable, {absent}" for rule, absent in lacking.items()]
    finding = finding_of(reason, tested, passed, notes=notes)
    yield replace(finding, observed=finding.observed + _net(case))


def _net(case: Case) -> str:
    """The whole step beside its parts: a slower main path can stand in a shorter step, and a reader must see both."""
    steps = case.compare_all([MetricRule(metric="step", direction="down")], case.treated)
    words = ", ".join(one.words(arm=len(case.treated) > 1) for one in steps if not one.absent)
    return f"; {words} (not judged)" if words else ""


def end_to_end(case: Case) -> Iterator[Finding]:
    """Gate 4: goodput at the fixed load and limits improved beyond the margin, and no guard is broken."""
    yield from _stopped(case)
    gains = case.compare_all(case.experiment.end_to_end, case.treated)
    guards = case.compare_all(case.experiment.guards, case.treated, harm=True)
    yield from unusable([*gains, *guards], case.experiment.aa_level)
    if empty := sum(one.empty_blocks for one in gains):
        yield Finding("no-successful-requests", f"{empty} blocks without one", "none empty")
    improved, kept = within(gains), within(guards)
    better = all_shown(improved, case.left)
    passed = all_shown(kept, better)
    reason = "improved"
    if not better:
        reason = open_or(improved, case.left, "not-improved", "improvement-not-shown")
    elif not passed:
        reason = open_or(kept, better, "guard-broken", "guard-not-shown")
    yield finding_of(reason, [*improved, *kept], passed)


def _stopped(case: Case) -> Iterator[Finding]:
    """A required experiment that did not pass, or requests that failed."""
    status: dict[str, Status] = {}
    for verdict in case.prior:  # of several results the one that did not pass speaks, whatever their order
        if status.get(verdict.experiment, Status.PASS) is Status.PASS:
            status[verdict.experiment] = verdict.status
    unmet = {name: status.get(name) for name in case.experiment.requires if status.get(name) is not Status.PASS}
    if unmet:
        seen = ", ".join(f"{name} {found.value if found else 'not measured'}" for name, found in unmet.items())
        yield Finding("requires-unmet", seen, "PASS")
    for run in case.runs.values():
        if count := sum(request.status == "failed" for sample in run.serving for request in sample.requests):
            yield Finding("failed-requests", f"{count} in arm {run.arm}, run {run.index}", "none")

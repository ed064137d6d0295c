"""Gate 0: the record is the one that was planned, and every arm computes the right thing before and after timing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise

from pytest_engram import schedule
from pytest_engram.gates.case import Case
from pytest_engram.gates.protocol import plan_hash
from pytest_engram.gates.reasons import Finding, of_problem
from pytest_engram.model import CorrectnessSample, Problem, RunRecord, Status

_WORST_FIRST = (Status.INVALID, Status.PASS, Status.FAIL, Status.NOT_MEASURED, Status.INCONCLUSIVE, Status.BLOCKED)
_EVERY_CASE = "every supported case in every arm, before and after timing"


def correctness(case: Case) -> Finding:
    """Gate 0: integrity of the record first, then broken contracts, then what is missing."""
    for check in (_protocol, _schedule, _broken, _problems, _missing, _storage):
        finding = next(check(case), None)
        if finding is not None:
            return finding
    samples = [sample for arm in case.arms for _, found in _moments(case.of(arm)) for sample in found]
    unsupported = sorted({sample.case for sample in samples if not sample.supported})
    passed = sum(sample.supported for sample in samples)
    tail = f"; not supported by a backend: {', '.join(unsupported)}" if unsupported else ""
    return Finding(
        reason="contract-kept", observed=f"{passed} cases passed in {len(case.arms)} arms{tail}",
        threshold=_EVERY_CASE, passed=case.candidates,
    )  # fmt: skip


def _protocol(case: Case) -> Iterator[Finding]:
    hashes = {plan_hash(case.plan), case.plan.protocol_hash}
    hashes |= {run.fingerprint["protocol"] for run in case.evidence.runs if "protocol" in run.fingerprint}
    if len(hashes) > 1:
        seen = " and ".join(sorted(one[:12] or "none" for one in hashes))
        yield Finding(reason="protocol-changed", observed=f"protocol hashes {seen}", threshold="one hash")


def _schedule(case: Case) -> Iterator[Finding]:
    """The stored schedule is the seed's; the runs are cells of it, once each and in its order."""
    plan = case.plan
    if not plan.schedule:
        return  # reaches INCONCLUSIVE at best, at gate 2
    fault = schedule.verify(plan.schedule, plan.experiment, plan.seed)
    if fault:
        yield Finding(reason="schedule-altered", observed=fault, threshold="the schedule that the seed gives")
    cells = {(run.index, run.block, run.arm) for run in plan.schedule}
    ran = [(run.index, run.block, run.arm) for run in case.evidence.runs]
    for cell in ran:
        if cell not in cells or ran.count(cell) > 1:
            yield Finding(reason="unscheduled-run", observed="run {}, block {}, arm {}".format(*cell))
    for before, after in pairwise(case.evidence.runs):
        if after.index < before.index or not _moment(before) <= _moment(after):
            observed = f"run {after.index} stands or started before run {before.index}"
            yield Finding(reason="schedule-altered", observed=observed, threshold="the order of the schedule")


def _moment(run: RunRecord) -> float:
    """Seconds since the epoch; NaN, which is in no order, for a time that cannot be read."""
    try:
        return datetime.fromisoformat(run.started_at.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return math.nan


def _broken(case: Case) -> Iterator[Finding]:
    for run in case.evidence.runs:
        for moment, samples in _moments([run]):
            for sample in samples:
                if sample.supported and not sample.passed:
                    observed = f"arm {run.arm}, run {run.index}, {moment} timing: {_place(sample)}"
                    yield Finding(reason="contract-broken", observed=observed, threshold=_EVERY_CASE)


def _place(sample: CorrectnessSample) -> str:
    at = [f"{name} {getattr(sample, name)}" for name in ("layer", "token", "head") if getattr(sample, name) is not None]
    where = f" at {', '.join(at)}" if at else ""
    values = f": expected {sample.expected}, seen {sample.seen}" if sample.expected is not None else ""
    return f"{sample.contract} {sample.case}{where}{values}{' (' + sample.detail + ')' if sample.detail else ''}"


def _problems(case: Case) -> Iterator[Finding]:
    """A crashed world, a killed rank, a machine that cannot: the worst one speaks for the experiment."""
    found: list[Problem] = [*case.evidence.problems, *(p for run in case.evidence.runs for p in run.problems)]
    found.sort(key=lambda problem: _WORST_FIRST.index(problem.status))
    yield from map(of_problem, found)


def _missing(case: Case) -> Iterator[Finding]:
    seen = {(arm, moment): _supported(found) for arm in case.arms for moment, found in _moments(case.of(arm))}
    everything = set().union(*seen.values())
    for (arm, moment), names in seen.items():
        if not names:
            observed = f"arm {arm}: no supported case {moment} timing"
            yield Finding(reason="no-correctness", observed=observed, threshold=_EVERY_CASE)
        elif names != everything:
            lacking = ", ".join(sorted(everything - names))
            observed = f"arm {arm}, {moment} timing, lacks or does not support: {lacking}"
            yield Finding(reason="cases-missing", observed=observed, threshold="the same cases everywhere")


def _storage(case: Case) -> Iterator[Finding]:
    """Where arms differ in grouping or backing: storage cases that passed, and replay cases at least asked for."""
    kinds = {(plan.backing, tuple(t.ranks for t in plan.tables)) for plan in case.plan.placements.values()}
    if len(kinds) < 2:
        return
    for arm in case.arms:
        samples = [sample for _, found in _moments(case.of(arm)) for sample in found]
        stored = any(sample.supported and re.search(r"\bS\d", sample.contract) for sample in samples)
        if not stored or not any(re.search(r"\bP5\b", sample.contract) for sample in samples):
            observed = f"arm {arm} has no {'replay (P5)' if stored else 'storage (S)'} case"
            yield Finding(reason="storage-not-checked", observed=observed, threshold="S and P5 cases in every arm")


def _moments(runs: Sequence[RunRecord]) -> Iterator[tuple[str, list[CorrectnessSample]]]:
    yield "before", [sample for run in runs for sample in run.correctness_before]
    yield "after", [sample for run in runs for sample in run.correctness_after]


def _supported(samples: Sequence[CorrectnessSample]) -> set[str]:
    return {sample.case for sample in samples if sample.supported}

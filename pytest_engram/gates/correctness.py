"""Gate 0: the record is the one that was planned, and every arm computes the right thing before and after timing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from pytest_engram import schedule
from pytest_engram.gates.comparison import Case
from pytest_engram.gates.reasons import Finding, of_problem
from pytest_engram.model import CorrectnessSample, Problem, RunRecord, Status

_WORST_FIRST = (Status.INVALID, Status.PASS, Status.FAIL, Status.NOT_MEASURED, Status.INCONCLUSIVE, Status.BLOCKED)
_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")  # as the runner writes it: order of text is order of time
_ENGINE_CASES = ("engine", "engine-edges")
_EVERY_CASE = "every supported case in every arm, before and after timing"


def correctness(case: Case) -> Iterator[Finding]:
    """Gate 0: integrity of the record first, then broken contracts, then what is missing."""
    for check in (_protocol, _schedule, _broken, _problems, _missing, _storage):
        yield from check(case)
    samples = [sample for _, _, sample in _samples(case.runs.values())]
    unsupported = sorted({sample.case for sample in samples if not sample.supported})
    tail = f"; not supported by a backend: {', '.join(unsupported)}" if unsupported else ""
    seen = f"{sum(sample.supported for sample in samples)} cases passed in {len(case.arms)} arms{tail}"
    yield Finding("contract-kept", seen, _EVERY_CASE, case.candidates)


def _protocol(case: Case) -> Iterator[Finding]:
    hashes = {schedule.plan_hash(case.plan), case.plan.protocol_hash}
    hashes |= {run.fingerprint["protocol"] for run in case.evidence.runs if "protocol" in run.fingerprint}
    if len(hashes) > 1:
        seen = " and ".join(sorted(one[:12] or "none" for one in hashes))
        yield Finding("protocol-changed", f"protocol hashes {seen}", "one hash")


def _schedule(case: Case) -> Iterator[Finding]:
    """The stored schedule is the seed's; the runs are cells of it, once each and in its order."""
    plan = case.plan
    if not plan.schedule:
        return  # reaches INCONCLUSIVE at best, at gate 2
    fault = schedule.verify(plan.schedule, plan.experiment, plan.seed)
    if fault:
        yield Finding("schedule-altered", fault, "the schedule that the seed gives")
    cells = {(run.index, run.block, run.arm) for run in plan.schedule}
    ran = [(run.index, run.block, run.arm) for run in case.evidence.runs]
    for cell in ran:
        if cell not in cells or ran.count(cell) > 1:
            yield Finding("unscheduled-run", "run {}, block {}, arm {}".format(*cell))
    for before, after in pairwise(case.evidence.runs):
        ordered = before.index <= after.index and before.started_at <= after.started_at
        if not ordered or not _UTC.fullmatch(after.started_at):
            seen = f"run {after.index} stands or started before run {before.index}"
            yield Finding("schedule-altered", seen, "the order of the schedule")


def _broken(case: Case) -> Iterator[Finding]:
    """A wrong row, also where it ended the schedule: neither what was not run then nor what else failed excuses it."""
    for run, moment, sample in _samples(case.evidence.runs):
        if sample.supported and not sample.passed:
            seen = f"arm {run.arm}, run {run.index}, {moment} timing: {explain(sample)}"
            yield Finding("contract-broken", seen, _EVERY_CASE)
    for problem in _all_problems(case):
        if problem.code == "stopped-after-correctness":
            yield Finding(problem.code, problem.message, _EVERY_CASE)


def explain(sample: CorrectnessSample) -> str:
    """One line for a person: contract line, case, token, head, layer, expected, seen, detail."""
    names = (name for name in ("token", "head", "layer") if getattr(sample, name) is not None)
    where = ", ".join(f"{name} {getattr(sample, name)}" for name in names)
    values = f"expected {sample.expected}, seen {sample.seen}" if sample.expected is not None else ""
    return f"{sample.contract} {sample.case}: " + "; ".join(part for part in (where, values, sample.detail) if part)


def _problems(case: Case) -> Iterator[Finding]:
    """A crashed world, a killed rank, a machine that cannot: the worst one speaks for the experiment."""
    yield from map(of_problem, sorted(_all_problems(case), key=lambda problem: _WORST_FIRST.index(problem.status)))


def _all_problems(case: Case) -> list[Problem]:
    return [*case.evidence.problems, *(problem for run in case.evidence.runs for problem in run.problems)]


def _missing(case: Case) -> Iterator[Finding]:
    """Every run has every case, before and after timing, once on every rank; the engine's own and H and L are there."""
    cells = [
        (f"arm {run.arm}, run {run.index}, {moment} timing", Counter(one.case for one in samples if one.supported))
        for run in case.runs.values()
        for moment, samples in (("before", run.correctness_before), ("after", run.correctness_after))
    ]
    cells += [(f"arm {arm}", Counter()) for arm in case.arms if not case.of(arm)]
    everything = set(_ENGINE_CASES).union(*(times for _, times in cells))
    for where, times in cells:
        if not times:
            yield Finding("no-correctness", f"{where}: no supported case", _EVERY_CASE)
        lacking = sorted(name for name in everything if times[name] != case.experiment.ranks)
        if lacking:
            seen = f"{where}, not once on every rank: {', '.join(lacking)}"
            yield Finding("cases-missing", seen, "the same supported cases everywhere")
    lines = " ".join(sample.contract for _, _, sample in _samples(case.runs.values()) if sample.supported)
    for letter in "HL":
        if not re.search(rf"\b{letter}\d", lines):
            yield Finding("cases-missing", f"no supported case of a contract line {letter}", "H and L lines")


def _storage(case: Case) -> Iterator[Finding]:
    """Where storage stands in question: storage cases that passed, and replay cases at least asked for."""
    for arm in case.arms if case.plan.storage_in_question else ():
        samples = [sample for _, _, sample in _samples(case.of(arm))]
        stored = any(sample.supported and re.search(r"\bS\d", sample.contract) for sample in samples)
        if not stored or not any(re.search(r"\bP5\b", sample.contract) for sample in samples):
            seen = f"arm {arm} has no {'replay (P5)' if stored else 'storage (S)'} case"
            yield Finding("storage-not-checked", seen, "S and P5 cases in every arm")


def _samples(runs: Iterable[RunRecord]) -> Iterator[tuple[RunRecord, str, CorrectnessSample]]:
    for run in runs:
        yield from ((run, "before", sample) for sample in run.correctness_before)
        yield from ((run, "after", sample) for sample in run.correctness_after)

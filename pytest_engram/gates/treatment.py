"""Gate 1: by the kernel's and the launches' own answer, the arms differ as the experiment says and in nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pytest_engram.gates.case import Case
from pytest_engram.gates.placement import placement
from pytest_engram.gates.reasons import Finding
from pytest_engram.model import OverlapSample, RunRecord, Timeline
from pytest_engram.schedule import base_arm

Launches = dict[tuple[int, int, int], frozenset[int]]  # (rank, layer, rows) -> grids that ran


def treatment(case: Case) -> Finding:
    """Gate 1: conditions first (fingerprints, grids), then the treatment of the experiment's variable."""
    finding = next(_conditions(case), None)
    return finding or _TREATMENTS[case.experiment.variable](case)


def _conditions(case: Case) -> Iterator[Finding]:
    prints = [(run.arm, run.fingerprint) for run in case.runs.values()]
    if not prints or not all(found for _, found in prints):
        yield Finding(reason="no-fingerprint", observed="a run without fingerprint", threshold="one for every run")
    first_arm, first = prints[0] if prints else ("", {})
    for arm, found in prints:
        for key in sorted(first.keys() | found.keys()):
            if first.get(key) != found.get(key) and not _declared(case, key):
                observed = f"{key}: {first.get(key)} in {first_arm}, {found.get(key)} in {arm}"
                yield Finding(reason="undeclared-difference", observed=observed, threshold="only the variable differs")
    if case.experiment.variable in ("policy", "submission"):
        yield from _same_grids(case)


def _declared(case: Case, key: str) -> bool:
    """Keys named after the variable may differ; so may the sharing groups where the placements regroup."""
    variable, name = case.experiment.variable, key.partition("@")[0]
    if variable == "policy" and name == "groups":
        return len({tuple(t.ranks for t in plan.tables) for plan in case.plan.placements.values()}) > 1
    return name == variable or name.startswith(f"{variable}.")


def _same_grids(case: Case) -> Iterator[Finding]:
    base = _launches(case.of("A"))
    for arm in case.candidates:
        for key, grids in _launches(case.of(arm)).items():
            if key in base and grids != base[key]:
                observed = f"grid of layer {key[1]}, {key[2]} rows: {_set(base[key])} in A, {_set(grids)} in {arm}"
                yield Finding(reason="undeclared-difference", observed=observed, threshold="the same grid in every arm")


def _submission(case: Case) -> Finding:
    for (_, name), run in sorted(case.runs.items()):
        asked = case.experiment.arms[base_arm(name)]["submission"]
        fault = next(_late(run, asked), None) if asked == "early" else next(_ahead(run), None)
        if not all(sample.timelines for sample in run.overlap) or _missing_rank(case, run):
            return Finding(reason="no-timelines", observed=f"arm {name}, run {run.index}", threshold="on every rank")
        if fault:
            observed = f"arm {name}, run {run.index}: {fault}"
            return Finding(reason="submission-not-as-asked", observed=observed, threshold=f"submission {asked}")
    arms = {arm: settings["submission"] for arm, settings in case.experiment.arms.items()}
    steps = sum(len(sample.timelines) for run in case.runs.values() for sample in run.overlap)
    observed = f"{', '.join(f'{arm} {how}' for arm, how in arms.items())}, in {steps} marked steps"
    return Finding(
        reason="treatment-delivered", observed=observed, threshold="every lookup as its arm asks",
        passed=case.candidates,
    )  # fmt: skip


def _missing_rank(case: Case, run: RunRecord) -> bool:
    return {sample.rank for sample in run.overlap} != set(range(case.experiment.ranks))


def _late(run: RunRecord, asked: str) -> Iterator[str]:
    """Early: all lookups are submitted before the first consumer waits and before their layers' compute starts."""
    for sample, line in _marked(run):
        first_wait = min(mark.wait_before for mark in line.lookups)
        for mark in line.lookups:
            starts = [s.start for s in line.spans if s.name == "compute" and s.layer == mark.layer]
            if mark.submit > min([first_wait, *starts]) + sample.resolution_ns:
                yield f"rank {line.rank}, step {line.step}: layer {mark.layer} is not submitted {asked}"


def _ahead(run: RunRecord) -> Iterator[str]:
    """At consumption: a lookup is submitted after the compute of every layer before its own, no later than its wait."""
    for sample, line in _marked(run):
        for mark in line.lookups:
            ends = [s.end for s in line.spans if s.name == "compute" and s.layer < mark.layer]
            earliest = max(ends, default=mark.wait_before)
            if not earliest - sample.resolution_ns <= mark.submit <= mark.wait_after:
                yield f"rank {line.rank}, step {line.step}: layer {mark.layer} is submitted outside its wait"


def _marked(run: RunRecord) -> Iterator[tuple[OverlapSample, Timeline]]:
    return ((sample, line) for sample in run.overlap for line in sample.timelines if line.lookups)


def _cap(case: Case) -> Finding:
    """A cap is a treatment only where the actual grid changed; candidates without a change drop out."""
    base, treated = _launches(case.of("A")), []
    for arm in case.candidates:
        found, cap = _launches(case.of(arm)), case.experiment.arms[arm]["cap"]
        if not found or not base:
            return Finding(reason="no-timelines", observed=f"arm {arm if base else 'A'}", threshold="in every arm")
        largest = max(max(grids) for grids in found.values())
        if cap is not None and largest > cap:
            return Finding(reason="cap-not-obeyed", observed=f"arm {arm}: {largest} programs", threshold=f"≤ {cap}")
        if found != base:
            treated.append(arm)
    grids = {arm: frozenset().union(*_launches(case.of(arm)).values()) for arm in ("A", *case.candidates)}
    observed = "grids: " + ", ".join(f"{arm} {_set(found)}" for arm, found in grids.items())
    untreated = [f"{arm}: no treatment, the same grid as A" for arm in case.candidates if arm not in treated]
    reason = "treatment-delivered" if treated else "no-treatment"
    return Finding(
        reason=reason, observed=observed, threshold="a grid other than A's", passed=tuple(treated),
        notes=tuple(untreated),
    )  # fmt: skip


def _launches(runs: list[RunRecord]) -> Launches:
    found: dict[tuple[int, int, int], set[int]] = {}
    for run in runs:
        for _, line in _marked(run):
            for mark in line.lookups:
                found.setdefault((line.rank, mark.layer, mark.rows), set()).add(mark.grid)
    return {key: frozenset(grids) for key, grids in found.items()}


def _backend(case: Case) -> Finding:
    base = _receipt(case.of("A"))
    for arm in case.candidates:
        found = _receipt(case.of(arm))
        if not base or not found:
            return Finding(reason="no-receipts", observed=f"arm {arm if base else 'A'}", threshold="backend.* receipts")
        if found == base:
            return Finding(reason="identical-code", observed=f"{arm}: {_words(found)}", threshold="another receipt")
    changed = [f"{k} {base.get(k)} → {v}" for k, v in found.items() if base.get(k) != v]
    return Finding(
        reason="treatment-delivered", observed="; ".join(changed)[:300], threshold="receipts that differ",
        passed=case.candidates,
    )  # fmt: skip


def _receipt(runs: list[RunRecord]) -> dict[str, str]:
    return {k: v for run in runs[:1] for k, v in run.fingerprint.items() if k.startswith("backend.")}


def _words(receipt: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in receipt.items())[:200]


def _set(grids: frozenset[int]) -> str:
    return "/".join(map(str, sorted(grids)))


_TREATMENTS: dict[str, Callable[[Case], Finding]] = {
    "policy": placement,
    "submission": _submission,
    "cap": _cap,
    "backend": _backend,
}

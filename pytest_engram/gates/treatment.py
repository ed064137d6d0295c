"""Gate 1: by the kernel's and the launches' own answer, the arms differ as the experiment says and in nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_engram.gates.comparison import Case
from pytest_engram.gates.placement import placement
from pytest_engram.gates.reasons import Finding
from pytest_engram.model import OverlapSample, RunRecord, Timeline
from pytest_engram.schedule import base_arm

Launches = dict[tuple[int, int, int], set[int]]  # (rank, layer, rows) -> grids that ran


def treatment(case: Case) -> Iterator[Finding]:
    """Gate 1: conditions first (fingerprints, grids), then the treatment of the experiment's variable."""
    yield from _conditions(case)
    yield from _TREATMENTS[case.experiment.variable](case)


def _conditions(case: Case) -> Iterator[Finding]:
    runs = list(case.runs.values())
    if not runs or not all(run.fingerprint for run in runs):
        yield Finding("no-fingerprint", "a run without fingerprint", "one for every run")
    for run in runs:
        first, found = runs[0].fingerprint, run.fingerprint
        for key in sorted(first.keys() | found.keys()):
            if first.get(key) != found.get(key) and not _declared(case, key):
                seen = f"{key}: {first.get(key)} in {runs[0].arm}, {found.get(key)} in {run.arm}"
                yield Finding("undeclared-difference", seen, "only the variable differs")
    base = _launches(case.of("A"))
    for arm in case.candidates if case.experiment.variable in ("policy", "submission") else ():
        for shape, grids in _launches(case.of(arm)).items():
            if grids != base.get(shape, grids):
                _, layer, rows = shape
                seen = f"grid of layer {layer}, {rows} rows: {_words(base[shape])} in A, {_words(grids)} in {arm}"
                yield Finding("undeclared-difference", seen, "the same grid in every arm")


def _declared(case: Case, key: str) -> bool:
    """Keys named after the variable may differ; so may the sharing groups where the placements regroup."""
    variable, name = case.experiment.variable, key.partition("@")[0]
    if variable == "policy" and name == "groups":
        return len({tuple(t.ranks for t in plan.tables) for plan in case.plan.placements.values()}) > 1
    return name == variable or name.startswith(f"{variable}.")


def _submission(case: Case) -> Iterator[Finding]:
    arms = {arm: settings["submission"] for arm, settings in case.experiment.arms.items()}
    for run in case.runs.values():
        where, asked = f"arm {run.arm}, run {run.index}", arms[base_arm(run.arm)]
        ranks = {sample.rank for sample in run.overlap if sample.timelines}
        if ranks != set(range(case.experiment.ranks)):
            yield Finding("no-timelines", where, "on every rank")
        for fault in _misplaced(run, asked):
            yield Finding("submission-not-as-asked", f"{where}, {fault}", f"submission {asked}")
    steps = sum(len(sample.timelines) for run in case.runs.values() for sample in run.overlap)
    seen = f"{', '.join(f'{arm} {how}' for arm, how in arms.items())}, in {steps} marked steps"
    yield Finding("treatment-delivered", seen, "every lookup as its arm asks", case.candidates)


def _misplaced(run: RunRecord, asked: str) -> Iterator[str]:
    """Lookups that were not submitted as asked.

    Early: before the first consumer waits and before the own layer's compute starts.  At consumption: after the
    compute of every earlier layer and no later than the own wait.
    """
    for sample, line in _marked(run):
        first_wait = min(mark.wait_before for mark in line.lookups)
        compute = [span for span in line.spans if span.name == "compute"]
        for mark in line.lookups:
            starts = [span.start for span in compute if span.layer == mark.layer]
            ends = [span.end for span in compute if span.layer < mark.layer]
            late = mark.submit - sample.resolution_ns > min([first_wait, *starts])
            ahead = mark.submit + sample.resolution_ns < max(ends, default=mark.wait_before)
            if late if asked == "early" else ahead or mark.submit > mark.wait_after:
                yield f"rank {line.rank}, step {line.step}: layer {mark.layer} is submitted elsewhere"


def _marked(run: RunRecord) -> Iterator[tuple[OverlapSample, Timeline]]:
    return ((sample, line) for sample in run.overlap for line in sample.timelines if line.lookups)


def _cap(case: Case) -> Iterator[Finding]:
    """A cap is a treatment only where the actual grid changed; candidates without a change drop out."""
    launches = {arm: _launches(case.of(arm)) for arm in ("A", *case.candidates)}
    grids = {arm: set().union(*found.values()) for arm, found in launches.items()}
    for arm, ran in grids.items():
        cap = case.experiment.arms[arm]["cap"]
        if not ran:
            yield Finding("no-timelines", f"arm {arm}", "in every arm")
        if cap is not None and max(ran) > cap:
            yield Finding("cap-not-obeyed", f"arm {arm}: {max(ran)} programs", f"≤ {cap}")
    treated = tuple(arm for arm in case.candidates if launches[arm] != launches["A"])
    untreated = [f"{arm}: no treatment, the same grid as A" for arm in case.candidates if arm not in treated]
    seen = "grids: " + ", ".join(f"{arm} {_words(ran)}" for arm, ran in grids.items())
    reason = "treatment-delivered" if treated else "no-treatment"
    yield Finding(reason, seen, "a grid other than A's", treated, notes=tuple(untreated))


def _launches(runs: list[RunRecord]) -> Launches:
    found: Launches = {}
    for run in runs:
        for _, line in _marked(run):
            for mark in line.lookups:
                found.setdefault((line.rank, mark.layer, mark.rows), set()).add(mark.grid)
    return found


def _backend(case: Case) -> Iterator[Finding]:
    base, changed = _receipt(case.of("A")), []
    for arm in ("A", *case.candidates):
        found = _receipt(case.of(arm))
        if not found:
            yield Finding("no-receipts", f"arm {arm}", "backend.* receipts")
        if arm != "A" and found == base:
            words = ", ".join(f"{key} {value}" for key, value in found.items())
            yield Finding("identical-code", f"{arm}: {words[:200]}", "another receipt")
        changed += [f"{key} {base.get(key)} → {value}" for key, value in found.items() if base.get(key) != value]
    yield Finding("treatment-delivered", "; ".join(changed)[:300], "receipts that differ", case.candidates)


def _receipt(runs: list[RunRecord]) -> dict[str, str]:
    return {k: v for run in runs[:1] for k, v in run.fingerprint.items() if k.startswith("backend.")}


def _words(grids: Iterable[int]) -> str:
    return "/".join(map(str, sorted(grids)))


_TREATMENTS = {"policy": placement, "submission": _submission, "cap": _cap, "backend": _backend}

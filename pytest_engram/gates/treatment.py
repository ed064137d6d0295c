"""Gate 1: by the kernel's and the launches' own answer, the arms differ as the experiment says and in nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

from pytest_engram.experiment_rules import places, settings
from pytest_engram.gates.comparison import Case, marked_steps
from pytest_engram.gates.placement import as_held, huge_pages, placement
from pytest_engram.gates.planned import planned
from pytest_engram.gates.reasons import Finding
from pytest_engram.model import RunRecord, Timeline
from pytest_engram.schedule import TWIN, base_arm


def treatment(case: Case) -> Iterator[Finding]:
    """Gate 1: what was planned, conditions (fingerprints, grids, huge pages), then the treatment of the variable."""
    yield from planned(case)
    yield from _conditions(case)
    yield from huge_pages(case)
    yield from _replayed(case)
    yield from _TREATMENTS[case.experiment.variable](case)


def _conditions(case: Case) -> Iterator[Finding]:
    runs = list(case.runs.values())
    if not runs or not all(run.fingerprint for run in runs):
        yield Finding("no-fingerprint", "a run without fingerprint", "one for every run")
    for run in runs:
        kin = next(one for one in runs if base_arm(one.arm) == base_arm(run.arm))  # alike in the variable, too
        for key in sorted({*runs[0].fingerprint, *kin.fingerprint, *run.fingerprint}):
            first = kin if _declared(case, key) else runs[0]
            before, found = first.fingerprint.get(key), run.fingerprint.get(key)
            if before != found:
                seen = f"{key}: {before} in {first.arm}, run {first.index}, {found} in {run.arm}, run {run.index}"
                yield Finding("undeclared-difference", seen, "only the variable differs")
    base, variable = _by_layer(case.launches("A")), case.experiment.variable
    for arm in (TWIN, *(() if variable == "backend" else case.candidates)):
        words = "{} rows" if variable == "cap" and arm != TWIN else "{} rows in a grid of {}"
        for place, ran in _by_layer(case.launches(arm)).items():
            pair = base.get(place, ran), ran
            before, after = (" or ".join(sorted({words.format(*one) for one in launches})) for launches in pair)
            if before != after:
                seen = f"layer {place[1]}: {before} in A, {after} in {arm}"
                yield Finding("undeclared-difference", seen, "the same launches in every arm")


def _declared(case: Case, key: str) -> bool:
    """Arms may differ in keys named after the variable, and in the sharing groups where the placements regroup."""
    variable, name = case.experiment.variable, key.partition("@")[0]
    if variable == "policy" and name == "groups":
        return len({tuple(t.ranks for t in plan.tables) for plan in case.plan.placements.values()}) > 1
    return name == variable or name.startswith(f"{variable}.")


def _submission(case: Case) -> Iterator[Finding]:
    """Every lookup where its arm asks, in marked steps of every batch size; treated where the workload's own differ."""
    asked: dict[str, dict[int, str]] = {arm: {} for arm in case.arms}
    for run in case.runs.values():
        chosen, where = settings(case.experiment, run.arm), f"arm {run.arm}, run {run.index}"
        ranks = {sample.rank for sample in run.overlap if sample.timelines}
        if ranks != set(range(case.experiment.ranks)):
            yield Finding("no-timelines", where, "on every rank")
        for resolution, line in (*marked_steps([run]), *_swept(run)):
            asked[run.arm][line.tokens] = way = submission_of(chosen, line.tokens)
            for layer in _misplaced(line, resolution, way):
                seen = f"{where}, rank {line.rank}, step {line.step}: layer {layer} is submitted elsewhere"
                yield Finding("submission-not-as-asked", seen, f"submission {way} of {line.tokens} tokens")
    lines = [(arm, tick, line) for arm in case.candidates for tick, line in marked_steps(case.of(arm))]
    other = {arm for arm, tick, line in lines for _ in _misplaced(line, tick, asked["A"].get(line.tokens, ""))}
    moved = tuple(arm for arm in case.candidates if arm in other)  # its marks could not be A's
    words = (f"{arm} {_ways(asked[arm])}" for arm in ("A", *case.candidates))
    steps = sum(len(sample.timelines) for run in case.runs.values() for sample in run.overlap)
    seen = f"{', '.join(words)}, in {steps} marked steps"
    yield Finding("treatment-delivered" if moved else "no-treatment", seen, "every lookup as its arm asks", moved)


def submission_of(chosen: dict[str, Any], tokens: int) -> str:
    """Where a batch's lookups are to be submitted: an engine may turn to its consumers above a number of tokens."""
    inline = chosen["inline_above"] is not None and tokens > chosen["inline_above"]
    return "at_consumption" if inline else str(chosen["submission"])


def _ways(asked: dict[int, str]) -> str:
    """``early``, or ``early at 1/64 tokens, at_consumption at 2048 tokens``."""
    sizes = {way: [str(size) for size in sorted(asked) if asked[size] == way] for way in sorted({*asked.values()})}
    return ", ".join(sizes) if len(sizes) < 2 else ", ".join(f"{w} at {'/'.join(s)} tokens" for w, s in sizes.items())


def _misplaced(line: Timeline, resolution: int, asked: str) -> Iterator[int]:
    """Layers whose lookups were not submitted as asked.

    Early: before the first consumer waits and before the own layer's compute starts.  At consumption: after the
    compute of every earlier layer and no later than the own wait.
    """
    first_wait = min(mark.wait_before for mark in line.lookups)
    compute = [span for span in line.spans if span.name == "compute"]
    for mark in line.lookups:
        starts = [span.start for span in compute if span.layer == mark.layer]
        ends = [span.end for span in compute if span.layer < mark.layer]
        late = mark.submit - resolution > min([first_wait, *starts])
        ahead = mark.submit + resolution < max(ends, default=mark.wait_before)
        if late if asked == "early" else ahead or mark.submit > mark.wait_after:
            yield mark.layer


def _swept(run: RunRecord) -> Iterator[tuple[int, Timeline]]:
    """(timer's resolution, marked step) at the other sizes: one step each."""
    resolution = {sample.rank: sample.resolution_ns for sample in run.overlap}
    lines = (sample.timeline for sample in run.sweep if sample.timeline is not None and sample.timeline.lookups)
    return ((resolution.get(line.rank, 0), line) for line in lines)


def _wait(case: Case) -> Iterator[Finding]:
    """A wait for the stream ends after all that was submitted before it; one for the layer need not, and once did not.

    Where it always did, both arms ran alike.
    """
    ahead = dict.fromkeys(case.arms, 0)
    for run in case.runs.values():
        lines = [*marked_steps([run])]
        if not lines:
            yield Finding("no-timelines", f"arm {run.arm}, run {run.index}", "in every arm")
        early = [line for resolution, line in lines if _went_on(line, resolution)]
        if early and settings(case.experiment, run.arm)["wait"] == "stream":
            seen = f"arm {run.arm}, run {run.index}, rank {early[0].rank}, step {early[0].step}"
            yield Finding("wait-not-as-asked", f"{seen}: a consumer went on before the stream was done", "wait stream")
        ahead[run.arm] += len(early)
    apart = {arm for arm in ahead if (ahead[arm] > 0) != (ahead["A"] > 0)}
    counts = ", ".join(f"{arm} {count}" for arm, count in ahead.items())
    seen = f"marked steps in which a consumer went on ahead of the stream: {counts}"
    passed = tuple(arm for arm in case.candidates if arm in apart)
    reason = "treatment-delivered" if passed else "no-treatment"
    yield Finding(reason, seen, "some with layer, none with stream", passed)


def _went_on(line: Timeline, resolution: int) -> bool:
    return any(
        mark.wait_after + resolution < other.done
        for mark in line.lookups
        for other in line.lookups
        if other.submit < mark.wait_before
    )


def _streams(case: Case) -> Iterator[Finding]:
    """Only says whether lookups overlapped: gate 2 voids whatever did not run on one stream."""
    counts = {arm: [_overlapping(line) for _, line in marked_steps(case.of(arm))] for arm in case.arms}
    seen = ", ".join(f"{arm} in {sum(found)} of {len(found)}" for arm, found in counts.items())
    yield Finding("treatment-delivered", f"marked steps with overlapping lookups: {seen}", "", case.candidates)


def _overlapping(line: Timeline) -> bool:
    spans = sorted((mark.start, mark.done) for mark in line.lookups)
    return any(after[0] < before[1] for before, after in pairwise(spans))


def _replayed(case: Case) -> Iterator[Finding]:
    """Each run's own count of replayed steps: none without graphs, some with them; an engine without them has none."""
    for run in case.runs.values():
        replays, asked = run.drift.get("graph_replays"), settings(case.experiment, run.arm)["graph"]
        if ((replays or 0) > 0) != asked or (replays is None and case.experiment.variable == "graph"):
            seen = "no count of replays" if replays is None else f"{replays:.0f} replayed steps"
            yield Finding("graph-not-as-asked", f"arm {run.arm}, run {run.index}: {seen}", f"graph {asked}".lower())


def _graph(case: Case) -> Iterator[Finding]:
    counts = {arm: sum(run.drift.get("graph_replays", 0) for run in case.of(arm)) for arm in case.arms}
    seen = ", ".join(f"{arm} {count:.0f}" for arm, count in counts.items())
    yield Finding("treatment-delivered", f"replayed steps: {seen}", "some with graphs, none without", case.candidates)


def _cap(case: Case) -> Iterator[Finding]:
    """A cap is a treatment only where the actual grid changed; of candidates that ran alike only the first stays in."""
    launches = {arm: case.launches(arm) for arm in ("A", *case.candidates)}
    grids = {arm: {grid for *_, grid in found} for arm, found in launches.items()}
    for arm, ran in grids.items():
        cap = case.experiment.arms[arm]["cap"]
        if {rank for rank, *_ in launches[arm]} != {*range(case.experiment.ranks)}:
            yield Finding("no-timelines", f"arm {arm}", "on every rank")
        if cap is not None and max(ran) > cap:
            yield Finding("cap-not-obeyed", f"arm {arm}: {max(ran)} programs", f"≤ {cap}")
    like = {arm: next(other for other in launches if launches[other] == found) for arm, found in launches.items()}
    treated = tuple(arm for arm in case.candidates if like[arm] == arm)
    untreated = [f"{arm}: no treatment, the same grid as {like[arm]}" for arm in case.candidates if arm not in treated]
    seen = "grids: " + ", ".join(f"{arm} {'/'.join(map(str, sorted(ran)))}" for arm, ran in grids.items())
    reason = "treatment-delivered" if treated else "no-treatment"
    yield Finding(reason, seen, "a grid of its own", treated, notes=tuple(untreated))


def _by_layer(launches: Collection[tuple[int, ...]]) -> dict[tuple[int, ...], set[tuple[int, ...]]]:
    """(rank, layer) -> (rows, grid) of what ran."""
    return {place[:2]: {one[2:] for one in launches if one[:2] == place[:2]} for place in launches}


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
    if places(case.experiment):
        yield from placement(case)
    else:
        if case.experiment.unit == "allocation" and settings(case.experiment, "A")["placement_by"] == "mount":
            yield from as_held(case)  # each build allocates, and one that evades the mount changes the pages, too
        yield Finding("treatment-delivered", "; ".join(changed)[:300], "receipts that differ", case.candidates)


def _receipt(runs: list[RunRecord]) -> dict[str, str]:
    return {k: v for run in runs[:1] for k, v in run.fingerprint.items() if k.startswith("backend.")}


_TREATMENTS = {
    "policy": placement, "submission": _submission, "inline_above": _submission, "wait": _wait, "streams": _streams,
    "graph": _graph, "cap": _cap, "backend": _backend,
}  # fmt: skip

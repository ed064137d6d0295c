"""Are a run's samples what the plan ordered: every rank, batch, step and request, once and alike in all runs?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_engram.gates.comparison import Case
from pytest_engram.gates.reasons import Finding
from pytest_engram.model import OverlapSample, RequestRecord, RunRecord, ServingSample, SweepSample, Timeline

Lengths = dict[tuple[int, float], int]  # (rank, arrival) -> tokens of the answer
_COARSEST_NS = 1_000_000  # a timer that is no finer excuses every contradiction of the marks


def planned(case: Case) -> Iterator[Finding]:
    """A rate over other steps, or a tail over other requests, than those that were ordered compares nothing."""
    runs = list(case.runs.values())
    loads = [(one.rank, q) for run in runs for one in run.serving for q in one.requests if q.status == "ok"]
    lengths = {(rank, q.arrival_ms): q.output_tokens for rank, q in loads}
    for run in runs:
        faults = [seen for wrong, seen in _faults(case, run, lengths) if wrong]
        faults += ["other bytes or requests than the first run"] if _fixed(run) != _fixed(runs[0]) else []
        if faults:
            seen = f"arm {run.arm}, run {run.index}: {faults[0]}"
            yield Finding("samples-not-as-planned", seen, "the plan's, on every rank")


def _fixed(run: RunRecord) -> list[object]:
    """What no arm changes: the bytes of the marked steps, the arrivals and the lengths of their prompts."""
    read = [(one.rank, one.source_bytes, one.staging_bytes, one.distinct_bytes) for one in run.overlap]
    return [read, [(one.rank, sorted((q.arrival_ms, q.prompt_tokens) for q in one.requests)) for one in run.serving]]


def _ended(length: int | None, request: RequestRecord) -> bool:
    """Whether a request that ended well has all its tokens, as many as in every run, each at a time that can be."""
    times = (-1.0 if request.ttft_ms is None else request.ttft_ms, *request.itl_ms)
    whole = request.output_tokens == length == len(times) and all(0 <= ms < math.inf for ms in times)
    return whole or request.status != "ok"


def _faults(case: Case, run: RunRecord, lengths: Lengths) -> Iterator[tuple[bool, str]]:
    """(whether it is wrong, what was seen)."""
    work, ranks, load = case.experiment.workload, [*range(case.experiment.ranks)], case.experiment.serving
    for name, wanted in (("overlap", ranks), ("compute", ranks), ("serving", ranks if load else [])):
        found = sorted(sample.rank for sample in getattr(run, name))
        yield found != wanted, f"{name} samples of ranks {found}"
    for one in run.overlap:
        yield from ((wrong, f"rank {one.rank}: {seen}") for wrong, seen in _marked(case, one))
    for plain in run.compute:
        series = [plain.step_ns, plain.main_ns, plain.communication_ns or plain.step_ns]
        yield plain.tokens != work.tokens, f"rank {plain.rank}: unmarked steps of {plain.tokens} tokens"
        yield {*map(len, series)} != {work.steps}, f"rank {plain.rank}: {len(plain.step_ns)} unmarked steps"
        timed = all(0 < ns < math.inf for ns in (*plain.step_ns, *plain.main_ns))
        yield not timed, f"rank {plain.rank}: a step that took no time"
    for served in run.serving:
        yield from ((wrong, f"rank {served.rank}: {seen}") for wrong, seen in _served(case, served, lengths))
    yield from _swept(case, run.sweep)
    for key, value in run.drift.items():
        yield not -math.inf < value < math.inf or (key.endswith("link_bytes_per_s") and value <= 0), f"{key} of {value}"


def _marked(case: Case, one: OverlapSample) -> Iterator[tuple[bool, str]]:
    work, distinct = case.experiment.workload, one.distinct_bytes
    yield one.state != work.reuse, f"{one.state} rows"
    yield not 1 <= one.resolution_ns <= _COARSEST_NS, f"a timer of {one.resolution_ns} ns"
    read = one.source_bytes if distinct is None else distinct
    yield not 0 < read <= one.source_bytes, f"{read} distinct of {one.source_bytes} bytes read"
    steps = {line.step for line in one.timelines}  # none at all is an absence, which later gates name
    yield bool(steps) and not len(steps) == len(one.timelines) == work.steps, f"{len(steps)} marked steps"
    wrong = [line.step for line in one.timelines if not _whole(case, line, one.rank, work.tokens)]
    yield bool(wrong), f"marked steps {wrong[:3]} of other tokens or without a layer's lookup"


def _whole(case: Case, line: Timeline, rank: int, tokens: int) -> bool:
    """A marked step of this batch with one lookup for every Engram layer."""
    layers = tuple(sorted(mark.layer for mark in line.lookups))
    return (line.rank, line.tokens, layers) == (rank, tokens, case.experiment.workload.engram_layers)


def _served(case: Case, served: ServingSample, lengths: Lengths) -> Iterator[tuple[bool, str]]:
    """Every planned arrival once, at the planned rate and limits, for at least as long as requests came."""
    load, arrivals = case.experiment.serving, {request.arrival_ms for request in served.requests}
    if load is not None:
        once = len(served.requests) == len(arrivals) == load.requests
        whole = all(_ended(lengths.get((served.rank, q.arrival_ms)), q) for q in served.requests)
        yield not whole, "a request that ended well without all its tokens, or at no possible time"
        yield not once, f"{len(served.requests)} requests, {len(arrivals)} arrivals of {load.requests}"
        yield (served.slo, served.rate) != (load.slo, load.rate), f"{served.rate:g}/s under {served.slo}"
        yield not max(arrivals, default=0) / 1e3 <= served.duration_s < math.inf, f"a load of {served.duration_s:g} s"


def _swept(case: Case, sweep: tuple[SweepSample, ...]) -> Iterator[tuple[bool, str]]:
    for tokens, peers in sorted({(one.tokens, one.peers) for one in sweep}):
        found = [one for one in sweep if (one.tokens, one.peers) == (tokens, peers)]
        where = f"sweep of {tokens} tokens, {peers} at work"
        yield {one.rank for one in found} != {*range(peers)}, f"{where}: a rank is missing"
        lines = [(one.timeline, one.rank) for one in found if one.timeline is not None]
        yield not all(_whole(case, line, rank, tokens) for line, rank in lines), f"{where}: other marks"
        yield not all(one.source_bytes > 0 for one in found), f"{where}: no bytes read"

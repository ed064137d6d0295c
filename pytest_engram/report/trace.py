"""Timelines as Chrome trace events, and back: what one step did, for the eye.  Traces explain; they never feed a gate.

What is written opens in Perfetto and chrome://tracing.  Read are that, traces of ``torch.profiler`` and the marks of
:mod:`pytest_engram.probe`; ``names`` says what lookups and waits are called in the user's engine.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from statistics import median
from types import SimpleNamespace as Slice
from typing import Any

from pytest_engram import codec, probe
from pytest_engram.errors import UsageError
from pytest_engram.model import LookupMark, Timeline
from pytest_engram.queueing import queue_report
from pytest_engram.report.records import Result

MOST = 200  # timelines in one written trace
TOLERANCE_NS = 2_000  # profilers align the clocks of host and device to about a microsecond
MARKS = ("hash_ready", "submit", "start", "done", "wait_before", "wait_after")
HOST, GPU = "runtime|driver", "kernel|gpu_mem"  # categories of events: launches, and what they launch
# Regular expressions for kernels that look up and that hash, for the lookups' stream, for waits (a slice, the first
# kernel that reads the rows, or the host's call before that kernel) and for a probe's marks; the layers of one step.
NAMES = {
    "lookup": "engram_lookup_kernel|^lookup_kernel|^lookup layer", "hash": "hash_ids_kernel|^hash", "stream": "",
    "wait": "StreamWaitEvent|^wait layer", "layers": "1,14", **{name: name.split("_")[-1] + "$" for name in MARKS},
}  # fmt: skip


def write(path: Path, results: Iterable[Result]) -> str:
    """Write the first marked step of every rank of every run, each from its own begin; returns what was written."""
    found = [
        (f"{result.experiment} run {run.index} arm {run.arm} rank {sample.rank}", sample.timelines[0])
        for result in results if result.evidence is not None
        for run in result.evidence.runs for sample in run.overlap if sample.timelines
    ]  # fmt: skip
    events = [event for pid, (title, line) in enumerate(found[:MOST], 1) for event in trace_events(pid, title, line)]
    codec.write_atomic(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, allow_nan=False).encode())
    return f"{path}: {len(found[:MOST])} timelines, {len(found[MOST:])} left out; a trace explains, it feeds no gate"


def trace_events(pid: int, title: str, line: Timeline) -> Iterator[dict[str, Any]]:
    """One timeline in µs from its begin, as process ``pid`` with a thread per stream; arguments hold exact ns."""

    def event(phase: str, thread: int, name: str, at: int, **more: Any) -> dict[str, Any]:
        return {"ph": phase, "pid": pid, "tid": thread, "name": name, "ts": (at - line.begin) / 1000, **more}

    def piece(thread: int, name: str, start: int, end: int, cat: str = "step", **args: Any) -> dict[str, Any]:
        return event("X", thread, name, start, dur=(end - start) / 1000, cat=cat, args=args)

    for thread, name in enumerate((title, "main stream", "prefetch stream", "consumer waits")):
        yield event("M", thread, "thread_name" if thread else "process_name", line.begin, args={"name": name})
    yield piece(1, f"step {line.step}", line.begin, line.end, tokens=line.tokens)
    for ready in {mark.hash_ready for mark in line.lookups}:
        yield piece(1, "hash", line.begin, ready, "kernel")
    for span in line.spans:
        yield piece(1, f"{span.name} layer {span.layer}", span.start, span.end)
    for number, mark in enumerate(sorted(line.lookups, key=lambda mark: mark.submit)):
        flow = pid << 16 | number << 1
        args = {name: getattr(mark, name) for name in ("layer", "queueing", "kernel", "exposed", "waited")}
        launch = {"rows": mark.rows, "tiles": mark.tiles, "grid": [mark.grid, 1, 1], "correlation": flow}
        yield piece(1, f"submit layer {mark.layer}", mark.submit, mark.submit, "runtime", correlation=flow)
        yield piece(2, f"lookup layer {mark.layer}", mark.start, mark.done, "kernel", **args, **launch)
        yield piece(3, f"wait layer {mark.layer}", mark.wait_before, mark.wait_after, "wait", **args)
        ends = (1, mark.submit), (2, mark.start), (2, mark.start), (3, max(mark.start, mark.wait_before))
        for end, (thread, at) in enumerate(ends):
            yield event("sfsf"[end], thread, "flow", at, cat="flow", id=flow + end // 2, bp="e")


def report(path: Path, names: str = "") -> list[str]:
    """The queue report of a foreign trace as text; ``names``: ``lookup=REGEX,wait=REGEX,…`` with keys of ``NAMES``."""
    lines, text = read(path, names)
    text.insert(0, f"{path}: {len(lines)} steps; a trace explains, it feeds no gate")
    for rank in dict.fromkeys(line.rank for line in lines):
        found = [queue_report(o, tolerance_ns=TOLERANCE_NS) for o in lines if o.rank == rank]
        faults = [f"step {step}: {one.reason}" for step, one in enumerate(found) if not one.serial]
        verdict = f"not a serial queue in {len(faults)} of" if faults else "one serial queue in"
        text += [f"rank {rank}: {verdict} {len(found)} steps", *faults[:3]]
        text.append("  layer   queueing s−r       kernel L      exposed E   (median µs)")
        times = [times for one in found for times in one.lookups]
        for layer in dict.fromkeys(one.layer for one in times):
            rows = [(one.queueing, one.kernel, one.exposed) for one in times if one.layer == layer]
            text.append(f"{layer:7}" + "".join(f"{median(row) / 1000:15,.1f}" for row in zip(*rows, strict=True)))
    return text


def read(path: Path, names: str = "") -> tuple[list[Timeline], list[str]]:
    """The timelines in a Chrome trace (.gz too) or in the lines of a probe, and what to know of them.

    Raises ``UsageError`` where nothing is found, or lookups and waits do not pair.
    """
    parts = [part.partition("=") for part in re.split(rf",(?=(?:{'|'.join(NAMES)})=)", names) if part]
    if unknown := [name for name, _, _ in parts if name not in NAMES]:
        raise UsageError(f"--names {unknown[0]}", code="bad-names", expected=f"NAME=REGEX, NAME in {', '.join(NAMES)}")
    chosen = {**NAMES, **{name: value for name, _, value in parts}}
    try:
        data, tree = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes(), None
        with suppress(ValueError):  # no single JSON text, but perhaps one on each line
            tree = json.loads(data, parse_float=Decimal)
        if isinstance(tree, dict) and not tree.keys() & {"traceEvents", "kind"}:
            raise _refuse(path, f"one JSON object ({', '.join([*tree][:4])} …) without traceEvents")
        events = tree.get("traceEvents") if isinstance(tree, dict) else tree
        found = _from_events(path, events, chosen) if isinstance(events, list) else (_from_marks(path, chosen), [])
    except (OSError, EOFError, AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise _refuse(path, f"{type(error).__name__}: {error}") from error
    if not found[0]:
        raise _refuse(path, f"no kernel is called {chosen['lookup']!r} and no mark {chosen['start']!r}")
    return found


def _refuse(path: Path, seen: str) -> UsageError:
    way = "say what the engine calls them: --names lookup=REGEX,wait=REGEX,stream=REGEX,layers=1,14"
    return UsageError(seen, code="bad-trace", where=str(path), expected="a profiler's trace or a probe's", way_out=way)


def _from_marks(path: Path, names: dict[str, str]) -> list[Timeline]:
    at: dict[Any, dict[str, list[int]]] = defaultdict(lambda: {name: [] for name in MARKS})
    for record in (record for record in probe.read_records(path)[0] if record.get("kind") == "mark"):
        for name in (name for name in MARKS if re.search(names[name], record["mark"])):
            at[record["rank"], record["layer"]][name].append(record["t_ns"])
    steps = defaultdict(list)
    for (rank, layer), times in at.items():
        times["hash_ready"] = times["hash_ready"] or times["submit"]
        if len({len(moments) for moments in times.values()}) > 1:
            raise _refuse(path, f"rank {rank}, layer {layer}: {', '.join(f'{len(times[n])} {n}' for n in MARKS)}")
        for step, moments in enumerate(zip(*times.values(), strict=True)):
            steps[rank, step].append((layer, moments))
    return [_line(rank, step, marks) for (rank, step), marks in sorted(steps.items())]


def _line(rank: int, step: int, found: Sequence[tuple[int, Sequence[int]]]) -> Timeline:
    """``found``: layer and moments in the order of ``MARKS``.  Rows, tiles and grid explain no queue and stay 0."""
    known = [{"layer": layer, **dict(zip(MARKS, moments, strict=True))} for layer, moments in found]
    begin, end = min(one["hash_ready"] for one in known), max(one["wait_after"] for one in known)
    marks = tuple(LookupMark(rows=0, tiles=0, grid=0, **one) for one in known)
    return Timeline(rank=rank, step=step, begin=begin, end=end, tokens=0, lookups=marks)


def _slices(events: list[Any]) -> Iterator[Slice]:
    """Complete events in ns; ``launch`` is when the host launched what it shares its correlation with, or None."""
    spans = [{"args": {}, "cat": "", "dur": 0, **event} for event in events if event.get("ph") == "X"]
    calls = [event for event in spans if re.search(HOST, event["cat"])]
    launches = {event["args"].get("correlation"): round(event["ts"] * 1000) for event in calls}
    for event in spans:
        args, start = event["args"], round(event["ts"] * 1000)
        launch = launches.get(args["correlation"]) if "correlation" in args else None
        yield Slice(
            name=event["name"], host=bool(re.search(HOST, event["cat"])), gpu=bool(re.match(GPU, event["cat"])),
            rank=args.get("device", event.get("pid")), stream=args.get("stream", event.get("tid")), start=start,
            end=start + round(event["dur"] * 1000), launch=launch, order=start if launch is None else launch,
            layer=args.get("layer"),
        )  # fmt: skip


def _from_events(path: Path, events: list[Any], names: dict[str, str]) -> tuple[list[Timeline], list[str]]:
    slices = sorted(_slices(events), key=lambda one: one.order)
    gpu, lines, notes = [one for one in slices if one.gpu], list[Timeline](), list[str]()
    lookups = [o for o in gpu if re.search(names["lookup"], o.name) and re.search(names["stream"], str(o.stream))]
    ends = {id(one): one for one in _consumers(slices, gpu, names["wait"]) if one not in lookups}
    for rank in sorted({one.rank for one in lookups}):
        ours = [one for one in lookups if one.rank == rank]
        waits = [one for one in ends.values() if one.rank == rank and one.order >= ours[0].order]
        ours = [one for one in ours if waits and one.order <= waits[-1].order]
        if len(ours) != len(waits) or not ours:
            raise _refuse(path, f"rank {rank}: {len(ours)} lookups and {len(waits)} consumer waits")
        known = [one.layer for one in ours if one.layer is not None]
        layers = known or [int(layer) for layer in names["layers"].split(",")] * len(ours)
        used, main, size = {one.stream for one in ours}, waits[0].stream, len(set(layers))
        near = sorted((one for one in gpu if (one.rank, one.stream) == (rank, main)), key=lambda one: one.start)
        hashes = [one for one in gpu if one.rank == rank and re.search(names["hash"], one.name)]
        both = zip(layers, ours, waits, strict=False)
        marks = [(layer, _moments(one, wait, near, hashes)) for layer, one, wait in both]
        lines += [_line(rank, n, marks[n * size :][:size]) for n in range(len(marks) // size)]
        if len(used) > 1 or main in used:
            notes.append(f"rank {rank}: lookups on streams {sorted(used)}, their consumers on {main}")
    return lines, notes


def _consumers(slices: list[Slice], gpu: list[Slice], pattern: str) -> Iterator[Slice]:
    """What is named a wait; for a call of the host the kernel that is launched next."""
    for one in (one for one in slices if re.search(pattern, one.name)):
        after = bisect_right(gpu, one.start, key=lambda one: int(one.order))
        yield from gpu[after : after + 1] if one.host else [one]


def _moments(lookup: Slice, wait: Slice, near: list[Slice], hashes: list[Slice]) -> tuple[int, ...]:
    """In the order of ``MARKS``.

    Ready: the last hash has ended, and what the consumer's stream was given before the lookup and had ended by its
    start.  A consumer arrives when the kernel before it has ended and the host has launched it.
    """
    ended = [one.end for one in hashes if one.start < lookup.start][-1:]
    before = [one for one in near if one.end <= lookup.start and None not in (one.launch, lookup.launch)]
    ended += [one.end for one in before if one.launch < lookup.launch][-1:]
    ready = max(ended, default=lookup.order)
    moments = ready, ready if lookup.launch is None else lookup.launch, lookup.start, lookup.end
    if not wait.gpu:
        return *moments, wait.start, wait.end
    arrivals = wait.launch or 0, *[one.end for one in near if one.start < wait.start][-1:]
    return *moments, min(wait.start, max(arrivals)), wait.start

"""Whether the timings may be judged at all: schedule, blocks, drift, serial queue, floor, positive control."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from pytest_engram import ledger, metrics, stats
from pytest_engram.experiment_rules import settings
from pytest_engram.gates.comparison import Case
from pytest_engram.gates.placement import from_rank
from pytest_engram.gates.reasons import Finding
from pytest_engram.queueing import queue_report
from pytest_engram.schedule import MINIMUM_BLOCKS

CLOCK_DRIFT = 0.15  # largest change of a clock (keys ending in _mhz) between the medians of two blocks
THROTTLED_RUNS = 0.1  # largest share of runs that were slowed by heat or by the board
SLOWDOWNS = 0x08 | 0x20 | 0x40 | 0x80  # NVML: hardware slowdown, software and hardware thermal, power brake


def validity(case: Case) -> Iterator[Finding]:
    """Why no timing of this evidence may be judged."""
    for check in (_blocks, _drift, _serial, _floor, _emulated, _control):
        yield from check(case)


def _blocks(case: Case) -> Iterator[Finding]:
    """One planned look: all planned blocks, and never fewer than the hard minimum."""
    if not case.plan.schedule:
        yield Finding("no-schedule", "no schedule is on record")
    have, wanted = len(case.blocks), max(case.experiment.blocks, MINIMUM_BLOCKS)
    if have < wanted:
        yield Finding("too-few-blocks", f"{have} complete blocks, needs {wanted - have} more", f"{wanted} blocks")


def _drift(case: Case) -> Iterator[Finding]:
    """Arms of one block run close together: a clock that changes between blocks is the machine's own doing."""
    runs = case.runs.values()
    for key in sorted({key for run in runs for key in run.drift}):
        values = [(run.block, run.drift[key]) for run in runs if key in run.drift]
        if key.endswith("_mhz"):
            middles = [median(v for block, v in values if block == one) for one in {block for block, _ in values}]
            if max(middles) > (1 + CLOCK_DRIFT) * min(middles):
                seen = f"{key} between {min(middles):.0f} and {max(middles):.0f}"
                yield Finding("machine-drifted", seen, f"{CLOCK_DRIFT:.0%}")
        elif "throttle" in key:
            hot = sum(bool(int(value) & SLOWDOWNS) for _, value in values)
            if hot > THROTTLED_RUNS * len(runs):
                yield Finding("throttled", f"{key} in {hot} of {len(runs)} runs", f"{THROTTLED_RUNS:.0%}")


def _serial(case: Case) -> Iterator[Finding]:
    """What no serial queue can do, within the timer's resolution; a late start is scheduling, not a contradiction.

    An arm that asks for more than one stream is none, whether or not its lookups happened to overlap.
    """
    for run in case.runs.values():
        for sample in run.overlap:
            for line in sample.timelines:
                fault = queue_report(line, tolerance_ns=sample.resolution_ns).reason
                if fault:
                    seen = f"arm {run.arm}, run {run.index}, rank {line.rank}, step {line.step}: {fault}"
                    yield Finding("not-a-serial-queue", seen)
    for arm in ("A", *case.candidates):
        if (streams := settings(case.experiment, arm)["streams"]) != 1:
            yield Finding("not-a-serial-queue", f"arm {arm} asks for {streams} streams", "one")


def _floor(case: Case) -> Iterator[Finding]:
    """Distinct rows cannot arrive faster than the link carries a copy, at its best in any run; silent without one.

    All rows count where nobody counted the distinct ones, except where the workload repeats them.
    """
    rates = [run.drift[key] for run in case.runs.values() for key in run.drift if key.endswith("link_bytes_per_s")]
    for run in case.runs.values() if rates else ():
        for sample in run.overlap:
            busy, rows = metrics.busy_ns(sample), sample.distinct_bytes
            if rows is None:
                rows = 0 if case.experiment.workload.reuse == "repeated" else sample.source_bytes
            least = 1e9 * ledger.link_floor_s(rows, max(rates))
            if busy is not None and busy < least:
                where = f"arm {run.arm}, run {run.index}, rank {sample.rank}"
                seen = f"{where}: {rows} bytes of distinct rows in {busy:.0f} ns"
                yield Finding("faster-than-link", seen, f"{least:.0f} ns at {max(rates) / 1e9:.1f} GB/s")


def _emulated(case: Case) -> Iterator[Finding]:
    """Emulated or interpreted, pages and rows are real and times are not: both may be proven, nothing timed may."""
    model = str((case.evidence.provenance.get("cpu.model") or {}).get("value") or "")
    if "TCG" in model:
        yield Finding("emulated-cpu", model, "a real processor")
    told = {(run.arm, *item) for run in case.runs.values() for item in run.fingerprint.items()}
    slow = {arm for arm, key, mode in told if (key.partition("@")[0], mode) == ("backend.mode", "interpreter")}
    if slow:
        yield Finding("interpreted-kernels", f"arm {', '.join(sorted(slow))}", "compiled kernels in every arm")


def _control(case: Case) -> Iterator[Finding]:
    """Near against far on this machine must differ, or no placement can be judged on it.

    The arms are ``control-N`` for NUMA node N; which one is nearer to rank 0 may be unknown.
    """
    if not case.experiment.positive_control:
        return
    blocks: dict[int, dict[str, float]] = {}
    for run in case.evidence.control:
        found = None if run.problems else metrics.value(run, "lookup")
        if found is not None and found > 0:
            blocks.setdefault(run.block, {})[run.arm] = found
    pairs = [pair for pair in blocks.values() if len(pair) == 2]
    if not pairs:
        yield Finding("no-positive-control", "no pair of control runs")
    costs = {arm: from_rank(case, 0, arm.rpartition("-")[2]) for arm in sorted(pairs[0])}
    near, far = sorted(costs, key=lambda arm: costs[arm] or 0)
    ratios = [math.log(pair[far] / pair[near]) for pair in pairs if {near, far} == pair.keys()]
    p_value = stats.two_sided(ratios) / 2 if None in costs.values() else stats.p_above(ratios, 0.0)
    if p_value > case.experiment.alpha:
        seen = f"{far} against {near}: {len(ratios)} pairs, p = {p_value:.3g}"
        yield Finding("control-without-difference", seen, f"far lookup longer, p ≤ {case.experiment.alpha:g}")

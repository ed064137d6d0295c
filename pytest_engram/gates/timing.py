"""Whether the timings may be judged at all: schedule, blocks, drift, serial queue, floor, positive control, A/A."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from statistics import median

from pytest_engram import metrics, stats
from pytest_engram.gates.case import Case, Comparison
from pytest_engram.gates.distances import from_rank
from pytest_engram.gates.reasons import Finding
from pytest_engram.model import RunRecord, Timeline
from pytest_engram.queueing import queue_report
from pytest_engram.schedule import MINIMUM_BLOCKS

CLOCK_DRIFT = 0.15  # largest change of a clock (keys ending in _mhz) between the medians of two blocks
THROTTLED_RUNS = 0.1  # largest share of runs that were slowed by heat or by the board
SLOWDOWNS = 0x08 | 0x20 | 0x40 | 0x80  # NVML: hardware slowdown, software and hardware thermal, power brake


def validity(case: Case) -> Finding | None:
    """The first reason why no timing of this evidence may be judged, or None."""
    checks: tuple[Callable[[Case], Iterator[Finding]], ...] = (_blocks, _drift, _serial, _floor, _control)
    return next((finding for check in checks for finding in check(case)), None)


def same_arms(comparisons: Iterable[Comparison], level: float) -> Finding | None:
    """A/A can only invalidate: two-sided, per metric, at the declared level or the least that the blocks can reach."""
    for found in comparisons:
        if found.absent:
            continue
        reachable = max(level, 2.0 ** (1 - len(found.aa)))
        p_value = stats.two_sided(found.aa)
        if p_value <= reachable:
            return Finding(
                reason="aa-differs", always_judged=True, threshold=f"p > {reachable:.3g}",
                observed=f"{found.rule.metric}: A' differs from A, p = {p_value:.3g}",
            )  # fmt: skip
    return None


def _blocks(case: Case) -> Iterator[Finding]:
    """One planned look: all planned blocks, and never fewer than the hard minimum."""
    if not case.plan.schedule:
        yield Finding(reason="no-schedule", observed="no schedule is on record", always_judged=True)
    wanted = max(case.experiment.blocks, MINIMUM_BLOCKS)
    have = len(case.blocks)
    if have < wanted:
        yield Finding(
            reason="too-few-blocks", observed=f"{have} complete blocks, needs {wanted - have} more",
            threshold=f"{wanted} blocks", always_judged=True,
        )  # fmt: skip


def _drift(case: Case) -> Iterator[Finding]:
    runs = list(case.runs.values())
    for key in sorted({key for run in runs for key in run.drift}):
        if key.endswith("_mhz"):
            yield from _clock(case, key)
        elif key.startswith("throttle"):
            hot = sum(bool(int(run.drift.get(key, 0)) & SLOWDOWNS) for run in runs)
            if hot > THROTTLED_RUNS * len(runs):
                seen = f"{key} in {hot} of {len(runs)} runs"
                yield Finding(reason="throttled", observed=seen, threshold=f"{THROTTLED_RUNS:.0%}", always_judged=True)


def _clock(case: Case, key: str) -> Iterator[Finding]:
    """Arms of one block run close together: only a change between blocks is the machine's own."""
    by_block: dict[int, list[float]] = {}
    for (block, _), run in case.runs.items():
        if key in run.drift:
            by_block.setdefault(block, []).append(run.drift[key])
    middles = [median(values) for values in by_block.values()]
    low, high = min(middles), max(middles)
    if high > (1 + CLOCK_DRIFT) * low:
        seen = f"{key} between {low:.0f} and {high:.0f}"
        yield Finding(reason="machine-drifted", observed=seen, threshold=f"{CLOCK_DRIFT:.0%}", always_judged=True)


def _serial(case: Case) -> Iterator[Finding]:
    for (_, arm), run in sorted(case.runs.items()):
        for sample in run.overlap:
            for line in sample.timelines:
                fault = next(_contradictions(line, sample.resolution_ns), None)
                if fault:
                    seen = f"arm {arm}, run {run.index}, rank {line.rank}, step {line.step}: {fault}"
                    yield Finding(reason="not-a-serial-queue", observed=seen, always_judged=True)


def _contradictions(line: Timeline, resolution: int) -> Iterator[str]:
    """What no serial queue can do; a late start is scheduling, not a contradiction."""
    lookups = queue_report(line).lookups
    submitted = {mark.layer: mark.submit for mark in line.lookups}
    for found in lookups:
        if found.kernel < 0 or found.waited < 0 or found.start < submitted[found.layer] - resolution:
            yield f"layer {found.layer}: its marks are out of order"
        if found.consumer + found.waited < found.finish - resolution:
            yield f"layer {found.layer}: its consumer went on before the rows were there"
    for before, after in pairwise(lookups):
        if after.start < before.finish - resolution:
            yield f"layer {after.layer} starts before layer {before.layer} is done"


def _floor(case: Case) -> Iterator[Finding]:
    """Distinct rows cannot arrive faster than the link carries them; silent where the link's speed is not known."""
    link = case.evidence.provenance.get("link_bytes_per_s")
    limit = link.get("value") if isinstance(link, dict) else link
    if not isinstance(limit, (int, float)) or limit <= 0:
        return
    for run in case.runs.values():
        for sample in run.overlap:
            rate = metrics.source_bandwidth(sample)
            if sample.state == "low-reuse" and rate is not None and rate > limit:
                seen = f"arm {run.arm}, run {run.index}, rank {sample.rank}: {rate / 1e9:.1f} GB/s"
                yield Finding(
                    reason="faster-than-link", observed=seen, threshold=f"{limit / 1e9:.1f} GB/s", always_judged=True
                )


def _control(case: Case) -> Iterator[Finding]:
    """Near against far on this machine must differ, or no placement can be judged on it."""
    if not case.experiment.positive_control:
        return
    pairs = _pairs(case.evidence.control)
    if not pairs:
        yield Finding(reason="no-positive-control", observed="no pair of control runs", always_judged=True)
        return
    near, far, known = _near_far(case)
    p_value, alpha = 1.0, case.experiment.alpha
    ratios = [math.log(pair[far] / pair[near]) for pair in pairs if near in pair and far in pair]
    if ratios:
        p_value = stats.p_above(ratios, 0.0) if known else stats.two_sided(ratios) / 2
    if p_value > alpha:
        seen = f"{far} against {near}: {len(ratios)} pairs, p = {p_value:.3g}"
        yield Finding(
            reason="control-without-difference", observed=seen,
            threshold=f"lookup of the far table longer, p ≤ {alpha:g}", always_judged=True,
        )  # fmt: skip


def _pairs(runs: Iterable[RunRecord]) -> list[dict[str, float]]:
    """Per block of the control: arm -> lookup time of rank 0."""
    blocks: dict[int, dict[str, float]] = {}
    for run in runs:
        found = None if run.problems else metrics.value(run, "lookup")
        if found:
            blocks.setdefault(run.block, {})[run.arm] = found
    return [pair for pair in blocks.values() if len(pair) == 2]


def _near_far(case: Case) -> tuple[str, str, bool]:
    """The control's arms ``control-N`` by the distance of node N from rank 0, and whether that distance is known."""
    arms = sorted({run.arm for run in case.evidence.control})
    costs = {arm: from_rank(case, 0, arm.rpartition("-")[2]) for arm in arms}
    known = None not in costs.values()
    ordered = sorted(arms, key=lambda arm: costs[arm] or 0) if known else arms
    return ordered[0], ordered[-1], known

"""The serial prefetch queue: s_i = max(r_i, f_{i−1}), f_i = s_i + L_i, E_i = max(0, f_i − c_i).

It explains an observed timeline; it predicts nothing, because waits move later consumers and contention changes L_i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_engram.model import LookupMark, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTimes:
    """One lookup in ns: ``ready`` r_i, ``start`` s_i, ``finish`` f_i, ``consumer`` c_i and the four differences.

    ``queueing`` s_i − r_i, ``kernel`` L_i, ``exposed`` E_i; ``waited`` is what the consumer's wait took by its own
    marks, so a wait booked as a lookup shows as a difference to ``exposed``.
    """

    layer: int
    ready: int
    start: int
    finish: int
    consumer: int
    queueing: int
    kernel: int
    exposed: int
    waited: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReport:
    """``serial`` False: the marks contradict one serial queue; ``reason`` names the first contradiction."""

    serial: bool
    reason: str | None
    lookups: tuple[LookupTimes, ...]


def queue_report(timeline: Timeline, *, tolerance_ns: int = 0, late_ns: float | None = None) -> QueueReport:
    """Lookups in the order of their submission, checked for self-consistency within ``tolerance_ns``.

    The tolerance covers launch latency and timer resolution; f_0 is unknown, so the first lookup may start late.
    ``late_ns`` is how late the others may start (default: the tolerance): lateness alone can be scheduling.
    """
    lookups = tuple(_times(mark) for mark in sorted(timeline.lookups, key=lambda mark: mark.submit))
    reason = next(_contradictions(lookups, tolerance_ns, tolerance_ns if late_ns is None else late_ns), None)
    return QueueReport(serial=reason is None, reason=reason, lookups=lookups)


def _times(mark: LookupMark) -> LookupTimes:
    ready = max(mark.hash_ready, mark.submit)
    return LookupTimes(
        layer=mark.layer, ready=ready, start=mark.start, finish=mark.done, consumer=mark.wait_before,
        queueing=mark.start - ready, kernel=mark.done - mark.start,
        exposed=max(0, mark.done - mark.wait_before), waited=mark.wait_after - mark.wait_before,
    )  # fmt: skip


def _contradictions(lookups: Sequence[LookupTimes], tolerance: int, late: float) -> Iterator[str]:
    for times in lookups:
        name, ahead = f"layer {times.layer}", times.finish - (times.consumer + times.waited)
        if times.kernel < 0 or times.waited < 0:
            yield f"{name}: a mark precedes the one before it"
        if times.queueing < -tolerance:
            yield f"{name}: starts {-times.queueing} ns before it is ready"
        if ahead > tolerance:
            yield f"{name}: its consumer passed {ahead} ns before the lookup was done"
    for before, after in pairwise(lookups):
        gap, overlap = after.start - max(after.ready, before.finish), before.finish - after.start
        if overlap > tolerance:
            yield f"layer {after.layer}: overlaps the lookup of layer {before.layer} by {overlap} ns"
        if gap < -tolerance or gap > late:
            yield f"layer {after.layer}: starts {gap:+} ns from max(ready, previous finish)"

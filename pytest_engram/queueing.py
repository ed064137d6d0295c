"""The serial prefetch queue: s_i = max(r_i, f_{i−1}), f_i = s_i + L_i, E_i = max(0, f_i − c_i).

It explains an observed timeline; it predicts nothing, because waits move later consumers and contention changes L_i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_engram.model import LookupMark, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReport:
    """``serial`` False: the marks contradict one serial queue; ``reason`` names the first contradiction."""

    serial: bool
    reason: str | None
    lookups: tuple[LookupMark, ...]


def queue_report(timeline: Timeline, *, tolerance_ns: int = 0) -> QueueReport:
    """Lookups in the order of their submission, checked for self-consistency within ``tolerance_ns``.

    The tolerance covers launch latency and timer resolution.  A late start contradicts nothing: it can be scheduling.
    """
    lookups = tuple(sorted(timeline.lookups, key=lambda mark: mark.submit))
    reason = next(_contradictions(lookups, tolerance_ns), None)
    return QueueReport(serial=reason is None, reason=reason, lookups=lookups)


def _contradictions(lookups: Sequence[LookupMark], tolerance: int) -> Iterator[str]:
    for mark in lookups:
        name, ahead = f"layer {mark.layer}", mark.done - mark.wait_after
        if mark.kernel < 0 or mark.waited < 0:
            yield f"{name}: a mark precedes the one before it"
        if mark.queueing < -tolerance:
            yield f"{name}: starts {-mark.queueing} ns before it is ready"
        if ahead > tolerance:
            yield f"{name}: its consumer passed {ahead} ns before the lookup was done"
    for before, after in pairwise(lookups):
        overlap = before.done - after.start
        if overlap > tolerance:
            yield f"layer {after.layer}: overlaps the lookup of layer {before.layer} by {overlap} ns"

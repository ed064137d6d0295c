"""One number per run and metric, read from its samples; absent with a reason where there is too little to read.

Every metric pools the ranks of a run; ``name@R`` reads rank R alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from pytest_engram.model import OverlapSample, RequestRecord, RunRecord, ServingSample, Slo, Timeline


@dataclass(frozen=True, slots=True)
class Reading:
    """``value`` is None when absent, and then ``reason`` says why; 0 is a measured zero."""

    value: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """How a metric is read and compared; ``additive`` ones by difference, the others by ratio."""

    source: str  # the field of ``RunRecord`` with its samples
    read: Callable[[list[Any]], Reading]  # from the samples of one rank or of all
    unit: str = "ns"
    direction: str = "down"  # where good lies: "down" or "up"
    additive: bool = False
    peers: bool = False  # needs more than one rank to exist
    minimum: int = 1  # samples below which it is absent


def measure(run: RunRecord, metric: str) -> Reading:
    """The reading of ``metric`` (a name of :data:`METRICS`, or ``name@rank``) in one run."""
    row, rank = find(metric), metric.partition("@")[2]
    return row.read([sample for sample in getattr(run, row.source) if not rank or sample.rank == int(rank)])


def value(run: RunRecord, metric: str) -> float | None:
    """The number alone; None when absent (:func:`measure` says why)."""
    return measure(run, metric).value


def find(metric: str) -> Metric:
    """The row of ``name`` or ``name@rank`` in :data:`METRICS`; raises ``KeyError`` for an unknown name."""
    return METRICS[metric.partition("@")[0]]


def quantile(samples: Sequence[float], q: float) -> Reading:
    """The empirical quantile; absent below 1/(1−q) samples, when not even one is expected beyond it."""
    if len(samples) < _needed(q):
        return Reading(None, f"{len(samples)} samples, P{100 * q:g} needs {_needed(q)}")
    return Reading(float(np.quantile(np.asarray(samples), q, method="higher")))


def meets(request: RequestRecord, slo: Slo) -> bool:
    """Whether a request counts as goodput: it ended well, and its TTFT and its mean token gap kept the limits.

    The mean gap is what serving benchmarks test (their TPOT); single late gaps are the business of ``itl_p95/p99``.
    """
    in_time = request.status == "ok" and request.ttft_ms is not None and request.ttft_ms <= slo.ttft_ms
    return in_time and (not request.itl_ms or fmean(request.itl_ms) <= slo.itl_ms)


def source_bandwidth(sample: OverlapSample) -> float | None:
    """Bytes per second that the lookups read from the host: source bytes of a step over its median ΣL_i."""
    busy = busy_ns(sample)
    return 1e9 * sample.source_bytes / busy if busy else None


def busy_ns(sample: OverlapSample) -> float | None:
    """The median over the marked steps of ΣL_i; None without a lookup that took time."""
    return middle(totals(line)[0] for line in sample.timelines if line.lookups) or None


def totals(line: Timeline) -> tuple[int, int]:
    """(ΣL_i, ΣE_i) of one marked step, in ns."""
    return sum(mark.kernel for mark in line.lookups), sum(mark.exposed for mark in line.lookups)


def _needed(q: float) -> int:
    return round(1 / (1 - q))


def middle(found: Iterable[float | None]) -> float | None:
    """The median of what is there; None of nothing."""
    known = [number for number in found if number is not None]
    return float(median(known)) if known else None


def _median(found: Iterable[float | None], otherwise: str) -> Reading:
    number = middle(found)
    return Reading(number, "" if number is not None else otherwise)


_UNMARKED = "no marked step with a lookup"


def _overlap(name: str, pick: Callable[[Iterable[int]], Iterable[int]] = list) -> Metric:
    """The median over the marked steps of one time of ``LookupMark``, or of what ``pick`` makes of each step's."""

    def read(samples: list[OverlapSample]) -> Reading:
        lines = [line for sample in samples for line in sample.timelines if line.lookups]
        return _median((n for line in lines for n in pick(getattr(mark, name) for mark in line.lookups)), _UNMARKED)

    return Metric("overlap", read)


def _compute(name: str, *, peers: bool = False) -> Metric:
    """The median over the unmarked steps of one series of ``ComputeSample``."""

    def read(samples: list[Any]) -> Reading:
        absent = [sample.communication_absent for sample in samples if getattr(sample, name) is None]
        if absent:
            return Reading(None, absent[0] or "not recorded")
        return _median((number for sample in samples for number in getattr(sample, name)), "no unmarked step")

    return Metric("compute", read, peers=peers)


def _serving(pick: Callable[[list[ServingSample]], Reading], unit: str, **fields: Any) -> Metric:
    def read(samples: list[ServingSample]) -> Reading:
        served = [sample for sample in samples if sample.requests and sample.duration_s > 0]
        return pick(served) if served else Reading(None, "no open-loop load was served")

    return Metric("serving", read, unit, **fields)


def _goodput(samples: list[ServingSample]) -> Reading:
    return Reading(sum(sum(meets(r, sample.slo) for r in sample.requests) / sample.duration_s for sample in samples))


def _rejection(samples: list[ServingSample]) -> Reading:
    """(rejected + failed + incomplete) / planned."""
    return Reading(fmean(request.status != "ok" for sample in samples for request in sample.requests))


def _tail(pick: Callable[[RequestRecord], Iterable[float | None]], q: float) -> Metric:
    def read(samples: list[ServingSample]) -> Reading:
        good = [request for sample in samples for request in sample.requests if request.status == "ok"]
        return quantile([number for request in good for number in pick(request) if number is not None], q)

    return _serving(read, "ms", minimum=_needed(q))


METRICS: dict[str, Metric] = {
    "lookup": _overlap("kernel"), "queueing": _overlap("queueing"),
    "exposed_wait": _overlap("exposed", lambda waits: [sum(waits)]),  # ΣE_i: what a step's consumers still had to wait
    "waited": _overlap("waited", lambda waits: [sum(waits)]),  # by the waits' own marks, whatever they waited for
    "source_bandwidth": Metric("overlap", lambda s: _median(map(source_bandwidth, s), _UNMARKED), "B/s", "up"),
    "main_compute": _compute("main_ns"), "step": _compute("step_ns"),
    "communication": _compute("communication_ns", peers=True),
    "goodput": _serving(_goodput, "requests/s", direction="up"),
    "rejection_rate": _serving(_rejection, "ratio", additive=True),
    **{f"ttft_p{q}": _tail(lambda request: (request.ttft_ms,), q / 100) for q in (95, 99)},
    **{f"itl_p{q}": _tail(lambda request: request.itl_ms, q / 100) for q in (95, 99)},
}  # fmt: skip

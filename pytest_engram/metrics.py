"""One number per run and metric, read from its samples; absent with a reason where there is too little to read.

Every metric pools the ranks of a run; ``name@R`` reads rank R alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from pytest_engram import queueing
from pytest_engram.model import OverlapSample, RequestRecord, RunRecord, ServingSample, Slo, Timeline


@dataclass(frozen=True, slots=True)
class Reading:
    """``value`` is None when absent, and then ``reason`` says why; 0 is a measured zero."""

    value: float | None
    reason: str = ""


Read = Callable[[RunRecord, int | None], Reading]


@dataclass(frozen=True, slots=True)
class Metric:
    """How a metric is read and compared; ``additive`` ones by difference, the others by ratio."""

    read: Read
    direction: str  # where good lies: "down" or "up"
    unit: str
    additive: bool = False
    served: bool = False  # comes from the open-loop load
    peers: bool = False  # needs more than one rank to exist
    minimum: int = 1  # samples below which it is absent


def measure(run: RunRecord, metric: str) -> Reading:
    """The reading of ``metric`` (a name of :data:`METRICS`, or ``name@rank``) in one run."""
    _, _, rank = metric.partition("@")
    return find(metric).read(run, int(rank) if rank else None)


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
    if request.status != "ok" or request.ttft_ms is None:
        return False
    return request.ttft_ms <= slo.ttft_ms and (not request.itl_ms or fmean(request.itl_ms) <= slo.itl_ms)


def source_bandwidth(sample: OverlapSample) -> float | None:
    """Bytes per second that the lookups read from the host: source bytes of a step over its median ΣL_i."""
    steps = [sum(mark.done - mark.start for mark in line.lookups) for line in sample.timelines if line.lookups]
    busy = median(steps) if steps else 0
    return 1e9 * sample.source_bytes / busy if busy > 0 else None


def _needed(q: float) -> int:
    return round(1 / (1 - q))


def _of_rank(samples: Iterable[Any], rank: int | None) -> list[Any]:
    return [sample for sample in samples if rank is None or sample.rank == rank]


def _median(found: Sequence[float], otherwise: str) -> Reading:
    return Reading(float(median(found))) if found else Reading(None, otherwise)


def _overlap(pick: Callable[[Timeline], Iterable[float]]) -> Read:
    """The median of what ``pick`` finds in every marked step."""

    def read(run: RunRecord, rank: int | None) -> Reading:
        lines = [line for sample in _of_rank(run.overlap, rank) for line in sample.timelines if line.lookups]
        return _median([number for line in lines for number in pick(line)], "no marked step with a lookup")

    return read


def _queueing(line: Timeline) -> list[int]:
    return [times.queueing for times in queueing.queue_report(line).lookups]


def _exposed(line: Timeline) -> list[int]:
    """ΣE_i of the step: what all its consumers together still had to wait."""
    return [sum(times.exposed for times in queueing.queue_report(line).lookups)]


def _bandwidth(run: RunRecord, rank: int | None) -> Reading:
    found = [b for sample in _of_rank(run.overlap, rank) if (b := source_bandwidth(sample)) is not None]
    return _median(found, "no marked step with a lookup")


def _compute(name: str) -> Read:
    """The median over the unmarked steps of one series of ``ComputeSample``."""

    def read(run: RunRecord, rank: int | None) -> Reading:
        samples = _of_rank(run.compute, rank)
        absent = [sample.communication_absent for sample in samples if getattr(sample, name) is None]
        if absent:
            return Reading(None, absent[0] or "not recorded")
        return _median([number for sample in samples for number in getattr(sample, name)], "no unmarked step")

    return read


def _serving(pick: Callable[[list[ServingSample]], Reading]) -> Read:
    def read(run: RunRecord, rank: int | None) -> Reading:
        samples = [sample for sample in _of_rank(run.serving, rank) if sample.requests and sample.duration_s > 0]
        return pick(samples) if samples else Reading(None, "no open-loop load was served")

    return read


def _goodput(samples: list[ServingSample]) -> Reading:
    return Reading(sum(sum(meets(r, sample.slo) for r in sample.requests) / sample.duration_s for sample in samples))


def _rejection(samples: list[ServingSample]) -> Reading:
    """(rejected + failed + incomplete) / planned."""
    requests = [request for sample in samples for request in sample.requests]
    return Reading(sum(request.status != "ok" for request in requests) / len(requests))


def _tail(pick: Callable[[RequestRecord], Iterable[float]], q: float) -> Metric:
    def read(samples: list[ServingSample]) -> Reading:
        good = [request for sample in samples for request in sample.requests if request.status == "ok"]
        return quantile([number for request in good for number in pick(request)], q)

    return Metric(_serving(read), "down", "ms", served=True, minimum=_needed(q))


def _ttft(request: RequestRecord) -> tuple[float, ...]:
    return () if request.ttft_ms is None else (request.ttft_ms,)


def _itl(request: RequestRecord) -> tuple[float, ...]:
    return request.itl_ms


METRICS: dict[str, Metric] = {
    "lookup": Metric(_overlap(lambda line: [mark.done - mark.start for mark in line.lookups]), "down", "ns"),
    "queueing": Metric(_overlap(_queueing), "down", "ns"),
    "exposed_wait": Metric(_overlap(_exposed), "down", "ns"),
    "source_bandwidth": Metric(_bandwidth, "up", "B/s"),
    "main_compute": Metric(_compute("main_ns"), "down", "ns"),
    "step": Metric(_compute("step_ns"), "down", "ns"),
    "communication": Metric(_compute("communication_ns"), "down", "ns", peers=True),
    "goodput": Metric(_serving(_goodput), "up", "requests/s", served=True),
    "rejection_rate": Metric(_serving(_rejection), "down", "ratio", additive=True, served=True),
    "ttft_p95": _tail(_ttft, 0.95),
    "ttft_p99": _tail(_ttft, 0.99),
    "itl_p95": _tail(_itl, 0.95),
    "itl_p99": _tail(_itl, 0.99),
}

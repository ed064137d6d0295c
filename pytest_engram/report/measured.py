"""What the samples of one experiment say in the middle, as table heads and rows; nothing is compared here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pytest_engram import metrics
from pytest_engram.model import Evidence, OverlapSample, RunRecord, StepReceipt
from pytest_engram.report import numbers

Table = tuple[Sequence[str], Iterable[Sequence[object]]]
_UNITS: dict[str, Callable[[float], str]] = {
    "ns": numbers.nanoseconds,
    "ms": lambda value: f"{value:,.1f} ms",
    "ratio": lambda value: f"{100 * value:.1f} %",
    "B/s": lambda value: f"{value / 1e9:.1f} GB/s",
}


def metric_table(evidence: Evidence) -> Table:
    """Per metric and rank, each arm's median over runs of the run's own reading; an absence keeps its reason."""
    arms = _arms(evidence)
    ranks = range(evidence.plan.experiment.ranks)
    names = [name for name in metrics.METRICS if _ever(evidence, name)]
    if len(ranks) > 1:
        names = [
            each
            for name in names
            for each in (name, *(f"{name}@{rank}" for rank in ranks if metrics.find(name).unit == "ns"))
        ]
    rows = [
        (name, *(_middle([run for run in evidence.runs if run.arm == arm], name) for arm in arms)) for name in names
    ]
    return ("metric", *(f"arm {arm}" for arm in arms)), rows


def startup_table(evidence: Evidence) -> Table:
    """Per arm, rank and step: medians of seconds and of what grew meanwhile (faults, object pages, mapped pages)."""
    found: dict[tuple[str, int, str], list[StepReceipt]] = {}
    for run in evidence.runs:
        for receipt in (receipt for sample in run.startup for receipt in sample.receipts):
            found.setdefault((run.arm, receipt.rank, receipt.step), []).append(receipt)
    head = ("arm", "rank", "step", "time", "minor faults", "object pages", "mapped pages", "allocations", "note")
    return head, [(*key, *_receipts(receipts)) for key, receipts in found.items()]


def ledger_table(evidence: Evidence) -> Table:
    """Per arm and rank: bytes read from the host and bytes staged, never added; the launches that really ran."""
    found: dict[tuple[str, int], list[OverlapSample]] = {}
    for run in evidence.runs:
        for sample in run.overlap:
            found.setdefault((run.arm, sample.rank), []).append(sample)
    head = ("arm", "rank", "source", "staging", "source rate", "rows", "tiles", "grid")
    return head, [(*key, *_ledger(samples)) for key, samples in found.items()]


def _arms(evidence: Evidence) -> list[str]:
    return list(dict.fromkeys(sorted((run.arm for run in evidence.runs), key=lambda arm: (arm[0] != "A", arm))))


def _ever(evidence: Evidence, name: str) -> bool:
    return any(metrics.value(run, name) is not None for run in evidence.runs)


def _middle(runs: Sequence[RunRecord], name: str) -> str:
    readings = [metrics.measure(run, name) for run in runs]
    middle = numbers.median(reading.value for reading in readings)
    if middle is None:
        return f"{numbers.ABSENT}: {readings[0].reason}" if readings else numbers.ABSENT
    unit = metrics.find(name).unit
    return _UNITS[unit](middle) if unit in _UNITS else f"{middle:,.3g} {unit}"


def _receipts(receipts: Sequence[StepReceipt]) -> Iterator[object]:
    yield numbers.seconds(numbers.median(receipt.seconds for receipt in receipts))
    for name in ("minor_faults", "object_pages", "mapped_pages"):
        pairs = [pair for receipt in receipts if (pair := getattr(receipt, name)) is not None]
        yield numbers.count(numbers.median(after - before for before, after in pairs))
    yield len(receipts)
    yield "; ".join(dict.fromkeys(receipt.not_applicable or receipt.detail for receipt in receipts))


def _ledger(samples: Sequence[OverlapSample]) -> Iterator[str]:
    yield numbers.size(numbers.median(sample.source_bytes for sample in samples))
    yield numbers.size(numbers.median(sample.staging_bytes for sample in samples))
    rate = numbers.median(metrics.source_bandwidth(sample) for sample in samples)
    yield numbers.ABSENT if rate is None else _UNITS["B/s"](rate)
    marks = [mark for sample in samples for line in sample.timelines for mark in line.lookups]
    for name in ("rows", "tiles", "grid"):
        seen = sorted({getattr(mark, name) for mark in marks})
        yield numbers.count(seen[0]) if len(seen) == 1 else f"{seen[0]:,}–{seen[-1]:,}" if seen else numbers.ABSENT

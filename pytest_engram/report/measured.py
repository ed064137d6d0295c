"""What one experiment's evidence says, as titled table heads and rows; nothing is compared here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pytest_engram import metrics
from pytest_engram.model import Evidence, OverlapSample, StepReceipt, Verdict
from pytest_engram.report import numbers

Rows = Iterable[Sequence[object]]
Table = tuple[str, Sequence[str], Rows]  # title, head, rows
_UNITS: dict[str, Callable[[float], str]] = {
    "ns": lambda value: numbers.seconds(value / 1e9),
    "ms": lambda value: f"{value:,.1f} ms",
    "ratio": lambda value: f"{100 * value:.1f} %",
    "B/s": lambda value: f"{value / 1e9:.1f} GB/s",
}
_STARTUP = ("arm", "rank", "step", "time", "minor faults", "object pages", "mapped pages", "allocations", "note")
_LEDGER = ("arm", "rank", "source", "staging", "source rate", "rows", "tiles", "grid")
_PROBLEMS = ("arm", "status", "code", "who", "where", "message", "times")
_EFFECTS = ("gate", "arm", "metric", "effect", "interval", "p", "blocks", "per block, %")


def tables(evidence: Evidence) -> Iterator[Table]:
    """Every table of an evidence, in reading order."""
    receipts = [(run.arm, r.rank, r.step, r) for run in evidence.runs for s in run.startup for r in s.receipts]
    samples = [(run.arm, sample.rank, sample) for run in evidence.runs for sample in run.overlap]
    yield "Medians over runs", *_metrics(evidence)
    yield "Where the pages lay", *_placement(evidence)
    yield "Start-up, never part of steady times", _STARTUP, _grouped(receipts, _receipts)
    yield "Bytes per step, separate ledgers", _LEDGER, _grouped(samples, _ledger)
    yield "Problems", _PROBLEMS, _problems(evidence)


def effects(verdict: Verdict) -> Table:
    """Every effect of every gate with its interval and its blocks."""
    rows = [
        (gate.gate, effect.arm, effect.metric, *numbers.measured(effect),
         numbers.ABSENT if effect.p_value is None else f"{effect.p_value:.4f}", effect.blocks,
         " ".join(numbers.signed(block) for block in effect.per_block))
        for gate in verdict.gates
        for effect in gate.effects
    ]  # fmt: skip
    return "Effects against arm A", _EFFECTS, rows


def _metrics(evidence: Evidence) -> tuple[Sequence[str], Rows]:
    """Per metric and rank, each arm's median over runs of the run's own reading; an absence keeps its reason."""
    arms = sorted({run.arm for run in evidence.runs}, key=lambda arm: (arm[0] != "A", arm))
    ranks = range(evidence.plan.experiment.ranks) if evidence.plan.experiment.ranks > 1 else ()
    found = [name for name in metrics.METRICS if any(metrics.value(run, name) is not None for run in evidence.runs)]
    names = [n for name in found for n in (name, *(f"{name}@{r}" for r in ranks if metrics.find(name).unit == "ns"))]
    rows = [(name, *(_middle(evidence, arm, name) for arm in arms)) for name in names]
    return ("metric", *(f"arm {arm}" for arm in arms)), rows


def _middle(evidence: Evidence, arm: str, name: str) -> str:
    readings = [metrics.measure(run, name) for run in evidence.runs if run.arm == arm]
    middle = numbers.median(reading.value for reading in readings)
    if middle is None:
        return f"{numbers.ABSENT}: {readings[0].reason}"
    unit = metrics.find(name).unit
    return _UNITS[unit](middle) if unit in _UNITS else f"{middle:,.3g} {unit}"


def _placement(evidence: Evidence) -> tuple[Sequence[str], Rows]:
    """One row per distinct answer of the kernel: runs of an arm that answered the same share a row."""
    audits = [(run.arm, pages) for run in evidence.runs for s in run.placement for pages in s.distributions]
    nodes = sorted({node for _, pages in audits for node in pages.pages})
    rows = Counter(
        (arm, pages.rank, pages.table, pages.moment.value,
         *(numbers.size(pages.pages.get(node, 0) * pages.page_bytes) for node in nodes),
         ", ".join(f"{name} {number}" for name, number in sorted(pages.unplaced.items())) or "0",
         f"{numbers.size(pages.covered_bytes)} of {numbers.size(pages.table_bytes)}", "+".join(pages.routes))
        for arm, pages in audits
    )  # fmt: skip
    listed = sorted(rows.items(), key=lambda row: row[0][:3])
    shares = [f"NUMA node {node}" for node in nodes]
    head = ("arm", "rank", "table", "moment", *shares, "pages not placed", "coverage", "asked by", "audits")
    return head, [(*row, times) for row, times in listed]


def _problems(evidence: Evidence) -> Rows:
    """Equal problems of one arm share a row."""
    found = [("", problem) for problem in evidence.problems]
    found += [(run.arm, problem) for run in evidence.runs for problem in run.problems]
    rows = Counter((arm, p.status.value, p.code, p.who, p.where, p.message) for arm, p in found)
    return [(*row, times) for row, times in sorted(rows.items())]


def _grouped(keyed: Iterable[tuple[Any, ...]], cells: Callable[[list[Any]], Iterator[object]]) -> Rows:
    """One row per key: all but the last item of a tuple are its key."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for *key, item in keyed:
        found.setdefault(tuple(key), []).append(item)
    return [(*key, *cells(items)) for key, items in found.items()]


def _receipts(receipts: list[StepReceipt]) -> Iterator[object]:
    """Medians of seconds and of what grew meanwhile."""
    yield numbers.seconds(numbers.median(receipt.seconds for receipt in receipts))
    for name in ("minor_faults", "object_pages", "mapped_pages"):
        pairs = [pair for receipt in receipts if (pair := getattr(receipt, name)) is not None]
        yield numbers.count(numbers.median(after - before for before, after in pairs))
    yield len(receipts)
    yield "; ".join(dict.fromkeys(receipt.not_applicable or receipt.detail for receipt in receipts))


def _ledger(samples: list[OverlapSample]) -> Iterator[object]:
    """Bytes read from the host and bytes staged, never added; the launches that really ran."""
    yield numbers.size(numbers.median(sample.source_bytes for sample in samples))
    yield numbers.size(numbers.median(sample.staging_bytes for sample in samples))
    rate = numbers.median(metrics.source_bandwidth(sample) for sample in samples)
    yield numbers.ABSENT if rate is None else _UNITS["B/s"](rate)
    marks = [mark for sample in samples for line in sample.timelines for mark in line.lookups]
    for name in ("rows", "tiles", "grid"):
        seen = sorted({getattr(mark, name) for mark in marks})
        yield "–".join(f"{end:,}" for end in dict.fromkeys((seen[0], seen[-1]))) if seen else numbers.ABSENT

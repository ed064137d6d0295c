"""What one experiment's evidence says, as titled table heads and rows; nothing is compared here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pytest_engram import metrics, planning, sweeps
from pytest_engram.errors import UsageError
from pytest_engram.gates.comparison import percent
from pytest_engram.model import Evidence, OverlapSample, PageDistribution, StepReceipt, SweepSample, Verdict
from pytest_engram.report import numbers
from pytest_engram.schedule import base_arm, block_arms

Rows = Iterable[Sequence[object]]
Table = tuple[str, Sequence[str], Rows]  # title, head, rows
_UNITS: dict[str, Callable[[float], str]] = {
    "ns": lambda value: numbers.seconds(value / 1e9), "ms": lambda value: f"{value:,.1f} ms",
    "ratio": lambda value: f"{100 * value:.1f} %", "B/s": lambda value: f"{value / 1e9:.1f} GB/s",
}  # fmt: skip
_STARTUP = ("arm", "rank", "step", "time", "minor faults", "object pages", "mapped pages", "allocations", "note")
_CAPACITY = ("arm", "table", "moment", "ranks", "size", "PSS, all ranks", "shared memory grew", "policy said", "runs")
_WORKERS = ("arm", "rank", "CPUs", "memory nodes allowed", "task policy", "staging", "runs")
_LEDGER = ("arm", "rank", "bytes of", "size", "time", "rate", "what moved them")
_SWEEP = ("arm", "tokens", "peers", "lookups", "P95", "together", "waits", "main", "main slowed", "runs")
_PROBLEMS = ("arm", "status", "code", "who", "where", "message", "times")
_EFFECTS = ("gate", "arm", "metric", "effect", "interval", "p", "blocks", "per block, %")


def tables(evidence: Evidence) -> Iterator[Table]:
    """Every table of an evidence, in reading order; its arms in the order of the experiment."""
    order = {arm: place for place, arm in enumerate(block_arms(evidence.plan.experiment))}
    evidence = replace(evidence, runs=tuple(sorted(evidence.runs, key=lambda run: order.get(run.arm, len(order)))))
    receipts = [(run.arm, r.rank, r.step, r) for run in evidence.runs for s in run.startup for r in s.receipts]
    samples = [(base_arm(run.arm), sample.rank, sample) for run in evidence.runs for sample in run.overlap]
    audits = [
        (run.arm, pages.table, pages.moment.value, (run.index, pages))
        for run in evidence.runs for s in run.placement for pages in s.distributions
    ]  # fmt: skip
    ranks = evidence.plan.experiment.ranks
    sweep = [
        (base_arm(run.arm), one.tokens, one.peers, (run.index, one))
        for run in evidence.runs if run.sweep for one in sweeps.samples(run, ranks)
    ]  # fmt: skip
    yield "Medians over runs", *_metrics(evidence)
    yield "Where the pages lay", *_placement(evidence)
    yield "What each table took, cross-checked", _CAPACITY, _grouped(audits, _took)
    yield "Workers", _WORKERS, _workers(evidence)
    yield "Start-up, never part of steady times", _STARTUP, _grouped(receipts, _receipts)
    yield "Bytes per step, separate ledgers", _LEDGER, _ledgers(evidence, samples)
    yield "Time by layer, where arms differ", *_layers(evidence)
    sweep.sort(key=lambda cell: (order[cell[0]], *cell[1:3]))
    yield "Batch sizes and peers at work, per step", _SWEEP, _grouped(sweep, _swept)
    yield "Problems", _PROBLEMS, _problems(evidence)


def effects(verdict: Verdict) -> Table:
    """Every effect of every gate with its interval and its blocks."""
    rows = [
        (gate.gate, effect.arm, effect.metric, *numbers.measured(effect),
         numbers.ABSENT if effect.p_value is None else f"{effect.p_value:.4f}", effect.blocks,
         " ".join(percent(block, numbers.ABSENT, "") for block in effect.per_block))
        for gate in verdict.gates
        for effect in gate.effects
    ]  # fmt: skip
    return "Effects against arm A", _EFFECTS, rows


def _metrics(evidence: Evidence) -> tuple[Sequence[str], Rows]:
    """Per metric and rank, each arm's median over runs of the run's own reading; an absence keeps its reason."""
    arms = [*dict.fromkeys(run.arm for run in evidence.runs)]
    ranks = range(evidence.plan.experiment.ranks) if evidence.plan.experiment.ranks > 1 else ()
    found = [name for name in metrics.METRICS if any(metrics.value(run, name) is not None for run in evidence.runs)]
    names = [n for name in found for n in (name, *(f"{name}@{r}" for r in ranks if metrics.find(name).unit == "ns"))]
    rows = [(name, *(_middle(evidence, arm, name) for arm in arms)) for name in names]
    return ("metric", *(f"arm {arm}" for arm in arms)), rows


def _middle(evidence: Evidence, arm: str, name: str) -> str:
    readings = [metrics.measure(run, name) for run in evidence.runs if run.arm == arm]
    middle = metrics.middle(reading.value for reading in readings)
    return _in(metrics.find(name).unit, middle) + (f": {readings[0].reason}" if middle is None else "")


def _in(unit: str, value: float | None) -> str:
    if value is None:
        return numbers.ABSENT
    return _UNITS[unit](value) if unit in _UNITS else f"{value:,.3g} {unit}"


def _placement(evidence: Evidence) -> tuple[Sequence[str], Rows]:
    """One row per distinct answer of the kernel: runs of an arm that answered the same share a row."""
    audits = [(run.arm, pages) for run in evidence.runs for s in run.placement for pages in s.distributions]
    nodes = sorted({node for _, pages in audits for node in pages.pages})
    rows = _counted(
        (arm, pages.rank, pages.table, pages.moment.value,
         *(numbers.size(pages.pages.get(node, 0) * pages.page_bytes) for node in nodes),
         ", ".join(f"{name} {number}" for name, number in sorted(pages.unplaced.items())) or "0",
         f"{numbers.size(pages.covered_bytes)} of {numbers.size(pages.table_bytes)}",
         "+".join(pages.routes))
        for arm, pages in audits
    )  # fmt: skip
    shares = [f"NUMA node {node}" for node in nodes]
    head = ("arm", "rank", "table", "moment", *shares, "pages not placed", "coverage", "asked by", "audits")
    return head, rows


def _took(found: list[tuple[int, PageDistribution]]) -> Iterator[object]:
    """Medians over runs.  The ranks' PSS adds up to a table's size where nobody else maps it; the nodes' growth is
    everybody's since before the first table.  Both check the audit, and no gate reads them."""
    runs, first = list(_by_key(found).values()), found[0][1]
    yield len(runs[0])
    yield numbers.size(first.covered_bytes)
    shares = [[audit.pss_bytes for audit in audits] for audits in runs]
    yield numbers.size(metrics.middle(None if None in run else sum(filter(None, run)) for run in shares))
    grown = ((node, metrics.middle(run[0].shmem_growth.get(node) for run in runs)) for node in first.shmem_growth)
    yield ", ".join(f"node {node} {numbers.size(more)}" for node, more in grown) or numbers.ABSENT
    yield ", ".join(sorted({audit.policy_text for _, audit in found}))
    yield len(runs)


def _workers(evidence: Evidence) -> Rows:
    """What was in force for each rank; allowed nodes are not bound ones."""
    workers = ((run.arm, sample.worker) for run in evidence.runs for sample in run.placement if sample.worker)
    return _counted(
        (arm, one.rank, one.cpus_allowed, one.mems_allowed, " ".join((one.task_policy, *map(str, one.task_nodes))),
         one.staging or numbers.ABSENT)
        for arm, one in workers
    )  # fmt: skip


def _problems(evidence: Evidence) -> Rows:
    """Equal problems of one arm share a row."""
    found = [("", problem) for problem in evidence.problems]
    found += [(run.arm, problem) for run in evidence.runs for problem in run.problems]
    return _counted(sorted((arm, p.status.value, p.code, p.who, p.where, p.message) for arm, p in found))


def _counted(rows: Iterable[tuple[object, ...]]) -> Rows:
    """Equal rows share one, and their number stands behind it."""
    return [(*row, times) for row, times in Counter(rows).items()]


def _grouped(keyed: Iterable[tuple[Any, ...]], cells: Callable[[list[Any]], Iterator[object]]) -> Rows:
    return [(*key, *cells(items)) for key, items in _by_key(keyed).items()]


def _by_key(keyed: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Any]]:
    """All but the last item of a tuple are its key."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for *key, item in keyed:
        found.setdefault(tuple(key), []).append(item)
    return found


def _receipts(receipts: list[StepReceipt]) -> Iterator[object]:
    """Medians of seconds and of what grew meanwhile."""
    yield numbers.seconds(metrics.middle(receipt.seconds for receipt in receipts))
    for name in ("minor_faults", "object_pages", "mapped_pages"):
        pairs = [pair for receipt in receipts if (pair := getattr(receipt, name)) is not None]
        yield numbers.count(metrics.middle(after - before for before, after in pairs))
    yield len(receipts)
    yield "; ".join(dict.fromkeys(receipt.not_applicable or receipt.detail for receipt in receipts))


def _ledgers(evidence: Evidence, samples: Iterable[tuple[str, int, OverlapSample]]) -> Rows:
    """One row per kind of traffic, never added; each with its own time, so with the rate that it really got."""
    for (arm, rank), mine in _by_key(samples).items():
        for name, size, ns, note in _lines(evidence, rank, mine):
            rate = 1e9 * size / ns if ns else None
            yield arm, rank, name, numbers.size(size), _in("ns", ns), _in("B/s", rate), note


def _lines(
    evidence: Evidence, rank: int, samples: list[OverlapSample]
) -> Iterator[tuple[str, float, float | None, str]]:
    """(line, bytes, ns, note): the host's rows beside main compute and alone, then what follows on the device."""
    steps = [line for sample in samples for line in sample.timelines]
    marks = [mark for line in steps for mark in line.lookups]
    shape = ", ".join(f"{name} {_range(getattr(mark, name) for mark in marks)}" for name in ("rows", "tiles", "grid"))
    read, staged = samples[0].source_bytes, samples[0].staging_bytes
    distinct = {sample.distinct_bytes for sample in samples} - {None}
    shares = (f"{1 - (size or 0) / (read or 1):.1%} read again" for size in distinct)
    again = ", ".join(shares) or "repeated rows not recorded"
    busy = metrics.middle(metrics.busy_ns(sample) for sample in samples)
    yield "source", read, busy, f"{shape}; {again}"
    alone = metrics.middle(ns for sample in samples for ns in sample.alone_ns)
    yield "source, nothing beside it", read, alone, "the same batches" if alone else "not recorded"
    try:
        ledger = planning.step_ledger(evidence.plan, rank)
    except UsageError as error:
        yield "staging", staged, busy, f"by the lookups; the rest is unknown: {error}"
        return
    dim = planning.layout_for(evidence.plan).head_dim
    pads = staged // (2 * dim) - read // (dim + dim // 32)
    yield "staging", staged, busy, f"by the lookups; {pads:,} rows of padded heads"
    queries = f"{ledger.collectives} per step: rows of other shards"
    following = [("query collectives", "gather", queries)] if evidence.plan.experiment.ranks > 1 else []
    for title, name, note in (*following, *((name, name, "activations") for name in ("projection", "gate"))):
        spans = [sum(s.end - s.start for s in line.spans if s.name == name) for line in steps if line.spans]
        yield title, getattr(ledger, name), metrics.middle(spans), note


def _range(values: Iterable[int]) -> str:
    seen = sorted(set(values))
    return "–".join(f"{end:,}" for end in dict.fromkeys((seen[0], seen[-1]))) if seen else numbers.ABSENT


def _layers(evidence: Evidence) -> tuple[Sequence[str], Rows]:
    """Medians over marked steps of a layer's main stream, waits excluded: which layers pay for the lookups."""
    arms = [*evidence.plan.experiment.arms]
    times = [sweeps.layer_times([run for run in evidence.runs if base_arm(run.arm) == arm]) for arm in arms]
    named = partial(sweeps.stretch, known=times[0], layers=evidence.plan.experiment.workload.layers)
    rows = [
        (named(layer), *(_in("ns", arm[layer]) for arm in times))
        for layer in sorted(set.intersection(*map(set, times)))
        if max(arm[layer] for arm in times) > (1 + sweeps.SLOWER_LAYER) * min(arm[layer] for arm in times)
    ]
    return ("layers", *(f"arm {arm}" for arm in arms)), rows


def _swept(found: list[tuple[int, SweepSample]]) -> Iterator[object]:
    """Medians over the steps of all runs and ranks; a P95 needs 20 of them."""
    looked = [one for _, one in found if one.lookup_ns]
    steps = [ns for one in looked for ns in one.lookup_ns]
    yield _in("ns", metrics.middle(steps))
    yield _in("ns", metrics.quantile(steps, 0.95).value)
    yield _in("B/s", sweeps.rate(looked, looked[0].peers) if looked else None)
    for name in ("exposed_ns", "main_ns"):
        yield _in("ns", metrics.middle(ns for _, one in found for ns in getattr(one, name)))
    yield percent(sweeps.slowdown(one for _, one in found), numbers.ABSENT)
    yield len({index for index, _ in found})

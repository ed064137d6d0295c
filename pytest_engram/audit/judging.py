"""The pages of the workers' tables, what contradicts what, and what none of it proves."""

from __future__ import annotations

import array
import bisect
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pytest_engram.audit.reading import ENGRAM, PAGE, SHM, Limits, Source, Span, Worker, problem, read_worker
from pytest_engram.model import Problem, Status, Topology
from pytest_engram.numa import pages
from pytest_engram.numa.tree import parse_list

UNMAPPED = -(1 << 30)  # no errno: this worker does not map the page, and any answer wins over that
REMOTE = 0.05  # share of a table's pages away from its GPU that is a finding, beyond the sampling bound
_METRICS = {"time_to_first_token": "ttft", "inter_token_latency": "itl", "time_per_output_token": "itl"}
NOT_PROVEN = (
    "that a table is slow or that moving it helps: pages say where reads go, not what they cost",
    "that a shown policy, a CPU mask or Mems_allowed placed anything: only the page counts are evidence",
    "that a mapping found by its name or size is an Engram table: only ranges recorded by pytest_engram.probe are",
    "that latency follows from placement: the engines' means are since their start, over whatever load they had",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One table as one worker maps it.  ``pages`` and ``unplaced`` count the pages that were asked about."""

    pid: int
    pages: dict[int, int]
    unplaced: dict[str, int]
    remote: float | None  # share of the placed pages that lie away from the worker's GPU
    page_kb: int | None
    huge_share: float | None
    pss_bytes: int | None
    policy_shown: str | None
    numa_maps_bytes: dict[int, int] | None  # of the whole VMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One backing over all workers, each of its pages counted once.  ``bound``: 95 % error of a share, 0 if exact."""

    key: str
    kind: str
    name: str
    nbytes: int
    asked: int
    bound: float
    pages: dict[int, int]
    unplaced: dict[str, int]
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Means since the server started, None where it counted nothing; ``pids`` as far as they could be told."""

    engine: str
    ttft_ms: float | None
    itl_ms: float | None
    pids: tuple[int, ...]
    remote: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One look at a server; ``findings`` are INVALID where something contradicts."""

    schema: int = 1
    workers: tuple[Worker, ...]
    tables: tuple[Table, ...]
    engines: tuple[Engine, ...]
    findings: tuple[Problem, ...]
    evidence: tuple[str, ...]
    not_proven: tuple[str, ...] = NOT_PROVEN
    next_command: str


def look(
    source: Source, pids: Sequence[int], limits: Limits, topology: Topology, *, metrics: str = "", matched: bool = False
) -> Report:
    """Read and judge once.  Matched processes that hold neither a table nor a GPU are left out."""
    workers = [read_worker(source, pid, limits, topology) for pid in pids]
    workers = [one for one in workers if not matched or one.spans or one.gpus or one.problems]
    tables, unasked = read_tables(source, workers, limits.pages)
    workers = [replace(one, spans=(), problems=one.problems + unasked.get(one.pid, ())) for one in workers]
    found = (*_findings(workers, tables, topology), *_leftovers(source, tables))
    return Report(
        workers=tuple(workers), tables=tuple(tables), engines=tuple(engines(metrics, workers, tables)), findings=found,
        evidence=tuple(_evidence(source, workers, tables)),
        next_command=_next(workers, tables, {one.code for one in found}),
    )  # fmt: skip


def ask(source: Source, pid: int, spans: Sequence[Span], where: Sequence[int]) -> array.array[int]:
    """One node or -errno per offset in ``where`` (ascending), in bounded calls; raises ``OSError``."""
    found = array.array("i", [UNMAPPED]) * len(where)
    for span in spans:
        low, high = (bisect.bisect_left(where, at) for at in (span.offset, span.offset + span.end - span.start))
        for first in range(low, high, pages.CHUNK_PAGES):
            chunk = where[first : min(first + pages.CHUNK_PAGES, high)]
            answer = source.status(pid, [at + span.start - span.offset for at in chunk])
            found[first : first + len(chunk)] = array.array("i", answer)
    return found


def read_tables(
    source: Source, workers: Sequence[Worker], limit: int
) -> tuple[list[Table], dict[int, tuple[Problem, ...]]]:
    """Every backing of the workers, and per worker what could not be asked."""
    items = sorted(((span.key, one.pid) for one in workers for span in one.spans), key=lambda item: item[0])
    by_pid, problems, tables = {one.pid: one for one in workers}, dict[int, tuple[Problem, ...]](), list[Table]()
    for key, members in groupby(dict.fromkeys(items), key=lambda item: item[0]):
        own = {pid: [span for span in by_pid[pid].spans if span.key == key] for _, pid in members}
        spans = [span for some in own.values() for span in some]
        low, high = min(one.offset for one in spans), max(one.offset + one.end - one.start for one in spans)
        where = pages.strata(range(low, high, PAGE), limit, key)
        merged, views = array.array("i", [UNMAPPED]) * len(where), []
        for pid, some in own.items():
            try:
                found = ask(source, pid, some, where)
            except OSError as error:
                problems[pid] = (*problems.get(pid, ()), problem(pid, "move_pages", error))
                continue
            merged = array.array("i", map(max, merged, found))  # a node wins over every reason
            views.append(_view(by_pid[pid], some, found))
        placed, unplaced = pages.split(Counter(merged))
        tables.append(Table(key=key, kind=spans[0].kind, name=spans[0].name, nbytes=high - low, asked=len(where),
                            bound=pages.bound(where), pages=placed, unplaced=unplaced, views=tuple(views)))  # fmt: skip
    return tables, problems


def _view(worker: Worker, spans: Sequence[Span], found: array.array[int]) -> View:
    placed, unplaced = pages.split(Counter(found))
    page_kb = max((span.kb["KernelPageSize"] for span in spans if span.kb), default=None)
    huge, mapped = (pages.sum_kb(spans, names) or 0 for names in (pages.HUGE, pages.MAPPED))
    lines = [span.line for span in spans if span.line]
    known = worker.node is not None and placed
    return View(
        pid=worker.pid, pages=placed, unplaced=unplaced, page_kb=page_kb, huge_share=huge / mapped if mapped else None,
        remote=1 - placed.get(worker.node or 0, 0) / sum(placed.values()) if known else None,
        pss_bytes=pages.sum_kb(spans, ("Pss",)) if page_kb == PAGE >> 10 else None,  # hugetlb is not in Pss
        policy_shown=", ".join(sorted({line.policy for line in lines})) or None,
        numa_maps_bytes=pages.node_bytes(lines) if lines else None,
    )  # fmt: skip


def _findings(workers: Sequence[Worker], tables: Sequence[Table], topology: Topology) -> Iterator[Problem]:
    """What the kernel's answers contradict; a request that cannot be checked yields nothing."""
    for worker in workers:
        for code, text in (*_memory(worker), *_cpus(worker, topology), *_nodes(worker, topology)):
            yield Problem(code=code, message=text, who=f"worker {worker.pid}")
        for table in tables:
            for code, text in (item for view in table.views for item in _pages(worker, table, view)):
                yield Problem(code=code, message=text, who=f"worker {worker.pid}", where=table.key)


def _memory(worker: Worker) -> Iterator[tuple[str, str]]:
    shown, asked = worker.task_policy, worker.asked.get("membind")
    if shown and asked and _listed(shown.removeprefix("bind:")) != _listed(asked):
        yield "membind-dropped", f"--membind {asked} was asked, the task's policy shows {shown}"
    if shown and not asked and "numa-bind" in worker.asked and not shown.startswith("bind"):
        yield "membind-dropped", f"--numa-bind was asked, the task's policy shows {shown}: at most its CPUs are bound"


def _listed(text: str) -> set[int]:
    """A node list; words such as "all" or "default" are no node."""
    return set(parse_list(text, where="nodes")) if re.fullmatch(r"\d[\d,-]*", text) else set()


def _cpus(worker: Worker, topology: Topology) -> Iterator[tuple[str, str]]:
    asked = worker.asked.get("cpunodebind", "")
    near = {topology.node_of_cpu(cpu) for cpu in _listed(worker.cpus or "")}
    if _listed(asked) and near - _listed(asked):
        yield "cpunodebind-dropped", f"--cpunodebind {asked} was asked, the CPU mask is {worker.cpus}"


def _nodes(worker: Worker, topology: Topology) -> Iterator[tuple[str, str]]:
    """--numa-bind-nodes names one node per visible GPU, in CUDA's order, which is taken to be PCI order."""
    asked = re.findall(r"\d+", worker.asked.get("numa-bind-nodes", ""))
    names = {str(index): gpu for index, gpu in enumerate(topology.gpus)} | {gpu.uuid: gpu for gpu in topology.gpus}
    visible = worker.visible.split(",") if worker.visible else [str(index) for index in range(len(topology.gpus))]
    for node, name in zip(asked, visible, strict=False):
        gpu = names.get(name.strip())
        if gpu and gpu.numa_node is not None and gpu.numa_node != int(node):
            yield "bind-contradicts-gpu", f"--numa-bind-nodes has GPU {gpu.pci} on {node}, it is near {gpu.numa_node}"


def _pages(worker: Worker, table: Table, view: View) -> Iterator[tuple[str, str]]:
    if view.pid != worker.pid:
        return
    if view.remote is not None and view.remote - table.bound > REMOTE:
        yield "remote-pages", f"{view.remote:.1%} of {table.name} lies away from node {worker.node}, its GPU's"
    asked, placed = _listed(worker.asked.get("membind", "")), sum(view.pages.values())
    outside = sum(count for node, count in view.pages.items() if node not in asked) if asked else 0
    if outside > (REMOTE + table.bound) * placed:
        yield "outside-membind", f"{outside / placed:.1%} of {table.name} lies outside --membind {sorted(asked)}"
    exact = {node: count * PAGE for node, count in view.pages.items()}
    if not table.bound and table.kind != "probe" and view.numa_maps_bytes not in (None, exact):
        yield "route-disagreement", f"{table.name}: move_pages counts {exact} bytes, numa_maps {view.numa_maps_bytes}"


def _leftovers(source: Source, tables: Sequence[Table]) -> Iterator[Problem]:
    """Named tables in /dev/shm that no audited worker maps, as a killed server leaves them; they are only named."""
    known = {table.key.split("+")[0] for table in tables}
    for name in source.tree.names(SHM[1:], f"{ENGRAM}.*"):
        found = (source.root / SHM[1:] / name).stat()
        if f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}" not in known:
            text = f"holds {found.st_blocks * 512} bytes and is mapped by none of these workers"
            yield Problem(code="leftover", message=text, who=f"{SHM}/{name}", status=Status.INCONCLUSIVE)


def engines(text: str, workers: Sequence[Worker], tables: Sequence[Table]) -> Iterator[Engine]:
    """Mean TTFT and ITL per engine label of a Prometheus text, beside the remote share of that engine's workers."""
    total = Counter[tuple[str, str, str]]()
    for name, part, label, value in re.findall(
        r'^vllm:(\w+)_seconds_(sum|count)\{(?:.*,)?engine="([^"]*)".*\} ([-+.\deE]+)$', text, re.M
    ):
        total[_METRICS.get(name, ""), part, label] += float(value)  # type: ignore[assignment]
    labels = sorted({label for *_, label in total})
    told = {one.pid: one.engine or (labels[0] if len(labels) == 1 else None) for one in workers}
    for label in labels:
        ttft, itl = (_mean(total[name, "sum", label], total[name, "count", label]) for name in ("ttft", "itl"))
        pids = tuple(pid for pid, engine in told.items() if engine == label)
        views = [(view.remote, table.nbytes) for table in tables for view in table.views if view.pid in pids]
        known = [(remote * nbytes, nbytes) for remote, nbytes in views if remote is not None]
        remote = _mean(sum(part for part, _ in known), sum(nbytes for _, nbytes in known))
        yield Engine(engine=label, pids=pids, remote=remote, ttft_ms=ttft and ttft * 1e3, itl_ms=itl and itl * 1e3)


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def _evidence(source: Source, workers: Sequence[Worker], tables: Sequence[Table]) -> Iterator[str]:
    asked = sum(table.asked * len(table.views) for table in tables)
    yield f"{len(workers)} workers, {len(tables)} tables, {asked} page answers by move_pages, none of them a touch"
    yield f"kernel.numa_balancing {source.tree.text('proc/sys/kernel/numa_balancing') or 'unknown'}"
    for table in (table for table in tables if table.bound):
        yield f"{table.name}: {table.asked} of {table.nbytes // PAGE} pages, one per stratum, ±{table.bound:.2%} (95 %)"
    for worker in (worker for worker in workers if worker.node is None):
        why = f"its GPUs {worker.gpus} name no single node" if worker.gpus else "it maps no GPU"
        yield f"worker {worker.pid}: near and remote pages are not told apart, {why}"
    for one in (gap for worker in workers for gap in worker.problems):
        yield f"{one.who}, {one.where} not read: {one.message}"


def _next(workers: Sequence[Worker], tables: Sequence[Table], codes: set[str]) -> str:
    pids, gaps = " ".join(str(one.pid) for one in workers), [gap for worker in workers for gap in worker.problems]
    if any("CAP_SYS_PTRACE" in gap.message for gap in gaps):
        return f"sudo pytest-engram audit {pids}   (or as the workers' own user)"
    if any(gap.code == "gone" for gap in gaps):
        return "pytest-engram audit --match vllm   (a process has ended: find the server's present ones)"
    if not tables:
        return "start the server with PYTEST_ENGRAM_PROBE=FOLDER and pytest_engram.probe.record_table in its loader"
    if codes & {"remote-pages", "membind-dropped", "outside-membind", "cpunodebind-dropped", "bind-contradicts-gpu"}:
        return "pytest-engram plan A1   (what measuring one placement against the other takes)"
    if any(gap.code == "stall" for gap in gaps):
        return f"pytest-engram audit {pids} --stall 5   (when a pause of that length is acceptable)"
    return f"pytest-engram audit {pids} --watch 10   (under load: do pages move, does a policy change?)"

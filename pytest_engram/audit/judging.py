"""The pages of the workers' tables, what contradicts what, and what none of it proves."""

from __future__ import annotations

import array
import bisect
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby

from pytest_engram.audit.reading import ENGRAM, PAGE, SHM, Limits, Source, Span, Worker, problem, read_worker
from pytest_engram.model import Problem, Status, Topology
from pytest_engram.numa import pages
from pytest_engram.numa.tree import parse_list

UNMAPPED = -(1 << 30)  # no errno: this worker does not map the page, and any answer wins over that
_LIST = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
REMOTE = 0.05  # share of a table's pages away from its GPU that is a finding, beyond the sampling bound
# finite and not negative; a time stamp may follow; a line without its end was cut
_SAMPLE = re.compile(r"^vllm:(\w+)_seconds_(sum|count)\{(.*)\} (\d{1,30}(?:\.\d*)?(?:e[-+]?\d\d?)?)(?: \d+)?\n", re.M)
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
    bound: float  # 95 % error of a share, 0 if exact
    remote: float | None  # share of the placed pages that lie away from the worker's GPU
    page_kb: int | None
    huge_share: float | None
    pss_bytes: int | None
    policy_shown: str | None
    numa_maps_bytes: dict[int, int] | None  # of the whole VMA; None where pages are mapped twice


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
    workers = [w for w in workers if not matched or w.spans or w.gpus or {p.code for p in w.problems} - {"gone"}]
    tables, unasked = read_tables(source, workers, limits.pages)
    workers = [replace(one, spans=(), problems=one.problems + unasked.get(one.pid, ())) for one in workers]
    found = (*_findings(workers, tables, topology), *_leftovers(source, workers, tables))
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
            chunk = slice(first, min(first + pages.CHUNK_PAGES, high))
            answer = source.status(pid, [at + span.start - span.offset for at in where[chunk]])
            found[chunk] = array.array("i", map(max, found[chunk], array.array("i", answer)))  # another may map it too
    return found


def mapped(spans: Sequence[Span]) -> list[range]:
    """The offsets of all pages that some span maps, each once, ascending."""
    found = list[range]()
    for low, high in sorted({(one.offset, one.offset + one.end - one.start) for one in spans}):
        joined = found and low <= found[-1].stop
        found.append(range(found[-1].start, max(high, found.pop().stop), PAGE) if joined else range(low, high, PAGE))
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
        total = sum(map(len, parts := mapped(spans)))
        chosen = [pages.strata(part, max(limit > 0, limit * len(part) // total), key) for part in parts]
        where = array.array("Q", chain(*chosen)) if chosen[1:] else chosen[0]
        merged, views, exact = array.array("i", [UNMAPPED]) * len(where), [], len(where) == total
        for pid, some in own.items():
            try:
                found = ask(source, pid, some, where)
            except OSError as error:
                problems[pid] = (*problems.get(pid, ()), problem(pid, "move_pages", error))
                continue
            merged = array.array("i", map(max, merged, found))  # a node wins over every reason
            views.append(_view(by_pid[pid], some, found, exact=exact))
        placed, unplaced = pages.split(Counter(merged if views else ()))
        tables.append(Table(key=key, kind=spans[0].kind, name=spans[0].name, nbytes=total * PAGE, asked=len(where),
                            bound=0.0 if exact else pages.bound(placed), pages=placed, unplaced=unplaced,
                            views=tuple(views)))  # fmt: skip
    return tables, problems


def _view(worker: Worker, spans: Sequence[Span], found: array.array[int], *, exact: bool) -> View:
    placed, unplaced = pages.split(Counter(found))
    page_kb = max((span.kb["KernelPageSize"] for span in spans if span.kb), default=None)
    huge, resident = (pages.sum_kb(spans, names) or 0 for names in (pages.HUGE, pages.MAPPED))
    lines = [span.line for span in spans if span.line]
    once = sum(map(len, mapped(spans))) * PAGE == sum(span.end - span.start for span in spans)
    known = worker.node is not None and placed
    return View(
        pid=worker.pid, pages=placed, unplaced=unplaced, bound=0.0 if exact else pages.bound(placed), page_kb=page_kb,
        huge_share=huge / resident if resident else None,
        remote=1 - placed.get(worker.node or 0, 0) / sum(placed.values()) if known else None,
        pss_bytes=pages.sum_kb(spans, ("Pss",)) if page_kb == PAGE >> 10 else None,  # hugetlb is not in Pss
        policy_shown=", ".join(sorted({line.policy for line in lines})) or None,
        numa_maps_bytes=pages.node_bytes(lines) if lines and once else None,
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
    if shown and asked and _listed(asked) and _listed(re.sub(r"^bind(=\S+?)?:", "", shown)) != _listed(asked):
        yield "membind-dropped", f"--membind {asked} was asked, the task's policy shows {shown}"
    if shown and not asked and "numa-bind" in worker.asked and not shown.startswith("bind"):
        yield "membind-dropped", f"--numa-bind was asked, the task's policy shows {shown}: at most its CPUs are bound"


def _listed(text: str) -> set[int]:
    """A node list; words such as "all" or "default" are no node."""
    return set(parse_list(text, where="nodes")) if _LIST.fullmatch(text) else set()


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
    if view.remote is not None and view.remote - view.bound > REMOTE:
        yield "remote-pages", f"{view.remote:.1%} of {table.name} lies away from node {worker.node}, its GPU's"
    asked, placed = _listed(worker.asked.get("membind", "")), sum(view.pages.values())
    outside = sum(count for node, count in view.pages.items() if node not in asked) if asked else 0
    if outside > (REMOTE + view.bound) * placed:
        yield "outside-membind", f"{outside / placed:.1%} of {table.name} lies outside --membind {sorted(asked)}"
    exact = {node: count * PAGE for node, count in view.pages.items()}
    told = view.numa_maps_bytes or {}  # what a worker touches or unmaps between the two routes contradicts nothing
    if not table.bound and table.kind != "probe" and told != exact and sum(told.values()) == placed * PAGE:
        yield "route-disagreement", f"{table.name}: move_pages counts {exact} bytes, numa_maps {told}"


def _leftovers(source: Source, workers: Sequence[Worker], tables: Sequence[Table]) -> Iterator[Problem]:
    """Named tables in /dev/shm that no audited worker maps, as a killed server leaves them; they are only named."""
    known = {table.key.split("+")[0] for table in tables}
    shut = any(gap.where == "maps" and "CAP_SYS_PTRACE" in gap.message for one in workers for gap in one.problems)
    for name in [] if shut else source.tree.names(SHM[1:], rf"{ENGRAM}[\s\S]*"):
        with suppress(FileNotFoundError):  # gone meanwhile
            found = (source.root / SHM[1:] / name).lstat()
            if f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}" not in known:
                text = f"holds {found.st_blocks * 512} bytes and is mapped by none of these workers"
                yield Problem(code="leftover", message=text, who=f"{SHM}/{name}", status=Status.INCONCLUSIVE)


def engines(text: str, workers: Sequence[Worker], tables: Sequence[Table]) -> Iterator[Engine]:
    """Mean TTFT and ITL per engine label of a Prometheus text, beside the remote share of that engine's workers."""
    total = Counter[tuple[str, str, str]]()
    for name, part, text_labels, value in _SAMPLE.findall(text):
        if match := re.search(r'(?:^|,)engine="([^"]*)"', text_labels):
            total[_METRICS.get(name, ""), part, match[1]] += float(value)  # type: ignore[assignment]
    labels = sorted({label for *_, label in total})
    told = {one.pid: one.engine or (labels[0] if len(labels) == 1 else None) for one in workers}
    for label in labels:
        ttft, itl = (_mean(*(total.get((name, part, label)) for part in ("sum", "count"))) for name in ("ttft", "itl"))
        pids = tuple(pid for pid, engine in told.items() if engine == label)
        views = [(view.remote, table.nbytes) for table in tables for view in table.views if view.pid in pids]
        known = [(remote * nbytes, nbytes) for remote, nbytes in views if remote is not None]
        remote = _mean(sum(part for part, _ in known), sum(nbytes for _, nbytes in known))
        yield Engine(engine=label, pids=pids, remote=remote, ttft_ms=ttft and ttft * 1e3, itl_ms=itl and itl * 1e3)


def _mean(total: float | None, count: float | None) -> float | None:
    return total / count if count and total is not None else None


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
        missing = "start the server with PYTEST_ENGRAM_PROBE=FOLDER and pytest_engram.probe.record_table in its loader"
        return missing if workers else "ps -ef   (no process with a table or a GPU matched: find the server's)"
    if codes & {"remote-pages", "membind-dropped", "outside-membind", "cpunodebind-dropped", "bind-contradicts-gpu"}:
        return "pytest-engram plan A1   (what measuring one placement against the other takes)"
    if any(gap.code == "stall" for gap in gaps):
        return f"pytest-engram audit {pids} --stall 5   (when a pause of that length is acceptable)"
    return f"pytest-engram audit {pids} --watch 10   (under load: do pages move, does a policy change?)"

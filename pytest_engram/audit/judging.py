"""Pages, shared backings and the server's latencies of the workers that were read; what follows and what does not."""

from __future__ import annotations

import array
import bisect
import errno
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pytest_engram.audit.reading import PAGE, Limits, Source, Span, Worker, problem
from pytest_engram.errors import EngramError
from pytest_engram.model import Problem, Topology
from pytest_engram.numa import _syscalls, pages
from pytest_engram.numa.tree import parse_list

REMOTE = 0.05  # share of a table's pages away from its GPU that is worth a finding, beyond the sampling bound
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")


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
class Finding:
    """One thing that the evidence shows; ``who`` is a worker or a table."""

    code: str
    who: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Means since the server started, None where it counted nothing; ``pids`` as far as they could be told."""

    engine: str
    ttft_ms: float | None
    itl_ms: float | None
    pids: tuple[int, ...]
    remote: float | None


def offsets(low: int, high: int, limit: int, key: str) -> tuple[Sequence[int], float]:
    """(Page offsets to ask about, 95 % bound on a node's share): all, or one at random out of each of ``limit`` strata.

    A fixed stride would alias with interleaving.  The bound is 1.96·√(0.25 / limit), the binomial worst case.
    """
    count = -(-(high - low) // PAGE)
    if not limit or count <= limit:
        return range(low, high, PAGE), 0.0
    draw = random.Random(key).random  # noqa: S311 - seeded, so that two looks ask about the same pages
    chosen = (low + int((stratum + draw()) * count / limit) * PAGE for stratum in range(limit))
    return array.array("Q", chosen), 0.98 / limit**0.5


def ask(source: Source, pid: int, spans: Sequence[Span], where: Sequence[int]) -> array.array[int]:
    """One node or -errno per offset in ``where`` (ascending), in bounded calls; raises ``OSError``."""
    found = array.array("i", [-errno.ENXIO]) * len(where)
    for span in spans:
        low, high = (bisect.bisect_left(where, at) for at in (span.offset, span.offset + span.end - span.start))
        for first in range(low, high, pages.CHUNK_PAGES):
            chunk = where[first : min(first + pages.CHUNK_PAGES, high)]
            answer = source.status(pid, [at + span.start - span.offset for at in chunk])
            found[first : first + len(chunk)] = array.array("i", map(_answered, array.array("i", answer)))
    return found


def _answered(status: int) -> int:
    return -errno.ENODATA if status == _syscalls.UNANSWERED else status


def read_tables(
    source: Source, workers: Sequence[Worker], near: dict[int, int | None], limits: Limits
) -> tuple[list[Table], list[Problem]]:
    """Every backing of the workers, and what could not be asked; ``near`` is each worker's GPU node."""
    spans = sorted(((span.key, one.pid, span) for one in workers for span in one.spans), key=lambda item: item[:2])
    tables, problems = [], []
    for key, items in groupby(spans, key=lambda item: item[0]):
        members = [(pid, [span for *_, span in own]) for pid, own in groupby(items, key=lambda item: item[1])]
        everyone = [span for _, own in members for span in own]
        low, high = (min(one.offset for one in everyone), max(one.offset + one.end - one.start for one in everyone))
        where, bound = offsets(low, high, limits.pages, key)
        merged, views = array.array("i", [-errno.ENXIO]) * len(where), []
        for pid, own in members:
            try:
                found = ask(source, pid, own, where)
            except (OSError, EngramError) as error:
                problems.append(problem(pid, "move_pages", error))
                continue
            merged = array.array("i", map(max, merged, found))  # a node wins over every reason
            views.append(_view(pid, own, found, near.get(pid)))
        placed, unplaced = _counts(merged)
        tables.append(Table(
            key=key, kind=everyone[0].kind, name=everyone[0].name, nbytes=high - low, asked=len(where), bound=bound,
            pages=placed, unplaced=unplaced, views=tuple(views),
        ))  # fmt: skip
    return tables, problems


def _counts(found: array.array[int]) -> tuple[dict[int, int], dict[str, int]]:
    counts = sorted(Counter(found).items())
    unplaced = {errno.errorcode.get(-status, str(status)): count for status, count in counts if status < 0}
    return {status: count for status, count in counts if status >= 0}, unplaced


def _view(pid: int, spans: Sequence[Span], found: array.array[int], node: int | None) -> View:
    placed, unplaced = _counts(found)
    kb = [span.kb for span in spans if span.kb]
    page_kb = max((one["KernelPageSize"] for one in kb), default=None)
    huge = sum(one.get(name, 0) for one in kb for name in _HUGE)
    mapped = sum(one.get(name, 0) for one in kb for name in ("Rss", "Shared_Hugetlb", "Private_Hugetlb"))
    told: Counter[int] = Counter()
    for line in (span.line for span in spans if span.line):
        told.update({number: count * (line.page_bytes or 0) for number, count in line.pages.items()})
    words = sorted({span.line.policy for span in spans if span.line})
    away = sum(placed.values()) - placed.get(node, 0) if node is not None else 0
    return View(
        pid=pid, pages=placed, unplaced=unplaced, page_kb=page_kb, huge_share=huge / mapped if mapped else None,
        remote=away / sum(placed.values()) if placed and node is not None else None,
        pss_bytes=sum(one["Pss"] for one in kb) << 10 if page_kb == PAGE >> 10 else None,  # hugetlb is not in Pss
        policy_shown=" ".join(words) or None, numa_maps_bytes=dict(told) if words else None,
    )  # fmt: skip


def gpus_of(source: Source, worker: Worker) -> list[str]:
    """PCI addresses of the GPUs whose device file the worker maps: known inside containers too, free of remapping."""
    folder = "proc/driver/nvidia/gpus"
    found = {pci: source.tree.text(f"{folder}/{pci}/information") or "" for pci in source.tree.names(folder)}
    minors = {pci: re.search(r"Device Minor:\s*(\d+)", text) for pci, text in found.items()}
    return [pci for pci, minor in minors.items() if minor and int(minor[1]) in worker.minors]


def near_node(pcis: Sequence[str], topology: Topology) -> tuple[int | None, str]:
    """(The one node near all of these GPUs, how it is known), or (None, why not)."""
    nodes = {gpu.pci: gpu.numa_node for gpu in topology.gpus if gpu.pci in pcis}
    if len(set(nodes.values())) == 1 and None not in nodes.values():
        return min(node for node in nodes.values() if node is not None), ", ".join(nodes)
    return None, f"GPUs {nodes}" if nodes else "maps no known GPU"


def findings(workers: Sequence[Worker], tables: Sequence[Table], near: dict[int, int | None], topology: Topology
             ) -> Iterator[Finding]:  # fmt: skip
    """What the kernel's answers contradict; a request that cannot be checked yields nothing."""
    for worker in workers:
        for code, text in (*_memory(worker), *_cpus(worker, topology), *_map(worker, topology)):
            yield Finding(code=code, who=f"worker {worker.pid}", text=text)
    for table in tables:
        for view in table.views:
            if view.remote is not None and view.remote - table.bound > REMOTE:
                text = f"{view.remote:.1%} of {table.name} lies away from node {near[view.pid]}, the GPU's"
                yield Finding(code="remote-pages", who=f"worker {view.pid}", text=text)
            exact = {node: count * PAGE for node, count in view.pages.items()}
            if table.bound == 0 and view.numa_maps_bytes not in (None, exact) and table.kind != "probe":
                text = f"move_pages counts {exact} bytes of {table.name}, numa_maps {view.numa_maps_bytes}"
                yield Finding(code="route-disagreement", who=f"worker {view.pid}", text=text)


def _memory(worker: Worker) -> Iterator[tuple[str, str]]:
    shown, asked = worker.task_policy, worker.asked.get("membind")
    if shown and asked and shown != f"bind:{asked}":
        yield "membind-dropped", f"--membind {asked} was asked, the task's policy shows {shown}"
    if shown and not asked and "numa-bind" in worker.asked and not shown.startswith("bind"):
        yield "membind-dropped", f"--numa-bind was asked, the task's policy shows {shown}: at most the CPUs are bound"


def _cpus(worker: Worker, topology: Topology) -> Iterator[tuple[str, str]]:
    asked = worker.asked.get("cpunodebind", "")
    if not re.fullmatch(r"[\d,-]+", asked) or not worker.cpus:
        return
    wanted = {cpu for node in parse_list(asked, where="--cpunodebind") for cpu in _cpus_of(node, topology)}
    if not set(parse_list(worker.cpus, where="Cpus_allowed_list")) <= wanted:
        yield "cpunodebind-dropped", f"--cpunodebind {asked} was asked, the CPU mask is {worker.cpus}"


def _cpus_of(node: int, topology: Topology) -> tuple[int, ...]:
    found = topology.node(node)
    return found.cpus if found else ()


def _map(worker: Worker, topology: Topology) -> Iterator[tuple[str, str]]:
    """--numa-bind-nodes names one node per visible GPU, in CUDA's order, taken to be PCI order."""
    nodes = [int(node) for node in re.findall(r"\d+", worker.asked.get("numa-bind-nodes", ""))]
    picked = (worker.visible or ",".join(map(str, range(len(topology.gpus))))).split(",")
    by_name = {str(index): gpu for index, gpu in enumerate(topology.gpus)} | {g.uuid: g for g in topology.gpus if g.uuid}
    for node, name in zip(nodes, picked, strict=False):
        gpu = by_name.get(name.strip())
        if gpu and gpu.numa_node is not None and gpu.numa_node != node:
            yield "bind-contradicts-gpu", f"--numa-bind-nodes puts GPU {gpu.pci} on node {node}; it is near {gpu.numa_node}"


def engines(text: str, workers: Sequence[Worker], tables: Sequence[Table]) -> list[Engine]:
    """Mean TTFT and ITL per engine label of a Prometheus text, beside the remote share of that engine's workers."""
    total: Counter[tuple[str, str, str]] = Counter()
    names = {"time_to_first_token": "ttft", "inter_token_latency": "itl", "time_per_output_token": "itl"}
    for name, part, labels, value in re.findall(r"^vllm:(\w+)_seconds_(sum|count)\{(.*)\} ([\d.e+-]+)$", text, re.M):
        label = re.search(r'engine="([^"]*)"', labels)
        if name in names and label:
            total[names[name], part, label[1]] += float(value)  # type: ignore[assignment]
    labels = sorted({label for *_, label in total})
    told = {one.pid: one.engine or (labels[0] if len(labels) == 1 else None) for one in workers}
    found = []
    for label in labels:
        ttft, itl = (1e3 * total[name, "sum", label] / total[name, "count", label] if total[name, "count", label]
                     else None for name in ("ttft", "itl"))  # fmt: skip
        pids = tuple(pid for pid, engine in told.items() if engine == label)
        views = [(view.remote, table.nbytes) for table in tables for view in table.views if view.pid in pids]
        known = [(remote, nbytes) for remote, nbytes in views if remote is not None]
        remote = sum(r * n for r, n in known) / sum(n for _, n in known) if known else None
        found.append(Engine(engine=label, ttft_ms=ttft, itl_ms=itl, pids=pids, remote=remote))
    return found

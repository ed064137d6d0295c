"""Where the pages of a range lie, asked of the kernel by two independent routes; looking touches nothing.

Route 1 is ``move_pages`` without targets, route 2 counts ``numa_maps`` by address range.  A displayed policy is only
shown.  Standard library only: the read-only audit of other processes uses this module too.
"""

from __future__ import annotations

import array
import collections
import errno
import mmap
import os
import random
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from pytest_engram.errors import PlacementError
from pytest_engram.model import Moment, PageDistribution, WorkerPolicy
from pytest_engram.numa import _syscalls, procfs
from pytest_engram.numa.tree import Tree

CHUNK_PAGES = 1 << 16  # per call: bounds how long one query runs
_THREADS = 4  # all walks take the same lock: more threads are not faster
_RECORD = re.compile(rb"([0-9a-f]+)(?:-([0-9a-f]+))? ")
HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")  # lines of smaps
MAPPED = ("Rss", "Shared_Hugetlb", "Private_Hugetlb")  # Rss counts no hugetlb page


def audit_range(
    address: int, nbytes: int, *, rank: int, moment: Moment, table: int, identity: str,
    page_bytes: int = mmap.PAGESIZE,
) -> PageDistribution:  # fmt: skip
    """The distribution of the whole pages of [address, address + nbytes).

    move_pages, numa_maps and smaps walk the pages side by side.  Raises ``PlacementError``: ``not-mapped`` (the range,
    or the object ``identity``, is not mapped there), ``page-size`` (other than ``page_bytes``), ``unanswered``,
    ``coverage``, ``route-disagreement`` or ``blocked-by-sandbox``.
    """
    where = f"audit {moment.value} of table {table}"
    vmas = mapped_vmas(address, nbytes, where=where, name="maps")
    identities = ", ".join(sorted({vma.identity for vma in vmas}))
    _require(identities, identity, "not-mapped", where, "the range maps")
    end = -(-(address + nbytes) // page_bytes) * page_bytes
    pages = range(address // page_bytes * page_bytes, end, page_bytes)
    whole = range(vmas[0].start, vmas[-1].end, page_bytes)  # numa_maps speaks of whole VMAs
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
        smaps = pool.submit(mapped_vmas, address, nbytes, where=where)
        text = pool.submit(_records, "numa_maps", address, end, where)
        placed, unplaced = query_range(pool, pages, where=where)
        first = placed if pages == whole else query_range(pool, whole, where=where)[0]
        vmas, lines = smaps.result(), _lines(text.result(), vmas)
    page = max(vma.kb["KernelPageSize"] for vma in vmas) << 10
    _require(page, page_bytes, "page-size", where, "a page has bytes")
    covered = (sum(placed.values()) + sum(unplaced.values())) * page
    _require(covered, len(pages) * page, "coverage", where, "answered bytes:")
    _compare_routes(lines, first, page_bytes, where)
    return PageDistribution(
        rank=rank, moment=moment, table=table, identity=identity, address=address, table_bytes=nbytes,
        page_bytes=page, pages=placed, unplaced=unplaced, covered_bytes=covered,
        policy_text=" ".join(sorted({line.policy for line in lines})), routes=("move_pages", "numa_maps"),
        pss_bytes=sum_kb(vmas, ("Pss",)) if page == mmap.PAGESIZE else None,  # Pss counts no hugetlb page
        huge_bytes=sum_kb(vmas, HUGE),
    )  # fmt: skip


def strata(pages: range, sample: int, key: str) -> Sequence[int]:
    """All pages, or one at random out of each of ``sample`` equal strata: a fixed stride aliases with interleaving."""
    if not 0 < sample < len(pages):
        return pages
    draw, width = random.Random(key).random, len(pages) / sample  # noqa: S311 - seeded: two looks ask the same pages
    return array.array("Q", (pages[int((stratum + draw()) * width)] for stratum in range(sample)))


def bound(placed: dict[int, int]) -> float:
    """95 % half-width of a node's share among ``placed`` sampled pages, 1.96·√(0.25 / n): the binomial worst case."""
    return float(min(1.0, 0.98 / max(sum(placed.values()), 1) ** 0.5))


def mapped_vmas(address: int, nbytes: int, *, where: str = "smaps", name: str = "smaps") -> tuple[procfs.Vma, ...]:
    """The records of smaps (or of ``maps``: no page is walked, ``kb`` is empty) that cover the range without a hole."""
    vmas = procfs.parse_smaps("".join(_records(name, address, address + nbytes, where)))
    position = address
    for vma in vmas:
        position = vma.end if vma.start <= position else position
    if position < address + nbytes:
        raise PlacementError(f"nothing is mapped at {position:#x}", code="not-mapped", where=where)
    return vmas


def query_range(
    pool: Executor, addresses: Sequence[int], *, where: str = "move_pages"
) -> tuple[dict[int, int], dict[str, int]]:
    """Pages per node, and per errno name for those that lie nowhere, by ``move_pages`` in chunks."""
    chunks = (addresses[first : first + CHUNK_PAGES] for first in range(0, len(addresses), CHUNK_PAGES))
    counts: collections.Counter[int] = collections.Counter()
    for status in pool.map(partial(_query_chunk, where), chunks):
        counts.update(status)
    if silent := counts[_syscalls.UNANSWERED]:
        raise PlacementError(f"{silent} pages got no answer", code="unanswered", where=where)
    return split(counts)


def split(counts: collections.Counter[int]) -> tuple[dict[int, int], dict[str, int]]:
    """Answers counted: pages per node, and per errno name for those that lie nowhere."""
    unplaced = {errno.errorcode.get(-code, "UNMAPPED"): counts[code] for code in sorted(counts) if code < 0}
    return {node: counts[node] for node in sorted(counts) if node >= 0}, unplaced


def _query_chunk(where: str, addresses: Sequence[int]) -> collections.Counter[int]:
    try:
        return _count_statuses(_syscalls.page_status(0, addresses))
    except OSError as error:
        raise _syscalls.refused(error, where) from error


def _count_statuses(status: bytes) -> collections.Counter[int]:
    """Count C ints without a Python step per page where all are node numbers below 256."""
    if status and status == status[:4] * (len(status) // 4):  # one node holds them all
        return collections.Counter({int.from_bytes(status[:4], sys.byteorder, signed=True): len(status) // 4})
    if any(status[lane::4].strip(b"\0") for lane in (1, 2, 3)):
        return collections.Counter(array.array("i", status))
    counts, low = collections.Counter[int](), status[0::4]
    while low:  # a third of what counting ints takes
        counts[low[0]] = low.count(low[:1])
        low = low.translate(None, low[:1])
    return counts


def _compare_routes(lines: Sequence[procfs.NumaMapsLine], placed: dict[int, int], page_bytes: int, where: str) -> None:
    """The same pages by both routes."""
    told = {node: size // page_bytes for node, size in node_bytes(lines).items()}
    if told != placed:
        raise PlacementError(
            f"numa_maps counts {told} pages per node and move_pages {placed}",
            code="route-disagreement", where=where, expected="the same pages by both routes",
            way_out="audit again while nothing maps, unmaps or migrates the table",
        )  # fmt: skip


def node_bytes(lines: Iterable[procfs.NumaMapsLine]) -> dict[int, int]:
    """Bytes per node, as numastat counts them: each mapping in its own page size."""
    total: collections.Counter[int] = collections.Counter()
    for line in lines:
        total.update({node: count * line.page_kb << 10 for node, count in line.pages.items()})
    return dict(sorted(total.items()))


def _require(seen: int | str, expected: int | str, code: str, where: str, what: str) -> None:
    if seen != expected:
        raise PlacementError(f"{what} {seen}", code=code, where=where, expected=str(expected))


def sum_kb(vmas: Iterable[Any], names: tuple[str, ...]) -> int | None:
    """Bytes that these lines of smaps say about all of ``vmas`` (anything with ``kb``); None where none says any."""
    values = [vma.kb[name] for vma in vmas for name in names if name in (vma.kb or ())]
    return sum(values) * 1024 if values else None


def _lines(records: Iterable[str], vmas: Iterable[procfs.Vma]) -> list[procfs.NumaMapsLine]:
    """The numa_maps lines of these VMAs: they tell a start and no end."""
    starts = {f"{vma.start:08x}" for vma in vmas}
    return [procfs.parse_numa_maps_line(line) for line in records if line.partition(" ")[0] in starts]


def _records(name: str, address: int, end: int, where: str) -> list[str]:
    """The lines of maps, smaps or numa_maps about [address, end); reading stops behind it.

    Pieces smaller than a record: of larger ones the kernel walks the last record's pages twice when it does not fit.
    """
    kept, inside = [], False
    try:
        with open(f"/proc/self/{name}", "rb", buffering=512) as lines:
            for line in lines:
                if found := _RECORD.match(line):
                    if int(found[1], 16) >= end:
                        break
                    inside = found[2] is None or int(found[2], 16) > address
                if inside:
                    kept.append(line.decode(errors="replace"))
    except OSError as error:
        raise _syscalls.refused(error, where) from error
    return kept


def staging_place(buffer: Any) -> str:
    """Where a staging buffer lies, in words: "HBM" for a CUDA tensor, else its placed pages' shares by move_pages.

    ``buffer`` is a tensor or a numpy array.  Pinned caches and task policies move it without a word: ask after warm-up.
    """
    if getattr(buffer, "is_cuda", False):
        return "HBM"
    address = buffer.ctypes.data if hasattr(buffer, "ctypes") else buffer.data_ptr()
    low = address // mmap.PAGESIZE * mmap.PAGESIZE
    with ThreadPoolExecutor(1) as pool:
        placed, _ = query_range(pool, range(low, address + buffer.nbytes, mmap.PAGESIZE), where="staging")
    return ", ".join(f"NUMA node {node} {count / sum(placed.values()):.0%}" for node, count in placed.items()) or "none"


def worker_policy(rank: int, staging: Any = None) -> WorkerPolicy:
    """What is in force for the calling thread: its CPUs, its policy, the nodes it is allowed, and its staging."""
    status = procfs.parse_status(Tree().need("proc/thread-self/status"))
    try:
        mode, nodes = _syscalls.get_mempolicy()
    except OSError as error:
        raise _syscalls.refused(error, "worker policy") from error
    return WorkerPolicy(
        rank=rank, cpus_allowed=status["Cpus_allowed_list"], mems_allowed=status["Mems_allowed_list"],
        task_policy=mode, task_nodes=nodes, staging=None if staging is None else staging_place(staging),
    )  # fmt: skip

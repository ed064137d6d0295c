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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pytest_engram.errors import PlacementError
from pytest_engram.model import Moment, PageDistribution, WorkerPolicy
from pytest_engram.numa import _syscalls, procfs

CHUNK_PAGES = 1 << 16  # per call: bounds how long one query runs
_THREADS = 4  # the kernel answers about 7 M pages/s per thread
_HUGE_FIELDS = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")


def audit_range(
    address: int, nbytes: int, *, rank: int, moment: Moment, table: int, identity: str, pid: int = 0
) -> PageDistribution:
    """The distribution of the whole pages of [address, address + nbytes) in process ``pid`` (0: this one).

    Raises ``PlacementError``: ``not-mapped`` (the range, or the object ``identity``, is not mapped there),
    ``unanswered``, ``coverage``, ``route-disagreement`` or ``blocked-by-sandbox``.
    """
    where = f"audit {moment.value} of table {table}"
    vmas = mapped_vmas(address, nbytes, pid=pid, where=where)
    _verify_identity(vmas, identity, where)
    lines = numa_lines(vmas, pid=pid, where=where)
    page = max(vma.kb["KernelPageSize"] for vma in vmas) * 1024
    start, end = address // page * page, -(-(address + nbytes) // page) * page
    placed, unplaced = query_range(start, end, page, pid=pid, where=where)
    covered = (sum(placed.values()) + sum(unplaced.values())) * page
    if covered != end - start:
        raise PlacementError(f"{covered} bytes are answered", code="coverage", where=where, expected=f"{end - start}")
    _compare_routes(vmas, lines, (start, end, page), placed, pid=pid, where=where)
    return PageDistribution(
        rank=rank, moment=moment, table=table, identity=identity, address=address, table_bytes=nbytes,
        page_bytes=page, pages=placed, unplaced=unplaced, covered_bytes=covered,
        policy_text=" ".join(sorted({line.policy for line in lines})), routes=("move_pages", "numa_maps"),
        pss_bytes=_sum_kb(vmas, ("Pss",)) if page == mmap.PAGESIZE else None,  # hugetlb is in neither Rss nor Pss
        huge_bytes=_sum_kb(vmas, _HUGE_FIELDS),
    )  # fmt: skip


def mapped_vmas(address: int, nbytes: int, *, pid: int = 0, where: str = "smaps") -> tuple[procfs.Vma, ...]:
    """The smaps records that cover the range without a hole."""
    end = address + nbytes
    vmas = procfs.parse_smaps(_smaps_text(pid, address, end, where))
    position = address
    for vma in vmas:
        position = vma.end if vma.start <= position else position
    if position < end:
        raise PlacementError(f"nothing is mapped at {position:#x}", code="not-mapped", where=where)
    return vmas


def mapped_bytes(address: int, nbytes: int) -> int:
    """Bytes of the range's VMAs that this process maps: Rss plus hugetlb, from smaps."""
    return _sum_kb(mapped_vmas(address, nbytes), ("Rss", "Shared_Hugetlb", "Private_Hugetlb")) or 0


def numa_lines(vmas: Iterable[procfs.Vma], *, pid: int, where: str) -> tuple[procfs.NumaMapsLine, ...]:
    """The numa_maps records of these VMAs, matched by address."""
    starts = {f"{vma.start:08x}" for vma in vmas}
    lines = (line for line in _read(pid, "numa_maps", where) if line.split(" ", 1)[0] in starts)
    return tuple(procfs.parse_numa_maps_line(line) for line in lines)


def query_range(
    start: int, end: int, page: int, *, pid: int = 0, where: str = "move_pages"
) -> tuple[dict[int, int], dict[str, int]]:
    """Pages of ``page`` bytes per node, and per errno name for those that lie nowhere, by ``move_pages``."""
    step = CHUNK_PAGES * page
    counts: collections.Counter[int] = collections.Counter()
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
        chunks = (range(first, min(end, first + step), page) for first in range(start, end, step))
        for status in pool.map(lambda addresses: _query_chunk(addresses, pid, where), chunks):
            counts.update(status)
    if silent := counts[_syscalls.UNANSWERED]:
        raise PlacementError(f"{silent} pages got no answer", code="unanswered", where=where)
    placed = {node: counts[node] for node in sorted(counts) if node >= 0}
    unplaced = {errno.errorcode.get(-code, str(code)): counts[code] for code in sorted(counts) if code < 0}
    return placed, unplaced


def _query_chunk(addresses: range, pid: int, where: str) -> collections.Counter[int]:
    try:
        return _count_statuses(_syscalls.page_status(pid, addresses))
    except OSError as error:
        if pid and error.errno in (errno.EPERM, errno.EACCES):
            raise _unreadable(pid, "move_pages", error, where) from error
        raise _syscalls.refused(error, where) from error


def _count_statuses(status: bytes) -> collections.Counter[int]:
    """Count C ints without a Python step per page where all are node numbers below 256."""
    if any(status[lane::4].strip(b"\0") for lane in (1, 2, 3)):
        return collections.Counter(array.array("i", status))
    counts: collections.Counter[int] = collections.Counter()
    low = status[0::4]
    while low:
        counts[low[0]] = low.count(low[:1])
        low = low.translate(None, low[:1])
    return counts


def _compare_routes(
    vmas: tuple[procfs.Vma, ...],
    lines: tuple[procfs.NumaMapsLine, ...],
    span: tuple[int, int, int],
    placed: dict[int, int],
    *,
    pid: int,
    where: str,
) -> None:
    """numa_maps speaks of whole VMAs: when the range is a part of one, the first route is asked for the VMA too."""
    start, end, page = span
    if vmas[0].start != start or vmas[-1].end != end:
        placed, _ = query_range(vmas[0].start, vmas[-1].end, page, pid=pid, where=where)
    told: collections.Counter[int] = collections.Counter()
    for line in lines:
        told.update({node: count * (line.page_bytes or 0) // page for node, count in line.pages.items()})
    if dict(told) != placed:
        raise PlacementError(
            f"numa_maps counts {dict(sorted(told.items()))} pages per node and move_pages {placed}",
            code="route-disagreement",
            where=where,
            expected="the same pages by both routes",
            way_out="audit again while nothing maps, unmaps or migrates the table",
        )


def _verify_identity(vmas: tuple[procfs.Vma, ...], identity: str, where: str) -> None:
    seen = sorted({vma.identity for vma in vmas})
    if seen != [identity]:
        raise PlacementError(f"the range maps {', '.join(seen)}", code="not-mapped", where=where, expected=identity)


def _sum_kb(vmas: Iterable[procfs.Vma], names: tuple[str, ...]) -> int | None:
    values = [vma.kb[name] for vma in vmas for name in names if name in vma.kb]
    return sum(values) * 1024 if values else None


def _smaps_text(pid: int, address: int, end: int, where: str) -> str:
    """The smaps blocks that overlap the range; reading stops behind it."""
    kept: list[str] = []
    inside = False
    for line in _read(pid, "smaps", where):
        low, dash, rest = line.partition("-")
        if dash and ":" not in low and (high := rest.split(" ", 1)[0]):
            if int(low, 16) >= end:
                break
            inside = int(high, 16) > address
        if inside:
            kept.append(line)
    return "".join(kept)


def _read(pid: int, name: str, where: str) -> Iterator[str]:
    try:
        with Path(f"/proc/{pid or 'self'}/{name}").open() as lines:
            yield from lines
    except OSError as error:
        raise _unreadable(pid, name, error, where) from error


def _unreadable(pid: int, name: str, error: OSError, where: str) -> PlacementError:
    return PlacementError(
        f"{name} of process {pid or 'self'}: {error.strerror or error}",
        code="not-readable",
        where=where,
        expected="PTRACE_MODE_READ_REALCREDS: the same user, or CAP_SYS_PTRACE",
        way_out="run as the user that owns the process, in its PID namespace, or with CAP_SYS_PTRACE",
    )


def worker_policy(rank: int) -> WorkerPolicy:
    """What is in force for the calling thread: its CPUs, its policy, the nodes it is allowed."""
    status = procfs.parse_status(Path("/proc/thread-self/status").read_text())
    try:
        mode, nodes = _syscalls.get_mempolicy()
    except OSError as error:
        raise _syscalls.refused(error, "worker policy") from error
    return WorkerPolicy(
        rank=rank,
        cpus_allowed=status["Cpus_allowed_list"],
        mems_allowed=status["Mems_allowed_list"],
        task_policy=mode,
        task_nodes=nodes,
    )

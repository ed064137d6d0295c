"""The audit asks the kernel by two routes, touches nothing, and notices every contradiction."""

from __future__ import annotations

import collections
import ctypes
import errno
import mmap
import os
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_engram.errors import NotMeasurable, PlacementError
from pytest_engram.model import Moment, NumaNode, PageDistribution, Topology
from pytest_engram.numa import _syscalls, capacity, pages, policy_calls
from pytest_engram.numa.backing import BACKINGS, Backing, Memfd
from pytest_engram.numa.tree import Tree

SIZE = 64 * 4096
FULL = NumaNode(id=0, cpus=(0,), memory_bytes=8 << 30, free_bytes=4096, reclaimable_bytes=0, distances={0: 10})


@pytest.fixture
def memfd() -> Iterator[Backing]:
    """A mapped, untouched memfd of 64 pages that will lie on node 0."""
    backing = BACKINGS["memfd"](SIZE)
    backing.create()
    backing.map()
    _syscalls.mbind(backing.address, SIZE, _syscalls.MPOL_BIND, (0,))
    yield backing
    backing.close()


def audit(backing: Backing, *, offset: int = 0, nbytes: int = SIZE, identity: str | None = None) -> PageDistribution:
    """Audit a part of the object, by default all of it."""
    return pages.audit_range(
        backing.address + offset, nbytes, rank=0, moment=Moment.LOADED, table=0, identity=identity or backing.identity
    )


def test_looking_touches_nothing() -> None:
    """K27: an audit of untouched pages allocates none and says ENOENT, never node 0."""
    count = 16_384
    with closing(Memfd(count * 4096)) as large:
        large.create()
        large.map()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        seen = audit(large, nbytes=large.nbytes)
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert (seen.pages, seen.unplaced, seen.covered_bytes) == ({}, {"ENOENT": count}, large.nbytes)
        assert large.allocated_bytes == 0
        assert pages.sum_kb(pages.mapped_vmas(large.address, large.nbytes), pages.MAPPED) == 0
    assert faults < count, faults  # the interpreter's own: what earlier tests gave back, this process's long smaps


def test_partly_resident_tables_are_counted_exactly(memfd: Backing) -> None:
    """Placed and unplaced pages add up to the table; PSS counts only the resident ones."""
    for page in range(20):
        memfd.mapped[page * 4096] = 1
    seen = audit(memfd)
    assert (seen.pages, seen.unplaced, seen.covered_bytes) == ({0: 20}, {"ENOENT": 44}, SIZE)
    assert seen.pss_bytes == 20 * 4096


def test_pages_of_a_peer_are_not_seen_before_they_are_mapped(memfd: Backing) -> None:
    """A second mapping sees none of the object's pages until it touches them itself."""
    memfd.mapped[:] = b"\1" * SIZE
    other = BACKINGS["memfd"](SIZE)
    other.attach({"path": memfd.path, "identity": memfd.identity})
    other.map()
    assert audit(other).unplaced == {"ENOENT": 64}
    _syscalls.madvise(other.address, SIZE, _syscalls.MADV_POPULATE_READ)
    assert audit(other).pages == audit(memfd).pages == {0: 64}
    other.close()


def test_a_part_of_a_mapping_can_be_audited(memfd: Backing) -> None:
    """An unaligned range inside a larger mapping is answered in whole pages, with both routes over the mapping."""
    memfd.mapped[:] = b"\1" * SIZE
    seen = audit(memfd, offset=4096 + 10, nbytes=4096)
    assert (seen.pages, seen.covered_bytes) == ({0: 2}, 8192)


def test_contradicting_routes_are_an_error(memfd: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted miscount in numa_maps is a route disagreement, whatever move_pages says."""
    memfd.mapped[:] = b"\1" * SIZE
    honest = pages.procfs.parse_numa_maps_line

    def lie(line: str) -> Any:
        return replace(honest(line), pages={0: 63, 1: 1})

    monkeypatch.setattr(pages.procfs, "parse_numa_maps_line", lie)
    with pytest.raises(PlacementError, match=r"\{0: 63, 1: 1\} pages per node and move_pages \{0: 64\}") as caught:
        audit(memfd)
    assert caught.value.code == "route-disagreement"


def test_unanswered_pages_are_an_error(memfd: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    """K24: a kernel or sandbox that fills no status is caught by the impossible value put there before."""
    monkeypatch.setattr(_syscalls, "_call", lambda *_: 0)
    with pytest.raises(PlacementError, match="64 pages got no answer"):
        audit(memfd)


def test_missing_pages_in_the_answer_break_coverage(memfd: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    """K29: an answer that does not cover the table is no answer."""
    monkeypatch.setattr(pages, "query_range", lambda *_, **__: ({0: 63}, {}))
    with pytest.raises(PlacementError) as caught:
        audit(memfd)
    assert caught.value.code == "coverage"


def test_another_object_or_a_hole_is_not_the_table(memfd: Backing) -> None:
    """K30: a range is tied to its table by device and inode, and by address; both are checked."""
    with pytest.raises(PlacementError, match=f"the range maps {memfd.identity}; expected 00:99:1"):
        audit(memfd, identity="00:99:1")
    with pytest.raises(PlacementError, match="nothing is mapped at 0x1000"):
        pages.audit_range(4096, 4096, rank=0, moment=Moment.LOADED, table=0, identity="anon")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_a_forbidden_query_names_the_capability(memfd: Backing, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """K1: move_pages refused for our own pages is the sandbox's doing."""

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(_syscalls, "_call", refuse)
    with pytest.raises(NotMeasurable, match="CAP_SYS_NICE / seccomp"):
        audit(memfd)


@pytest.mark.parametrize(
    "numbers", [[], [-2] * 3, [0] * 5, [1, 0, 3, 1], [0, -2, 5, -14], [300, 1, 300], [255, 255, 256]]
)
def test_fast_and_plain_counting_agree(numbers: list[int]) -> None:
    """Counting what is all one equals counting one by one, with errors and with nodes above 255 too."""
    status = struct.pack(f"{len(numbers)}i", *numbers)
    assert pages._count_statuses(status) == collections.Counter(numbers)


@pytest.mark.parametrize("numbers", [range(0), range(4096, 8192, 4096), range(0x7FFF_FFF0_0000, 0x7FFF_FFF3_0000, 9)])
def test_addresses_of_a_range_are_the_listed_ones(numbers: range) -> None:
    """The words made without a step per page equal those made one by one."""
    assert _syscalls._words(numbers) == _syscalls._words(list(numbers)) == struct.pack(f"{len(numbers)}Q", *numbers)


def test_chunks_add_up(memfd: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query in chunks that do not divide the table still counts every page once."""
    memfd.mapped[:] = b"\1" * SIZE
    monkeypatch.setattr(pages, "CHUNK_PAGES", 7)
    assert audit(memfd).pages == {0: 64}


@pytest.mark.slow
def test_a_full_models_pages_are_audited_exactly_in_ten_seconds() -> None:
    """49.5 million populated entries (one GiB mapped 189 times), every one answered by both routes; best of three."""
    unit, total = 1 << 30, 202_758_032_400 // 4096 * 4096
    backing, libc = BACKINGS["memfd"](unit), ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    backing.create()
    base = libc.mmap(None, total, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)  # MAP_NORESERVE
    try:
        for start in range(base, base + total, unit):
            size = min(unit, base + total - start)
            flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED
            assert libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, backing._descriptor, 0) == start
            _syscalls.madvise(start, size, _syscalls.MADV_POPULATE_WRITE)
        seconds = []
        for _ in range(3):
            begin, worked = time.monotonic(), time.process_time()
            seen = pages.audit_range(base, total, rank=0, moment=Moment.LOADED, table=0, identity=backing.identity)
            seconds.append((time.monotonic() - begin, time.process_time() - worked))
            assert (seen.unplaced, sum(seen.pages.values())) == ({}, 49_501_472)
        wall, worked = min(seconds)
        if wall > 10 and wall * min(4, len(os.sched_getaffinity(0))) > 1.3 * worked:
            pytest.skip(f"others keep this machine busy: {wall:.1f} s for {worked:.1f} s of work")
        assert wall <= 10, seconds
    finally:
        libc.munmap(base, total)
        backing.close()


@pytest.mark.parametrize("period", [2, 10, 20])
def test_the_bound_holds_for_interleaved_pages(period: int) -> None:
    """In at least 95 % of samples the share is within the bound, where a fixed stride of 10 pages would alias."""

    def error(asked: Any) -> float:
        return abs(sum(address // 4096 % period < period // 2 for address in asked) / len(asked) - 0.5)

    table = range(0, 1000 * 4096, 4096)
    assert sum(error(pages.strata(table, 100, str(key))) <= 0.098 for key in range(200)) >= 190
    assert error(table[::10]) == (0.5 if period < 20 else 0.0)


def test_another_page_size_is_an_error(memfd: Backing) -> None:
    """A table that should lie on 2 MiB pages and does not is named, not miscounted."""
    with pytest.raises(PlacementError, match="4096; expected 2097152") as caught:
        pages.audit_range(
            memfd.address, SIZE, rank=0, moment=Moment.LOADED, table=0, identity=memfd.identity, page_bytes=2 << 20
        )
    assert caught.value.code == "page-size"


def test_private_tables_do_not_merge_with_neighbours() -> None:
    """Two private tables allocated in a row are two VMAs, so numa_maps speaks of each alone."""
    tables = [BACKINGS["anon-thp"](1) for _ in range(3)]
    for table in tables:
        table.create()
        table.map()
    for table in tables:
        (vma,) = pages.mapped_vmas(table.address, table.nbytes)
        assert (vma.start, vma.end - vma.start) == (table.address, table.nbytes)
        assert table.address % (2 << 20) == 0
        table.close()


def test_probe_proves_by_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """K2, K5: the probe passes here, and a sandbox whose mbind does nothing is found out by the page's place."""
    assert policy_calls.probe_calls()["mbind"] == "works"
    with monkeypatch.context() as absent:
        absent.setattr(_syscalls, "mems_allowed", lambda: (0, 1000))
        assert "EINVAL" in policy_calls.probe_calls()["mbind"]
    monkeypatch.setattr(_syscalls, "mbind", lambda *_: None)
    monkeypatch.setattr(_syscalls, "page_status", lambda *_: struct.pack("i", 5))
    assert "a page bound to node 0 is answered with status 5" in policy_calls.probe_calls()["mbind"]


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("live_memory", Topology(nodes=(FULL,), sockets={}), "NUMA node 0 has, less its reserve, 0"),
        ("cgroup_free", 100, "the memory cgroup has 100"),
    ],
)
def test_the_probe_touches_no_page_that_could_wake_the_oom_killer(
    monkeypatch: pytest.MonkeyPatch, name: str, answer: Any, said: str
) -> None:
    """K19: without room to spare it is unknown, with the reason, whether mbind works; no page is touched or asked."""
    monkeypatch.setattr(capacity, name, lambda: answer)
    asked, honest = [], _syscalls.page_status
    monkeypatch.setattr(_syscalls, "page_status", lambda *words: (asked.append(words), honest(*words))[1])
    found = policy_calls.probe_calls()["mbind"]
    assert found.startswith("unknown, no page was touched: ")
    assert said in found
    assert asked == [(0, (0,))], "only the probe of move_pages itself"


def test_a_masked_sysfs_leaves_the_other_calls_their_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """K2: where no node can be read mbind alone is unknown, with the reason; the three other calls are answered."""
    monkeypatch.setattr(capacity, "Tree", lambda: Tree(tmp_path))
    found = policy_calls.probe_calls()
    assert found.pop("mbind").startswith("unknown, no page was touched: ")
    assert found == dict.fromkeys(("get_mempolicy", "set_mempolicy", "move_pages"), "works")


def test_every_policy_call_is_probed_by_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """K1, K2: all calls work here; one that is refused is named alone with its way out; this thread's policy stays."""
    _syscalls.set_mempolicy(_syscalls.MPOL_BIND, (0,))
    try:
        assert set(policy_calls.probe_calls().values()) == {"works"}
        assert _syscalls.get_mempolicy() == ("bind", (0,))
    finally:
        _syscalls.set_mempolicy(_syscalls.MPOL_DEFAULT, ())
    honest = _syscalls._call

    def refuse(name: str, *arguments: Any) -> int:
        if name == "set_mempolicy":
            raise OSError(errno.EPERM, f"{name}: EPERM")
        return honest(name, *arguments)

    monkeypatch.setattr(_syscalls, "_call", refuse)
    found = policy_calls.probe_calls()
    assert "--cap-add SYS_NICE" in found.pop("set_mempolicy")
    assert set(found.values()) == {"works"}


def test_node_masks_have_an_end() -> None:
    """A node number beyond the mask is refused here, not silently dropped."""
    with mmap.mmap(-1, 4096) as scratch, pytest.raises(OSError, match="beyond 1024 mask bits"):
        _syscalls.mbind(_syscalls.address_of(scratch), 4096, _syscalls.MPOL_BIND, (1024,))


def test_staging_is_where_its_pages_are() -> None:
    """K40: a touched buffer lies on its node, an untouched one nowhere, a device tensor in HBM."""
    with mmap.mmap(-1, 8 * 4096) as memory:
        buffer = np.frombuffer(memory, dtype=np.uint16)
        assert pages.staging_place(buffer) == "none"
        buffer[:] = 1
        assert pages.staging_place(buffer[100:]) == "NUMA node 0 100%"
        assert pages.worker_policy(0, buffer).staging == "NUMA node 0 100%"
        del buffer
    assert pages.staging_place(SimpleNamespace(is_cuda=True)) == "HBM"


def test_worker_policy_reads_what_is_in_force() -> None:
    """A task policy set in this thread is what is reported, with its nodes."""
    assert pages.worker_policy(3).task_policy == "default"
    _syscalls.set_mempolicy(_syscalls.MPOL_BIND, (0,))
    try:
        seen = pages.worker_policy(3)
    finally:
        _syscalls.set_mempolicy(_syscalls.MPOL_DEFAULT, ())
    assert (seen.rank, seen.task_policy, seen.task_nodes) == (3, "bind", (0,))
    assert seen.mems_allowed
    assert seen.cpus_allowed

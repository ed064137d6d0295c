"""Planted placement faults on two nodes: one change each, caught by the product and named by its code."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import guestkit
import pytest

from pytest_engram.model import Moment, PlacementPlan
from pytest_engram.numa import _syscalls
from pytest_engram.numa.backing import BACKINGS, Memfd, Tmpfs
from pytest_engram.numa.pages import audit_range

MPOL_F_NODE, MPOL_F_ADDR = 1, 2
ELSEWHERE = guestkit.asked("bind", 1)


def caught(fault: str, by: str, code: str, expected: str) -> None:
    """One line of the table; the code is the product's own."""
    guestkit.say("faults", f"{fault:60}", f"{by:26}", code)
    assert code == expected


def code_of_build(plan: PlacementPlan = ELSEWHERE, nbytes: int = guestkit.BYTES) -> str:
    """Build and throw away."""

    def build() -> None:
        with guestkit.built(plan, nbytes):
            pass

    return guestkit.code_of(build)


def judged(plan: PlacementPlan, **how: Any) -> str:
    """What gate 1 says about a table that could be built."""
    with guestkit.built(plan, **how) as table:
        return guestkit.gate_one(plan, table.distributions)


@pytest.fixture(autouse=True)
def on_node_0() -> Iterator[None]:
    """The toucher's own node is 0, so that node 1 can only come from a policy."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    yield
    os.sched_setaffinity(0, cpus)


@contextmanager
def over_shm(*how: str) -> Iterator[None]:
    """Something else mounted on /dev/shm."""
    subprocess.run(["mount", *how, "/dev/shm"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "/dev/shm"], check=True)


def after_map(monkeypatch: pytest.MonkeyPatch, deed: Callable[[Any], None]) -> None:
    """Do something to a tmpfs object between its mapping and its policy."""
    whole = Tmpfs.map

    def map_and_more(self: Tmpfs) -> None:
        whole(self)
        deed(self)

    monkeypatch.setattr(Tmpfs, "map", map_and_more)


def test_nothing_planted() -> None:
    """Negative control: the same build without a fault is as asked."""
    assert judged(ELSEWHERE) == "as-asked"


def test_bind_after_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    """K17: one page touched before the policy is found before anything is placed."""
    after_map(monkeypatch, lambda backing: backing.mapped.__setitem__(0, 1))
    caught("bind after touch", "starting-state check", code_of_build(), "already-touched")


def test_a_query_that_faults_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """K27: ``get_mempolicy(MPOL_F_NODE | MPOL_F_ADDR)`` allocates the page that it is asked about."""

    def ask(backing: Tmpfs) -> None:
        node, libc = ctypes.c_int(), ctypes.CDLL(None, use_errno=True)
        where, how = ctypes.c_void_p(backing.address), ctypes.c_ulong(MPOL_F_NODE | MPOL_F_ADDR)
        assert libc.syscall(ctypes.c_long(239), ctypes.byref(node), None, ctypes.c_ulong(0), where, how) == 0

    after_map(monkeypatch, ask)
    caught("a query that faults the page (MPOL_F_ADDR)", "starting-state check", code_of_build(), "already-touched")


def test_map_populate_then_mbind(monkeypatch: pytest.MonkeyPatch) -> None:
    """MAP_POPULATE leaves nothing for a policy to decide."""

    def map_populated(self: Memfd) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(self._descriptor, self.nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        self._view = memoryview(self._map)

    monkeypatch.setattr(Memfd, "map", map_populated)
    plan = guestkit.asked("bind", 1, backing="memfd")
    caught("MAP_POPULATE, then mbind", "starting-state check", code_of_build(plan), "already-touched")


def test_move_with_a_second_mapper() -> None:
    """MPOL_MF_MOVE of pages that a peer maps returns 0 and moves nothing."""
    told = guestkit.world("move_with_a_second_mapper")
    audits = guestkit.distributions(audit for rank in told for audit in rank)
    assert {audit.policy_text for audit in audits if audit.moment.value == "replayed"} == {"bind:1"}
    code = guestkit.gate_one(guestkit.asked("bind", 1, ranks=(0, 1)), audits)
    caught("MPOL_MF_MOVE with a second mapper, returned 0", "gate 1", code, "not-as-asked")


def test_policy_on_the_wrong_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy on half of the table places half of the table."""
    whole = _syscalls.mbind
    monkeypatch.setattr(_syscalls, "mbind", lambda start, size, *how: whole(start, size // 2, *how))
    caught("policy on half of the range", "gate 1", judged(ELSEWHERE), "not-as-asked")


def test_registration_before_the_pre_touch() -> None:
    """Stock order: registration faults the pages, then the policy comes too late; receipts show who allocated."""
    with guestkit.built(ELSEWHERE, order="stock") as table:
        code = guestkit.gate_one(ELSEWHERE, table.distributions)
        grew = [r.step for r in table.receipts if r.object_pages and r.object_pages[0] < r.object_pages[1]]
    assert grew == ["register"]
    caught("registration before policy and pre-touch", "gate 1, receipts", code, "not-as-asked")


def test_interleave_read_from_the_policy_text() -> None:
    """K15: numa_maps shows ``interleave`` for pages that all lie on one node."""
    plan = guestkit.asked("interleave", 0, 1)
    with guestkit.built(plan, order="stock") as table:
        assert {audit.policy_text for audit in table.distributions} == {"interleave:0-1"}
        assert guestkit.nodes_of(table) == [0]
        code = guestkit.gate_one(plan, table.distributions)
    caught("interleave read from the policy text", "gate 1", code, "not-as-asked")


@pytest.fixture(scope="module")
def cpuset() -> Iterator[None]:
    """A cgroup whose members may use node 0 only."""
    (guestkit.CPUSET.parent / "cgroup.subtree_control").write_text("+cpuset")
    guestkit.CPUSET.mkdir(exist_ok=True)
    (guestkit.CPUSET / "cpuset.mems").write_text("0")
    yield
    guestkit.CPUSET.rmdir()


def test_a_peer_in_a_cpuset(cpuset: None) -> None:
    """Pages of an object that is bound to node 1 land on node 0 when a peer in a cpuset of node 0 faults them."""
    told = guestkit.world("peer_in_a_cpuset")
    audits = guestkit.distributions(audit for rank in told for audit in rank)
    code = guestkit.gate_one(guestkit.asked("bind", 1, backing="memfd", ranks=(0, 1)), audits)
    caught("a peer in a cpuset mems=0 faults a bind:1 object", "gate 1", code, "not-as-asked")


def test_a_node_outside_the_cpuset(cpuset: None) -> None:
    """The policy's own check knows the cpuset; past it the kernel's EINVAL is named."""
    (code,) = guestkit.world("own_table_in_a_cpuset", ranks=guestkit.RANKS[:1])
    caught("bind:1 from inside a cpuset mems=0", "policy check, then mbind", code, "node-not-allowed, kernel-einval")


def test_a_regular_file_is_refused() -> None:
    """K16: where /dev/shm is not tmpfs, nothing is placed at all."""
    with over_shm("--bind", str(guestkit.OUT)):
        caught("/dev/shm is not tmpfs", "backing check", code_of_build(), "shm-not-tmpfs")


def test_a_regular_file_as_backing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """K16: ``mbind`` on a file that is not shmem returns 0 and is ignored."""
    subprocess.run(["mount", "-t", "ramfs", "none", str(tmp_path)], check=True)
    monkeypatch.setattr(Memfd, "_open", lambda _self: os.open(tmp_path / "table", os.O_RDWR | os.O_CREAT))
    caught("a regular file as backing", "gate 1", judged(guestkit.asked("bind", 1, backing="memfd")), "not-as-asked")
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_an_absent_node() -> None:
    """By name and past the name's check."""
    code = f"{guestkit.code_of(lambda: guestkit.resolved('bind:9'))}, {code_of_build(guestkit.asked('bind', 9))}"
    caught("an absent node", "policy check, capacity", code, "absent-node, absent-node")


def test_fewer_weights() -> None:
    """One weight for two nodes, and weights that the kernel does not have."""
    caught(
        "fewer weights than nodes",
        "policy check",
        guestkit.code_of(lambda: guestkit.resolved("weighted-interleave:3")),
        "bad-weights",
    )
    Path("/sys/kernel/mm/mempolicy/weighted_interleave/node0").write_text("5")
    code = code_of_build(guestkit.resolved("weighted-interleave:3,1"))
    caught("weights other than the kernel's", "weight check", code, "other-weights")


def test_untouched_pages_of_a_follower() -> None:
    """ENOENT in a follower means "not asked yet", never "as the leader"."""
    told = guestkit.world("untouched_follower")
    audits = guestkit.distributions(audit for rank in told for audit in rank)
    assert [set(audit.unplaced) for audit in audits if audit.rank == 1] == [{"ENOENT"}] * 3
    code = guestkit.gate_one(guestkit.asked("bind", 1, ranks=(0, 1)), audits)
    caught("move_pages on a follower's untouched pages", "gate 1", code, "pages-unplaced")


def test_a_small_shm() -> None:
    """K31: a tmpfs smaller than the table is found before the touch that would be SIGBUS."""
    with over_shm("-t", "tmpfs", "-o", "size=8m", "none"):
        caught("/dev/shm smaller than the table", "capacity", code_of_build(), "too-large")


def test_a_pool_on_the_other_node() -> None:
    """Huge pages reserved on node 0 do not serve a table on node 1."""
    pool = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages")
    pool.write_text("12")
    code = code_of_build(guestkit.asked("bind", 1, backing="hugetlb"))
    pool.write_text("0")
    caught("hugetlb pool on the other node", "capacity", code, "too-large")


def test_an_audit_of_another_object() -> None:
    """A range that maps another object than the table's is no evidence about the table."""
    with guestkit.built(ELSEWHERE) as table:
        other = BACKINGS["memfd"](guestkit.BYTES)
        other.create()
        other.map()
        code = guestkit.code_of(
            lambda: audit_range(
                other.address, guestkit.BYTES, rank=0, moment=Moment.REPLAYED, table=0, identity=table.identity
            )
        )
        other.close()
    caught("an audit of another object", "audit", code, "not-mapped")

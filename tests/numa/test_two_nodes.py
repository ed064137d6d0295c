"""What only a kernel with several memory nodes can show; skipped elsewhere, run in the multi-node guest."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.model import Moment, PlacementPlan, TablePlan
from pytest_engram.numa import _syscalls, capacity, policy_calls
from pytest_engram.numa.group import SoloGroup
from pytest_engram.numa.table import SharedTable, build_table

NODES = [node.id for node in capacity.live_memory().memory_nodes if node.cpus]
pytestmark = pytest.mark.two_nodes
GUEST = pytest.mark.guest
PAGES = 512


def build(mode: str, *nodes: int, backing: str = "tmpfs", order: str = "placed") -> SharedTable:
    """A table of 512 pages in this process."""
    plan = TablePlan(ranks=(0,), mode=mode, nodes=nodes)
    placement = PlacementPlan(policy="test", backing=backing, tables=(plan,))
    return build_table(SoloGroup(), placement, PAGES * 4096, order=order)


@pytest.mark.parametrize("backing", ["tmpfs", "memfd", "anon-thp"])
def test_pages_lie_on_the_bound_node(backing: str) -> None:
    """Either node can be chosen; every page lies there, wherever the toucher runs."""
    for node in NODES[:2]:
        table = build("bind", node, backing=backing)
        assert table.distributions[0].pages == {node: PAGES}
        table.close()


@GUEST
def test_the_nodes_own_account_agrees() -> None:
    """The bound node's Shmem grows by the table and the other's does not, up to the kernel's per-CPU batches."""
    first, second = NODES[:2]
    plan = TablePlan(ranks=(0,), mode="bind", nodes=(second,))
    placement = PlacementPlan(policy="test", backing="memfd", tables=(plan,))
    table = build_table(SoloGroup(), placement, 64 << 20)
    growth = table.distributions[0].shmem_growth
    assert growth[second] == pytest.approx(64 << 20, abs=4 << 20)
    assert abs(growth[first]) < 4 << 20
    table.close()


def test_interleave_is_half_and_half() -> None:
    """Page by page over two nodes."""
    table = build("interleave", *NODES[:2])
    assert table.distributions[0].pages == dict.fromkeys(NODES[:2], PAGES // 2)
    table.close()


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """Stay on one CPU, so that the default policy means one node."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_cpu")
def test_a_late_policy_is_shown_but_moves_nothing() -> None:
    """K15: mbind after the touch returns 0 and numa_maps shows it; the audit says where the pages really are."""
    first = build("default")
    (home,) = first.distributions[0].pages
    first.close()
    other = next(node for node in NODES if node != home)
    late = build("bind", other, order="stock")
    assert late.distributions[0].policy_text == f"bind:{other}"
    assert late.distributions[0].pages == {home: PAGES}
    late.close()


def test_peers_on_another_node_do_not_move_the_table(world: Any) -> None:
    """Every rank's audit gives the leader's placement at every moment, and the ranks' PSS adds up to one table."""
    results = world("protocol", ranks=2, nodes=[NODES[1]], deadline_s=120)
    for result in results:
        assert [audit["pages"] for audit in result["distributions"]] == [{str(NODES[1]): 768}] * 3
    assert sum(result["distributions"][-1]["pss_bytes"] for result in results) == 768 * 4096


def test_one_table_per_node_in_lock_step(world: Any) -> None:
    """Two groups with one node each: every rank's table lies on its own node."""
    results = world("protocol", ranks=2, groups=[[0], [1]], nodes=NODES[:2], spread=True, deadline_s=120)
    assert [result["distributions"][0]["pages"] for result in results] == [{str(node): 768} for node in NODES[:2]]


@pytest.mark.usefixtures("one_cpu")
def test_moving_a_page_is_seen_by_the_audit() -> None:
    """Negative control of the audit: one page moved on purpose is one page elsewhere."""
    table = build("default", backing="anon-thp")
    (home,) = table.distributions[0].pages
    other = next(node for node in NODES if node != home)
    where, target, status = (ctypes.c_void_p * 1)(table.address), (ctypes.c_int * 1)(other), (ctypes.c_int * 1)(-1)
    _syscalls._call("move_pages", 0, 1, where, target, status, 2)  # MPOL_MF_MOVE
    assert list(status) == [other]
    moved = table.audit(Moment.REPLAYED).pages
    assert moved[other] >= 1
    assert sum(moved.values()) == PAGES
    table.close()


@GUEST
def test_huge_pages_come_from_the_bound_nodes_pool() -> None:
    """hugetlb: the pool of the chosen node is checked first, then every 2 MiB page lies there, counted as one page."""
    first, second = NODES[:2]
    pool = Path(f"/sys/devices/system/node/node{second}/hugepages/hugepages-2048kB/nr_hugepages")
    pool.write_text("2")
    table = build("bind", second, backing="hugetlb")
    seen = table.distributions[0]
    assert (seen.pages, seen.page_bytes, seen.huge_bytes, seen.pss_bytes) == ({second: 1}, 2 << 20, 2 << 20, None)
    table.close()
    with pytest.raises(UsageError, match=f"page pool of NUMA node {first} has 0"):
        build("bind", first, backing="hugetlb")
    pool.write_text("0")


@GUEST
def test_weights_are_the_machines_and_are_verified() -> None:
    """Weighted interleave follows the weights in sysfs; asking for others is not measurable, nothing is changed."""
    first, second = NODES[:2]
    weight = Path(f"/sys/kernel/mm/mempolicy/weighted_interleave/node{first}")
    if not weight.exists():
        pytest.skip("this kernel has no weighted interleave")
    plan = TablePlan(ranks=(0,), mode="weighted-interleave", nodes=(first, second), weights=(3, 1))
    placement = PlacementPlan(policy="test", backing="memfd", tables=(plan,))
    with pytest.raises(NotMeasurable, match=f"node {first} has weight 1; expected 3"):
        build_table(SoloGroup(), placement, PAGES * 4096)
    weight.write_text("3")
    table = build_table(SoloGroup(), placement, PAGES * 4096)
    assert table.distributions[0].pages == {first: 384, second: 128}
    table.close()
    weight.write_text("1")


def test_the_probe_covers_every_node() -> None:
    """A scratch page can be bound to each allowed node, and lies there."""
    assert set(NODES) <= set(_syscalls.mems_allowed())
    assert policy_calls.probe_calls()["mbind"] == "works"

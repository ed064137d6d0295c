"""Every policy on every backing, by two real peers on two nodes: asked, got, by which route."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import guestkit
import pytest

from pytest_engram import codec
from pytest_engram.model import PlacementPlan
from pytest_engram.numa.topology import read_topology

POLICIES = (
    "default", "bind:0", "bind:1", "preferred:0", "preferred:1", "interleave", "interleave:0,1",
    "weighted-interleave:3,1", "per-socket", "per-numa-node", "split",
)  # fmt: skip
BACKINGS = ("tmpfs", "memfd", "hugetlb", "anon-thp")
CELLS = list(product(POLICIES, BACKINGS))
WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")
EXPECTED = {  # policy -> per rank, node -> share
    "default": ({0: 1.0}, {0: 1.0}),  # the leader touches, on node 0
    "bind:0": ({0: 1.0}, {0: 1.0}),
    "bind:1": ({1: 1.0}, {1: 1.0}),
    "preferred:0": ({0: 1.0}, {0: 1.0}),
    "preferred:1": ({1: 1.0}, {1: 1.0}),
    "interleave": ({0: 0.5, 1: 0.5},) * 2,
    "interleave:0,1": ({0: 0.5, 1: 0.5},) * 2,
    "weighted-interleave:3,1": ({0: 0.75, 1: 0.25},) * 2,
    **dict.fromkeys(("per-socket", "per-numa-node", "split"), ({0: 1.0}, {1: 1.0})),
}


def pool(node: int, pages: int) -> None:
    """Reserve 2 MiB pages on one node."""
    path = Path(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages")
    path.write_text(str(pages))
    assert int(path.read_text()) == pages


@pytest.fixture(scope="module")
def reports() -> dict[tuple[int, int], Any]:
    """(cell, rank) -> report, of one world that builds all tables one after the other; then why it ended."""
    for node, weight in enumerate((3, 1)):
        (WEIGHTS / f"node{node}").write_text(str(weight))
        pool(node, 12)
    plans = [guestkit.resolved(policy, backing, ranks=2) for policy, backing in CELLS]
    found: dict[tuple[int, int], Any] = {}

    def note(_rank: int, report: Any) -> None:
        found[report["cell"], report["rank"]] = report

    payload = {"cells": codec.to_builtins(plans), "bytes": guestkit.BYTES}
    try:
        guestkit.world("matrix", payload, on_event=note)
    finally:
        for node in (0, 1):
            pool(node, 0)
    return found


@pytest.mark.parametrize(("policy", "backing"), CELLS, ids=[f"{policy}-{backing}" for policy, backing in CELLS])
def test_pages_lie_where_the_policy_says(policy: str, backing: str, reports: dict[tuple[int, int], Any]) -> None:
    """Both peers' kernels answer the asked distribution by both routes, at three moments, with equal content."""
    number = CELLS.index((policy, backing))
    plan: PlacementPlan = guestkit.resolved(policy, backing, ranks=2)
    audits = guestkit.distributions(audit for rank in (0, 1) for audit in reports[number, rank]["audits"])
    got = "; ".join(f"rank {a.rank} {guestkit.pages_text(a)}" for a in audits if a.moment.value == "replayed")
    verdict = guestkit.gate_one(plan, audits)
    huge = max(audit.huge_bytes or 0 for audit in audits) / guestkit.BYTES
    routes = "+".join(sorted({route for audit in audits for route in audit.routes}))
    guestkit.say("policies", f"{policy:24}", f"{backing:8}", got, routes, f"huge {huge:.0%}", verdict)
    assert len(audits) == 6
    assert all(reports[number, rank]["same"] for rank in (0, 1))
    for audit in audits:
        wanted = EXPECTED[policy][audit.rank]
        if backing == "anon-thp" and policy == "default":
            wanted = {audit.rank: 1.0}  # a private copy each, touched at home
        total = sum(audit.pages.values())
        assert {node: pytest.approx(share, abs=0.02) for node, share in wanted.items()} == {
            node: count / total for node, count in audit.pages.items()
        }
        assert audit.unplaced == {}
        assert audit.routes == ("move_pages", "numa_maps")
    private = backing == "anon-thp" and len(plan.tables) == 1
    assert verdict == ("not-shared" if private else "as-asked")


def test_huge_pages_are_real() -> None:
    """anon-thp is made of huge pages here, and the audit says so; tmpfs is not."""
    with guestkit.built(guestkit.asked("bind", 1, backing="anon-thp")) as table:
        assert table.distributions[-1].huge_bytes == guestkit.BYTES
    with guestkit.built(guestkit.asked("bind", 1)) as table:
        assert table.distributions[-1].huge_bytes == 0


def test_display_devices_have_their_nodes() -> None:
    """Display-class devices behind root ports of two nodes are seen with the node that sysfs gives them."""
    assert [gpu.numa_node for gpu in read_topology(stand_ins=True).gpus] == [0, 1]
    assert read_topology().gpus == ()  # a management display is no GPU


def test_the_machine_is_two_sockets() -> None:
    """Two sockets with one memory node each, at the distance that the firmware gives."""
    found = read_topology()
    assert found.socket_nodes() == {0: (0,), 1: (1,)}
    assert [node.distances for node in found.nodes] == [{0: 10, 1: 21}, {0: 21, 1: 10}]
    assert found.hypervisor is not None

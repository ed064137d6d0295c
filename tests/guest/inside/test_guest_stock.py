"""Who decides where stock code's pages lie: the registering rank, or a mount; a placed table follows the request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import guestkit
import pytest

from pytest_engram import codec
from pytest_engram.numa import _syscalls
from pytest_engram.numa.world import RankSpec


@pytest.fixture
def home() -> Iterator[None]:
    """Any test may move this process or change its policy; the next one starts as before."""
    cpus = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cpus)
    _syscalls.set_mempolicy(_syscalls.MPOL_DEFAULT, ())


@pytest.mark.parametrize("cpu", [0, 1])
def test_stock_follows_the_cpu_and_placed_the_request(cpu: int, home: None) -> None:
    """Registration in a process on node N puts the pages there; our order puts them where they are asked for."""
    os.sched_setaffinity(0, {cpu})
    for node in (0, 1):
        with guestkit.built(guestkit.asked("bind", node), order="stock") as stock:
            assert guestkit.nodes_of(stock) == [cpu]
        with guestkit.built(guestkit.asked("bind", node)) as placed:
            assert guestkit.nodes_of(placed) == [node]
    guestkit.say("stock", f"registering process on CPU {cpu}", f"stock: node {cpu}", "placed: as asked, 0 and 1")


@pytest.mark.parametrize("node", [0, 1])
def test_stock_follows_the_task_policy(node: int, home: None) -> None:
    """numactl's policy of the registering process beats its CPU, and our order beats both."""
    os.sched_setaffinity(0, {1 - node})
    _syscalls.set_mempolicy(_syscalls.MPOL_BIND, (node,))
    with guestkit.built(guestkit.asked("default"), order="stock") as stock:
        assert guestkit.nodes_of(stock) == [node]
    with guestkit.built(guestkit.asked("bind", 1 - node)) as placed:
        assert guestkit.nodes_of(placed) == [1 - node]
    guestkit.say("stock", f"task policy bind:{node} on CPU {1 - node}", f"stock: node {node}", f"placed: {1 - node}")


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_peer_to_register_decides(first: int) -> None:
    """Of two peers the first to register places the pages of both, whoever leads and whatever is bound later."""
    told = guestkit.world("first_to_register", {"first": first})
    audits = guestkit.distributions(audit for rank in told for audit in rank)
    assert [sorted(audit.pages) for audit in audits] == [[first]] * 6
    assert {audit.policy_text for audit in audits} == {"bind:0"}  # shown on both sides, true on one
    guestkit.say("stock", f"rank {first} registers first", f"both ranks' pages: node {first}", "numa_maps: bind:0")


def test_a_private_mount_flips_stock_placement(home: None) -> None:
    """A tmpfs with ``mpol=`` over the ranks' /dev/shm decides for code that sets no policy; the machine's stays."""
    os.sched_setaffinity(0, {0})
    before = Path("/proc/mounts").read_text(), Path("/dev/shm").stat().st_dev
    with guestkit.built(guestkit.asked("default"), order="stock") as stock:
        assert guestkit.nodes_of(stock) == [0]
    for mode, nodes in (("bind", (1,)), ("interleave", (0, 1)), ("preferred", (1,))):
        asked = guestkit.asked(mode, *nodes, ranks=(0, 1))
        told = guestkit.world("mounted", codec.to_builtins(asked), ranks=(RankSpec(cpus=(0,)),) * 2)
        audits = guestkit.distributions(audit for rank in told for audit in rank["audits"])
        assert [sorted(audit.pages) for audit in audits] == [list(nodes)] * 6
        assert guestkit.gate_one(asked, audits) == "as-asked"
        told_words = told[1]["told"].partition(" of ")[0]
        guestkit.say("stock", "ranks on CPU 0", f"stock: nodes {nodes}", told_words)
    assert (Path("/proc/mounts").read_text(), Path("/dev/shm").stat().st_dev) == before

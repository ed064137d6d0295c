"""Who decides where stock code's pages lie: the registering rank, or a mount; a placed table follows the request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import guestkit
import pytest

from pytest_engram.numa import _syscalls


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
    """A tmpfs with ``mpol=`` over /dev/shm in a private mount namespace decides for code that sets no policy."""
    os.sched_setaffinity(0, {0})
    before = Path("/proc/mounts").read_text()
    here = Path("/dev/shm").stat().st_dev
    found = {mpol: _stock_under(mpol) for mpol in ("default", "bind:1", "interleave:0-1")}
    assert {mpol: one["nodes"] for mpol, one in found.items()} == {
        "default": [0], "bind:1": [1], "interleave:0-1": [0, 1]
    }  # fmt: skip
    assert (Path("/proc/mounts").read_text(), Path("/dev/shm").stat().st_dev) == (before, here)
    for mpol, one in found.items():
        guestkit.say("stock", f"private /dev/shm mpol={mpol}, on CPU 0", f"stock: nodes {one['nodes']}", one["text"])


def _stock_under(mpol: str) -> dict[str, Any]:
    mount = f"mount -t tmpfs -o size=256m,mpol={mpol} tmpfs /dev/shm"
    call = f'{sys.executable} -c "import guestkit; guestkit.stock_here()"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mount} && exec {call}"], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found

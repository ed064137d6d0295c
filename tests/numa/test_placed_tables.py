"""What stays as it was when a table is placed, and what a user of ``engram_table`` is told when it goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_engram import policies
from pytest_engram.errors import PeerError, UsageError
from pytest_engram.layout import EngramLayout
from pytest_engram.model import PlacementPlan, TablePlan, Topology
from pytest_engram.needs import named_nodes
from pytest_engram.numa import _syscalls, pages, table
from pytest_engram.numa.backing import Memfd
from pytest_engram.numa.group import SoloGroup
from pytest_engram.numa.topology import read_topology
from pytest_engram.tables import PlacedTable, place

BOUND = PlacementPlan(policy="bind:0", backing="memfd", tables=(TablePlan(ranks=(0,), mode="bind", nodes=(0,)),))


@pytest.fixture(scope="module")
def machine() -> Topology:
    """This one."""
    return read_topology()


def build(machine: Topology, **asked: Any) -> PlacedTable:
    default: dict[str, Any] = {"policy": "bind:0", "backing": "memfd", "ranks": 2, "rows": 20_000, "seed": 1}
    return place(machine, **(default | asked))


def ranks() -> list[int]:
    """The peer processes of this one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            title = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == os.getpid() and b"pytest_engram.numa.world" in title:
            found.append(int(stat.parent.name))
    return found


def test_one_policy_call_and_one_mapping_per_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """K20: a table is one ``mbind`` and one entry of the process's mappings, however long; two policies are two."""
    calls: list[Sequence[Any]] = []
    real = _syscalls.mbind

    def mbind(*words: Any) -> None:
        calls.append(words)
        real(*words)

    monkeypatch.setattr(_syscalls, "mbind", mbind)
    with closing(table.build_table(SoloGroup(), BOUND, 32 << 20)) as made:
        assert [(call[0], call[1]) for call in calls] == [(made.address, 32 << 20)]
        assert len(pages.mapped_vmas(made.address, 32 << 20, name="maps")) == 1
        real(made.address, 16 << 20, _syscalls.MODES["interleave"], (0,))
        assert len(pages.mapped_vmas(made.address, 32 << 20, name="maps")) == 2


def test_only_the_table_is_placed() -> None:
    """K21: the process's own policy is what it was, so later allocations such as staging stay where they would be."""
    before = _syscalls.get_mempolicy()
    with closing(table.build_table(SoloGroup(), BOUND, 4 << 20)) as made:
        assert _syscalls.get_mempolicy() == before == ("default", ())
        staging = np.ones(1 << 20, dtype=np.uint8)
        shown = {line.start: line.policy for line in _lines(staging.ctypes.data, made.address)}
    assert sorted(shown.values()) == ["bind:0", "default"]


def _lines(*addresses: int) -> Iterator[Any]:
    for address in addresses:
        vmas = pages.mapped_vmas(address, 4096, name="maps")
        yield from pages._lines(pages._records("numa_maps", address, address + 4096, "test"), vmas)


def test_a_peer_that_leaves_takes_nothing_along() -> None:
    """K33: who attaches is no owner: its exit unlinks nothing, and Python's resource tracker never hears of a table."""
    script = (
        "import sys; from pytest_engram.numa.backing import Memfd; one = Memfd(8192)\n"
        "one.attach(dict(path=sys.argv[1], identity=sys.argv[2])); one.map(); one.mapped[0] = 7\n"
        "print([name for name in sys.modules if 'resource_tracker' in name or 'shared_memory' in name])"
    )
    with closing(Memfd(8192)) as made:
        handle = made.create()
        made.map()
        told = subprocess.run([sys.executable, "-c", script, *handle.values()], capture_output=True, check=True)
        assert (told.stdout.strip(), made.mapped[0]) == (b"[]", 7)
        with closing(Memfd(8192)) as late:
            late.attach(handle)
            late.map()
            assert late.mapped[0] == 7


@pytest.mark.parametrize("rows", [0, -1, 10, 1 << 31, 10**12])
def test_impossible_sizes_start_no_process(machine: Topology, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A number of rows that no layout has is the user's error, found before any peer is started."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a world was started"))
    begin = time.monotonic()
    with pytest.raises(UsageError, match=f"{rows} rows") as caught:
        build(machine, rows=rows)
    assert caught.value.code == "bad-layout"
    assert time.monotonic() - begin < 1, "no search among primes precedes the refusal"


def test_as_many_rows_as_int32_counts_are_a_size() -> None:
    """Negative control: the largest number of rows whose numbers fit the ids' type is searched for and found."""
    (rows,) = EngramLayout.for_rows((1 << 31) - 1, layers=(1,), n_heads=64).num_embeddings
    assert 0.99 * (1 << 31) < rows < 1 << 31


@pytest.mark.parametrize("text", ["bind:²", "preferred:²", "interleave:0,²", "split:²", "weighted-interleave:0=²"])
def test_digits_that_are_no_decimals_are_refused(machine: Topology, text: str) -> None:
    """``²`` is a digit to Python and no number: a usage error like any other word."""
    with pytest.raises(UsageError, match="²"):
        policies.resolve(text, machine, 1, backing="tmpfs")
    assert named_nodes(text) == ()


def test_a_peer_that_dies_unseen_fails_the_test(machine: Topology) -> None:
    """A rank that is killed while the test reads its pages is told when the table is given back; nothing is left."""
    made = build(machine)
    first, _second = ranks()
    os.kill(first, signal.SIGKILL)
    with pytest.raises(PeerError, match="SIGKILL"):
        made.close()
    assert ranks() == []
    assert not made.backing.is_mapped
    made.close()


def test_a_table_given_back_in_peace_raises_nothing(machine: Topology) -> None:
    """Negative control: peers that were let go have no error, and closing twice is closing once."""
    made = build(machine)
    assert len(ranks()) == 2
    made.close()
    made.close()
    assert ranks() == []


def lives(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["killed", "well"])
def test_what_a_rank_forked_ends_with_the_world(world: Any, end: str) -> None:
    """A killed rank whose child holds its connection open is named at the deadline; no child survives the call."""
    begin = time.monotonic()
    with pytest.raises(PeerError, match="rank 0") if end == "killed" else nullcontext():
        world("forks", end=end, deadline_s=3)
    ((_, child),) = world.events
    while lives(child):  # its end is under way
        assert time.monotonic() - begin < 100
        time.sleep(0.01)

"""Four nodes, one without memory and one without CPUs: what may hold a table, and what happens when it is full."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import guestkit
import pytest

from pytest_engram.errors import UsageError
from pytest_engram.numa import capacity
from pytest_engram.numa.topology import read_topology

TOO_MUCH = 620 * guestkit.MIB  # node 3 has 512 MiB


@pytest.fixture(autouse=True)
def on_node_0() -> Iterator[None]:
    """Tests move this process; the next one starts at home."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    yield
    os.sched_setaffinity(0, cpus)


def test_the_topology_is_the_firmwares() -> None:
    """CPUs, memory and distances of each node, a node without memory and one without CPUs among them."""
    found = read_topology(stand_ins=True)
    assert [(node.id, node.cpus, node.has_memory) for node in found.nodes] == [
        (0, (0,), True), (1, (1,), True), (2, (2,), False), (3, (), True)
    ]  # fmt: skip
    assert [node.id for node in found.memory_nodes] == [0, 1, 3]
    assert [gpu.numa_node for gpu in found.gpus] == [1]
    assert [tuple(node.distances.values()) for node in found.nodes] == [
        (10, 21, 12, 31), (21, 10, 22, 17), (12, 22, 10, 33), (31, 17, 33, 10)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "pages"),
    [
        ("bind:0", {0: 1}), ("bind:1", {1: 1}), ("bind:3", {3: 1}), ("preferred:3", {3: 1}),
        ("interleave", {0: 1 / 2, 1: 1 / 2}),  # nodes with CPUs only
        ("interleave:0,1,3", {0: 1 / 3, 1: 1 / 3, 3: 1 / 3}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backing", ["tmpfs", "memfd", "anon-thp"])
def test_pages_lie_where_the_policy_says(policy: str, pages: dict[int, float], backing: str) -> None:
    """Memory without CPUs can be asked for by number; what names no node spreads over nodes with CPUs."""
    plan = guestkit.resolved(policy, backing)
    with guestkit.built(plan, 24 * guestkit.MIB) as table:  # 12 huge pages are even for two nodes and for three
        audit = table.distributions[-1]
        verdict = guestkit.gate_one(plan, table.distributions)
    words = (guestkit.pages_text(audit), "+".join(audit.routes), verdict)
    guestkit.say("policies-four", f"{policy:24}", f"{backing:8}", *words)
    total = sum(audit.pages.values())
    assert {node: count / total for node, count in audit.pages.items()} == pytest.approx(pages, abs=0.02)
    assert verdict == "as-asked"


def test_a_cpu_without_memory_uses_its_neighbour() -> None:
    """The first touch from the memory-less node lands on the nearest node with memory, not on "its own"."""
    os.sched_setaffinity(0, {2})
    with guestkit.built(guestkit.asked("default"), order="stock") as table:
        assert guestkit.nodes_of(table) == [0]
    guestkit.say("policies-four", "default, from node 2", "tmpfs", "N0 100.0%", "node 2 has no memory", "nearest: 12")


def test_a_memory_less_node_is_refused() -> None:
    """By name, and past the name's check by capacity, before the kernel's EINVAL."""

    def build() -> None:
        with guestkit.built(guestkit.asked("bind", 2)):
            pass

    codes = [guestkit.code_of(lambda: guestkit.resolved("bind:2")), guestkit.code_of(build)]
    guestkit.say("faults", f"{'a memory-less node':60}", f"{'policy check, capacity':26}", ", ".join(codes))
    assert codes == ["memoryless-node", "too-large"]


def test_preferred_spills_and_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """K19: PREFERRED on a node that is too small spills without an error; gate 1 reads the pages."""
    plan = guestkit.asked("preferred", 3, backing="memfd")
    monkeypatch.setattr(capacity, "default_reserve", lambda *_: 64 * guestkit.MIB)  # twice the table are not left free
    with guestkit.built(plan, TOO_MUCH) as table:
        code, seen = guestkit.gate_one(plan, table.distributions), guestkit.pages_text(table.distributions[-1])
        assert len(guestkit.nodes_of(table)) > 1
    guestkit.say("faults", f"{f'PREFERRED spills on a full node ({seen})':60}", f"{'gate 1':26}", code)
    assert code == "not-as-asked"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """An innocent process, larger than we are, on another node."""
    work = "import time; held = bytearray(b'x') * (300 << 20); print('held', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_small_node_is_refused_before_the_oom_killer(bystander: subprocess.Popen[bytes]) -> None:
    """K19: BIND to a node that is too small is refused by the capacity check; nobody is killed."""
    before = kills()
    with pytest.raises(UsageError) as refused, guestkit.built(guestkit.asked("bind", 3, backing="memfd"), TOO_MUCH):
        pass
    time.sleep(1)
    assert bystander.poll() is None
    assert kills() == before == 0
    guestkit.say(
        "faults", f"{'BIND to a node that is too small':60}", f"{'capacity, before the OOM':26}", refused.value.code
    )
    assert refused.value.code == "too-large"
    assert "NUMA node 3" in str(refused.value)


def kills() -> int:
    """Processes that this kernel's OOM killer has ended so far."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

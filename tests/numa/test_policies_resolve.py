"""What each policy name means on each kind of machine."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.model import Gpu, NumaNode, TablePlan, Topology
from pytest_engram.policies import POLICIES, resolve


def node(number: int, *, cpus: tuple[int, ...] = (), memory: int = 64 << 30, gpu: bool = False) -> NumaNode:
    """A NUMA node with 64 GiB."""
    return NumaNode(
        id=number, cpus=cpus, memory_bytes=memory, free_bytes=memory, reclaimable_bytes=0, distances={}, gpu_memory=gpu
    )


def machine(*nodes: NumaNode, sockets: dict[int, tuple[int, ...]] | None = None, **fields: Any) -> Topology:
    """A topology of those nodes."""
    return Topology(nodes=nodes, sockets=sockets or {}, **fields)


TWO = machine(
    node(0, cpus=(0, 2)),
    node(1, cpus=(1, 3)),
    sockets={0: (0, 2), 1: (1, 3)},
    gpus=(Gpu(pci="0000:41:00.0", numa_node=1), Gpu(pci="0000:81:00.0", numa_node=0)),
)
SNC = machine(*(node(number, cpus=(number,)) for number in range(4)), sockets={0: (0, 1), 1: (2, 3)})
ODD = machine(
    node(0, cpus=(0,)),
    node(1, cpus=(1,), memory=0),
    node(2),  # memory only: CXL or HBM
    node(3, gpu=True),
    node(4, cpus=(4,)),
    sockets={0: (0, 1, 4)},
    mems_allowed=(0, 1, 2, 3),
)


def table(ranks: tuple[int, ...], mode: str, *nodes: int, weights: tuple[int, ...] = ()) -> TablePlan:
    """An expected table."""
    return TablePlan(ranks=ranks, mode=mode, nodes=nodes, weights=weights)


@pytest.mark.parametrize(
    ("text", "topology", "rank_nodes", "expected"),
    [
        ("default", TWO, None, [table((0, 1), "default")]),
        ("bind:1", TWO, None, [table((0, 1), "bind", 1)]),
        ("bind:2", ODD, None, [table((0, 1), "bind", 2)]),
        ("preferred:0", TWO, None, [table((0, 1), "preferred", 0)]),
        ("interleave", TWO, None, [table((0, 1), "interleave", 0, 1)]),
        ("interleave:2,0", ODD, None, [table((0, 1), "interleave", 0, 2)]),
        ("weighted-interleave:3,1", TWO, None, [table((0, 1), "weighted-interleave", 0, 1, weights=(3, 1))]),
        ("weighted-interleave:1=2,0=5", TWO, None, [table((0, 1), "weighted-interleave", 0, 1, weights=(5, 2))]),
        ("per-socket", TWO, None, [table((0,), "bind", 0), table((1,), "bind", 1)]),
        ("per-socket", TWO, [1, 0], [table((1,), "bind", 0), table((0,), "bind", 1)]),
        ("per-socket", TWO, [1, 1], [table((0, 1), "bind", 1)]),
        ("per-socket", SNC, [0, 3], [table((0,), "interleave", 0, 1), table((1,), "interleave", 2, 3)]),
        ("per-numa-node", SNC, [3, 0], [table((1,), "bind", 0), table((0,), "bind", 3)]),
        ("per-numa-node", SNC, None, [table((0,), "bind", 0), table((1,), "bind", 2)]),
        ("per-gpu-node", TWO, None, [table((1,), "bind", 0), table((0,), "bind", 1)]),
        ("per-gpu-node", TWO, [0, 0], [table((0, 1), "bind", 0)]),
        ("split", TWO, [0, 1], [table((0,), "bind", 0), table((1,), "bind", 1)]),
        ("split:1", TWO, [1, 1], [table((0, 1), "bind", 1)]),
    ],
)
def test_golden(text: str, topology: Topology, rank_nodes: list[int | None] | None, expected: list[TablePlan]) -> None:
    """Each policy gives the golden tables; socket and NUMA node differ under sub-NUMA clustering (K11)."""
    plan = resolve(text, topology, 2, backing="memfd", rank_nodes=rank_nodes)
    assert (plan.policy, plan.backing, list(plan.tables)) == (text, "memfd", expected)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("nonsense", "unknown-policy", "weighted-interleave:W0,W1"),
        ("bind", "bad-policy", "expected bind:N"),
        ("bind:", "bad-policy", "expected bind:N"),
        ("default:0", "bad-policy", "expected default"),
        ("interleave:", "bad-policy", "interleave[:N,M]"),
        ("bind:x", "bad-node", "'x' is no node number"),
        ("bind:9", "absent-node", "NUMA node 9 does not exist"),
        ("bind:1", "memoryless-node", "NUMA node 1 has no memory"),
        ("bind:3", "gpu-memory-node", "NUMA node 3 is a GPU's own memory"),
        ("preferred:4", "node-not-allowed", "NUMA node 4 is outside Mems_allowed_list"),
        ("interleave:0,0", "bad-node", "a node is listed twice"),
        ("weighted-interleave:1,2", "bad-weights", "2 weights for 1 nodes"),
        ("weighted-interleave:0=1,2", "bad-weights", "NODE=WEIGHT"),
        ("weighted-interleave:0=1,2=0", "bad-weights", "weights 1 to 255"),
        ("weighted-interleave:0=1,0=2", "bad-weights", "each node once"),
        ("split:3", "bad-shards", "a divisor of 2 ranks"),
        ("split:x", "bad-shards", "x shards"),
        ("split:0", "bad-shards", "a divisor of 2 ranks"),
    ],
)
def test_mistakes_are_usage_errors(text: str, code: str, said: str) -> None:
    """Each mistake names what was asked, and nodes that cannot hold a table list those that can (K9)."""
    with pytest.raises(UsageError) as caught:
        resolve(text, ODD, 2, backing="tmpfs")
    assert caught.value.code == code
    assert said in str(caught.value)
    if "node" in code:
        assert "memory nodes for this process: 0, 2" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "topology", "rank_nodes", "code"),
    [
        ("interleave", ODD, None, "one-memory-node"),
        ("per-gpu-node", machine(node(0, cpus=(0,)), gpus=(Gpu(pci="a"), Gpu(pci="b"))), None, "unknown-rank-node"),
        ("per-gpu-node", machine(node(0, cpus=(0,)), gpus=(Gpu(pci="a", numa_node=0),)), None, "too-few-gpus"),
        ("per-socket", TWO, [0, None], "unknown-rank-node"),
        ("per-numa-node", ODD, [0, 1], "unknown-rank-node"),
        ("per-socket", machine(node(0)), None, "unknown-topology"),
        ("split:1", TWO, [0, 1], "consumers-apart"),
    ],
)
def test_what_the_machine_lacks_is_not_measurable(
    text: str, topology: Topology, rank_nodes: list[int | None] | None, code: str
) -> None:
    """K7: an unknown GPU node stays unknown and makes per-* policies not measurable, never node 0."""
    with pytest.raises(NotMeasurable) as caught:
        resolve(text, topology, 2, backing="tmpfs", rank_nodes=rank_nodes)
    assert caught.value.code == code


def test_a_split_puts_each_head_shard_beside_its_consumers() -> None:
    """Unpinned ranks are placed by shard: ranks r and r + S read shard r; two shards fill each NUMA node by half."""
    plan = resolve("split:2", TWO, 4, backing="tmpfs")
    assert plan.tables == (table((0, 2), "bind", 0), table((1, 3), "bind", 1))
    assert plan.notes == (
        "capacity of one table, 2 head shards: NUMA node 0 50.0%, NUMA node 1 50.0%",
        "every TP group spans NUMA nodes 0, 1: its collectives cross them, "
        "the gather of heads with 12,288 B per token and rank",  # 2 layers x 12 heads x 256 bf16 from the other shard
    )


def test_a_split_on_one_node_adds_no_collective() -> None:
    """Shares count shards, not ranks; without a second NUMA node nothing crosses; no other policy has notes."""
    sums, collectives = resolve("split", TWO, 3, backing="tmpfs", rank_nodes=[1, 1, 1]).notes
    assert sums == "capacity of one table, 3 head shards: NUMA node 1 100.0%"
    assert collectives == "no TP group spans NUMA nodes: the rank placement adds no crossing collective"
    uneven = resolve("split", TWO, 3, backing="tmpfs", rank_nodes=[1, 0, 1]).notes[0]
    assert uneven == "capacity of one table, 3 head shards: NUMA node 0 33.3%, NUMA node 1 66.7%"
    assert resolve("per-numa-node", TWO, 2, backing="tmpfs").notes == ()


def test_every_row_is_usable() -> None:
    """Every policy of the registry resolves on a two-node machine when written as its usage says."""
    arguments = {"bind": ":0", "preferred": ":1", "weighted-interleave": ":1,2"}
    for name, row in POLICIES.items():
        assert row.usage.startswith(name)
        assert resolve(name + arguments.get(name, ""), TWO, 2, backing="tmpfs", rank_nodes=[0, 1]).tables

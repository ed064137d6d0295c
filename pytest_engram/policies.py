"""Placement policies by name: text + topology to the tables that are asked for.  One function and one row each.

Socket and NUMA node are different (sub-NUMA clustering), and a serving engine's ``per_node`` means per host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from pytest_engram import ledger
from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.layout import EngramLayout
from pytest_engram.model import PlacementPlan, TablePlan, Topology

BACKING_NAMES = ("tmpfs", "memfd", "hugetlb", "anon-thp", "pinned", "cumem")  # of numa.backing and engines.backings
Tables = tuple[TablePlan, ...]
Nodes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a policy function sees.  ``rank_nodes`` gives each rank's NUMA node, None where it is unknown."""

    text: str
    argument: str | None
    topology: Topology
    ranks: int
    rank_nodes: Sequence[int | None] | None

    @property
    def places(self) -> Nodes:
        """The memory nodes that have CPUs, so neither CXL nor HBM."""
        return tuple(node.id for node in self.topology.memory_nodes if node.cpus)

    def table(self, mode: str, nodes: Nodes = (), weights: Nodes = ()) -> Tables:
        """One table for all ranks."""
        return (TablePlan(ranks=tuple(range(self.ranks)), mode=mode, nodes=nodes, weights=weights),)

    def refuse(self, seen: str, *, code: str, expected: str) -> NoReturn:
        """Raise the ``UsageError`` that lists the nodes one could have asked for."""
        usable = ", ".join(str(node.id) for node in self.topology.memory_nodes) or "none"
        way_out = f"memory nodes for this process: {usable}"
        raise UsageError(seen, code=code, where=f"policy {self.text!r}", expected=expected, way_out=way_out)

    def lack(self, seen: str, *, code: str, expected: str | None = None, way_out: str | None = None) -> NoReturn:
        """Raise the ``NotMeasurable`` of a machine that has not what the policy speaks of."""
        raise NotMeasurable(seen, code=code, where=f"policy {self.text!r}", expected=expected, way_out=way_out)

    def node(self, text: str | None) -> int:
        """A node that can hold the table, or a ``UsageError`` that says why it cannot."""
        if text is None or not text.isdecimal():
            self.refuse(f"{text!r} is no node number", code="bad-node", expected="a NUMA node number")
        node = self.topology.node(int(text))
        faults = {
            "absent-node": (node is None, "does not exist"),
            "gpu-memory-node": (node is not None and node.gpu_memory, "is a GPU's own memory"),
            "memoryless-node": (node is not None and not node.has_memory, "has no memory"),
            "node-not-allowed": (node not in self.topology.memory_nodes, "is outside Mems_allowed_list (cpuset)"),
        }
        for code, (applies, seen) in faults.items():
            if applies:
                self.refuse(f"NUMA node {int(text)} {seen}", code=code, expected="a node with host memory")
        return int(text)


def interleave(request: Request) -> Tables:
    """One table, page by page over the listed nodes, by default over all places."""
    listed = request.argument.split(",") if request.argument else None
    nodes = request.places if listed is None else tuple(sorted(map(request.node, listed)))
    if len(set(nodes)) < len(nodes):
        request.refuse("a node is listed twice", code="bad-node", expected="each node once")
    if listed is None and len(nodes) < 2:
        request.lack(
            f"{len(nodes)} node with CPUs and memory", code="one-memory-node", expected="two or more",
            way_out="list nodes explicitly, or use a machine with several",
        )  # fmt: skip
    return request.table("interleave", nodes)


def weighted_interleave(request: Request) -> Tables:
    """One table over the nodes by weight: ``3,1`` for the default nodes in order, or ``0=3,1=1``."""
    parts, places = (request.argument or "").split(","), request.places
    pairs = [tuple(part.split("=", 1)) for part in parts if "=" in part]
    if not pairs and len(parts) == len(places):
        pairs = list(zip(map(str, places), parts, strict=True))
    if len(pairs) < len(parts):
        expected = f"one weight each for the nodes {', '.join(map(str, places))}, or NODE=WEIGHT pairs"
        request.refuse(f"{len(parts)} weights for {len(places)} nodes", code="bad-weights", expected=expected)
    weights = {request.node(node): weight for node, weight in pairs}
    if len(weights) < len(pairs) or not all(text.isdecimal() and 1 <= int(text) <= 255 for text in weights.values()):
        request.refuse("weights or nodes are wrong", code="bad-weights", expected="each node once, weights 1 to 255")
    nodes = tuple(sorted(weights))
    return request.table("weighted-interleave", nodes, tuple(int(weights[node]) for node in nodes))


def per_socket(request: Request) -> Tables:
    """One table per socket, shared by the ranks that live there, spread over the socket's nodes."""
    groups = [nodes for nodes in request.topology.socket_nodes().values() if nodes]
    return _tables(groups, _homes(request, groups))


def per_numa_node(request: Request) -> Tables:
    """One table per NUMA node, shared by the ranks that live there."""
    groups = [(node,) for node in request.places]
    return _tables(groups, _homes(request, groups))


def per_gpu_node(request: Request) -> Tables:
    """One table per NUMA node that has GPUs, shared by those GPUs' ranks; rank r drives GPU r by default."""
    nodes = request.rank_nodes or tuple(gpu.numa_node for gpu in request.topology.gpus[: request.ranks])
    if len(nodes) < request.ranks:
        request.lack(f"{len(nodes)} GPUs for {request.ranks} ranks", code="too-few-gpus")
    groups = [(node.id,) for node in request.topology.memory_nodes]
    return _tables(groups, _homes(replace(request, rank_nodes=nodes), groups))


def split(request: Request) -> Tables:
    """One table per TP head shard, on the NUMA node of its consumers: rank r reads shard r modulo the shards.

    The tables together are one table; by default each rank is the only consumer of its shard.
    """
    text = request.argument or str(request.ranks)
    shards = int(text) if text.isdecimal() else 0
    if shards < 1 or request.ranks % shards:
        request.refuse(f"{text} shards", code="bad-shards", expected=f"a divisor of {request.ranks} ranks")
    groups, tables = [(node,) for node in request.places], []
    homes = _homes(request, groups, shards)
    for shard in range(shards):
        consumers = tuple(range(shard, request.ranks, shards))
        if len({homes[rank] for rank in consumers}) > 1:
            request.lack(
                f"the consumers of head shard {shard}, ranks {consumers}, sit on several NUMA nodes",
                code="consumers-apart", expected="all on one", way_out="regroup the ranks, or pay for per-numa-node",
            )  # fmt: skip
        tables.append(TablePlan(ranks=consumers, mode="bind", nodes=groups[homes[shard]]))
    return tuple(tables)


def split_notes(tables: Tables) -> tuple[str, ...]:
    """What a split needs of each NUMA node, and which collectives the ranks' places send across nodes."""
    shards = Counter(table.nodes[0] for table in tables)
    sums = (f"NUMA node {node} {count / len(tables):.1%}" for node, count in sorted(shards.items()))
    capacity = f"capacity of one table, {len(tables)} head shards: {', '.join(sums)}"
    if len(shards) < 2:
        return capacity, "no TP group spans NUMA nodes: the rank placement adds no crossing collective"
    gathered = ledger.step_bytes(1, EngramLayout.deepseek_v41(), shards=len(tables)).gather
    crossing = f"every TP group spans NUMA nodes {', '.join(map(str, sorted(shards)))}: its collectives cross them"
    return capacity, f"{crossing}, the gather of heads with {gathered:,} B per token and rank"


def _homes(request: Request, groups: Sequence[Nodes], blocks: int | None = None) -> list[int]:
    """Each rank's group; where nothing pins the ranks, contiguous blocks.  No rank is placed without its node."""
    if not groups:
        request.lack("no socket or node has memory and CPUs", code="unknown-topology")
    blocks = blocks or request.ranks
    if request.rank_nodes is None:
        return [rank % blocks * len(groups) // blocks for rank in range(request.ranks)]
    homes: dict[int | None, int] = {node: index for index, group in enumerate(groups) for node in group}
    for rank, node in enumerate(request.rank_nodes):
        if node not in homes:
            told = "is unknown" if node is None else f"is {node}, which holds no host table"
            request.lack(
                f"the NUMA node of rank {rank} {told}", code="unknown-rank-node",
                expected="each rank's GPU (or CPUs) on a known memory node",
                way_out="pytest-engram doctor shows each source's answer",
            )  # fmt: skip
    return [homes[node] for node in request.rank_nodes]


def _tables(groups: Sequence[Nodes], homes: Sequence[int]) -> Tables:
    ranks = {index: tuple(rank for rank, home in enumerate(homes) if home == index) for index in sorted(set(homes))}
    modes = {index: "bind" if len(groups[index]) == 1 else "interleave" for index in ranks}
    return tuple(TablePlan(ranks=ranks[index], mode=modes[index], nodes=groups[index]) for index in ranks)


@dataclass(frozen=True, slots=True)
class Policy:
    """One row: the function and how a user writes it (``:`` means an argument, ``[:`` an optional one)."""

    resolve: Callable[[Request], Tables]
    usage: str
    notes: Callable[[Tables], tuple[str, ...]] = lambda _tables: ()

    def accepts(self, colon: str, argument: str) -> bool:
        """Whether the part behind the name fits the usage."""
        return bool(colon) == bool(argument) and ("[:" in self.usage or bool(colon) == (":" in self.usage))


POLICIES: dict[str, Policy] = {
    "default": Policy(lambda request: request.table("default"), "default"),  # the first toucher decides
    "bind": Policy(lambda request: request.table("bind", (request.node(request.argument),)), "bind:N"),
    "preferred": Policy(lambda request: request.table("preferred", (request.node(request.argument),)), "preferred:N"),
    "interleave": Policy(interleave, "interleave[:N,M]"),
    "weighted-interleave": Policy(weighted_interleave, "weighted-interleave:W0,W1 or :N=W,M=W"),
    "per-socket": Policy(per_socket, "per-socket"),
    "per-numa-node": Policy(per_numa_node, "per-numa-node"),
    "per-gpu-node": Policy(per_gpu_node, "per-gpu-node"),
    "split": Policy(split, "split[:SHARDS]", split_notes),
}


def resolve(
    text: str, topology: Topology, ranks: int, *, backing: str, rank_nodes: Sequence[int | None] | None = None
) -> PlacementPlan:
    """The tables that ``text`` means for ``ranks`` ranks on ``topology``; ``rank_nodes`` is each rank's NUMA node.

    Raises ``UsageError`` for an unknown policy or a node that cannot hold a table, ``NotMeasurable`` where the
    machine lacks what the policy speaks of.
    """
    name, colon, argument = text.partition(":")
    policy = POLICIES.get(name)
    if policy is None:
        usages = ", ".join(row.usage for row in POLICIES.values())
        raise UsageError(f"unknown policy {text!r}", code="unknown-policy", where="placement", expected=usages)
    if not policy.accepts(colon, argument):
        raise UsageError(f"bad policy {text!r}", code="bad-policy", where="placement", expected=policy.usage)
    if ranks < 1 or (rank_nodes is not None and len(rank_nodes) != ranks):
        raise UsageError(f"{ranks} ranks with nodes {rank_nodes}", code="bad-ranks", where="placement")
    request = Request(text=text, argument=argument or None, topology=topology, ranks=ranks, rank_nodes=rank_nodes)
    tables = policy.resolve(request)
    return PlacementPlan(policy=text, backing=backing, tables=tables, notes=policy.notes(tables))

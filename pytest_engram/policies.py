"""Placement policies by name: text + topology to the tables that are asked for.  One function and one row each.

Socket and NUMA node are different (sub-NUMA clustering), and a serving engine's ``per_node`` means per host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.model import PlacementPlan, TablePlan, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a policy function sees.  ``rank_nodes`` gives each rank's NUMA node, None where it is unknown."""

    text: str
    argument: str | None
    topology: Topology
    ranks: int
    rank_nodes: tuple[int | None, ...] | None

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.ranks))

    def refuse(self, seen: str, *, code: str, expected: str, way_out: str | None = None) -> NoReturn:
        """Raise the ``UsageError`` that lists the nodes one could have asked for."""
        nodes = ", ".join(str(node.id) for node in self.topology.memory_nodes)
        raise UsageError(
            seen,
            code=code,
            where=f"policy {self.text!r}",
            expected=expected,
            way_out=way_out or f"memory nodes for this process: {nodes or 'none'}",
        )

    def node(self, text: str) -> int:
        """A node that can hold the table, or a ``UsageError`` that says why it cannot."""
        if not text.isdigit():
            self.refuse(f"{text!r} is no node number", code="bad-node", expected="a NUMA node number")
        number = int(text)
        node = self.topology.node(number)
        reasons = {
            "absent-node": (node is None, "does not exist"),
            "gpu-memory-node": (node is not None and node.gpu_memory, "is a GPU's own memory"),
            "memoryless-node": (node is not None and not node.has_memory, "has no memory"),
            "node-not-allowed": (node not in self.topology.memory_nodes, "is outside Mems_allowed_list (cpuset)"),
        }
        for code, (applies, seen) in reasons.items():
            if applies:
                self.refuse(f"NUMA node {number} {seen}", code=code, expected="a node with host memory")
        return number

    def nodes(self) -> tuple[int, ...]:
        """The listed nodes, or by default every memory node that has CPUs (so neither CXL nor HBM)."""
        if self.argument is None:
            return tuple(node.id for node in self.topology.memory_nodes if node.cpus)
        numbers = tuple(self.node(part) for part in self.argument.split(","))
        if len(set(numbers)) < len(numbers):
            self.refuse("a node is listed twice", code="bad-node", expected="each node once")
        return tuple(sorted(numbers))


def _one(mode: str, request: Request) -> tuple[TablePlan, ...]:
    return (TablePlan(ranks=request.everyone, mode=mode, nodes=(request.node(request.argument or ""),)),)


def default(request: Request) -> tuple[TablePlan, ...]:
    """One table without a policy: the first toucher decides."""
    return (TablePlan(ranks=request.everyone, mode="default"),)


def bind(request: Request) -> tuple[TablePlan, ...]:
    """One table on one node."""
    return _one("bind", request)


def preferred(request: Request) -> tuple[TablePlan, ...]:
    """One table on one node while it has room; spills to others."""
    return _one("preferred", request)


def interleave(request: Request) -> tuple[TablePlan, ...]:
    """One table, page by page over the nodes."""
    nodes = request.nodes()
    if request.argument is None and len(nodes) < 2:
        raise NotMeasurable(
            f"{len(nodes)} node with CPUs and memory", code="one-memory-node", where=f"policy {request.text!r}",
            expected="two or more", way_out="list nodes explicitly, or use a machine with several",
        )  # fmt: skip
    return (TablePlan(ranks=request.everyone, mode="interleave", nodes=nodes),)


def weighted_interleave(request: Request) -> tuple[TablePlan, ...]:
    """One table over the nodes by weight: ``3,1`` for the default nodes in order, or ``0=3,1=1``."""
    parts = (request.argument or "").split(",")
    pairs = [part.partition("=")[::2] for part in parts]
    named = all("=" in part for part in parts)
    candidates = [node.id for node in request.topology.memory_nodes if node.cpus]
    if not named:
        if any("=" in part for part in parts) or len(parts) != len(candidates):
            request.refuse(
                f"{len(parts)} weights for {len(candidates)} nodes",
                code="bad-weights",
                expected=f"one weight each for the nodes {', '.join(map(str, candidates))}, or NODE=WEIGHT pairs",
            )
        pairs = [(str(node), weight) for node, weight in zip(candidates, parts, strict=True)]
    weights = {request.node(node): weight for node, weight in pairs}
    if len(weights) < len(pairs) or not all(text.isdigit() and 1 <= int(text) <= 255 for text in weights.values()):
        request.refuse("weights or nodes are wrong", code="bad-weights", expected="each node once, weights 1 to 255")
    nodes = tuple(sorted(weights))
    return (
        TablePlan(
            ranks=request.everyone,
            mode="weighted-interleave",
            nodes=nodes,
            weights=tuple(int(weights[n]) for n in nodes),
        ),
    )


def per_socket(request: Request) -> tuple[TablePlan, ...]:
    """One table per socket, shared by the ranks that live there, spread over the socket's nodes."""
    groups = [nodes for nodes in request.topology.socket_nodes().values() if nodes]
    return _per_group(request, groups)


def per_numa_node(request: Request) -> tuple[TablePlan, ...]:
    """One table per NUMA node, shared by the ranks that live there."""
    return _per_group(request, [(node.id,) for node in request.topology.memory_nodes if node.cpus])


def per_gpu_node(request: Request) -> tuple[TablePlan, ...]:
    """One table per NUMA node that has GPUs, shared by those GPUs' ranks; rank r drives GPU r by default."""
    homes = request.rank_nodes or tuple(gpu.numa_node for gpu in request.topology.gpus[: request.ranks])
    if len(homes) < request.ranks:
        raise NotMeasurable(
            f"{len(homes)} GPUs for {request.ranks} ranks", code="too-few-gpus", where=f"policy {request.text!r}"
        )
    groups = [(node.id,) for node in request.topology.memory_nodes]
    return _tables(request, groups, _homes(request, homes, groups))


def _per_group(request: Request, groups: Sequence[tuple[int, ...]]) -> tuple[TablePlan, ...]:
    if not groups:
        raise NotMeasurable("no socket or node has memory and CPUs", code="unknown-topology", where=request.text)
    if request.rank_nodes is None:  # nothing pins the ranks yet: contiguous blocks, as data-parallel engines do
        homes = [rank * len(groups) // request.ranks for rank in request.everyone]
    else:
        homes = _homes(request, request.rank_nodes, groups)
    return _tables(request, groups, homes)


def _homes(request: Request, nodes: Iterable[int | None], groups: Sequence[tuple[int, ...]]) -> list[int]:
    """Each rank's group; a rank whose node is unknown or in no group cannot be placed honestly."""
    homes = []
    for rank, node in enumerate(nodes):
        home = next((index for index, group in enumerate(groups) if node in group), None)
        if home is None:
            told = "is unknown" if node is None else f"is {node}, which holds no host table"
            raise NotMeasurable(
                f"the NUMA node of rank {rank} {told}", code="unknown-rank-node", where=f"policy {request.text!r}",
                expected="each rank's GPU (or CPUs) on a known memory node",
                way_out="pytest-engram doctor shows each source's answer",
            )  # fmt: skip
        homes.append(home)
    return homes


def _tables(request: Request, groups: Sequence[tuple[int, ...]], homes: Sequence[int]) -> tuple[TablePlan, ...]:
    return tuple(
        TablePlan(
            ranks=tuple(rank for rank in request.everyone if homes[rank] == index),
            mode="bind" if len(groups[index]) == 1 else "interleave",
            nodes=groups[index],
        )
        for index in sorted(set(homes))
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """One row: the function and how a user writes it (``:`` means an argument, ``[:`` an optional one)."""

    resolve: Callable[[Request], tuple[TablePlan, ...]]
    usage: str

    def accepts(self, colon: str, argument: str) -> bool:
        """Whether the part behind the name fits the usage."""
        if "[:" in self.usage:
            return bool(colon) == bool(argument)
        return bool(colon) == bool(argument) == (":" in self.usage)


POLICIES: dict[str, Policy] = {
    "default": Policy(default, "default"),
    "bind": Policy(bind, "bind:N"),
    "preferred": Policy(preferred, "preferred:N"),
    "interleave": Policy(interleave, "interleave[:N,M]"),
    "weighted-interleave": Policy(weighted_interleave, "weighted-interleave:W0,W1 or :N=W,M=W"),
    "per-socket": Policy(per_socket, "per-socket"),
    "per-numa-node": Policy(per_numa_node, "per-numa-node"),
    "per-gpu-node": Policy(per_gpu_node, "per-gpu-node"),
    "split": Policy(per_numa_node, "split"),  # a shard on its consumers' node: the caller passes shard bytes
}


def resolve(
    text: str,
    topology: Topology,
    ranks: int,
    *,
    backing: str,
    rank_nodes: Sequence[int | None] | None = None,
) -> PlacementPlan:
    """The tables that ``text`` means for ``ranks`` ranks on ``topology``; ``rank_nodes`` is each rank's NUMA node.

    Raises ``UsageError`` for an unknown policy or a node that cannot hold a table, ``NotMeasurable`` where the
    machine lacks what the policy speaks of.
    """
    name, colon, argument = text.partition(":")
    policy = POLICIES.get(name)
    usages = ", ".join(row.usage for row in POLICIES.values())
    if policy is None:
        raise UsageError(f"unknown policy {text!r}", code="unknown-policy", where="placement", expected=usages)
    if not policy.accepts(colon, argument):
        raise UsageError(f"bad policy {text!r}", code="bad-policy", where="placement", expected=policy.usage)
    if ranks < 1 or (rank_nodes is not None and len(rank_nodes) != ranks):
        raise UsageError(f"{ranks} ranks with nodes {rank_nodes}", code="bad-ranks", where="placement")
    request = Request(
        text=text, argument=argument or None, topology=topology, ranks=ranks,
        rank_nodes=None if rank_nodes is None else tuple(rank_nodes),
    )  # fmt: skip
    return PlacementPlan(policy=text, backing=backing, tables=policy.resolve(request))

"""How far each rank's reader is from its table's pages: what A1's prediction per rank rests on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_engram import codec
from pytest_engram.errors import UsageError
from pytest_engram.gates.case import Case
from pytest_engram.gates.placement import shares_after_replay
from pytest_engram.model import Topology


def topology(case: Case) -> Topology | None:
    """The machine in ``provenance["topology"]`` (plain or as ``{"value": …}``), if it is on record."""
    tree: Any = case.evidence.provenance.get("topology")
    if isinstance(tree, Mapping) and "value" in tree:
        tree = tree["value"]
    try:
        return tree if isinstance(tree, Topology) or tree is None else codec.from_builtins(tree, Topology)
    except UsageError:
        return None


def home(case: Case, rank: int) -> int | None:
    """The NUMA node of the rank's reader: its GPU's, or on the CPU engine that of its lookup worker, its last CPU."""
    machine = topology(case)
    if machine is None or rank >= len(case.plan.cpus):
        return None
    if case.plan.engine == "cuda":
        return machine.gpus[rank].numa_node if rank < len(machine.gpus) else None
    return machine.node_of_cpu(case.plan.cpus[rank][-1]) if case.plan.cpus[rank] else None


def from_rank(case: Case, rank: int, node: int | str) -> int | None:
    """The firmware's distance from the rank's reader to a NUMA node; None if one end or the distance is unknown."""
    machine, start = topology(case), home(case, rank)
    found = machine.node(start) if machine is not None and start is not None else None
    return found.distances.get(int(node)) if found is not None and str(node).isdigit() else None


def cost(case: Case, arm: str, rank: int) -> float | None:
    """The mean distance of the rank's pages, weighted by where the kernel says they lie in ``arm``."""
    runs = case.of(arm)
    share = shares_after_replay(runs[0]).get(rank) if runs else None
    if not share:
        return None
    parts = {node: from_rank(case, rank, node) for node in share}
    if any(distance is None for distance in parts.values()):
        return None
    return sum(share[node] * (parts[node] or 0) for node in share) / sum(share.values())


def prediction(case: Case, arm: str, rank: int) -> str | None:
    """Is ``arm`` nearer than A ("down": times shrink), farther ("up") or as far ("")?  None: a distance is unknown."""
    before, after = cost(case, "A", rank), cost(case, arm, rank)
    if before is None or after is None:
        return None
    if abs(after - before) < 0.01 * before:
        return ""
    return "down" if after < before else "up"

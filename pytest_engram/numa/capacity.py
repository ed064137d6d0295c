"""Does a placement fit?  Asked before anything is touched: BIND to a full node ends in the OOM killer, not in ENOMEM,
and a larger bystander dies first; tmpfs over its size ends in SIGBUS.
"""

from __future__ import annotations

import collections
import os
import shutil

from pytest_engram.errors import UsageError
from pytest_engram.model import NumaNode, PlacementPlan, TablePlan, Topology
from pytest_engram.numa.backing import BACKINGS, PMD_BYTES, SHM
from pytest_engram.numa.cgroup import cgroup_headroom as cgroup_free
from pytest_engram.numa.topology import read_allowed, read_memory
from pytest_engram.numa.tree import Tree

__all__ = ["GIB", "cgroup_free", "check_capacity", "default_reserve", "live_memory", "shm_free"]

GIB = 1 << 30
_POOL = "reserve pages in /sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages"


def default_reserve(node_bytes: int, num_bytes: int) -> int:
    """Bytes of a node to leave free: 1 GiB or 5 %, but for a small table no more than twice its size (≥ 64 MiB)."""
    return min(max(GIB, node_bytes // 20), max(64 << 20, 2 * num_bytes))


def check_capacity(
    plan: PlacementPlan, num_bytes: int, topology: Topology, shm_free_bytes: int | None, cgroup_free_bytes: int | None,
    *, reserve: int | None = None,
) -> None:  # fmt: skip
    """Raise ``UsageError`` (code ``too-large``) naming the first limit that ``plan`` would exceed.

    ``num_bytes`` is per table; ``reserve`` per node, default :func:`default_reserve`.  None limits are unknown or
    absent and not checked.
    """
    shared = BACKINGS[plan.backing].shared
    copies = [(table, num_bytes * (1 if shared else len(table.ranks))) for table in plan.tables]
    total = sum(size for _, size in copies)
    if plan.backing == "tmpfs" and shm_free_bytes is not None:
        _require(total, shm_free_bytes, f"{SHM} has", "use the memfd backing, fewer rows, or a larger tmpfs")
    if cgroup_free_bytes is not None:
        _require(total, cgroup_free_bytes, "the memory cgroup has", "use fewer rows or a larger memory limit")

    def room(node: NumaNode) -> int:
        kept = default_reserve(node.memory_bytes, num_bytes) if reserve is None else reserve
        return max(0, node.available_bytes - kept)

    way_out = "use fewer rows, another node, or free memory (page cache that is not reclaimable counts)"
    for number, size in _charges(copies).items():
        node = topology.node(number)
        if node is None:
            raise UsageError(f"NUMA node {number} is absent", code="absent-node", where="capacity")
        _require(size, room(node), f"NUMA node {number} has, less its reserve,", way_out)
        if plan.backing == "hugetlb":
            pool = f"the 2 MiB page pool of NUMA node {number} has"
            _require(size, node.hugepages.get(PMD_BYTES, (0, 0))[1] * PMD_BYTES, pool, _POOL.format(number))
    _require(total, sum(map(room, topology.memory_nodes)), "the allowed NUMA nodes have, less their reserves,", way_out)


def _charges(copies: list[tuple[TablePlan, int]]) -> dict[int, int]:
    """Bytes that must lie on each node; ``default`` and ``preferred`` may spill and bind no node."""
    charges: collections.Counter[int] = collections.Counter()
    for table, size in copies:
        weights = table.weights or (1,) * len(table.nodes)
        for node, weight in zip(table.nodes, weights, strict=True):
            charges[node] += -(-size * weight // sum(weights)) if table.mode not in ("default", "preferred") else 0
    return dict(charges)


def _require(needed: int, available: int, who_has: str, way_out: str) -> None:
    if needed > available:
        raise UsageError(
            f"the tables need {needed} bytes ({needed / GIB:.2f} GiB); "
            f"{who_has} {available} ({available / GIB:.2f} GiB)", code="too-large", where="capacity", way_out=way_out,
        )  # fmt: skip


def live_memory() -> Topology:
    """The nodes' memory now, and which of them this process may use; no sockets, no GPUs."""
    return Topology(nodes=read_memory(Tree())[0], sockets={}, mems_allowed=read_allowed(Tree())[1])


def shm_free() -> int | None:
    """Bytes that an unprivileged process may still allocate in /dev/shm; None where there is none, or no limit."""
    usage = shutil.disk_usage(SHM) if os.path.isdir(SHM) else None
    return usage.free if usage and usage.total else None

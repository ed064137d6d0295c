"""Does a placement fit?  Asked before anything is touched: BIND to a full node ends in the OOM killer, not in ENOMEM,
and a larger bystander dies first; tmpfs over its size ends in SIGBUS.
"""

from __future__ import annotations

import collections
import os
from pathlib import Path

from pytest_engram.errors import UsageError
from pytest_engram.model import NumaNode, PlacementPlan, TablePlan, Topology
from pytest_engram.numa import _syscalls
from pytest_engram.numa.backing import BACKINGS, PMD_BYTES, SHM
from pytest_engram.numa.topology import read_nodes
from pytest_engram.numa.tree import Tree

GIB = 1 << 30
_SMALL_RESERVE = 64 << 20
_CGROUP = Path("/sys/fs/cgroup")


def default_reserve(node_bytes: int, num_bytes: int) -> int:
    """Bytes of a node to leave free: 1 GiB or 5 %, but for a small table no more than twice its size (≥ 64 MiB)."""
    return min(max(GIB, node_bytes // 20), max(_SMALL_RESERVE, 2 * num_bytes))


def check_capacity(
    plan: PlacementPlan,
    num_bytes: int,
    topology: Topology,
    shm_free_bytes: int | None,
    cgroup_free_bytes: int | None,
    *,
    reserve: int | None = None,
) -> None:
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
    _check_memory(copies, num_bytes, topology, reserve)
    if plan.backing == "hugetlb":
        _check_pools(copies, topology)


def _check_memory(copies: list[tuple[TablePlan, int]], num_bytes: int, topology: Topology, reserve: int | None) -> None:
    def room(node: NumaNode) -> int:
        kept = default_reserve(node.memory_bytes, num_bytes) if reserve is None else reserve
        return max(0, node.available_bytes - kept)

    way_out = "use fewer rows, another node, or free memory (page cache that is not reclaimable counts)"
    for number, size in _charges(copies).items():
        node = topology.node(number)
        if node is None:
            raise UsageError(f"NUMA node {number} is absent", code="absent-node", where="capacity")
        _require(size, room(node), f"NUMA node {number} has, less its reserve,", way_out)
    everywhere = sum(room(node) for node in topology.memory_nodes)
    _require(sum(size for _, size in copies), everywhere, "the allowed NUMA nodes have, less their reserves,", way_out)


def _check_pools(copies: list[tuple[TablePlan, int]], topology: Topology) -> None:
    for number, size in _charges(copies).items():
        node = topology.node(number)
        _, free = node.hugepages.get(PMD_BYTES, (0, 0)) if node else (0, 0)
        path = f"/sys/devices/system/node/node{number}/hugepages/hugepages-2048kB/nr_hugepages"
        _require(size, free * PMD_BYTES, f"the 2 MiB page pool of NUMA node {number} has", f"reserve pages in {path}")


def _charges(copies: list[tuple[TablePlan, int]]) -> dict[int, int]:
    """Bytes that must lie on each node; ``default`` and ``preferred`` may spill and bind no node."""
    charges: collections.Counter[int] = collections.Counter()
    for table, size in copies:
        if table.mode in ("default", "preferred"):
            continue
        weights = table.weights or (1,) * len(table.nodes)
        for node, weight in zip(table.nodes, weights, strict=True):
            charges[node] += -(-size * weight // sum(weights))
    return dict(charges)


def _require(needed: int, available: int, who_has: str, way_out: str) -> None:
    if needed > available:
        seen = f"the tables need {needed} bytes ({needed / GIB:.2f} GiB)"
        raise UsageError(
            f"{seen}; {who_has} {available} ({available / GIB:.2f} GiB)",
            code="too-large",
            where="capacity",
            way_out=way_out,
        )


def live_memory() -> Topology:
    """The nodes' memory now, and which of them this process may use; no sockets, no GPUs."""
    return Topology(nodes=read_nodes(Tree()), sockets={}, mems_allowed=_syscalls.mems_allowed())


def shm_free() -> int | None:
    """Bytes that an unprivileged process may still allocate in /dev/shm."""
    try:
        status = os.statvfs(SHM)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def cgroup_free(root: Path = _CGROUP, membership: str | None = None) -> int | None:
    """The least head-room of this process's memory cgroup and its ancestors (v1 or v2); None: no limit is visible.

    ``membership`` is the text of ``/proc/self/cgroup``.  Inactive file pages count as head-room.
    """
    text = Path("/proc/self/cgroup").read_text() if membership is None else membership
    rooms = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        names = ("memory.max", "memory.current", "inactive_file")
        base = root
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        elif controllers:
            continue
        rooms += _rooms(base, path, names)
    return min(rooms, default=None)


def _rooms(base: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Head-room at every level whose files are visible (a container may see only its own root)."""
    here = base / path.lstrip("/")
    levels = [level for level in (here, *here.parents) if level == base or base in level.parents]
    return [room for level in levels if (room := _room(level, names)) is not None]


def _room(level: Path, names: tuple[str, str, str]) -> int | None:
    try:
        limit, used = ((level / name).read_text().strip() for name in names[:2])
        statistics = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max" or int(limit) >= 1 << 62:  # v1 prints "no limit" as a huge number
        return None
    return max(0, int(limit) - int(used) + int(statistics.get(names[2], 0)))

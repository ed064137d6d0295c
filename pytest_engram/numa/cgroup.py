"""Memory cgroups, versions 1 and 2: what may still be allocated before the OOM killer acts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pytest_engram.numa import procfs
from pytest_engram.numa.tree import Tree

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as 2**63 rounded down to a page
_FILES = {  # controller -> filesystem, limit, usage, and the line of memory.stat that counts inactive file cache
    "memory": ("cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "unified": ("cgroup2", "memory.max", "memory.current", "inactive_file"),
}


def memory_limit(root: Path = Path("/")) -> int | None:
    """The tightest limit in bytes of this process's memory cgroup and its ancestors; None: none is set or seen."""
    return min((limit for limit, _ in _levels(Tree(root))), default=None)


def cgroup_headroom(root: Path = Path("/")) -> int | None:
    """Bytes that may still be charged, over every ancestor's limit; None where no limit is set or seen.

    limit − usage + inactive page cache, which the kernel reclaims first; tmpfs pages are charged and stay.
    """
    return min((max(0, limit - used) for limit, used in _levels(Tree(root))), default=None)


def cgroup_paths(tree: Tree) -> dict[str, str]:
    """Controller → path; the unified hierarchy of version 2 is named ``unified``."""
    lines = (line.split(":", 2) for line in (tree.text("proc/self/cgroup") or "").splitlines())
    return {name: path for _, controllers, path in lines for name in (controllers or "unified").split(",")}


def _levels(tree: Tree) -> Iterator[tuple[int, int]]:
    """(limit, used without inactive file cache) of each limited level, of whichever hierarchy controls memory."""
    for controller, (fstype, limit_name, used_name, cache_name) in _FILES.items():
        for folder in _folders(tree, controller, fstype):
            limit, used = (tree.number(f"{folder}/{name}") for name in (limit_name, used_name))
            if limit is not None and used is not None and limit < _UNLIMITED:
                cache = re.search(rf"^{cache_name} (\d+)$", tree.text(f"{folder}/memory.stat") or "", re.M)
                yield limit, used - (int(cache[1]) if cache else 0)


def _folders(tree: Tree, controller: str, fstype: str) -> Iterator[str]:
    """The process's own group first, then its ancestors up to the mount; a cgroup namespace hides the rest."""
    path = cgroup_paths(tree).get(controller)
    mounts = procfs.parse_mounts(tree.text("proc/self/mountinfo") or "")
    fitting = (one for one in reversed(mounts) if one.kind == fstype)
    mount = next((one for one in fitting if controller in ("unified", *one.super_options.split(","))), None)
    if mount is not None and path is not None:
        inside = path.removeprefix(mount.root) if mount.root != "/" else path
        parts = [part for part in inside.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield "/".join([mount.point.lstrip("/"), *parts[:depth]])

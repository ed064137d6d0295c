"""Mounts and memory cgroups, versions 1 and 2: what may still be allocated before the OOM killer acts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_engram.numa.tree import Tree

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as 2**63 rounded down to a page


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of mountinfo.  ``root`` is the part of the filesystem that is mounted; octal escapes are undone."""

    root: str
    point: str
    fstype: str
    options: str
    super_options: str


def read_mounts(tree: Tree) -> list[Mount]:
    """The mounts this process sees, in mount order: of two on one point the later is in force."""
    return list(filter(None, map(_mount, (tree.text("proc/self/mountinfo") or "").splitlines())))


def mount_at(tree: Tree, point: str) -> Mount | None:
    """The mount in force at exactly that point."""
    return next((mount for mount in reversed(read_mounts(tree)) if mount.point == point), None)


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
    paths = {}
    for line in (tree.text("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(",") if controllers else ["unified"], path))
    return paths


def _levels(tree: Tree) -> Iterator[tuple[int, int]]:
    """(limit, used without inactive file cache) of each limited level, of whichever hierarchy controls memory."""
    files = {
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        "unified": ("memory.max", "memory.current", "inactive_file"),
    }
    paths = cgroup_paths(tree)
    for controller, (limit_name, used_name, cache_name) in files.items():
        for folder in _folders(tree, controller, paths.get(controller)):
            limit, used = (tree.number(f"{folder}/{name}") for name in (limit_name, used_name))
            if limit is None or used is None or limit >= _UNLIMITED:
                continue
            cache = re.search(rf"^{cache_name} (\d+)$", tree.text(f"{folder}/memory.stat") or "", re.M)
            yield limit, used - (int(cache[1]) if cache else 0)


def _folders(tree: Tree, controller: str, path: str | None) -> Iterator[str]:
    """The process's own group first, then its ancestors up to the mount; a cgroup namespace hides the rest."""
    mount = next((one for one in reversed(read_mounts(tree)) if _controls(one, controller)), None)
    if mount is None or path is None:
        return
    inside = path[len(mount.root) :] if mount.root != "/" and path.startswith(mount.root) else path
    parts = [part for part in inside.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        yield "/".join([mount.point.lstrip("/"), *parts[:depth]])


def _controls(mount: Mount, controller: str) -> bool:
    if controller == "unified":
        return mount.fstype == "cgroup2"
    return mount.fstype == "cgroup" and controller in mount.super_options.split(",")


def _mount(line: str) -> Mount | None:
    left, found, right = line.partition(" - ")
    own, kind = left.split(" "), right.split(" ")
    if not found or len(own) < 6 or len(kind) < 3:
        return None
    root, point = (_unescape(text) for text in own[3:5])
    return Mount(root=root, point=point, fstype=kind[0], options=own[5], super_options=kind[2])


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

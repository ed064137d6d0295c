"""Placement of engines that nobody patched: their world gets a /dev/shm of its own, whose mount places every page.

A tmpfs gives new files the policy of its ``mpol=`` option, so code that sets none obeys it.  Rank 0 mounts one over
/dev/shm in a private mount namespace and the other ranks enter that; the machine's mount is never changed, and all is
gone with the last rank.
"""

from __future__ import annotations

import os
import shutil
import time

from pytest_engram.errors import NotMeasurable
from pytest_engram.model import PlacementPlan, StepReceipt
from pytest_engram.numa import _syscalls, procfs
from pytest_engram.numa.backing import SHM
from pytest_engram.numa.group import Group
from pytest_engram.numa.tree import Tree, format_list

_MODES = {"bind": "bind", "interleave": "interleave", "preferred": "prefer"}  # as Documentation/filesystems/tmpfs.rst


def mount_policy(placement: PlacementPlan) -> str:
    """What ``mpol=`` says for a placement; ``NotMeasurable`` (``not-by-mount``) where one mount cannot say it."""
    table = placement.tables[0]
    if len(placement.tables) > 1 or placement.backing != "tmpfs" or table.mode not in _MODES:
        raise NotMeasurable(
            f"{placement.policy} on {placement.backing}", code="not-by-mount", who="placement_by: mount",
            expected="bind, preferred or interleave of one tmpfs table: a mount has one policy for all its files",
        )  # fmt: skip
    return f"{_MODES[table.mode]}:{format_list(table.nodes)}"


def enter(group: Group, placement: PlacementPlan) -> StepReceipt:
    """Give all ranks one private /dev/shm with the placement's policy; the receipt says what stayed equal.

    Raises ``NotMeasurable``: ``not-by-mount``, ``no-private-mount`` (needs CAP_SYS_ADMIN), ``other-capacity``.
    """
    policy, machine, total, begin = mount_policy(placement), _mount(), shutil.disk_usage(SHM).total, time.monotonic()
    others = f"{len(os.listdir(SHM))} names, mapped by process {_users() or '(none)'}"
    leader = group.broadcast(os.getpid(), step="mount")
    try:
        if group.rank == 0:
            _syscalls.unshare(_syscalls.CLONE_NEWNS)
            _syscalls.mount("", "/", _syscalls.MS_REC | _syscalls.MS_PRIVATE)  # nothing travels back to the machine
            options = f"mode=1777,size={total},huge={machine.option('huge', 'never')},mpol={policy}"
            _syscalls.mount("tmpfs", SHM, _syscalls.MS_NOSUID | _syscalls.MS_NODEV, options)
        group.barrier(step="mounted")
        if group.rank != 0:
            _syscalls.join_mounts(leader)
    except OSError as error:
        raise NotMeasurable(
            str(error), code="no-private-mount", who="placement_by: mount", expected="CAP_SYS_ADMIN",
            way_out="run as root, or measure a patched allocation against the stock one",
        ) from error  # fmt: skip
    if _mount().option("mpol") != policy or shutil.disk_usage(SHM).total != total:
        raise NotMeasurable(f"{SHM} is {_mount()}", code="other-capacity", expected=f"mpol={policy}, {total} bytes")
    detail = (
        f"private {SHM} mpol={policy} of {total} bytes as before, {os.readlink('/proc/self/ns/ipc')} as before; "
        f"the machine's, mpol={machine.option('mpol')}, stays: {others}"
    )
    seconds = time.monotonic() - begin
    return StepReceipt(step="mount", rank=group.rank, seconds=seconds, minor_faults=(0, 0), object_pages=None,
                       mapped_pages=None, detail=detail)  # fmt: skip


def _mount() -> procfs.Mount:
    found = procfs.mount_of(SHM, procfs.parse_mounts(Tree().need("proc/thread-self/mountinfo")))
    if found is None or found.kind != "tmpfs" or found.point != SHM:
        seen = f"{SHM} is {found.kind if found else 'absent'}"
        raise NotMeasurable(seen, code="shm-not-tmpfs", who="placement_by: mount", expected="a tmpfs mounted there")
    return found


def _users() -> str:
    """Who maps files of the machine's /dev/shm now: processes that could be read, others are not seen."""
    tree = Tree()
    return ", ".join(pid for pid in tree.names("proc", r"\d+") if f" {SHM}/" in (tree.text(f"proc/{pid}/maps") or ""))

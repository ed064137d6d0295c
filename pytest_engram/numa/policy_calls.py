"""What the kernel's policy calls do in this process, found out by doing: a call that returns 0 proves nothing."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.model import PlacementPlan, TablePlan
from pytest_engram.numa import _syscalls, capacity


def probe_calls() -> dict[str, str]:
    """What each policy call does in this process: "works", or why not and the way out, or "unknown" and why.

    Asked by doing, since a call that reads proves none that writes, in a thread whose policy ends with it.
    """
    acts: dict[str, Callable[[], object]] = {
        "get_mempolicy": _syscalls.get_mempolicy,
        "set_mempolicy": lambda: _syscalls.set_mempolicy(_syscalls.MPOL_DEFAULT, ()),
        "move_pages": lambda: _syscalls.page_status(0, (0,)),
        "mbind": _bind_and_look,
    }
    with ThreadPoolExecutor(1) as pool:
        return dict(zip(acts, pool.map(_attempt, acts.values()), strict=True))


def _attempt(act: Callable[[], object]) -> str:
    try:
        answer = act()
    except OSError as error:
        return str(_syscalls.refused(error, "probe"))
    except (UsageError, NotMeasurable) as error:  # a bound page that finds no room wakes the OOM killer
        return f"unknown, no page was touched: {error.seen}"
    return answer if isinstance(answer, str) else "works"


def _bind_and_look() -> str | None:
    """Bind a scratch page to each allowed node with room to spare, touch it, ask where it lies; None: all is well."""
    for node in _syscalls.mems_allowed():
        with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as scratch:
            address = _syscalls.address_of(scratch)
            _syscalls.mbind(address, mmap.PAGESIZE, _syscalls.MPOL_BIND, (node,))
            table = TablePlan(ranks=(0,), mode="bind", nodes=(node,))
            plan = PlacementPlan(policy=f"bind:{node}", backing="memfd", tables=(table,))
            capacity.check_capacity(plan, mmap.PAGESIZE, capacity.live_memory(), None, capacity.cgroup_free())
            scratch[0] = 1
            seen = int.from_bytes(_syscalls.page_status(0, (address,)), sys.byteorder, signed=True)
        if seen != node:
            return f"a page bound to node {node} is answered with status {seen}: policy calls have no effect here"
    return None

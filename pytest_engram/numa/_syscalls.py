"""The only ctypes calls into the kernel: memory policy, page queries, madvise, parent-death signal.

Constants keep the names of ``linux/mempolicy.h``, ``asm-generic/mman-common.h`` and ``linux/prctl.h``.
``get_mempolicy(MPOL_F_NODE | MPOL_F_ADDR)`` is absent on purpose: it faults the page that it is asked about.
"""

from __future__ import annotations

import array
import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from pytest_engram.errors import NotMeasurable, PlacementError

MPOL_DEFAULT, MPOL_PREFERRED, MPOL_BIND, MPOL_INTERLEAVE, MPOL_LOCAL = 0, 1, 2, 3, 4
MPOL_PREFERRED_MANY, MPOL_WEIGHTED_INTERLEAVE = 5, 6
MPOL_F_MEMS_ALLOWED = 1 << 2
MPOL_MODE_FLAGS = 0b111 << 13  # MPOL_F_STATIC_NODES, MPOL_F_RELATIVE_NODES, MPOL_F_NUMA_BALANCING
MPOL_MF_STRICT, MPOL_MF_MOVE, MPOL_MF_MOVE_ALL = 1 << 0, 1 << 1, 1 << 2
MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLLAPSE = 14, 22, 23, 25
PR_SET_PDEATHSIG = 1
UNANSWERED = 0x7F7F7F7F  # no node and no errno looks like this

MODES = {
    "default": MPOL_DEFAULT,
    "preferred": MPOL_PREFERRED,
    "bind": MPOL_BIND,
    "interleave": MPOL_INTERLEAVE,
    "weighted-interleave": MPOL_WEIGHTED_INTERLEAVE,
}
MODE_NAMES = {number: name for name, number in MODES.items()} | {
    MPOL_LOCAL: "local",
    MPOL_PREFERRED_MANY: "preferred-many",
}
_NUMBERS = {  # (x86_64, aarch64)
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "move_pages": (279, 239),
}
_MASK_BITS = 1024  # MAX_NUMNODES of every distribution kernel; larger masks are refused from 4,097 bits on


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _number(name: str) -> int:
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise NotMeasurable(
            f"no number is known for the system call {name} on {machine}",
            code="unknown-architecture",
            expected="x86_64 or aarch64",
        )
    return _NUMBERS[name][machine == "aarch64"]


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {errno.errorcode.get(number, number)} ({os.strerror(number)})")
    return result


def _call(name: str, *arguments: Any) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return _checked(int(_libc().syscall(ctypes.c_long(_number(name)), *words)), name)


def _mask(nodes: Sequence[int]) -> Any:
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    return mask


def mbind(address: int, nbytes: int, mode: int, nodes: Sequence[int], flags: int = 0) -> None:
    """Set the policy of a range; the kernel reads ``maxnode - 1`` bits, hence bits + 1."""
    if max(nodes, default=0) >= _MASK_BITS:
        raise OSError(errno.EINVAL, f"mbind: node {max(nodes)} is beyond {_MASK_BITS} mask bits")
    _call("mbind", address, nbytes, mode, _mask(nodes), _MASK_BITS + 1, flags)


def set_mempolicy(mode: int, nodes: Sequence[int]) -> None:
    """Set the calling thread's policy."""
    _call("set_mempolicy", mode, _mask(nodes), _MASK_BITS + 1)


def get_mempolicy() -> tuple[str, tuple[int, ...]]:
    """The calling thread's policy: its mode's name and its nodes."""
    mode = ctypes.c_int()
    nodes = _read_policy(ctypes.byref(mode), 0)
    number = mode.value & ~MPOL_MODE_FLAGS
    return MODE_NAMES.get(number, f"mode {number}"), nodes


def mems_allowed() -> tuple[int, ...]:
    """The nodes that the kernel lets this thread use (cpuset), by ``MPOL_F_MEMS_ALLOWED``."""
    return _read_policy(None, MPOL_F_MEMS_ALLOWED)


def _read_policy(mode: Any, flags: int) -> tuple[int, ...]:
    mask = _mask(())
    _call("get_mempolicy", mode, mask, _MASK_BITS, None, flags)
    return tuple(bit for bit in range(_MASK_BITS) if mask[bit // 64] >> bit % 64 & 1)


def page_status(pid: int, addresses: Sequence[int]) -> bytes:
    """``move_pages`` with ``nodes=NULL``: one native C int per address, a node or -errno.

    Entries that the kernel left alone keep ``UNANSWERED``.
    """
    pages = array.array("Q", addresses)
    status = bytearray(UNANSWERED.to_bytes(4, sys.byteorder) * len(pages))
    where = ctypes.c_void_p(pages.buffer_info()[0])
    _call("move_pages", pid, len(pages), where, None, ctypes.c_void_p(address_of(status)), 0)
    return bytes(status)


def move_pages(addresses: Sequence[int], nodes: Sequence[int], *, move_all: bool = False) -> list[int]:
    """Ask to move pages of this process; one status per page.  For negative tests: a later query is the evidence."""
    count = len(addresses)
    pages, targets = (ctypes.c_void_p * count)(*addresses), (ctypes.c_int * count)(*nodes)
    status = (ctypes.c_int * count)(*[UNANSWERED] * count)
    _call("move_pages", 0, count, pages, targets, status, MPOL_MF_MOVE_ALL if move_all else MPOL_MF_MOVE)
    return list(status)


def madvise(address: int, nbytes: int, advice: int) -> None:
    """``madvise(2)``; EINVAL means that this kernel does not know the advice."""
    libc = _libc()
    _checked(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice)), "madvise")


def die_with_parent(signal_number: int) -> None:
    """``PR_SET_PDEATHSIG``: this process gets the signal when the thread that started it ends."""
    _checked(_libc().prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0), "prctl")


def address_of(buffer: Any) -> int:
    """First byte's address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def refused(error: OSError, step: str) -> PlacementError:
    """The error a person reads when the kernel or a sandbox refused a placement call."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return PlacementError(
            str(error),
            code="blocked-by-sandbox",
            where=step,
            expected="CAP_SYS_NICE or a seccomp profile that allows mbind, set_mempolicy and move_pages",
            way_out="run the container with --cap-add SYS_NICE (CAP_SYS_NICE / seccomp), or relax its seccomp profile",
        )
    name = errno.errorcode.get(error.errno or 0, "unknown").lower()
    return PlacementError(str(error), code=f"kernel-{name}", where=step)


def probe_mbind(nodes: Sequence[int] = ()) -> str | None:
    """Bind a scratch page to each node, touch it, ask where it lies; None if it works, else why not.

    By default every node of ``mems_allowed``.  A policy call that returns 0 proves nothing (stubs exist).
    """
    try:
        for node in nodes or mems_allowed():
            seen = _bind_touch_query(node)
            if seen != node:
                return f"a page bound to node {node} is answered with status {seen}: policy calls have no effect here"
    except OSError as error:
        return str(refused(error, "probe"))
    return None


def _bind_touch_query(node: int) -> int:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as scratch:
        address = address_of(scratch)
        mbind(address, mmap.PAGESIZE, MPOL_BIND, (node,))
        scratch[0] = 1
        return int.from_bytes(page_status(0, (address,)), sys.byteorder, signed=True)

"""The only ctypes calls into the kernel: policy, page queries, madvise, counters, namespaces, parent-death signal.

Constants keep the names of ``linux/mempolicy.h``, ``asm-generic/mman-common.h``, ``linux/sched.h``, ``linux/mount.h``,
``linux/prctl.h`` and ``linux/perf_event.h``.
``get_mempolicy(MPOL_F_NODE | MPOL_F_ADDR)`` is absent on purpose: it faults the page that it is asked about.
"""

from __future__ import annotations

import array
import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from collections.abc import Sequence
from typing import Any

from pytest_engram.errors import NotMeasurable, PlacementError

MPOL_DEFAULT, MPOL_BIND = 0, 2
# by number
MODE_NAMES = ("default", "preferred", "bind", "interleave", "local", "preferred-many", "weighted-interleave")
MODES = {name: number for number, name in enumerate(MODE_NAMES)}
MPOL_F_MEMS_ALLOWED = 1 << 2
MPOL_MODE_FLAGS = 0b111 << 13  # MPOL_F_STATIC_NODES, MPOL_F_RELATIVE_NODES, MPOL_F_NUMA_BALANCING
MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLLAPSE = 14, 22, 23, 25
PR_SET_PDEATHSIG = 1
CLONE_FS, CLONE_NEWNS = 0x200, 0x20000
PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING, PERF_FLAG_FD_CLOEXEC, PERF_ATTR_SIZE_VER0 = 1, 2, 8, 64
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
UNANSWERED = -errno.ENODATA  # no node, and no errno of move_pages

_NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279, "perf_event_open": 298},
    "aarch64": {"mbind": 235, "set_mempolicy": 237, "get_mempolicy": 236, "move_pages": 239, "perf_event_open": 241},
}
_MASK_BITS = 1024  # MAX_NUMNODES of every distribution kernel; larger masks are refused from 4,097 bits on


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {errno.errorcode.get(number, number)} ({os.strerror(number)})")
    return result


def _call(name: str, *arguments: Any) -> int:
    numbers = _NUMBERS.get(machine := platform.machine())
    if numbers is None:
        seen, known = f"no number is known for the system call {name} on {machine}", " or ".join(_NUMBERS)
        raise NotMeasurable(seen, code="unknown-architecture", expected=known)
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in (numbers[name], *arguments)]
    return _checked(int(_libc().syscall(*words)), name)


def _mask(nodes: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
    bits = sum(1 << node for node in set(nodes))
    return ctypes.create_string_buffer(bits.to_bytes(_MASK_BITS // 8, sys.byteorder), _MASK_BITS // 8)


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
    return MODE_NAMES[number] if number < len(MODE_NAMES) else f"mode {number}", nodes


def mems_allowed() -> tuple[int, ...]:
    """The nodes that the kernel lets this thread use (cpuset), by ``MPOL_F_MEMS_ALLOWED``."""
    return _read_policy(None, MPOL_F_MEMS_ALLOWED)


def _read_policy(mode: Any, flags: int) -> tuple[int, ...]:
    mask = _mask(())
    _call("get_mempolicy", mode, mask, _MASK_BITS, None, flags)
    bits = int.from_bytes(mask.raw, sys.byteorder)
    return tuple(bit for bit in range(_MASK_BITS) if bits >> bit & 1)


def page_status(pid: int, addresses: Sequence[int]) -> bytes:
    """``move_pages`` with ``nodes=NULL``: one native C int per address, a node or -errno.

    Entries that the kernel left alone keep ``UNANSWERED``.
    """
    unanswered = UNANSWERED.to_bytes(4, sys.byteorder, signed=True)
    pages, status = _words(addresses), bytearray(unanswered * len(addresses))
    _call("move_pages", pid, len(addresses), ctypes.c_char_p(pages), None, ctypes.c_void_p(address_of(status)), 0)
    return bytes(status)


def _words(numbers: Sequence[int]) -> bytes:
    """Native 64-bit words.  A range is one sum of two long integers, without a Python object per number."""
    if not isinstance(numbers, range):
        return array.array("Q", numbers).tobytes()
    ramp, ones = _ramp(len(numbers), numbers.step)
    return (ramp + numbers.start * ones).to_bytes(8 * len(numbers), sys.byteorder)


@functools.lru_cache(maxsize=2)
def _ramp(count: int, step: int) -> tuple[int, int]:
    """The words 0, step, 2 · step … and as many ones, each as one long integer."""
    ramp, ones = array.array("Q", range(0, count * step, step)), array.array("Q", [1]) * count
    return int.from_bytes(ramp.tobytes(), sys.byteorder), int.from_bytes(ones.tobytes(), sys.byteorder)


def madvise(address: int, nbytes: int, advice: int) -> None:
    """``madvise(2)``; EINVAL means that this kernel does not know the advice."""
    _checked(_libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice)), "madvise")


def perf_event_open(kind: int, config: int, config1: int, cpu: int) -> int:
    """A counter of all that happens on ``cpu``; each read of its fd gives three native 64-bit words.

    They are the count, the ns since it was opened and the ns of these in which it counted.
    """
    times = PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING
    attr = struct.pack("=2I5Q2IQ", kind, PERF_ATTR_SIZE_VER0, config, 0, 0, times, 0, 0, 0, config1)
    return _call("perf_event_open", ctypes.c_char_p(attr), -1, cpu, -1, PERF_FLAG_FD_CLOEXEC)


def die_with_parent(signal_number: int) -> None:
    """``PR_SET_PDEATHSIG``: this process gets the signal when the thread that started it ends."""
    _checked(_libc().prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0), "prctl")


def unshare(flags: int) -> None:
    """``unshare(2)`` for the calling thread and those that it starts later."""
    _checked(_libc().unshare(ctypes.c_int(flags)), "unshare")


def join_mounts(pid: int) -> None:
    """Enter the mount namespace and root of a process; the calling thread gives up what it shares with its siblings."""
    here, root = os.getcwd(), os.open(f"/proc/{pid}/root", os.O_PATH)  # setns leaves a chroot
    try:
        unshare(CLONE_FS)
        with open(f"/proc/{pid}/ns/mnt", "rb") as namespace:
            _checked(_libc().setns(ctypes.c_int(namespace.fileno()), ctypes.c_int(CLONE_NEWNS)), "setns")
        os.fchdir(root)
        os.chroot(".")
        os.chdir(here)
    finally:
        os.close(root)


def mount(kind: str, point: str, flags: int, options: str = "") -> None:
    """``mount(2)``; ``kind`` "" changes the flags of what is there."""
    source = kind.encode() or None
    words = source, point.encode(), source, ctypes.c_ulong(flags), options.encode() or None
    _checked(_libc().mount(*words), f"mount {point}")


def address_of(buffer: Any) -> int:
    """First byte's address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def refused(error: OSError, step: str) -> PlacementError | NotMeasurable:
    """What a person reads when the kernel refused a placement call, or a sandbox, which makes it an absence (K1)."""
    if error.errno not in (errno.EPERM, errno.EACCES):
        name = errno.errorcode.get(error.errno or 0, "unknown").lower()
        return PlacementError(str(error), code=f"kernel-{name}", where=step)
    return NotMeasurable(
        str(error), code="blocked-by-sandbox", where=step,
        expected="CAP_SYS_NICE or a seccomp profile that allows mbind, set_mempolicy and move_pages",
        way_out="run the container with --cap-add SYS_NICE (CAP_SYS_NICE / seccomp), or relax its seccomp profile",
    )  # fmt: skip

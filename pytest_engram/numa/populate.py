"""Touch every page of a mapping in chunks, by several threads, with an error instead of SIGBUS where memory ends."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from pytest_engram.errors import PlacementError
from pytest_engram.numa import _syscalls
from pytest_engram.numa.backing import Backing

CHUNK_BYTES = 64 << 20
_MAX_THREADS = 16


def populate(backing: Backing, tick: Callable[[int, int], None], *, write: bool, threads: int | None = None) -> str:
    """Make every page resident in this process; ``write`` allocates, otherwise the pages are only mapped.

    ``tick(done, total)`` is called in this thread after every chunk; it may raise, which ends the work.
    Returns how it was done.  Raises ``PlacementError`` (code ``cannot-populate``) where the memory ends.
    """
    workers, done = threads or min(len(os.sched_getaffinity(0)), _MAX_THREADS), 0
    way, act = _choose(backing, write=write)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="engram-populate")
    try:
        for nbytes in pool.map(partial(_chunk, backing, act), range(0, backing.nbytes, CHUNK_BYTES)):
            done += nbytes
            tick(done, backing.nbytes)
    finally:
        pool.shutdown(cancel_futures=True)
    detail = f"{way} by {workers} threads"
    return f"{detail}, MADV_COLLAPSE {_collapse(backing)}" if backing.wants_huge and write else detail


def _choose(backing: Backing, *, write: bool) -> tuple[str, Callable[[int, int], object]]:
    """``madvise`` where the kernel knows the advice (5.14), else a touch; asked with an empty range."""
    advice = _syscalls.MADV_POPULATE_WRITE if write else _syscalls.MADV_POPULATE_READ
    kind = "write" if write else "read"

    def advise(offset: int, nbytes: int) -> None:
        _syscalls.madvise(backing.address + offset, nbytes, advice)

    def touch(offset: int, nbytes: int) -> None:
        view = np.frombuffer(backing.mapped, dtype=np.uint8)[offset : offset + nbytes : backing.page_bytes]
        if write:
            backing.reserve(offset, nbytes)
            view |= 0  # writes without changing a byte
        else:
            view.max()

    try:
        advise(0, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _syscalls.refused(error, "populate") from error
        return f"touch_{kind}", touch
    return f"populate_{kind}", advise


def _chunk(backing: Backing, act: Callable[[int, int], object], offset: int) -> int:
    nbytes = min(CHUNK_BYTES, backing.nbytes - offset)
    try:
        act(offset, nbytes)
    except OSError as error:
        raise PlacementError(
            f"{error}, {offset} of {backing.nbytes} bytes into the table", code="cannot-populate", where="populate",
            expected="room for every page: /dev/shm, the page pool and the memory of the chosen nodes",
            way_out="use fewer rows, another backing or another node",
        ) from error  # fmt: skip
    return nbytes


def _collapse(backing: Backing) -> str:
    """Ask for the huge pages that the fault path did not give; results never depend on it."""
    for offset in range(0, backing.nbytes, CHUNK_BYTES):
        nbytes = min(CHUNK_BYTES, backing.nbytes - offset)
        for delay in (0.01, 0.02, 0.0):
            if (said := _refusal(backing.address + offset, nbytes)) != "EAGAIN":
                break
            time.sleep(delay)
        if said:
            return said
    return "done"


def _refusal(address: int, nbytes: int) -> str:
    try:
        _syscalls.madvise(address, nbytes, _syscalls.MADV_COLLAPSE)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "failed")
    return ""

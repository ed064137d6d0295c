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

CHUNK_BYTES = 8 << 20  # per call; four huge pages, so that all threads end together
_COLLAPSE_BYTES = 1 << 30  # each call drains every CPU's page lists: few of them
Act = Callable[[int, int], object]  # (offset, bytes)


def populate(backing: Backing, tick: Callable[[int, int], None], *, write: bool, threads: int | None = None) -> str:
    """Make every page resident in this process; ``write`` allocates, otherwise the pages are only mapped.

    ``tick(done, total)`` is called in this thread after every chunk; it may raise, which ends the work.
    Returns how it was done.  Raises ``PlacementError`` (code ``cannot-populate``) where the memory ends.
    """
    name, act = _choose(backing, write=write)
    # More than eight make one object's new small pages slower (reports/h200).
    threads, done = threads or min(len(os.sched_getaffinity(0)), 16 if backing.huge or not write else 8), 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="engram-populate")
    try:  # whichever thread is free takes the next chunk
        for nbytes in pool.map(partial(_guarded, act, backing), range(0, backing.nbytes, CHUNK_BYTES)):
            done += nbytes
            tick(done, backing.nbytes)
    finally:
        pool.shutdown(cancel_futures=True)
    detail = f"{name} by {threads} threads"
    return f"{detail}, MADV_COLLAPSE {_collapse(backing)}" if backing.wants_huge and write else detail


def _choose(backing: Backing, *, write: bool) -> tuple[str, Act]:
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


def _guarded(act: Act, backing: Backing, offset: int) -> int:
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


def _collapse(backing: Backing, tries: int = 3) -> str:
    """Ask for the huge pages that the fault path did not give; results never depend on it."""
    try:
        for offset in range(0, backing.nbytes, _COLLAPSE_BYTES):
            nbytes = min(_COLLAPSE_BYTES, backing.nbytes - offset)
            _syscalls.madvise(backing.address + offset, nbytes, _syscalls.MADV_COLLAPSE)
    except OSError as error:
        if error.errno != errno.EAGAIN or tries == 1:
            return errno.errorcode.get(error.errno or 0, "failed")
        time.sleep(0.01)
        return _collapse(backing, tries - 1)
    return "done"

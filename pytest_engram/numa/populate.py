"""Touch every page of a mapping in chunks, by several threads, with an error instead of SIGBUS where memory ends."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from pytest_engram.errors import PlacementError
from pytest_engram.numa import _syscalls
from pytest_engram.numa.backing import Backing

CHUNK_BYTES = 64 << 20
_MAX_THREADS = 16
_HEARTBEAT_S = 0.5
_COLLAPSE_TRIES = 3


def populate(backing: Backing, tick: Callable[[int, int], None], *, write: bool, threads: int | None = None) -> str:
    """Make every page resident in this process; ``write`` allocates, otherwise the pages are only mapped.

    ``tick(done, total)`` is called in this thread after every chunk, and while a chunk is slow; it may raise.
    Returns how it was done.  Raises ``PlacementError`` (code ``cannot-populate``) where the memory ends.
    """
    workers = threads or min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    way = _choose(backing, write=write)
    offsets = iter(range(0, backing.nbytes, CHUNK_BYTES))
    done = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="engram-populate") as pool:
        running: set[Future[int]] = set()
        while True:
            for offset in offsets:
                running.add(pool.submit(_chunk, backing, way, offset))
                if len(running) == workers:
                    break
            if not running:
                break
            finished, running = wait(running, timeout=_HEARTBEAT_S, return_when=FIRST_COMPLETED)
            done += sum(future.result() for future in finished)
            tick(done, backing.nbytes)
    detail = f"{way.__name__.strip('_')} by {workers} threads"
    return f"{detail}, {_collapse(backing)}" if backing.wants_huge and write else detail


Way = Callable[[Backing, int, int], None]


def _choose(backing: Backing, *, write: bool) -> Way:
    """``madvise`` where the kernel knows the advice (5.14), else a touch; asked with an empty range."""
    advice = _syscalls.MADV_POPULATE_WRITE if write else _syscalls.MADV_POPULATE_READ
    try:
        _syscalls.madvise(backing.address, 0, advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _syscalls.refused(error, "populate") from error
        return _touch_write if write else _touch_read
    return _populate_write if write else _populate_read


def _chunk(backing: Backing, way: Way, offset: int) -> int:
    nbytes = min(CHUNK_BYTES, backing.nbytes - offset)
    try:
        way(backing, offset, nbytes)
    except OSError as error:
        raise PlacementError(
            f"{error}, {offset} of {backing.nbytes} bytes into the table",
            code="cannot-populate",
            where="populate",
            expected="room for every page: /dev/shm, the page pool and the memory of the chosen nodes",
            way_out="use fewer rows, another backing or another node",
        ) from error
    return nbytes


def _populate_write(backing: Backing, offset: int, nbytes: int) -> None:
    _syscalls.madvise(backing.address + offset, nbytes, _syscalls.MADV_POPULATE_WRITE)


def _populate_read(backing: Backing, offset: int, nbytes: int) -> None:
    _syscalls.madvise(backing.address + offset, nbytes, _syscalls.MADV_POPULATE_READ)


def _touch_write(backing: Backing, offset: int, nbytes: int) -> None:
    backing.reserve(offset, nbytes)
    view = np.frombuffer(backing.mapped, dtype=np.uint8)[offset : offset + nbytes : backing.page_bytes]
    view |= 0  # writes without changing a byte


def _touch_read(backing: Backing, offset: int, nbytes: int) -> None:
    np.frombuffer(backing.mapped, dtype=np.uint8)[offset : offset + nbytes : backing.page_bytes].max()


def _collapse(backing: Backing) -> str:
    """Ask for the huge pages that the fault path did not give; results never depend on it."""
    said = ""
    for attempt in range(_COLLAPSE_TRIES):
        said = _collapse_once(backing)
        if said != "EAGAIN":
            break
        time.sleep(0.01 * 2**attempt)
    return f"MADV_COLLAPSE {said}"


def _collapse_once(backing: Backing) -> str:
    try:
        for offset in range(0, backing.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, backing.nbytes - offset)
            _syscalls.madvise(backing.address + offset, nbytes, _syscalls.MADV_COLLAPSE)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "failed")
    return "done"

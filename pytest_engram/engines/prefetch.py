"""The serial prefetch stream of the CPU engine: a FIFO that one worker thread, bound to its own CPUs, works off."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any

from pytest_engram.backends.protocol import Launch
from pytest_engram.errors import PlacementError


class Ticket:
    """One lookup: what to run, where to mark its times, on which side stream (None: inline), and what became of it."""

    __slots__ = ("_finished", "error", "lane", "launch", "mark", "run")

    def __init__(
        self, run: Callable[[], Launch], mark: Callable[[str], Any] = lambda _name: None, lane: int | None = 0
    ) -> None:
        self.run, self.mark, self.lane, self._finished = run, mark, lane, threading.Event()
        self.launch: Launch | None = None
        self.error: Exception | None = None

    def work(self) -> None:
        """Run the lookup; whatever happens, its consumer is released."""
        self.mark("start")
        try:
            self.launch = self.run()
        except Exception as error:  # noqa: BLE001 - it belongs to the consumer, which raises it
            self.error = error
        self.mark("done")
        self._finished.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of this lookup only; False when the deadline came first."""
        return self._finished.wait(seconds)


class PrefetchQueue:
    """``submit`` never blocks; tickets run one after the other in the order of their submission."""

    def __init__(self, cpus: Iterable[int]) -> None:
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._last: Ticket | None = None
        self._thread = threading.Thread(target=self._work, name="engram-prefetch", daemon=True)
        self._thread.start()
        try:
            bind_threads([self._thread.native_id or 0], cpus)
        except PlacementError:
            self.close(1.0)
            raise

    def submit(self, ticket: Ticket) -> None:
        """Queue a lookup behind those submitted before it."""
        ticket.mark("submit")
        self._last = ticket
        self._tickets.put(ticket)

    def drain(self, seconds: float) -> bool:
        """Wait for all that was submitted so far; False when the deadline came first."""
        return self._last is None or self._last.wait(seconds)

    def close(self, seconds: float) -> bool:
        """End the worker after what it still has to do; False when it did not end in time."""
        self._tickets.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            ticket.work()


def bind_threads(threads: Iterable[int], cpus: Iterable[int]) -> dict[int, set[int]]:
    """Bind kernel threads to CPUs and return what each was bound to; ``PlacementError`` where the kernel refuses."""
    wanted, before = sorted(set(cpus)), {}
    for thread in threads:
        with suppress(ProcessLookupError):  # it ended meanwhile
            before[thread] = os.sched_getaffinity(thread)
            try:
                os.sched_setaffinity(thread, wanted)
            except ProcessLookupError:
                raise
            except OSError as error:
                raise PlacementError(
                    f"sched_setaffinity: {error}", code="cpus-refused", who="cpu engine", where=f"CPUs {wanted}",
                    way_out="give the engine CPUs of Cpus_allowed_list",
                ) from error  # fmt: skip
    return before


def foreign_threads() -> tuple[int, ...]:
    """Kernel ids of the threads that Python did not start: BLAS keeps a pool of them."""
    known = {thread.native_id for thread in threading.enumerate()}
    return tuple(thread for thread in map(int, os.listdir("/proc/self/task")) if thread not in known)


def cpu_clocks(cpus: Iterable[int]) -> dict[str, float]:
    """Mean MHz of the CPUs where /proc/cpuinfo tells, and the 1-minute load; what is not readable is absent."""
    wanted, speeds, cpu = set(cpus), [], -1
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "processor":
                cpu = int(value)
            elif name.strip() == "cpu MHz" and cpu in wanted:
                speeds.append(float(value))
    clocks = {"cpu_mhz": sum(speeds) / len(speeds)} if speeds else {}
    return {**clocks, "load_1min": os.getloadavg()[0]}


def clock_resolution() -> int:
    """Smallest positive step of ``perf_counter_ns`` that is seen here, in ns: reading it costs that much too."""
    reads = [time.perf_counter_ns() for _ in range(2000)]
    return min((after - before for before, after in pairwise(reads) if after > before), default=1)

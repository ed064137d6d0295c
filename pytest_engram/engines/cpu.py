"""The CPU engine: numpy matmuls on the main thread, one bound worker thread that gathers rows.

numpy releases the GIL in matmul and take, so a lookup that is submitted early runs beside the main compute.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from pytest_engram.engines.chain import Chain
from pytest_engram.engines.prefetch import (
    PrefetchQueue,
    Ticket,
    bind_threads,
    clock_resolution,
    cpu_clocks,
    foreign_threads,
)
from pytest_engram.engines.protocol import EngineSetup
from pytest_engram.engines.step import SuiteEngine
from pytest_engram.errors import PlacementError
from pytest_engram.hashing import HashBatch
from pytest_engram.numa import _syscalls

_SWITCH_INTERVAL_S = 5e-4  # the default 5 ms would let a thread that runs Python delay the other's wake-up by a step


class EmulatedCudart:
    """Registration where no GPU reads: its caller faults the pages, as ``cudaHostRegister`` was measured to do."""

    def register(self, address: int, nbytes: int) -> int:
        """Fault untouched pages with write intent, under this task's policy and on its CPU."""
        lead = address % mmap.PAGESIZE  # CUDA takes any address, madvise the start of a page and any length
        _syscalls.madvise(address - lead, nbytes + lead, _syscalls.MADV_POPULATE_WRITE)
        return 0

    def unregister(self, address: int) -> int:  # noqa: ARG002 - CUDA's signature
        """Nothing was pinned."""
        return 0

    def pinned(self, byte: Any) -> bool:  # noqa: ARG002
        """CPUs read whatever is mapped."""
        return True

    def synchronize(self) -> None:
        """No kernel runs."""


class CpuEngine(SuiteEngine):
    """One rank's suite loop on CPUs: the last CPU of ``setup.cpus`` gathers, the others compute.

    BLAS reads its thread count once, when numpy is imported: start the process with :meth:`threads_env`.
    """

    name = "cpu"
    hold = False  # a CPU step has nothing to enqueue
    tolerance = 1e-4  # float32 sums of another order: 1e-6

    def __init__(self, setup: EngineSetup, *, deadline_s: float = 60.0) -> None:
        super().__init__(setup, setup.tables)
        self._deadline_s, self._stuck = deadline_s, False
        main, worker = self.split_cpus(setup.cpus)
        limited = self.threads_env(setup.cpus).items() <= os.environ.items()
        notes = {
            "the lookup worker shares its only CPU with the main compute": main == worker,
            "BLAS was not limited by threads_env before numpy's import: rows are right, timings are not": not limited,
        }
        self.notes = tuple(note for note, applies in notes.items() if applies)
        layout = setup.layout
        shape = len(setup.tables), setup.max_tokens, self._shards[0].local_heads, layout.head_dim
        self._allocate(np.zeros(shape, np.uint16), partial(np.zeros, dtype=np.uint16))
        self._chain = Chain(layout, setup.workload, setup.seed)
        self.resolution_ns = clock_resolution()
        self._fifo = PrefetchQueue(worker)  # before the rest is bound: a CPU that is refused leaves nothing behind
        self._fifos, self._worker = [self._fifo], worker
        try:
            # Two BLAS threads that spin on one CPU are slower than none: without its limit the pool stays unbound.
            self._affinity = bind_threads([threading.get_native_id(), *(foreign_threads() if limited else ())], main)
        except PlacementError:
            self._fifo.close(1.0)
            raise
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)

    @staticmethod
    def unavailable() -> str | None:
        """Why this engine cannot run here; numpy is all it needs."""
        return None

    @staticmethod
    def registrar(rank: int) -> None:
        """What pins a table for this engine: nothing, CPUs read mapped pages."""

    @staticmethod
    def cudart(rank: int) -> EmulatedCudart:  # noqa: ARG004 - the protocol's argument
        """What an engine's own storage registers with."""
        return EmulatedCudart()

    @staticmethod
    def split_cpus(cpus: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(main compute, lookup worker); a single CPU serves both."""
        return (cpus[:-1], cpus[-1:]) if len(cpus) > 1 else (cpus, cpus)

    @classmethod
    def threads_env(cls, cpus: tuple[int, ...]) -> dict[str, str]:
        """Environment that must stand before numpy is imported, so that BLAS leaves the worker's CPU alone."""
        count = str(len(cls.split_cpus(cpus)[0]))
        return dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), count)

    def drift(self) -> dict[str, float | str]:
        """MHz of the engine's CPUs where readable, and the machine's load."""
        return {**cpu_clocks(self._setup.cpus)}

    def close(self) -> None:
        """Join the worker and give every thread its old CPUs back; a second call does nothing."""
        if not self._shards:
            return
        self._shards = ()
        alive = [fifo for fifo in self._fifos if not fifo.close(self._deadline_s)]
        sys.setswitchinterval(self._switch_interval)
        for thread, cpus in self._affinity.items():
            bind_threads([thread], cpus)
        if alive:
            raise self._failed("a lookup worker did not end", "lookup-failed")

    def _stage(self, batch: HashBatch) -> tuple[Any, Any]:
        if self._stuck:
            raise self._failed("an earlier lookup never ended", "lookup-failed")
        return batch.token_ids, ~batch.dead

    def _enqueue(self) -> AbstractContextManager[None]:
        return np.errstate(all="ignore")  # a wrong row may overflow: the oracle's verdict, not a warning's

    def _submit(self, ticket: Ticket) -> None:
        if ticket.lane is None:
            ticket.mark("submit")
            ticket.work()
            return
        if ticket.lane == len(self._fifos):
            self._fifos.append(PrefetchQueue(self._worker))
        self._fifos[ticket.lane].submit(ticket)

    def _await(self, layer: int, ticket: Ticket) -> None:
        """After a failure nothing need be drained: the queue is serial, what is left runs before the next step's."""
        ended = ticket.wait(self._deadline_s)
        if not ended or ticket.launch is None:
            self._stuck = not ended
            seen = str(ticket.error or "the backend returned no Launch") if ended else f"no end in {self._deadline_s} s"
            raise self._failed(seen, "lookup-failed", f"lookup of layer {layer}") from ticket.error

    def _drain(self) -> None:
        self._stuck = not all(fifo.drain(self._deadline_s) for fifo in self._fifos)
        if self._stuck:
            raise self._failed(f"no end in {self._deadline_s} s", "lookup-failed", "prefetch stream")

    def _finish(self, array: Any) -> Any:
        return array.copy()

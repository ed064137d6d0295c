"""The CPU engine: numpy matmuls on the main thread, one bound worker thread that gathers rows.

numpy releases the GIL in matmul and take, so a lookup that is submitted early runs beside the main compute.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from typing import Any

import numpy as np

from pytest_engram.engines.dense import Dense
from pytest_engram.engines.prefetch import (
    PrefetchQueue,
    Ticket,
    bind_threads,
    clock_resolution,
    cpu_clocks,
    foreign_threads,
)
from pytest_engram.engines.protocol import EngineSetup, StepResult, StepSettings
from pytest_engram.engines.tables import consumers, full_shards
from pytest_engram.errors import EngramError, UsageError
from pytest_engram.hashing import HashBatch
from pytest_engram.model import Span, Timeline

_SWITCH_INTERVAL_S = 5e-4  # the default 5 ms would let a thread that runs Python delay the other's wake-up by a step

_IMPOSSIBLE = 0x7FFF  # a NaN that no lookup writes: a row that was not staged cannot pass for one that was


class CpuEngine:
    """One rank's suite loop on CPUs: the last CPU of ``setup.cpus`` gathers, the others compute.

    BLAS reads its thread count once, when numpy is imported: start the process with :meth:`threads_env`.
    """

    name = "cpu"
    hold = False  # a CPU step has nothing to enqueue

    def __init__(self, setup: EngineSetup, *, deadline_s: float = 60.0) -> None:
        self._setup, self._deadline_s, self._stuck = setup, deadline_s, False
        layout, workload = setup.layout, setup.workload
        self._consumers = consumers(setup)
        main, worker = self.split_cpus(setup.cpus)
        limited = self.threads_env(setup.cpus).items() <= os.environ.items()
        self.notes = _notes(shared=main == worker, limited=limited)
        self._hasher = setup.backend.hasher(layout, setup.token_map, slot_cache=False)
        self._shards = full_shards(setup.tables, layout)
        shape = (len(setup.tables), setup.max_tokens, layout.columns, layout.head_dim)
        self._staging = np.zeros(shape, np.uint16)  # one buffer per layer, never reallocated
        self._dense = Dense(layout, workload, setup.max_tokens, setup.seed)
        self.resolution_ns = clock_resolution()
        self._switch_interval = sys.getswitchinterval()
        # Two BLAS threads that spin on one CPU are slower than none: without its limit the pool stays unbound.
        self._affinity = bind_threads([threading.get_native_id(), *(foreign_threads() if limited else ())], main)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._queue: PrefetchQueue | None = PrefetchQueue(worker)

    @staticmethod
    def unavailable() -> str | None:
        """Why this engine cannot run here; numpy is all it needs."""
        return None

    @staticmethod
    def registrar(rank: int) -> None:
        """What pins a table for this engine: nothing, CPUs read mapped pages."""

    @staticmethod
    def split_cpus(cpus: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(main compute, lookup worker); a single CPU serves both."""
        return (cpus[:-1], cpus[-1:]) if len(cpus) > 1 else (cpus, cpus)

    @classmethod
    def threads_env(cls, cpus: tuple[int, ...]) -> dict[str, str]:
        """Environment that must stand before numpy is imported, so that BLAS leaves the worker's CPU alone."""
        count = str(len(cls.split_cpus(cpus)[0]))
        return {"OPENBLAS_NUM_THREADS": count, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}

    def step(self, batch: HashBatch, settings: StepSettings, *, marks: bool, index: int = 0) -> StepResult:
        """See :class:`~pytest_engram.engines.protocol.Engine`.

        Raises:
            EngramError: ``lookup-failed`` when the backend's lookup raised or did not end by the deadline.
            UsageError: the batch is larger than ``max_tokens`` or the submission is unknown.
        """
        trace = _Trace(marks=marks)
        begin = time.perf_counter_ns()
        _, tickets = self._prepare(batch, settings)
        hash_ready = trace.now()
        self._submit_early(tickets, settings)
        with np.errstate(all="ignore"):  # a wrong row may overflow: the oracle's verdict, not a warning's
            output = self._forward(batch, tickets, settings, trace)
        end = time.perf_counter_ns()
        timeline = None
        if marks:
            timeline = Timeline(
                rank=self._setup.rank, step=index, begin=begin, end=end, tokens=len(output),
                lookups=tuple(
                    ticket.mark(layer, hash_ready, wait)
                    for (layer, ticket), wait in zip(tickets.items(), trace.waits, strict=True)
                ),
                spans=tuple(trace.spans),
            )  # fmt: skip
        return StepResult(end - begin, end - begin - trace.waited, output.copy(), timeline)

    def rows(self, batch: HashBatch, settings: StepSettings) -> tuple[Any, Any]:
        """See :class:`~pytest_engram.engines.protocol.Engine`; the same queue and the same staging as a step."""
        ids, tickets = self._prepare(batch, settings)
        self._staging[:, : len(ids)] = _IMPOSSIBLE
        self._submit_early(tickets, settings)
        for layer, ticket in tickets.items():
            self._consume(layer, ticket, settings)
        return ids, np.stack([self._staging[i, : len(ids)] for i in range(len(tickets))], axis=1)

    def drift(self) -> dict[str, float]:
        """MHz of the engine's CPUs where readable, and the machine's load."""
        return cpu_clocks(self._setup.cpus)

    def close(self) -> None:
        """Join the worker and give every thread its old CPUs back; a second call does nothing."""
        if self._queue is None:
            return
        ended, self._queue = self._queue.close(self._deadline_s), None
        sys.setswitchinterval(self._switch_interval)
        for thread, cpus in self._affinity.items():
            bind_threads([thread], cpus)
        if not ended:
            raise EngramError("the lookup worker did not end", code="lookup-failed", who=f"rank {self._setup.rank}")

    def _prepare(self, batch: HashBatch, settings: StepSettings) -> tuple[Any, dict[int, Ticket]]:
        """Hash the batch and make one ticket per Engram layer, in the order of the layers."""
        self._check(len(batch.token_ids), settings)
        ids = self._hasher(batch)
        tickets = {
            layer: Ticket(
                partial(
                    self._setup.backend.lookup,
                    self._shards[i], ids[:, i], self._staging[i, : len(ids)], cap=settings.cap,
                )
            )
            for layer, i in self._consumers.items()
        }  # fmt: skip
        return ids, tickets

    def _submit_early(self, tickets: dict[int, Ticket], settings: StepSettings) -> None:
        if settings.submission == "early":
            for ticket in tickets.values():
                self._fifo.submit(ticket)

    def _forward(self, batch: HashBatch, tickets: dict[int, Ticket], settings: StepSettings, trace: _Trace) -> Any:
        hidden = self._dense.embed(batch.token_ids)
        for layer in range(self._setup.workload.layers):
            if layer in tickets:
                wait = self._consume(layer, tickets[layer], settings)
                trace.add_wait(*wait)
                hidden = self._engram(hidden, layer, batch, trace)
            start = trace.now()
            hidden = self._dense.layer(hidden, layer)
            trace.add_span("compute", layer, start)
        return hidden

    def _engram(self, hidden: Any, layer: int, batch: HashBatch, trace: _Trace) -> Any:
        start = trace.now()
        key, value = self._dense.project(self._staging[self._consumers[layer], : len(hidden)])
        start = trace.add_span("projection", layer, start)
        dense = self._dense
        hidden[...] = self._setup.backend.gate(hidden, key, value, dense.query_norm, dense.key_norm, ~batch.dead)
        trace.add_span("gate", layer, start)
        return hidden

    def _consume(self, layer: int, ticket: Ticket, settings: StepSettings) -> tuple[int, int]:
        """Wait for this layer's own lookup; (before, after) in ns.

        After a failure nothing need be drained: the queue is serial, so what is left runs before the next step's.
        """
        if settings.submission != "early":
            self._fifo.submit(ticket)
        before = time.perf_counter_ns()
        ended = ticket.wait(self._deadline_s)
        after = time.perf_counter_ns()
        if not ended or ticket.launch is None:
            self._stuck = not ended
            seen = str(ticket.error or "the backend returned no Launch") if ended else f"no end in {self._deadline_s} s"
            raise EngramError(
                seen, code="lookup-failed", who=f"rank {self._setup.rank}", where=f"lookup of layer {layer}",
                expected="rows in the staging buffer",
            ) from ticket.error  # fmt: skip
        return before, after

    def _check(self, tokens: int, settings: StepSettings) -> None:
        if self._stuck:
            raise EngramError("an earlier lookup never ended", code="lookup-failed", who=f"rank {self._setup.rank}")
        if tokens > self._setup.max_tokens:
            raise UsageError(
                f"{tokens} tokens in a batch", code="too-many-tokens", who="cpu engine",
                expected=f"at most {self._setup.max_tokens}, the size of the staging buffer",
            )  # fmt: skip
        if settings.submission not in {"early", "at_consumption"}:
            raise UsageError(
                f"submission {settings.submission!r}", code="bad-submission", who="cpu engine",
                expected="'early' or 'at_consumption'",
            )  # fmt: skip

    @property
    def _fifo(self) -> PrefetchQueue:
        if self._queue is None:
            raise EngramError("the engine is closed", code="lookup-failed", who=f"rank {self._setup.rank}")
        return self._queue


class _Trace:
    """What a step records besides its own clock; unmarked, only the sum of the waits."""

    def __init__(self, *, marks: bool) -> None:
        self._marks = marks
        self.waited = 0
        self.waits: list[tuple[int, int]] = []
        self.spans: list[Span] = []

    def now(self) -> int:
        return time.perf_counter_ns() if self._marks else 0

    def add_wait(self, before: int, after: int) -> None:
        self.waited += after - before
        self.waits.append((before, after))

    def add_span(self, name: str, layer: int, start: int) -> int:
        end = self.now()
        if self._marks:
            self.spans.append(Span(name=name, layer=layer, start=start, end=end))
        return end


def _notes(*, shared: bool, limited: bool) -> tuple[str, ...]:
    """What a reader of this engine's timings must know."""
    notes = {
        "the lookup worker shares its only CPU with the main compute": shared,
        "BLAS was not limited by threads_env before numpy's import: rows are right, timings are not": not limited,
    }
    return tuple(note for note, applies in notes.items() if applies)

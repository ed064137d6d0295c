"""Prefetch engines with one fault each: name -> (contract lines that must catch it, backend)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import Launch
from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.backends.streams import StreamPrefetch
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.engines.prefetch import Ticket
from pytest_engram.engines.protocol import StepSettings


def _engine(**methods: Any) -> ReferenceBackend:
    """The CPU engine with some methods replaced."""
    backend = ReferenceBackend()
    backend.prefetch = type("Faulty", (CpuEngine,), methods)  # type: ignore[method-assign]
    return backend


def _submitted_before_hashing(self: Any, batch: Any, settings: StepSettings) -> Any:
    """Lookups are submitted on the ids buffer of the step before, which hashing then overwrites."""
    layout, count, hasher = self._setup.layout, len(batch.token_ids), self._hasher
    if not hasattr(self, "_buffer"):
        self._buffer = np.zeros((self._setup.max_tokens, len(layout.layer_ids), layout.columns), np.int32)
    ids = self._buffer[:count]
    self._hasher = lambda _: ids
    try:
        _, tickets = CpuEngine._prepare(self, batch, settings)
    finally:
        self._hasher = hasher
    CpuEngine._submit_early(self, tickets, settings)
    ids[:] = hasher(batch)
    return ids, tickets


def _ids_reused() -> ReferenceBackend:
    """The memory of the ids is given to somebody else as soon as the lookups are submitted."""

    def prepare(self: Any, batch: Any, settings: StepSettings) -> Any:
        self._ids, tickets = CpuEngine._prepare(self, batch, settings)
        return self._ids.copy(), tickets

    def submit(self: Any, tickets: Any, settings: StepSettings) -> None:
        CpuEngine._submit_early(self, tickets, settings)
        self._ids[:] = 0

    return _engine(_prepare=prepare, _submit_early=submit)


def _consumer_waits_for(layers: Callable[[int, list[int]], list[int]]) -> ReferenceBackend:
    """The consumer of an early lookup waits for ``layers(own, all)``."""

    def prepare(self: Any, batch: Any, settings: StepSettings) -> Any:
        ids, self._made = CpuEngine._prepare(self, batch, settings)
        self._early = settings.submission == "early"
        return ids, self._made

    def wait(self: Any, layer: int, _ticket: Any) -> None:
        for other in layers(layer, list(self._made)) if self._early else [layer]:
            self._made[other].wait(10)

    return _engine(_prepare=prepare, _await=wait)


def _prepare_after(change: Callable[[Any], None]) -> ReferenceBackend:
    """``change(engine)`` before every step."""

    def prepare(self: Any, batch: Any, settings: StepSettings) -> Any:
        change(self)
        return CpuEngine._prepare(self, batch, settings)

    return _engine(_prepare=prepare)


def _submit_by(submit: Callable[[Any, Any], Any]) -> ReferenceBackend:
    """``submit(engine, tickets in layer order)`` in the place of the serial queue, for early submission."""

    def submit_early(self: Any, tickets: Any, settings: StepSettings) -> None:
        if settings.submission == "early":
            submit(self, list(tickets.values()))

    return _engine(_submit_early=submit_early)


def _one_thread_each(_engine: Any, tickets: Any) -> None:
    for ticket in tickets:
        threading.Thread(target=ticket.work).start()


def _nothing() -> Launch:
    return Launch(0, 0, 0)


def _skip_equal_counts(self: Any, batch: Any, settings: StepSettings) -> Any:
    """A batch as long as the last one is taken for staged."""
    ids, tickets = CpuEngine._prepare(self, batch, settings)
    if len(ids) == getattr(self, "_last", None):
        tickets = {layer: Ticket(_nothing) for layer in tickets}
    self._last = len(ids)
    return ids, tickets


def _late_forgotten(self: Any, layer: int, ticket: Any, settings: StepSettings) -> None:
    """Only early lookups run; the consumer of any other takes what lies there."""
    CpuEngine._consume(self, layer, ticket if settings.submission == "early" else Ticket(_nothing), settings)


def _new_staging(self: Any) -> None:
    self._old = getattr(self, "_old", [])
    self._old.append(self.staging)  # so that the allocator cannot give the same memory again
    self.staging = np.zeros_like(self.staging)


def _copied_shards(self: Any) -> None:
    self._shards = tuple(replace(shard, weight=shard.weight.copy()) for shard in self._shards)


def _rebuilt_views(self: Any) -> None:
    self._shards = tuple(replace(shard) for shard in self._shards)


def _truncating_step(self: Any, batch: Any, settings: StepSettings, *, marks: bool, index: int = 0) -> Any:
    """A batch that does not fit is cut."""
    most = self._setup.max_tokens
    if len(batch.token_ids) > most:
        batch = type(batch).sequence(batch.token_ids[:most])
    return CpuEngine.step(self, batch, settings, marks=marks, index=index)


def _streams(**methods: Any) -> ReferenceBackend:
    """The stream-ordered queue with some methods replaced, on a virtual GPU."""
    backend, kind = ReferenceBackend(), type("Faulty", (StreamPrefetch,), methods)
    backend.streams = lambda layout, tables, most, around, *, engine: kind(  # type: ignore[method-assign]
        backend.lookup, layout, tables, most, around, engine
    )
    return backend


def _uncaptured(edge: str) -> ReferenceBackend:
    """The stream-ordered queue leaves one kind of edge out of a graph that is captured."""

    def init(self: Any, *parts: Any) -> None:
        StreamPrefetch.__init__(self, *parts)
        queue, honest = self._queue, self.cuda.graph

        @contextmanager
        def graph(captured: Any) -> Iterator[None]:
            setattr(queue, edge, lambda _: None)
            with honest(captured):
                yield
            delattr(queue, edge)

        self.cuda.graph = graph

    return _streams(__init__=init)


def _inline_when_large(self: Any, tickets: Any) -> None:
    for ticket in tickets:
        if len(ticket.run.args[1]) > 8:
            ticket.work()
        else:
            self._submit(ticket)


def _copied_ids(self: Any, layer: int, ids: Any) -> None:
    StreamPrefetch.submit(self, layer, ids.clone())


def _host_waits(self: Any, layer: int, tokens: int) -> Any:
    self.cuda.synchronize()
    return StreamPrefetch.take(self, layer, tokens)


FAULTS: dict[str, tuple[str, ReferenceBackend]] = {
    "no producer wait": ("P1", _engine(_prepare=_submitted_before_hashing, _submit_early=lambda *_: None)),
    "ids are reused while the lookup waits": ("P2", _ids_reused()),
    "no consumer wait": ("P3", _consumer_waits_for(lambda own, layers: [])),
    "the consumer waits for the first layer": ("P3", _consumer_waits_for(lambda own, layers: layers[:1])),
    "the consumer waits for the last layer": ("P3", _consumer_waits_for(lambda own, layers: layers[-1:])),
    "the consumer waits for all layers": ("P3", _consumer_waits_for(lambda own, layers: layers)),
    "equal counts are taken for staged": ("P5", _engine(_prepare=_skip_equal_counts)),
    "late lookups are forgotten": ("P5", _engine(_consume=_late_forgotten)),
    "staging is allocated anew": ("P6", _prepare_after(_new_staging)),
    "a batch that does not fit is cut": ("P6", _engine(step=_truncating_step)),
    "lookups on the main stream": ("P7", _submit_by(lambda _, tickets: [ticket.work() for ticket in tickets])),
    "one side stream per layer": ("P7", _submit_by(_one_thread_each)),
    "last in, first out": ("P7", _submit_by(lambda self, tickets: [self._fifo.submit(t) for t in reversed(tickets)])),
    "the host waits instead of the stream": ("P4", _streams(take=_host_waits)),
    "a graph keeps the ids of its capture": ("P5", _streams(submit=_copied_ids)),
    "no producer wait inside a graph": ("P5", _uncaptured("_await_producer")),
    "no consumer wait inside a graph": ("P5", _uncaptured("_await_rows")),
    "a large batch is looked up inline": ("P8", _submit_by(_inline_when_large)),
    "every step copies the table": ("P9", _prepare_after(_copied_shards)),
    "every step makes new views": ("P9", _prepare_after(_rebuilt_views)),
}  # fmt: skip

"""Prefetch engines and shared storages with one fault each: name -> (contract lines that must catch it, backend)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import Launch
from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.backends.streams import StreamPrefetch
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.engines.prefetch import Ticket
from pytest_engram.engines.protocol import StepSettings
from pytest_engram.errors import EngramError, PeerError
from pytest_engram.gpu.registration import register
from pytest_engram.model import PlacementPlan, TablePlan
from pytest_engram.numa.shared import SharedTable
from pytest_engram.numa.table import build_table


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


def _launch(differences: dict[str, str] | None = None, **methods: Any) -> ReferenceBackend:
    """The launcher's decisions replaced."""
    backend = ReferenceBackend()
    backend.differences = backend.differences if differences is None else differences
    vars(backend).update(methods)
    return backend


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


def _storage(change: Callable[[Any], Any] = lambda table: table, **options: Any) -> ReferenceBackend:
    """``change(table)`` after a rank has built its part; options of :func:`_build`."""
    backend = ReferenceBackend()

    def storage(group: Any, nbytes: int, cudart: Any, *, backing: str = "tmpfs") -> Any:
        table = _build(group, nbytes, cudart, backing, **options)
        return change(table) or table

    backend.storage = storage  # type: ignore[method-assign]
    return backend


def _build(
    group: Any, nbytes: int, cudart: Any, backing: str, *, order: str = "placed", pin: Any = register
) -> Any:  # fmt: skip
    tables = (TablePlan(ranks=tuple(range(group.size)), mode="default", nodes=()),)
    plan = PlacementPlan(policy="shared", backing=backing, tables=tables)
    return build_table(
        group, plan, nbytes, register=lambda table: pin(table.buffer, cudart=cudart), order=order, threads=1
    )


def _subclass(**methods: Any) -> Callable[[Any], None]:
    """The table's class gets other methods."""
    return lambda table: setattr(table, "__class__", type("Faulty", (SharedTable,), methods))


def _unchecked(buffer: Any, *, cudart: Any) -> Any:
    cudart.pinned = lambda _byte: True
    return register(buffer, cudart=cudart)


def _never_undone(buffer: Any, *, cudart: Any) -> Any:
    held = register(buffer, cudart=cudart)
    held._gone.detach()
    return SimpleNamespace(close=lambda: None, held=held)


def _own_words(backend: ReferenceBackend) -> ReferenceBackend:
    honest = backend.storage

    def storage(*inputs: Any, **options: Any) -> Any:
        try:
            return honest(*inputs, **options)
        except PeerError as error:
            raise EngramError("sharing failed somewhere", code="failed") from error

    backend.storage = storage  # type: ignore[method-assign]
    return backend


def _private(table: Any) -> None:
    if not table.leads:
        table._buffer = np.array(table.buffer)


def _named(table: Any) -> None:
    path = f"/dev/shm/planted-left-{os.getpid()}"
    with open(path, "wb") as file:
        file.truncate(table.nbytes)
    table.backing.close = partial(_unlink_late, path, table.backing.close)


def _unlink_late(path: str, close: Callable[[], None]) -> None:
    close()
    if os.path.exists(path):
        os.unlink(path)


def _no_barrier(self: Any, fill: Any, _group: Any) -> None:
    if self.leads:
        fill(self.buffer)


def _first_barrier_only(self: Any, fill: Any, group: Any) -> None:
    """Only the first load call ends in a barrier."""
    if self.leads:
        fill(self.buffer)
    if not hasattr(self, "loads"):
        self.loads = 1
        group.barrier(step="load")


def _deaf_to_views(table: Any) -> None:
    table.registration.hold = lambda _view: None


def _twice(table: Any) -> None:
    held = table.registration
    honest = held._unregister

    def unregister() -> int:
        chunks = list(held._chunks)
        code: int = honest()
        return code or sum(held._cudart.unregister(address) for address in chunks)

    held._unregister = unregister


def _replaceable(table: Any) -> None:
    _subclass(buffer=property(SharedTable.buffer.fget, lambda self, new: setattr(self, "_buffer", new)))(table)  # type: ignore[attr-defined]


def _half_loaded_thp(self: Any, fill: Any, group: Any) -> None:
    SharedTable.load(self, fill, group)
    if self.backing.name == "anon-thp":
        self.buffer[-4096:] = 0


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
    "peers hear no cause": ("S1 S3", _own_words(_storage())),
    "pinned is not checked": ("S2", _storage(pin=_unchecked)),
    "a private copy in the peer": ("S2 S6", _storage(_private)),
    "a failure undoes nothing": ("S3", _storage(pin=_never_undone)),
    "a file is left in /dev/shm": ("S4", _storage(_named)),
    "unregistered under a living view": ("S5", _storage(_deaf_to_views)),
    "unregistered twice": ("S5", _storage(_twice)),
    "never unregistered": ("S5", _storage(lambda table: setattr(table.registration, "_end", lambda: None))),
    "load without a barrier": ("S6", _storage(_subclass(load=_no_barrier))),
    "only the first load has a barrier": ("S6", _storage(_subclass(load=_first_barrier_only))),
    "the table's memory can be replaced": ("S7", _storage(_replaceable)),
    "sharing is always accepted": ("S8", _launch(sharing=lambda **_: None)),
    "replicas share over hosts": ("S9", _launch(sharing_group=lambda nodes, replica: len(nodes) // replica)),
    "a fallback without a word": ("S10", _launch(may_share=lambda nbytes, *, shm, replicas: (
        nbytes < 1 << 50 and shm == "/dev/shm" and replicas > 1))),
    "tables are shared whatever there is": ("S10", _launch(may_share=lambda *_, **__: True)),
    "a short cgroup is a refusal": ("S12", _launch(differences={})),
    "registered before it is placed": ("S13", _storage(order="stock")),
    "THP loses the last page": ("S14", _storage(_subclass(load=_half_loaded_thp))),
}  # fmt: skip

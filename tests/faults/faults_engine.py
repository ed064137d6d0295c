"""Prefetch engines and shared storages with one fault each: name -> (contract lines that must catch it, backend)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from pytest_engram.backends.reference import ReferenceBackend
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


def _no_producer_wait(self: Any, batch: Any, settings: StepSettings) -> Any:
    """Lookups are submitted on the ids buffer of the step before, which hashing then overwrites."""
    self._check(len(batch.token_ids), settings)
    layout, count = self._setup.layout, len(batch.token_ids)
    if not hasattr(self, "_ids"):
        self._ids = np.zeros((self._setup.max_tokens, len(layout.layer_ids), layout.columns), np.int32)
    ids, hasher = self._ids[:count], self._hasher
    self._hasher = lambda _: ids
    try:
        prepared = CpuEngine._prepare(self, batch, settings)
    finally:
        self._hasher = hasher
    ids[:] = hasher(batch)
    return prepared


def _ids_reused(self: Any, batch: Any, settings: StepSettings) -> Any:
    """The memory of the ids is given to somebody else as soon as the lookups are submitted."""
    ids, tickets = CpuEngine._prepare(self, batch, settings)
    kept = ids.copy()
    ids[:] = 0
    return kept, tickets


def _consume_by(wait: Callable[[int, Any, dict[int, Any]], Any]) -> Callable[..., tuple[int, int]]:
    """The consumer waits for what ``wait(layer, ticket, tickets)`` says."""

    def consume(self: Any, layer: int, ticket: Any, tickets: Any, settings: StepSettings) -> tuple[int, int]:
        if settings.submission != "early":
            self._fifo.submit(ticket)
        wait(layer, ticket, tickets)
        return 0, 0

    return consume


def _wait(*tickets: Any) -> None:
    for ticket in tickets:
        ticket.wait(10)


def _prepare_then(change: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """``change(engine, batch)`` before the step is prepared."""

    def prepare(self: Any, batch: Any, settings: StepSettings) -> Any:
        change(self, batch)
        return CpuEngine._prepare(self, batch, settings)

    return prepare


def _submit_by(submit: Callable[[Any, Any], None]) -> ReferenceBackend:
    """``submit(engine, tickets in layer order)`` in the place of the serial queue, for early submission."""

    def prepare(self: Any, batch: Any, settings: StepSettings) -> Any:
        ids, tickets = CpuEngine._prepare(self, batch, replace(settings, submission="at_consumption"))
        submit(self, list(tickets.values()))
        return ids, tickets

    def consume(self: Any, layer: int, ticket: Any, tickets: Any, _settings: Any) -> tuple[int, int]:
        return _wait(ticket) or (0, 0)

    return _engine(_prepare=prepare, _consume=consume)


def _one_thread_each(_engine: Any, tickets: Any) -> None:
    for ticket in tickets:
        threading.Thread(target=ticket.work).start()


def _skip_equal_counts(self: Any, batch: Any, settings: StepSettings) -> Any:
    """A batch as long as the last one is taken for staged."""
    ids, tickets = CpuEngine._prepare(self, batch, replace(settings, submission="at_consumption"))
    if len(batch.token_ids) == getattr(self, "_last", None):
        tickets = {layer: Ticket(lambda: "nothing") for layer in tickets}  # type: ignore[arg-type, return-value]
    self._last = len(batch.token_ids)
    if settings.submission == "early":
        for ticket in tickets.values():
            self._fifo.submit(ticket)
    return ids, tickets


def _live_only(self: Any, batch: Any, settings: StepSettings) -> Any:
    """Rows of ids that the table does not own keep what an earlier step staged."""
    backend = self._setup.backend

    def lookup(shard: Any, ids: Any, out: Any, *, cap: int | None = None) -> Any:
        before = out.copy()
        launch = backend.lookup(shard, ids, out, cap=cap)
        out[:] = np.where((out == 0).all(axis=(1, 2), keepdims=True), before, out)
        return launch

    self._setup = replace(self._setup, backend=SimpleNamespace(lookup=lookup, gate=backend.gate))
    try:
        return CpuEngine._prepare(self, batch, settings)
    finally:
        self._setup = replace(self._setup, backend=backend)



def _new_staging(self: Any, _batch: Any) -> None:
    self._old = getattr(self, "_old", [])
    self._old.append(self._staging)  # so that the allocator cannot give the same memory again
    self._staging = np.zeros_like(self._staging)


def _copied_shards(self: Any, _batch: Any) -> None:
    self._shards = tuple(replace(shard, weight=shard.weight.copy()) for shard in self._shards)


def _rebuilt_views(self: Any, _batch: Any) -> None:
    self._shards = tuple(replace(shard) for shard in self._shards)


def _truncating_step(self: Any, batch: Any, settings: StepSettings, *, marks: bool, index: int = 0) -> Any:
    """A batch that does not fit is cut."""
    most = self._setup.max_tokens
    if len(batch.token_ids) > most:
        batch = type(batch).sequence(batch.token_ids[:most])
    return CpuEngine.step(self, batch, settings, marks=marks, index=index)


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
    path = f"/dev/shm/pytest-engram-left-{os.getpid()}"
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
    "no producer wait": ("P1", _engine(_prepare=_no_producer_wait)),
    "ids are reused while the lookup waits": ("P2", _engine(_prepare=_ids_reused)),
    "no consumer wait": ("P3", _engine(_consume=_consume_by(lambda *_: None))),
    "the consumer waits for the first layer": ("P3", _engine(_consume=_consume_by(lambda _, t, all_: _wait(next(iter(all_.values())))))),
    "the consumer waits for the last layer": ("P3", _engine(_consume=_consume_by(lambda _, t, all_: _wait(list(all_.values())[-1])))),
    "the consumer waits for all layers": ("P3", _engine(_consume=_consume_by(lambda _, t, all_: _wait(*all_.values())))),
    "equal counts are taken for staged": ("P5", _engine(_prepare=_skip_equal_counts)),
    "dead rows keep an earlier step's": ("P5", _engine(_prepare=_live_only)),
    "staging is allocated anew": ("P6", _engine(_prepare=_prepare_then(_new_staging))),
    "a batch that does not fit is cut": ("P6", _engine(step=_truncating_step)),
    "lookups on the main stream": ("P7", _submit_by(lambda _, tickets: [ticket.work() for ticket in tickets])),
    "one side stream per layer": ("P7", _submit_by(_one_thread_each)),
    "last in, first out": ("P7", _submit_by(lambda self, tickets: [self._fifo.submit(t) for t in reversed(tickets)])),
    "every step copies the table": ("P9", _engine(_prepare=_prepare_then(_copied_shards))),
    "every step makes new views": ("P9", _engine(_prepare=_prepare_then(_rebuilt_views))),
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
    "registered before it is placed": ("S13", _storage(order="stock")),
    "THP loses the last page": ("S14", _storage(_subclass(load=_half_loaded_thp))),
}  # fmt: skip

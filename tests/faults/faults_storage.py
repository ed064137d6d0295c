"""Shared storages and launchers with one fault each: name -> (contract lines that must catch it, backend)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.errors import EngramError, PeerError
from pytest_engram.gpu.registration import register
from pytest_engram.model import PlacementPlan, TablePlan
from pytest_engram.numa.shared import SharedTable
from pytest_engram.numa.table import build_table


def _launch(differences: dict[str, str] | None = None, **methods: Any) -> ReferenceBackend:
    """The launcher's decisions replaced."""
    backend = ReferenceBackend()
    backend.differences = backend.differences if differences is None else differences
    vars(backend).update(methods)
    return backend


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
    return build_table(group, plan, nbytes, register=lambda table: pin(table.buffer, cudart=cudart), order=order)


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


def _left_open(table: Any) -> None:
    os.ftruncate(os.memfd_create("planted-left"), table.nbytes)  # without a page: the table's own would stay full


def _spread(nodes: Any, replica: int) -> int:
    """As :func:`sharing_group`, wherever a replica's ranks are."""
    replicas = [set(nodes[first : first + replica]) for first in range(0, len(nodes), replica)]
    runs = [len(list(run)) for _, run in groupby(replicas)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(nodes)) else 1


FAULTS: dict[str, tuple[str, ReferenceBackend]] = {
    "peers hear no cause": ("S1 S3", _own_words(_storage())),
    "pinned is not checked": ("S2", _storage(pin=_unchecked)),
    "a private copy in the peer": ("S2 S6", _storage(_private)),
    "a failure undoes nothing": ("S3", _storage(pin=_never_undone)),
    "a file is left in /dev/shm": ("S4", _storage(_named)),
    "unregistered under a living view": ("S5", _storage(_deaf_to_views)),
    "unregistered twice": ("S5", _storage(_twice)),
    "never unregistered": ("S5", _storage(lambda table: setattr(table.registration, "_end", lambda: None))),
    "unregistered with the table only": ("S5", _storage(_subclass(close=lambda _: None))),
    "a descriptor is left open": ("S5", _storage(_left_open)),
    "load without a barrier": ("S6", _storage(_subclass(load=_no_barrier))),
    "only the first load has a barrier": ("S6", _storage(_subclass(load=_first_barrier_only))),
    "the table's memory can be replaced": ("S7", _storage(_replaceable)),
    "sharing is always accepted": ("S8", _launch(sharing=lambda **_: None)),
    "sharing is never accepted": ("S8", _launch(sharing=lambda **_: 1 / 0)),
    "replicas over two hosts share": ("S9", _launch(sharing_group=_spread)),
    "replicas share over hosts": ("S9", _launch(sharing_group=lambda nodes, replica: len(nodes) // replica)),
    "a fallback without a word": ("S10", _launch(may_share=lambda nbytes, *, shm, replicas: (
        nbytes < 1 << 50 and shm == "/dev/shm" and replicas > 1))),
    "tables are shared whatever there is": ("S10", _launch(may_share=lambda *_, **__: True)),
    "a short cgroup is a refusal": ("S12", _launch(differences={})),
    "registered before it is placed": ("S13", _storage(order="stock")),
    "THP loses the last page": ("S14", _storage(_subclass(load=_half_loaded_thp))),
}  # fmt: skip

"""Prefetch over CUDA streams as the contract's cases drive it: this package's own queue, on a GPU or a virtual one.

A backend offers ``streams(layout, tables, most, around) -> Prefetch``.  Each lookup runs through
``around(layer, shard or table view, staging rows, run)`` on the stream that the backend chose for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from pytest_engram.backends.arrays import place, to_numpy
from pytest_engram.backends.protocol import TableShard
from pytest_engram.backends.virtual import VirtualCuda
from pytest_engram.engines.tables import full_shards
from pytest_engram.errors import NotMeasurable
from pytest_engram.hashing import EngramLayout

Around = Callable[[int, Any, Any, Callable[[], Any]], None]


class Prefetch(Protocol):
    """One rank's prefetch of all Engram layers."""

    cuda: Any  # torch.cuda or its virtual twin
    device: Any

    def submit(self, layer: int, ids: Any) -> None:
        """Start the lookup of ``ids`` int32 [T, H], written on the current stream."""

    def take(self, layer: int, tokens: int) -> Any:
        """Let the current stream wait for this layer only; its staging rows bf16 [T, H, dim]."""


class StreamPrefetch:
    """:class:`~pytest_engram.gpu.streams.PrefetchStream` over the tables that it is given."""

    def __init__(self, lookup: Any, layout: EngramLayout, tables: Any, most: int, around: Around, engine: str) -> None:
        from pytest_engram.gpu.streams import PrefetchStream

        torch = require("torch")
        self.cuda = torch.cuda if engine == "cuda" else VirtualCuda()
        self.device = torch.device(engine)
        placed = tuple((place(weight, engine), place(scales, engine)) for weight, scales in tables)
        self._shards, self._lookup, self._around = full_shards(placed, layout), lookup, around
        self._plain = to_numpy if engine == "cpu" else lambda tensor: tensor
        self._queue = PrefetchStream(
            len(tables), most, layout.columns, layout.head_dim, device=self.device, cuda=self.cuda
        )

    def submit(self, layer: int, ids: Any) -> None:
        """See :class:`Prefetch`."""
        self._queue.submit(layer, ids, partial(self._run, layer, self._shards[layer]))

    def take(self, layer: int, tokens: int) -> Any:
        """See :class:`Prefetch`."""
        self._queue.consume(layer)
        return self._queue.rows(layer, tokens)

    def _run(self, layer: int, shard: TableShard, ids: Any, out: Any, *, cap: int | None) -> None:
        look = partial(self._lookup, shard, self._plain(ids), self._plain(out), cap=cap)
        self._around(layer, shard, out, look)


def new_variants(kernel: Any, launches: Iterable[Callable[[], Any]]) -> int:
    """Compiled variants of a Triton kernel that ``launches`` add on the current GPU."""
    torch = require("torch")
    try:
        cache = kernel.device_caches[torch.cuda.current_device()]
        before = len(cache[0])
    except (AttributeError, IndexError, TypeError) as error:
        raise NotMeasurable(f"Triton shows no compiled variants ({error!r})", code="no-kernel-cache") from None
    for launch in launches:
        launch()
    return len(cache[0]) - before


def require(name: str, way_out: str = "pip install 'pytest-engram[gpu]'") -> Any:
    """A module whose absence is a named one."""
    try:
        return import_module(name)
    except ImportError as error:
        raise NotMeasurable(f"needs {name} ({error})", code=f"no-{name}", way_out=way_out) from None

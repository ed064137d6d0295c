"""The contract cases of the prefetch queue: P1–P3, P5–P7 and P9.

A backend with the capability offers ``prefetch(setup: EngineSetup) -> Engine``.  The engine gets a spy as its backend,
which delays a hash or a lookup until the mistake that a case looks for would have shown.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import Backend, Launch, TableShard
from pytest_engram.cases.case import Case, Finding, Probe, Unsupported, engine_differs
from pytest_engram.engines.protocol import Engine, EngineSetup, StepSettings
from pytest_engram.engines.tables import fill_table, table_bytes, table_views
from pytest_engram.hashing import EngramLayout, HashBatch
from pytest_engram.model import Workload
from pytest_engram.rows import synthetic_at

_MOST = 16  # tokens of the largest batch
_DELAY_S = 0.1  # a correct engine spends it; a faulty one needs far less to show itself
_DEADLOCK_S = 3.0  # only an engine that waits for too much spends it
_LAYERS = (1, 3)


class _Spy:
    """Passes everything to the backend; logs lookups as (layer index, thread, shard, staging address)."""

    def __init__(self, backend: Backend, layout: EngramLayout) -> None:
        self._backend, self._rows = backend, [layout.rows(i) for i in range(len(_LAYERS))]
        self.log: list[tuple[int, int, TableShard, int]] = []
        self.running, self.overlapped, self.finished = 0, False, [0] * len(_LAYERS)
        self.on_hash: Callable[[], Any] = lambda: None
        self.on_lookup: Callable[[int], Any] = lambda _: None
        self.on_gate: Callable[[], Any] = lambda: None

    def hasher(self, *args: Any, **options: Any) -> Any:
        made = self._backend.hasher(*args, **options)
        return lambda batch: (self.on_hash(), made(batch))[1]

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        layer = self._rows.index(shard.end)
        self.log.append((layer, threading.get_ident(), shard, out.ctypes.data))
        self.overlapped |= self.running > 0
        self.running += 1
        self.on_lookup(layer)
        launch = self._backend.lookup(shard, ids, out, cap=cap)
        self.finished[layer] += 1
        self.running -= 1
        return launch

    def gate(self, *inputs: Any) -> Any:
        self.on_gate()
        return self._backend.gate(*inputs)


class _Bench:
    """One small table, one engine over it, one spy between engine and backend."""

    def __init__(self, probe: Probe, make: Callable[[EngineSetup], Engine]) -> None:
        self.layout = EngramLayout.for_rows(4000, layers=_LAYERS, n_heads=2, head_dim=64)
        self._map, self.spy = probe.token_map, _Spy(probe.backend, self.layout)
        buffer = np.zeros(table_bytes(self.layout), np.uint8)
        fill_table(buffer, self.layout, 1)
        self.tables = table_views(buffer, self.layout)
        self.engine = make(
            EngineSetup(
                rank=0, layout=self.layout, tables=self.tables, token_map=self._map, max_tokens=_MOST, seed=1,
                backend=self.spy, cpus=tuple(sorted(os.sched_getaffinity(0))),  # type: ignore[arg-type]
                workload=Workload(hidden=64, layers=5, engram_layers=_LAYERS, tokens=_MOST),
            )
        )  # fmt: skip

    def step(self, batch: HashBatch) -> None:
        """Run one step with early submission."""
        self.engine.step(batch, StepSettings(), marks=False)

    def differs(self, batch: HashBatch, submission: str = "early") -> Finding | None:
        """Compare the engine's ids and staged rows with the oracle's."""
        path = partial(self.engine.rows, batch, StepSettings(submission=submission))
        return engine_differs(path, batch, self.layout, self._map, self._source)

    def _source(self, layer: int, rows: Any) -> Any:
        return synthetic_at(rows, self.layout.head_dim, layer=layer, seed=1)


@contextmanager
def _bench(probe: Probe) -> Iterator[_Bench]:
    make = getattr(probe.backend, "prefetch", None)
    if make is None or probe.engine != "cpu":
        raise Unsupported(f"the backend has no prefetch(setup) for these cases on {probe.engine}")
    bench = _Bench(probe, make)
    try:
        yield bench
    finally:
        bench.engine.close()


def producer_wait(probe: Probe) -> Finding | None:
    """A lookup starts after its ids are written, however long hashing takes."""
    with _bench(probe) as bench:
        started = threading.Event()
        bench.spy.on_hash = lambda: started.wait(_DELAY_S)
        bench.spy.on_lookup = lambda _: started.set()
        for _ in range(2):
            started.clear()
            if found := bench.differs(HashBatch.sequence(probe.tokens(9))):
                return found
    return None


def ids_kept(probe: Probe) -> Finding | None:
    """The ids of a submitted lookup stay as they are until it has run, also if it runs late."""
    with _bench(probe) as bench:
        bench.spy.on_lookup = lambda _: threading.Event().wait(_DELAY_S / 2)
        return bench.differs(HashBatch.sequence(probe.tokens(9)))


def consumer_wait(probe: Probe) -> Finding | None:
    """A layer's gate gets its rows after its own lookup has ended."""
    with _bench(probe) as bench:
        gated, spy = [threading.Event() for _ in _LAYERS], bench.spy
        seen: list[tuple[int, ...]] = []

        def on_gate() -> None:
            seen.append(tuple(spy.finished))
            gated[len(seen) - 1].set()

        spy.on_lookup, spy.on_gate = lambda layer: gated[layer].wait(_DELAY_S), on_gate
        bench.step(HashBatch.sequence(probe.tokens(9)))
    for layer, finished in enumerate(seen):
        if not finished[layer]:
            return Finding(detail="gated before its lookup had ended", layer=_LAYERS[layer])
    return None


def own_layer(probe: Probe) -> Finding | None:
    """A consumer waits for its own layer only: the first layer is gated while the second's lookup still runs."""
    with _bench(probe) as bench:
        gated, ended = threading.Event(), []
        bench.spy.on_gate = gated.set
        bench.spy.on_lookup = lambda layer: ended.append(layer == 0 or gated.wait(_DEADLOCK_S))
        bench.step(HashBatch.sequence(probe.tokens(9)))
    if all(ended):
        return None
    return Finding(detail="the first layer's consumer waited for the second layer's lookup", layer=_LAYERS[0])


def fresh_rows(probe: Probe) -> Finding | None:
    """Every step stages its own rows: new ids, other batch sizes and dead tokens leave nothing of an earlier step."""
    with _bench(probe) as bench:
        for number, count in enumerate((_MOST, 1, 5, 5, _MOST, 1, 7)):
            batch = HashBatch.sequence(probe.tokens(count), dead=np.arange(count) % 4 == 3)
            if found := bench.differs(batch, ("early", "at_consumption")[number % 3 == 2]):
                return found
    return None


def fixed_staging(probe: Probe) -> Finding | None:
    """The staging rows of a layer keep their address over all batch sizes; a batch that does not fit is refused."""
    with _bench(probe) as bench:
        for count in (_MOST, 1, 5):
            bench.step(HashBatch.sequence(probe.tokens(count)))
        places = {(layer, address) for layer, _, _, address in bench.spy.log}
        if len(places) != len(_LAYERS):
            return Finding(detail="staging moves", expected="one address per layer", seen=str(sorted(places)))
        try:
            bench.step(HashBatch.sequence(probe.tokens(_MOST + 1)))
        except Exception:  # noqa: BLE001 - whichever error the engine chose
            return None
    return Finding(detail=f"{_MOST + 1} tokens were accepted", expected=f"at most {_MOST}")


def one_side_stream(probe: Probe) -> Finding | None:
    """All lookups run on one stream beside the main one, each after the other, in the order of the layers."""
    with _bench(probe) as bench:
        bench.spy.on_lookup = lambda _: threading.Event().wait(_DELAY_S / 8)
        for count in (3, _MOST):
            bench.step(HashBatch.sequence(probe.tokens(count)))
        layers, threads = [call[0] for call in bench.spy.log], {call[1] for call in bench.spy.log}
    if layers != [0, 1] * 2 or bench.spy.overlapped:
        return Finding(detail="not first in, first out", expected="[0, 1, 0, 1], none beside another", seen=str(layers))
    if len(threads) != 1 or threading.get_ident() in threads:
        return Finding(detail="lookups are not on one side stream", seen=f"{len(threads)} threads")
    return None


def cached_views(probe: Probe) -> Finding | None:
    """Lookups read the shared table itself through views that are made once, never a copy of it."""
    with _bench(probe) as bench:
        for _ in range(2):
            bench.step(HashBatch.sequence(probe.tokens(3)))
        for layer, _, shard, _ in bench.spy.log:
            first = next(other for number, _, other, _ in bench.spy.log if number == layer)
            if shard is not first or not np.shares_memory(shard.weight, bench.tables[layer][0]):
                return Finding(detail="a lookup read something else than the first view", layer=_LAYERS[layer])
    return None


PREFETCH_CASES = (
    Case("producer-wait", "P1", "prefetch", producer_wait),
    Case("ids-kept", "P2", "prefetch", ids_kept),
    Case("consumer-wait", "P3", "prefetch", consumer_wait),
    Case("own-layer", "P3", "prefetch", own_layer),
    Case("fresh-rows", "P5", "prefetch", fresh_rows),
    Case("fixed-staging", "P6", "prefetch", fixed_staging),
    Case("one-side-stream", "P7", "prefetch", one_side_stream),
    Case("cached-views", "P9", "prefetch", cached_views),
)

"""What the prefetch cases run on: an engine whose queue is a thread, or lookups on a GPU's streams."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from pytest_engram.backends.arrays import to_numpy
from pytest_engram.backends.protocol import Launch, TableShard
from pytest_engram.backends.streams import Around, Prefetch, require
from pytest_engram.backends.virtual import VirtualCuda
from pytest_engram.cases.case import Finding, Probe, Unsupported, engine_differs, staged_differ
from pytest_engram.engines.protocol import EngineSetup, StepSettings
from pytest_engram.engines.tables import fill_table, table_bytes, table_views
from pytest_engram.gpu.timeline import spin
from pytest_engram.hashing import EngramLayout, HashBatch, hash_ids
from pytest_engram.model import Workload
from pytest_engram.rows import synthetic_at

MOST = 16  # tokens of the largest batch
_DELAY_S = 0.1  # of a thread: a correct engine spends it; a faulty one needs far less to show itself
_DELAY_NS = 5_000_000  # of a stream
_DEADLOCK_S = 3.0  # only an engine that waits for too much spends it
LAYERS = (1, 3)
_LAYOUT = EngramLayout.for_rows(4000, layers=LAYERS, n_heads=2, head_dim=64)


class Bench:
    """One small table; ``calls`` are lookups as (layer index, stream, shard or table view, staging address)."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.calls = probe, []  # type: ignore[var-annotated]
        self.on_hash: Callable[[], Any] = lambda: None
        self.on_lookup: Callable[[int], Any] = lambda _: None
        buffer = np.zeros(table_bytes(_LAYOUT), np.uint8)
        fill_table(buffer, _LAYOUT, 1)
        self.tables = table_views(buffer, _LAYOUT)

    def together(self, tokens_across_dp: tuple[int, ...]) -> None:
        """Tell the rank how many tokens all ranks of its group have, if it asks."""

    def source(self, layer: int, rows: Any) -> Any:
        """The content of any row."""
        return synthetic_at(rows, _LAYOUT.head_dim, layer=layer, seed=1)


class Threads(Bench):
    """An engine over the table, and itself as the backend between engine and table."""

    def __init__(self, probe: Probe, make: Callable[..., Any], rank: int) -> None:
        super().__init__(probe)
        self.main, self.pause = threading.get_ident(), lambda: threading.Event().wait(_DELAY_S)
        self.on_gate: Callable[[], Any] = lambda: None
        self.name, self.engines = "spy", frozenset({"cpu"})
        self._engine = make(
            EngineSetup(
                rank=rank, layout=_LAYOUT, tables=self.tables, token_map=probe.token_map, max_tokens=MOST, seed=1,
                backend=self, cpus=tuple(sorted(os.sched_getaffinity(0))),  # type: ignore[arg-type]
                workload=Workload(hidden=64, layers=5, engram_layers=LAYERS, tokens=MOST),
            )
        )  # fmt: skip
        self.close = self._engine.close

    def differs(self, batch: HashBatch, submission: str = "early") -> Finding | None:
        """Compare the engine's ids and staged rows with the oracle's."""
        path = partial(self._engine.rows, batch, StepSettings(submission=submission))
        return engine_differs(path, batch, _LAYOUT, self.probe.token_map, self.source)

    def step(self, batch: HashBatch) -> None:
        """Run one step with early submission."""
        self._engine.step(batch, StepSettings(), marks=False)

    def early(self, batch: HashBatch) -> bool:
        """Whether the first layer is gated while the second's lookup still runs."""
        gated, ended = threading.Event(), []
        self.on_gate = gated.set
        self.on_lookup = lambda layer: ended.append(layer == 0 or gated.wait(_DEADLOCK_S))
        self.step(batch)
        return all(ended)

    def hasher(self, *args: Any, **options: Any) -> Any:
        """The backend's own, late where the case says so."""
        made = self.probe.backend.hasher(*args, **options)
        return lambda batch: (self.on_hash(), made(batch))[1]

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        """The backend's own, written down and late where the case says so."""
        layer = [_LAYOUT.rows(i) for i in range(len(LAYERS))].index(shard.end)
        self.calls.append((layer, threading.get_ident(), shard, out.ctypes.data))
        self.on_lookup(layer)
        return self.probe.backend.lookup(shard, ids, out, cap=cap)

    def gate(self, *inputs: Any) -> Any:
        """The backend's own."""
        self.on_gate()
        return self.probe.backend.gate(*inputs)


class Streams(Bench):
    """Lookups on a GPU's streams, or on a virtual GPU's."""

    def __init__(self, probe: Probe, make: Callable[[EngramLayout, Any, int, Around], Prefetch]) -> None:
        super().__init__(probe)
        self._made, self._torch = make(_LAYOUT, self.tables, MOST, self._around), require("torch")
        self._cuda = cuda = self._made.cuda
        self.main, self.close = cuda.current_stream(), cuda.synchronize
        self.together = getattr(self._made, "together", self.together)  # type: ignore[method-assign]
        self._virtual = cuda if isinstance(cuda, VirtualCuda) else None
        self._launch = self._virtual.launch if self._virtual else lambda run, *, out: run()  # noqa: ARG005
        self.pause = partial(self._virtual.spin if self._virtual else spin, _DELAY_NS)
        self.pause()  # compiles
        cuda.synchronize()

    def differs(self, batch: HashBatch, submission: str = "early") -> Finding | None:
        """Compare the rows of all layers; the ids are written late, and their memory is given away at once."""
        source, *held, rows = self._buffers(len(batch.token_ids))
        fresh, layers = self._fill(source, batch), range(len(LAYERS))
        self.on_hash()
        self._launch(partial(held[0].copy_, source), out=held[0])
        for group in [layers] if submission == "early" else [[layer] for layer in layers]:
            for layer in group:
                self._made.submit(layer, held[0][:, layer])
            reused = self._forget(held) if layers[-1] in group else None
            self._take(rows, group)
        self._cuda.synchronize()
        del reused
        return staged_differ(to_numpy(rows), fresh, _LAYOUT, self.source)

    def without(self, dependency: str, batch: HashBatch) -> Finding | None:
        """As :meth:`differs` where a GPU would ignore one kind of dependency, and be late where that shows."""
        if self._virtual is None:
            raise Unsupported("a real GPU ignores no dependency")
        if dependency == "wait_stream":
            self.on_hash = self.pause
        else:
            self.on_lookup = lambda layer: layer == 0 and self.pause()
        self._virtual.ignored = dependency
        try:
            return self.differs(batch)
        finally:
            self._virtual.ignored = ""  # an engine may keep its virtual GPU for the next case

    def step(self, batch: HashBatch) -> None:
        """Run one step with early submission."""
        self.differs(batch)

    def early(self, batch: HashBatch) -> bool:
        """Whether the first layer's rows are there while the second's lookup still runs."""
        consumed, running = (self._cuda.Event(enable_timing=True) for _ in range(2))
        _, ids, rows = self._buffers(len(batch.token_ids))
        self.on_lookup = lambda layer: layer and (self.pause(), running.record(self._cuda.current_stream()))
        for layer in range(len(LAYERS)):
            self._made.submit(layer, ids[:, layer])
        self._take(rows, [0])
        consumed.record(self._cuda.current_stream())
        self._take(rows, [1])
        self._cuda.synchronize()
        return bool(consumed.elapsed_time(running) > 0)

    def captured(self) -> Callable[[HashBatch], Finding | None]:
        """Capture a step of the largest batch as one graph; what is returned replays it with a batch's ids.

        The ids are written inside, as by a hash kernel, and whatever a case delays is late in each replay.
        """
        source, ids, rows = self._buffers(MOST)

        def once() -> None:
            self.on_hash()
            self._launch(partial(ids.copy_, source), out=ids)
            for layer in range(len(LAYERS)):
                self._made.submit(layer, ids[:, layer])
            self._take(rows, range(len(LAYERS)))

        def replay(batch: HashBatch) -> Finding | None:
            fresh = self._fill(source, batch)
            graph.replay()
            self._cuda.synchronize()
            return staged_differ(to_numpy(rows), fresh, _LAYOUT, self.source)

        once()  # compiles
        self._cuda.synchronize()
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph):
            once()
        return replay

    def _around(self, layer: int, table: Any, out: Any, run: Callable[[], Any]) -> None:
        self.calls.append((layer, self._cuda.current_stream(), table, out.data_ptr()))
        self.on_lookup(layer)
        self._launch(run, out=out)

    def _buffers(self, tokens: int) -> tuple[Any, Any, Any]:
        """(next ids, ids that the lookups read int32 [T, L, H], rows that come out bf16 [L, T, H, dim])."""
        torch, device, shape = self._torch, self._made.device, (tokens, len(LAYERS), _LAYOUT.columns)
        source, ids = torch.zeros((2, *shape), dtype=torch.int32, device=device).unbind()
        ids = ids.clone()
        if self._virtual:
            self._virtual.kept.clear()
            keep = {"record_stream": lambda ids, stream: stream.record(ids)}
            ids = ids.as_subclass(type("Ids", (torch.Tensor,), keep))
        rows = torch.zeros((len(LAYERS), tokens, _LAYOUT.columns, _LAYOUT.head_dim), dtype=torch.bfloat16)
        return source, ids, rows.to(device)

    def _fill(self, source: Any, batch: HashBatch) -> Any:
        fresh = hash_ids(_LAYOUT, batch, self.probe.token_map)
        source.copy_(self._torch.from_numpy(fresh))
        return fresh

    def _take(self, rows: Any, layers: Iterable[int]) -> None:
        for layer in layers:
            self._launch(partial(rows[layer].copy_, self._made.take(layer, rows.shape[1])), out=rows[layer])

    def _forget(self, held: list[Any]) -> list[Any]:
        """Give the ids' memory away, as the allocator does unless a stream has told it to keep it."""
        ids = held.pop()
        like = self._torch.full_like(ids, -1)
        if self._virtual and ids.untyped_storage().data_ptr() not in self._virtual.kept:
            self._launch(partial(ids.copy_, like), out=ids)
        del ids
        return [like.clone() for _ in range(64)]  # on a GPU one of these gets that memory

"""Checks of streams, graphs, events and a whole engine that only a real GPU can answer; see ``on_gpu.py``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu_memory_checks import DIM, HEADS, ROWS, expect, host

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.engines.cuda import CudaEngine
from pytest_engram.engines.protocol import EngineSetup, StepSettings
from pytest_engram.engines.tables import fill_table, full_shards, table_bytes, table_views
from pytest_engram.gpu.gather import lookup
from pytest_engram.gpu.registration import register
from pytest_engram.gpu.streams import PrefetchStream
from pytest_engram.gpu.timeline import self_test, spin
from pytest_engram.hashing import EngramLayout, HashBatch, hash_ids
from pytest_engram.model import Workload
from pytest_engram.rows import lookup_rows, same_bits

DELAY_NS = 5_000_000


def tables() -> tuple[Any, list[Any], Any]:
    """(layout, numpy shards, device shards) of two small layers in HBM."""
    layout = EngramLayout.for_rows(ROWS)
    buffer = np.zeros(table_bytes(layout), np.uint8)
    fill_table(buffer, layout, 5)
    views = table_views(buffer, layout)
    on_gpu = tuple((torch.from_numpy(w).cuda(), torch.from_numpy(s).cuda()) for w, s in views)
    return layout, list(full_shards(views, layout)), full_shards(on_gpu, layout)


def oracle(shards: list[Any], ids: Any) -> Any:
    """u16 [L, T, H, dim]."""
    out = np.empty((len(shards), len(ids), HEADS, DIM), np.uint16)
    for layer, one in enumerate(shards):
        lookup_rows(one, ids[:, layer], out[layer])
    return out


def prefetch_step(stream: PrefetchStream, shards: Any, ids: Any, out: Any, *, delay: bool = False) -> None:
    """Submit both layers, then consume each into ``out`` [L, T, H, dim]."""

    def one(layer: int) -> Callable[..., Any]:
        def run(rows: Any, into: Any, *, cap: int | None) -> Any:
            if delay:
                spin(DELAY_NS)
            return lookup(shards[layer], rows, into, cap=cap)

        return run

    for layer in range(len(shards)):
        stream.submit(layer, ids[:, layer], one(layer), cap=66)
    for layer in range(len(shards)):
        stream.consume(layer)
        out[layer].copy_(stream.rows(layer, len(ids)))


def bits(out: Any) -> Any:
    """bf16 on the device to u16 on the host."""
    return out.view(torch.int16).cpu().numpy().view(np.uint16)


def check_graph_replay() -> dict[str, Any]:
    """P5: one capture, new ids at each replay, eager steps in between; staging addresses do not move."""
    layout, plain, shards = tables()
    stream = PrefetchStream(2, 300, HEADS, DIM)
    ids = torch.zeros((64, 2, HEADS), dtype=torch.int32, device="cuda")
    out = torch.zeros((2, 64, HEADS, DIM), dtype=torch.bfloat16, device="cuda")
    prefetch_step(stream, shards, ids, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefetch_step(stream, shards, ids, out)
    rng, address = np.random.default_rng(1), stream.staging.data_ptr()
    for replay in range(50):
        fresh = rng.integers(-1, layout.rows(0), (64, 2, HEADS), dtype=np.int32)
        ids.copy_(torch.from_numpy(fresh))
        graph.replay()
        expect(bits(out), oracle(plain, fresh), f"replay {replay}")
        if replay % 10 == 0:
            large = rng.integers(0, layout.rows(0), (300, 2, HEADS), dtype=np.int32)
            wide = torch.zeros((2, 300, HEADS, DIM), dtype=torch.bfloat16, device="cuda")
            prefetch_step(stream, shards, torch.from_numpy(large).cuda(), wide)
            expect(bits(wide), oracle(plain, large), f"eager step after replay {replay}")
    assert stream.staging.data_ptr() == address
    return {"replays": 50}


class NoProducerWait(PrefetchStream):
    def _await_producer(self, stream: Any) -> None:
        return


class NoKeep(PrefetchStream):
    def _keep(self, ids: Any, stream: Any) -> None:
        return


class NoConsumerWait(PrefetchStream):
    def _await_rows(self, done: Any) -> None:
        return


def outcome(kind: type[PrefetchStream], *, producer: bool) -> bool:
    """Whether rows are right when the producer, or else the lookup, is late and the ids are dropped at once."""
    layout, plain, shards = tables()
    rng = np.random.default_rng(3)
    old, new = (rng.integers(0, layout.rows(0), (64, 2, HEADS), dtype=np.int32) for _ in range(2))
    stream = kind(2, 64, HEADS, DIM)
    out = torch.zeros((2, 64, HEADS, DIM), dtype=torch.bfloat16, device="cuda")
    source, ids = torch.from_numpy(new).cuda(), torch.from_numpy(old).cuda()
    prefetch_step(stream, shards, ids, out)
    torch.cuda.synchronize()
    if producer:
        spin(DELAY_NS)
    ids.copy_(source)
    for layer in range(2):
        stream.submit(layer, ids[:, layer], late(shards[layer], 0 if producer else DELAY_NS), cap=66)
    shape = ids.shape
    del ids
    if not producer:
        # One of these gets the ids' memory, unless it is kept.
        _reused = [torch.full(shape, -1, dtype=torch.int32, device="cuda") for _ in range(64)]
    for layer in range(2):
        stream.consume(layer)
        out[layer].copy_(stream.rows(layer, 64))
    torch.cuda.synchronize()
    return bool(same_bits(bits(out), oracle(plain, new)).all())


def late(table: Any, delay_ns: int) -> Callable[..., Any]:
    """A lookup behind a kernel that takes ``delay_ns``."""

    def run(ids: Any, out: Any, *, cap: int | None) -> Any:
        if delay_ns:
            spin(delay_ns)
        return lookup(table, ids, out, cap=cap)

    return run


def check_missing_dependencies() -> dict[str, Any]:
    """P4: all three there: right; any one missing: wrong, once a delay makes it visible."""
    seen = {
        "complete, late producer": outcome(PrefetchStream, producer=True),
        "complete, late lookup": outcome(PrefetchStream, producer=False),
        "no producer wait": outcome(NoProducerWait, producer=True),
        "no record_stream": outcome(NoKeep, producer=False),
        "no consumer wait": outcome(NoConsumerWait, producer=False),
    }
    wanted = [True, True, False, False, False]
    assert list(seen.values()) == wanted, seen
    return seen


def check_timer() -> dict[str, Any]:
    """X9: kernels of known length."""
    return {str(asked): seen for asked, seen in self_test(torch.cuda).items()}


def check_engine() -> dict[str, Any]:
    """A whole engine over a registered table: oracle rows, equal outputs of both submission points, a timeline."""
    layout = EngramLayout.for_rows(1_000_000)
    token_map = np.arange(129_280, dtype=np.int32) % layout.compressed_vocab
    buffer = host(table_bytes(layout))
    fill_table(buffer, layout, 5)
    held = register(buffer)
    views = table_views(buffer, layout)
    work = Workload(hidden=2048, layers=8, engram_layers=(1, 5), tokens=512)
    engine = CudaEngine(EngineSetup(
        rank=0, layout=layout, workload=work, tables=views, token_map=token_map, backend=ReferenceBackend(),
        cpus=(0,), max_tokens=512, seed=1,
    ))  # fmt: skip
    batch = HashBatch.sequence(np.random.default_rng(0).integers(0, 129_280, 512), history=[1, 2, 3])
    early, late_ = StepSettings(), StepSettings(submission="at_consumption")
    ids, rows = engine.rows(batch, early)
    assert (ids == hash_ids(layout, batch, token_map)).all()
    expect(np.moveaxis(rows, 1, 0), oracle(list(full_shards(views, layout)), ids), "engine rows")
    steps = [engine.step(batch, how, marks=True) for how in (early, late_, early, late_, early, late_)][2:]
    assert all((step.output == steps[0].output).all() for step in steps)
    plain = [engine.step(batch, how, marks=False) for how in (early, late_)]
    report: dict[str, Any] = {
        name: {"step_us": step.step_ns / 1e3, "main_us": step.main_ns / 1e3, "lookups": lookups(step)}
        for name, step in zip(("early", "at_consumption", "early again", "late again"), steps, strict=True)
    }
    report["unmarked"] = {"step_us": [s.step_ns / 1e3 for s in plain], "main_us": [s.main_ns / 1e3 for s in plain]}
    report["drift"] = engine.drift()
    engine.close()
    del engine, views
    gc.collect()
    held.close()
    return report


def lookups(step: Any) -> list[dict[str, float]]:
    """Queueing, kernel and exposed wait in µs of each lookup, and its actual launch."""
    line = step.timeline
    for mark in line.lookups:
        assert line.begin <= mark.hash_ready <= mark.submit <= mark.start + 500
        assert mark.start < mark.done
        assert mark.done <= mark.wait_after + 2_000
    return [
        {
            "queue": (mark.start - mark.submit) / 1e3, "kernel": (mark.done - mark.start) / 1e3,
            "wait": (mark.wait_after - mark.wait_before) / 1e3, "grid": mark.grid, "tiles": mark.tiles,
        }
        for mark in line.lookups
    ]  # fmt: skip

"""Where the Engram layers lie in one shared table buffer: per layer weights, then scales, on page boundaries."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import TableShard
from pytest_engram.engines.protocol import EngineSetup
from pytest_engram.errors import UsageError
from pytest_engram.layout import EngramLayout, HeadShard, head_shard
from pytest_engram.rows import synthetic_rows

_ALIGN = 4096
_CHUNK_BYTES = 4 << 20  # synthetic rows are written in pieces that stay in the cache


WHOLE = (0, 1)  # every head: (index of a head shard, number of shards)


def table_bytes(layout: EngramLayout, shard: tuple[int, int] = WHOLE) -> int:
    """Bytes of the buffer that holds every layer of ``layout``, or a shard of each; a multiple of 4 KiB."""
    return _segments(layout, shard)[-1][1]


def table_views(buffer: Any, layout: EngramLayout, shard: tuple[int, int] = WHOLE) -> tuple[tuple[Any, Any], ...]:
    """(weight u8 [rows, dim], scales u8 [rows, dim // block]) per layer: views of ``buffer``, never copies.

    ``buffer`` is anything with the buffer protocol, u8, of at least ``table_bytes(layout, shard)`` bytes.
    """
    flat, least = np.frombuffer(buffer, np.uint8), table_bytes(layout, shard)
    if len(flat) < least:
        raise UsageError(f"{len(flat)} bytes", code="small-buffer", who="table", expected=f"at least {least} bytes")
    found = [flat[start : start + shape[0] * shape[1]].reshape(shape) for start, _, shape in _segments(layout, shard)]
    return tuple(zip(found[::2], found[1::2], strict=True))


def fill_table(
    buffer: Any, layout: EngramLayout, seed: int, *, shard: tuple[int, int] = WHOLE,
    check: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Write the synthetic rows of every layer on all of this task's CPUs; ``check``, called after each piece in this
    thread, may raise to stop."""
    views, step = table_views(buffer, layout, shard), max(1, _CHUNK_BYTES // layout.head_dim)
    pieces = [(layer, start) for layer, (weight, _) in enumerate(views) for start in range(0, len(weight), step)]

    def write(piece: tuple[int, int]) -> None:
        layer, start = piece
        (weight, scales), first = views[layer], _rows(layout, layer, shard).start
        stop = min(start + step, len(weight))
        weight[start:stop], scales[start:stop] = synthetic_rows(
            first + start, first + stop, layout.head_dim, layer=layer, seed=seed, block=layout.block
        )

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(write, pieces):  # what is not begun is dropped with this iterator
            check()


def full_shards(
    views: tuple[tuple[Any, Any], ...], layout: EngramLayout, shard: tuple[int, int] = WHOLE
) -> tuple[TableShard, ...]:
    """Per Engram layer the part of the rank ``shard`` = (index, shards): by default every head.

    ``views`` are of whole layers, or of this shard's rows where the rank has a table of its own.
    Ids beyond the primes' sum give zeros.  ``UsageError`` for a shard without heads.
    """
    index, shards = shard
    return tuple(
        cut(weight, scales, head_shard(layout.primes[layer], shards, index), layout.columns)
        for layer, (weight, scales) in enumerate(views)
    )


def cut(weight: Any, scales: Any, own: HeadShard, columns: int) -> TableShard:
    """The rows of ``own`` as a shard of all ``columns``: out of a whole layer's arrays, or they are just those rows."""
    rows = slice(None) if len(weight) == own.end - own.start else slice(own.start, own.end)
    return TableShard(
        weight=weight[rows], scales=scales[rows], start=own.start, end=own.end,
        head_start=own.head_start, local_heads=own.local_heads, total_heads=columns,
    )  # fmt: skip


def consumers(setup: EngineSetup) -> dict[int, int]:
    """Layer of the main chain -> index of its table, in the order of the layers; ``UsageError`` if they do not fit."""
    layers = setup.workload.engram_layers
    if len(layers) != len(setup.tables) or sorted(set(layers)) != list(layers) or layers[-1] >= setup.workload.layers:
        raise UsageError(
            f"Engram layers {layers} with {len(setup.tables)} tables and {setup.workload.layers} layers",
            code="bad-layers", who="engine", expected="one rising layer number per table, below the layer count",
        )  # fmt: skip
    return {layer: index for index, layer in enumerate(layers)}


def _rows(layout: EngramLayout, layer: int, shard: tuple[int, int]) -> range:
    """The rows of a layer's table that a shard's buffer holds."""
    if shard[1] == 1:
        return range(layout.num_embeddings[layer])
    own = head_shard(layout.primes[layer], shard[1], shard[0])
    return range(own.start, own.end)


def _segments(layout: EngramLayout, shard: tuple[int, int] = WHOLE) -> list[tuple[int, int, tuple[int, int]]]:
    """(start, aligned stop, shape) of weight and scales of each layer, in bytes from the buffer's begin."""
    segments, start = [], 0
    for layer in range(len(layout.layer_ids)):
        rows = len(_rows(layout, layer, shard))
        for columns in (layout.head_dim, layout.head_dim // layout.block):
            stop = start + -(-rows * columns // _ALIGN) * _ALIGN
            segments.append((start, stop, (rows, columns)))
            start = stop
    return segments

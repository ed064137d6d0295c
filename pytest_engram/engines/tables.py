"""Where the Engram layers lie in one shared table buffer: per layer weights, then scales, on page boundaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import TableShard
from pytest_engram.engines.protocol import EngineSetup
from pytest_engram.errors import UsageError
from pytest_engram.layout import EngramLayout
from pytest_engram.rows import synthetic_rows

_ALIGN = 4096
_CHUNK_BYTES = 4 << 20  # synthetic rows are written in pieces that stay in the cache


def table_bytes(layout: EngramLayout) -> int:
    """Bytes of the buffer that holds every layer of ``layout``; a multiple of 4 KiB."""
    return _segments(layout)[-1][1]


def table_views(buffer: Any, layout: EngramLayout) -> tuple[tuple[Any, Any], ...]:
    """(weight u8 [rows, dim], scales u8 [rows, dim // block]) per layer: views of ``buffer``, never copies.

    ``buffer`` is anything with the buffer protocol, u8, of at least ``table_bytes(layout)`` bytes.
    """
    flat = np.frombuffer(buffer, np.uint8)
    if len(flat) < table_bytes(layout):
        raise UsageError(
            f"{len(flat)} bytes", code="small-buffer", who="table", expected=f"at least {table_bytes(layout)} bytes"
        )
    segments = [flat[start : start + shape[0] * shape[1]].reshape(shape) for start, _, shape in _segments(layout)]
    return tuple(zip(segments[::2], segments[1::2], strict=True))


def fill_table(buffer: Any, layout: EngramLayout, seed: int, *, check: Callable[[], None] | None = None) -> None:
    """Write the synthetic rows of every layer; ``check`` is called between pieces and may raise to stop."""
    step = max(1, _CHUNK_BYTES // layout.head_dim)
    for layer, (weight, scales) in enumerate(table_views(buffer, layout)):
        for start in range(0, len(weight), step):
            stop = min(start + step, len(weight))
            weight[start:stop], scales[start:stop] = synthetic_rows(
                start, stop, layout.head_dim, layer=layer, seed=seed, block=layout.block
            )
            if check is not None:
                check()


def full_shards(views: tuple[tuple[Any, Any], ...], layout: EngramLayout) -> tuple[TableShard, ...]:
    """Per Engram layer the shard of a rank that owns every head; ids beyond the primes' sum give zeros."""
    return tuple(
        TableShard(
            weight=weight, scales=scales, start=0, end=layout.rows(index),
            head_start=0, local_heads=layout.columns, total_heads=layout.columns,
        )
        for index, (weight, scales) in enumerate(views)
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


def _segments(layout: EngramLayout) -> list[tuple[int, int, tuple[int, int]]]:
    """(start, aligned stop, shape) of weight and scales of each layer, in bytes from the buffer's begin."""
    segments, start = [], 0
    for rows in layout.num_embeddings:
        for columns in (layout.head_dim, layout.head_dim // layout.block):
            stop = start + -(-rows * columns // _ALIGN) * _ALIGN
            segments.append((start, stop, (rows, columns)))
            start = stop
    return segments

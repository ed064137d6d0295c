"""Bytes and launch arithmetic: each kind of traffic on its own line, never added and divided by one bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pytest_engram.errors import UsageError
from pytest_engram.layout import EngramLayout

TILE_ROWS = 16  # rows per program and pass of the lookup kernel


class Launch(NamedTuple):
    """The actual launch of one lookup: (token, local head) rows, tiles of 16 rows, programs."""

    rows: int
    tiles: int
    grid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLedger:
    """Bytes of one step on one rank, all Engram layers; ``None`` where the caller did not say the shapes.

    ``source`` is read from the host (FP8 values and scales of true heads), ``staging`` written for the consumer
    (bf16, padded heads included), ``gather`` received from the other head shards in ``collectives`` collectives,
    ``projection`` and ``gate`` the activations that those two read and write.
    """

    source: int
    staging: int
    gather: int
    collectives: int = 0
    projection: int | None = None
    gate: int | None = None


def launch(tokens: int, local_heads: int, cap: int | None = None) -> Launch:
    """tiles = ceil(rows / 16); grid = min(tiles, cap).  An empty batch launches nothing."""
    if cap is not None and cap < 1:
        raise UsageError(f"cap {cap}", code="bad-cap", who="lookup", expected="at least 1 program")
    rows = tokens * local_heads
    tiles = -(-rows // TILE_ROWS)
    return Launch(rows, tiles, tiles if cap is None else min(tiles, cap))


def background_cap(multiprocessors: int) -> int:
    """The background grid's cap: half of the SMs.  It caps programs; it reserves no SM."""
    return max(1, multiprocessors // 2)


def row_bytes(dim: int, block: int = 32) -> int:
    """d FP8 values and d / block scale bytes."""
    return dim + dim // block


def source_bytes(tokens: int, heads: int, dim: int, block: int = 32) -> int:
    """B_source = N · H · (d + d / block) of one layer."""
    return tokens * heads * row_bytes(dim, block)


def staging_bytes(tokens: int, padded_heads: int, dim: int) -> int:
    """B_staging = 2 · N · H_padded · d of one layer."""
    return 2 * tokens * padded_heads * dim


def step_bytes(
    tokens: int, layout: EngramLayout, *, shards: int = 1, shard: int = 0, hidden: int | None = None
) -> ByteLedger:
    """The ledger of one step of ``tokens`` tokens on the rank of head shard ``shard`` of ``shards``.

    Heads that pad the last shard are staged and gathered, and read from nowhere.  ``hidden`` is the width D of a
    single residual stream (float32).
    """
    layers, dim, columns = len(layout.layer_ids), layout.head_dim, layout.columns
    local = -(-columns // shards)
    true = max(0, min(local, columns - shard * local))
    staged = layers * staging_bytes(tokens, local, dim)
    read = layers * staging_bytes(tokens, columns, dim)
    wide = None if hidden is None else layers * tokens * hidden * 4
    return ByteLedger(
        source=layers * source_bytes(tokens, true, dim, layout.block),
        staging=staged,
        gather=(shards - 1) * staged,
        collectives=layers if shards > 1 else 0,
        projection=None if wide is None else read + 2 * wide,  # rows in, key and value out
        gate=None if wide is None else 4 * wide,  # hidden, key and value in, hidden out
    )


def distinct_share(steps: Sequence[Any]) -> float:
    """Share of distinct rows among all that several steps read; each step's ids int [T, L, H].  1.0 for no rows."""
    ids = np.concatenate(steps)
    return sum(len(np.unique(ids[:, layer])) for layer in range(ids.shape[1])) / ids.size if ids.size else 1.0


def link_floor_s(source: int, bytes_per_second: float) -> float:
    """The least seconds in which distinct rows can cross a link; a faster lookup is a broken measurement."""
    return source / bytes_per_second

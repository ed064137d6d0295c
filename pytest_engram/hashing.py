"""The hashing oracle: token batches to hash ids, vectorised over the batch (contract H3–H18)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pytest_engram.errors import UsageError
from pytest_engram.layout import EngramLayout, HeadShard, head_shard, shard_rank
from pytest_engram.tokens import build_token_map, synthetic_token_map

__all__ = [
    "DEAD_ID", "IMAGE_SENTINEL_ID", "EngramLayout", "HashBatch", "HeadShard", "SlotCache", "build_token_map",
    "dummy_ids", "hash_ids", "head_shard", "padded_ids", "shard_rank", "synthetic_token_map", "window_row",
]  # fmt: skip

DEAD_ID = -1  # a hash id without a row, and the slot-cache value of a token that takes part in no n-gram
IMAGE_SENTINEL_ID = 129_264

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

_DEPTH = 3  # tokens before a chunk that the model's longest n-gram reaches
_CHUNK = 8192  # tokens per pass: the working set stays in the L2 cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HashBatch:
    """One flattened batch: T tokens of R requests; arrays may have any stride.

    ``query_start_loc`` int32 [R + 1] may repeat boundaries (H9); tokens past its end belong to the last request and
    their output is not defined.  ``window`` int32 [R, depth]: column j is the token at chunk start − 1 − j, −1 is
    unknown (H8).  ``slots`` int64 [T] (< 0: not written) and ``block_table`` int32 [R, B] serve a slot cache.
    Raises ``UsageError`` for a wrong dtype, shape or value; ids beyond the token map are found by :func:`hash_ids`.
    """

    token_ids: Int32
    positions: Int64
    query_start_loc: Int32
    dead: Bool
    window: Int32
    window_dead: Bool
    slots: Int64 | None = None
    block_table: Int32 | None = None
    block_size: int = 64

    def __post_init__(self) -> None:
        _expect("token_ids", self.token_ids, np.int32, (None,), at_least=0)
        _expect("query_start_loc", self.query_start_loc, np.int32, (None,), at_least=0)
        tokens, requests = len(self.token_ids), len(self.query_start_loc) - 1
        _expect("positions", self.positions, np.int64, (tokens,), at_least=0)
        _expect("dead", self.dead, np.bool_, (tokens,))
        _expect("window", self.window, np.int32, (requests, None), at_least=-1)
        _expect("window_dead", self.window_dead, np.bool_, self.window.shape)
        if self.slots is not None:
            _expect("slots", self.slots, np.int64, (tokens,))
        if self.block_table is not None:
            _expect("block_table", self.block_table, np.int32, (requests, None), at_least=0)
        starts = self.query_start_loc
        if requests < (tokens > 0) or starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > tokens:
            raise _bad("query_start_loc", f"{starts.tolist()[:8]}", f"0 … {tokens}, never decreasing")
        if self.block_size < 1:
            raise _bad("block_size", str(self.block_size), "at least 1")

    @classmethod
    def sequence(
        cls,
        tokens: ArrayLike,
        start: int | None = None,
        history: Sequence[int] | None = None,
        *,
        dead: ArrayLike | None = None,
        history_dead: ArrayLike | None = None,
        slots: ArrayLike | None = None,
        block_table: ArrayLike | None = None,
        block_size: int = 64,
    ) -> HashBatch:
        """One request's chunk.  ``history`` are the tokens before it, oldest first; None is an unknown window.

        ``start`` is the chunk's first position, by default the length of the history.  The image sentinel is dead in
        the chunk and in the window; ``dead`` and ``history_dead`` mark further tokens.
        """
        ids = np.asarray(tokens, dtype=np.int32)
        past = np.asarray([] if history is None else history, dtype=np.int32)
        past_dead = _dead(past, history_dead)
        window = np.full((1, _DEPTH), -1, dtype=np.int32)
        window_dead = np.zeros((1, _DEPTH), dtype=bool)
        known = min(_DEPTH, len(past))
        window[0, :known], window_dead[0, :known] = past[::-1][:known], past_dead[::-1][:known]
        first = len(past) if start is None else start
        return cls(
            token_ids=ids,
            positions=np.arange(first, first + len(ids), dtype=np.int64),
            query_start_loc=np.array([0, len(ids)], dtype=np.int32),
            dead=_dead(ids, dead),
            window=window,
            window_dead=window_dead,
            slots=None if slots is None else np.asarray(slots, dtype=np.int64),
            block_table=None if block_table is None else np.atleast_2d(np.asarray(block_table, dtype=np.int32)),
            block_size=block_size,
        )

    @classmethod
    def concat(cls, batches: Sequence[HashBatch]) -> HashBatch:
        """The requests of all ``batches`` flattened into one; narrower block tables are padded with block 0."""
        if not batches:
            raise _bad("batches", "none", "at least one batch")
        if len({(batch.block_size, batch.slots is None, batch.block_table is None) for batch in batches}) > 1:
            raise _bad("batches", "different block sizes, slots or block tables", "the same kind of batch")
        ends = np.cumsum([0, *(len(batch.token_ids) for batch in batches)])
        starts = [batch.query_start_loc[:-1] + end for batch, end in zip(batches, ends, strict=False)]
        slots = [batch.slots for batch in batches if batch.slots is not None]
        tables = [batch.block_table for batch in batches if batch.block_table is not None]
        width = max((table.shape[1] for table in tables), default=0)
        padded = [np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables]
        plain = ("token_ids", "positions", "dead", "window", "window_dead")
        return cls(
            **{name: np.concatenate([getattr(batch, name) for batch in batches]) for name in plain},
            query_start_loc=np.concatenate([*starts, ends[-1:]]).astype(np.int32),
            slots=np.concatenate(slots) if slots else None,
            block_table=np.concatenate(padded) if padded else None,
            block_size=batches[0].block_size,
        )


class SlotCache:
    """The V1 runner's history: one compressed id or ``DEAD_ID`` per KV slot; new slots are 0, not dead (H12)."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise UsageError(f"{num_slots} slots", code="bad-slots", who="SlotCache", expected="at least 1")
        self.values = np.zeros(num_slots, dtype=np.int32)

    def write(self, slots: Any, values: Int32) -> None:
        """Store ``values`` [T] at ``slots`` [T]; a negative slot is not written."""
        kept = slots >= 0
        self.values[slots[kept]] = values[kept]

    def read(self, requests: Int64, positions: Int64, batch: HashBatch) -> Int32:
        """What the owner of each position wrote, through the batch's block table; both [T], result int32 [T]."""
        table = batch.block_table
        assert table is not None  # noqa: S101 - hash_ids refuses such a batch
        at = np.clip(positions, 0, table.shape[1] * batch.block_size - 1)
        block = table[requests, at // batch.block_size].astype(np.int64)
        slot = np.clip(block * batch.block_size + at % batch.block_size, 0, len(self.values) - 1)
        values: Int32 = self.values[slot]
        return values


def window_row(history: Sequence[int], computed: int, *, known: int | None = None) -> list[int]:
    """The window of a chunk that starts at ``computed``: column j is token ``computed − 1 − j``, else −1.

    ``known`` limits what the runner can see: the prompt's length on V1 (H13), all of the history on V2 (H14).
    """
    limit = len(history) if known is None else known
    wanted = (computed - 1 - column for column in range(_DEPTH))
    return [int(history[at]) if 0 <= at < limit else -1 for at in wanted]


def hash_ids(layout: EngramLayout, batch: HashBatch, token_map: Int32, cache: SlotCache | None = None) -> Int32:
    """Hash ids int32 [T, L, H]: row numbers of each layer's table, in [offset, offset + prime) of their column.

    ``token_map`` int32 [vocabulary].  With a ``cache`` the batch is written to it first, then read (H12).  Raises
    ``UsageError`` for another map, for token ids beyond it and for a cache without slots and block table.
    """
    tokens = len(batch.token_ids)
    out = np.empty((tokens, len(layout.layer_ids), layout.columns), dtype=np.int32)
    if not tokens:
        return out
    values = _shifted_values(layout, _sources(layout, batch, np.asarray(token_map), cache))
    for first in range(0, tokens, _CHUNK):
        _hash_chunk(layout, values[:, first : first + _CHUNK], out[first : first + _CHUNK])
    return out


def check_batch(batch: HashBatch, pad: int, vocabulary: int, slots: int | None) -> None:
    """Raise ``UsageError`` for ids beyond the token map, and for what a bound cache of ``slots`` slots cannot serve."""
    for name, ids in (("token_ids", batch.token_ids), ("window", batch.window), ("pad", np.array([pad]))):
        if ids.max(initial=0) >= vocabulary:
            raise _bad(name, f"id {ids.max()}", f"below {vocabulary}, the length of the token map")
    if slots is None:
        if not batch.window.shape[1]:
            raise _bad("window", "no columns and no slot cache", "a window (H20), −1 where it is unknown")
    elif batch.slots is None or batch.block_table is None:
        raise _bad("slots and block_table", "None", "arrays, because a slot cache is bound")
    elif batch.slots.max(initial=-1) >= slots:
        raise _bad("slots", f"slot {batch.slots.max()}", f"below {slots}, the slots of the cache")


def dummy_ids(layout: EngramLayout, tokens: int) -> Int32:
    """What a replica without requests contributes: int32 [tokens, L, H] of ``DEAD_ID`` (H17)."""
    return np.full((tokens, len(layout.layer_ids), layout.columns), DEAD_ID, dtype=np.int32)


def padded_ids(ids: Int32, tokens_across_dp: Sequence[int] | None, group: slice) -> Int32:
    """A replica's ids [T, …] padded with ``DEAD_ID`` to the most tokens in its own sharing group of all replicas (L10).

    Raises ``UsageError`` for more tokens than that, and where the counts are not known.
    """
    if tokens_across_dp is None or len(ids) > max(tokens_across_dp[group]):
        raise _bad("ids", f"{len(ids)} tokens, counts {tokens_across_dp}", "at most the group's largest count")
    short = max(tokens_across_dp[group]) - len(ids)
    return np.concatenate([ids, np.full((short, *ids.shape[1:]), DEAD_ID, dtype=np.int32)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """Where the value of each shift comes from: the chunk, the window, the slot cache, the pad id (H7)."""

    batch: HashBatch
    own: Int32  # [T] compressed ids, DEAD_ID where dead
    window: Int32  # [R, depth] the same for the window
    request: Int64  # [T]
    start: Int64  # [T] first position of the token's chunk
    pad: int
    cache: SlotCache | None

    def at(self, shift: int) -> Int32:
        """[T] the compressed id ``shift`` positions back, or DEAD_ID."""
        source: Int32 = np.concatenate([self.own[:shift], self.own[: len(self.own) - shift]])[: len(self.own)]
        position = self.batch.positions - shift
        outside = np.flatnonzero(position < self.start)
        source[outside] = self._before_chunk(outside, position[outside])
        return source

    def _before_chunk(self, tokens: Int64, position: Int64) -> Any:
        request, depth = self.request[tokens], self.window.shape[1]
        fallback = np.int32(self.pad) if self.cache is None else self.cache.read(request, position, self.batch)
        if not depth:
            return fallback
        column = self.start[tokens] - 1 - position
        inside = np.minimum(column, depth - 1)
        known = (column < depth) & (self.batch.window[request, inside] >= 0)
        return np.where(known, self.window[request, inside], fallback)


def _sources(layout: EngramLayout, batch: HashBatch, token_map: Int32, cache: SlotCache | None) -> _Sources:
    """Map the batch's tokens; write the slot cache before anything reads it (H12)."""
    _expect("token_map", token_map, np.int32, (None,), at_least=0)
    check_batch(batch, layout.pad_token_id, len(token_map), None if cache is None else len(cache.values))
    own = np.where(batch.dead, np.int32(DEAD_ID), token_map[batch.token_ids])
    if cache is not None:
        cache.write(batch.slots, own)
    request = _request_of(batch)
    return _Sources(
        batch=batch, own=own, request=request, cache=cache, pad=int(token_map[layout.pad_token_id]),
        window=np.where(batch.window_dead, np.int32(DEAD_ID), token_map[np.maximum(batch.window, 0)]),
        start=batch.positions[np.minimum(batch.query_start_loc[request], len(own) - 1)],
    )  # fmt: skip


def _shifted_values(layout: EngramLayout, sources: _Sources) -> Int64:
    """[max_ngram, T]: the compressed id at each shift; the pad's from the first blocked shift on (H6)."""
    positions = sources.batch.positions
    values = np.empty((layout.max_ngram, len(positions)), dtype=np.int64)
    blocked = np.zeros(len(positions), dtype=bool)
    for shift in range(layout.max_ngram):
        source = sources.at(shift)
        blocked |= (positions < shift) | (source == DEAD_ID)
        values[shift] = np.where(blocked, sources.pad, source)
    return values


def _request_of(batch: HashBatch) -> Int64:
    """[T] each token's request by upper bound in the boundaries; repeated boundaries are legal (H9)."""
    found = np.searchsorted(batch.query_start_loc[1:], np.arange(len(batch.token_ids)), side="right")
    return np.minimum(found, len(batch.query_start_loc) - 2)


def _hash_chunk(layout: EngramLayout, values: Int64, out: Int32) -> None:
    """Fill ``out`` [t, L, H] from ``values`` [max_ngram, t] (H5).

    The remainder is rolling − quotient × prime in the low 32 bits: numpy's division by one number is vectorised, its
    remainder is not.
    """
    unsigned, low_out = values.view(np.uint64), out.view(np.uint32)
    quotient, low_quotient = np.empty_like(unsigned[0]), np.empty(values.shape[1], dtype=np.uint32)
    multipliers, primes, offsets = layout.multipliers.astype(np.uint64), layout.primes.astype(np.uint64), layout.offsets
    for layer in range(len(layout.layer_ids)):
        rolling = unsigned[0] * multipliers[layer, 0]
        for shift in range(1, layout.max_ngram):
            rolling ^= unsigned[shift] * multipliers[layer, shift]
            low = rolling.astype(np.uint32)
            for column in range((shift - 1) * layout.n_heads, shift * layout.n_heads):
                np.floor_divide(rolling, primes[layer, column], out=quotient)
                low_quotient[:] = quotient
                low_quotient *= np.uint32(primes[layer, column])
                np.subtract(low, low_quotient, out=low_quotient)
                np.add(low_quotient, np.uint32(offsets[layer, column]), out=low_out[:, layer, column])


def _dead(ids: Int32, extra: ArrayLike | None) -> Bool:
    sentinel: Bool = ids == IMAGE_SENTINEL_ID
    return sentinel if extra is None else sentinel | np.asarray(extra, dtype=bool)


def _expect(name: str, array: Any, dtype: Any, shape: tuple[int | None, ...], *, at_least: int | None = None) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        kind = getattr(array, "dtype", type(array).__name__)
        raise _bad(name, str(kind), f"a numpy array of {np.dtype(dtype)}")
    if array.ndim != len(shape) or any(want is not None and want != got for want, got in zip(shape, array.shape)):  # noqa: B905
        raise _bad(name, f"shape {array.shape}", f"shape {shape}")
    if at_least is not None and array.size and array.min() < at_least:
        raise _bad(name, f"value {array.min()}", f"at least {at_least}")


def _bad(what: str, seen: str, expected: str) -> UsageError:
    return UsageError(seen, code="bad-batch", who="HashBatch", where=what, expected=expected)

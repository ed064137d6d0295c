"""The contract cases of lookups: L1–L5, L7–L10 and the rows of H17."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pytest_engram import ledger
from pytest_engram.backends.arrays import to_numpy
from pytest_engram.backends.protocol import TableShard
from pytest_engram.cases.case import Finding, Parts, Probe, Unsupported, cases, compare, refused, rows_differ
from pytest_engram.engines.tables import cut
from pytest_engram.hashing import DEAD_ID, EngramLayout, head_shard, shard_rank
from pytest_engram.rows import lookup_rows, synthetic_rows

_DIM = 256
_HEADS = 3
_SCALES: dict[str, tuple[str, Any]] = {  # case -> (what it asserts, the scale bytes, or how many of 20 … 240)
    "every-code": ("Every finite FP8 code, −0.0 and subnormals among them, under scale bytes 20 … 240.", 12),
    "scale-byte-0": ("Scale byte 0 gives 0.0 with the value's sign, not 2^−127.", [0]),
    "scale-byte-255": ("Scale byte 255 gives infinity (and NaN for zero values), not NaN throughout.", [255]),
    "scale-extremes": ("Scale bytes 1, 2 and 9: results below 2^−126 are kept, not flushed.", [1, 2, 9]),
    "scale-large": ("Scale bytes 246 … 254: what exceeds bf16, as 448 × 2^127, becomes infinity.", [246, 253, 254]),
}


def exact_rows(probe: Probe) -> Parts:
    """Rows are FP8 → FP32 × 2^(byte − 127) → bf16, bit by bit, for 1, 7 and 256 tokens."""
    return _counted(probe, _table(probe, 500), (1, 7, 256))


def background(probe: Probe) -> Parts:
    """A capped (background) grid gives the same bits and reports rows, tiles of 16 and programs of the launch."""
    shard = _table(probe, 300)
    ids = _drawn(probe, shard, 41)
    for cap in (1, 3, 64):
        yield f"cap {cap}", probe.rows_differ(shard, ids, cap)
        _, seen = probe.lookup(shard, ids, cap)
        made = ledger.launch(41, _HEADS, cap)
        if (seen.rows, seen.tiles) != (made.rows, made.tiles) or not 1 <= seen.grid <= made.grid:
            yield f"cap {cap}", Finding(detail="launch", expected=str(made), seen=str(seen))


def nan_codes(probe: Probe) -> Finding | None:
    """The two FP8 NaN codes stay NaN under every scale."""
    codes = np.where(np.arange(_DIM) % 5 == 0, 0x38, np.where(np.arange(_DIM) % 2, 0x7F, 0xFF))
    return _codes(probe, [0, 1, 127, 254, 255], codes.astype(np.uint8))


def bounds(probe: Probe) -> Parts:
    """Ids outside [start, end), DEAD_ID among them, give zeros; start and end − 1 are owned; row 0 is not read."""
    ids = [DEAD_ID, 99, 100, 101, 149, 150, 151, 2**31 - 1, -(2**31), 0, 99, 149]
    wanted = np.array(ids, dtype=np.int32).reshape(4, _HEADS)
    for start in (100, 0):
        weight, scales = _content(probe, 50)
        weight[[0, -1]], scales[[0, -1]] = 0x7E, 255  # infinite: zero times a row that must not be read is not zero
        shard = probe.shard(weight, scales, heads=_HEADS, start=start)
        shifted = wanted - np.int32(100 - start) * (wanted > 0)
        yield f"rows [{start}, {start + 50})", probe.rows_differ(shard, shifted)


def dead_rows(probe: Probe) -> Parts:
    """A dummy or padded batch of DEAD_ID gives zero rows, for 0 and 7 tokens (H17's rows, L10's padding)."""
    shard = _table(probe, 20)
    for count in (0, 7):
        yield f"{count} tokens", probe.rows_differ(shard, np.full((count, _HEADS), DEAD_ID, dtype=np.int32))


def dp_padding(probe: Probe) -> Parts:
    """Replicas that share a table pad their ids with DEAD_ID to their own group's most tokens; more is refused."""
    pad, counts, group = probe.optional("padded_ids"), (3, 5, 4096, 1), slice(0, 2)
    ids = probe.rng.integers(0, 20, (6, _HEADS), dtype=np.int32)
    for count in (3, 5):
        wanted = np.concatenate([ids[:count], np.full((5 - count, _HEADS), DEAD_ID, np.int32)])
        padded, name = to_numpy(pad(probe.place(ids[:count]), counts, group)), f"{count} tokens in a slot of 5"
        yield name, compare(padded, wanted, lambda token, head: {"token": token, "head": head})
    yield "6 tokens in a slot of 5", refused(partial(pad, probe.place(ids), counts, group), "gathered")
    yield "no counts", refused(partial(pad, probe.place(ids[:3]), None, group), "gathered")


def padded_heads(probe: Probe) -> Parts:
    """A shard's columns past the true heads give zeros: 23 heads over 4 shards, 24 over 5."""
    for heads, shards in ((23, 4), (24, 5)):
        weight, scales, primes = _heads(probe, heads)
        last = cut(weight, scales, head_shard(primes, shards, shards - 1), heads)
        yield f"{heads} heads over {shards} shards", probe.rows_differ(last, _head_ids(probe, primes, 3))


def shards_assemble(probe: Probe) -> Finding | None:
    """The shards' outputs side by side, cut to the true heads, are the whole lookup."""
    return _assembled(probe, range(5))


def head_order(probe: Probe) -> Finding | None:
    """Heads are split TP-major, then DP inside: outputs gathered over DP, then over TP, are the whole lookup."""
    rank = getattr(probe.backend, "shard_rank", shard_rank)
    return _assembled(probe, [rank(tp, dp, 2) for tp in range(3) for dp in range(2)])


def strided_ids(probe: Probe) -> Parts:
    """Ids are an int32 slice [:, layer] of [T, L, H], read by its strides."""
    shard = _table(probe, 200)
    base = probe.rng.integers(0, 200, (9, 2, _HEADS), dtype=np.int32)
    yield "by token", probe.rows_differ(shard, base[:, 1])
    yield "by head", probe.rows_differ(shard, np.repeat(base[:, 0], 2, axis=1)[:, ::2])


def wide_addresses(probe: Probe) -> Finding | None:
    """Row addresses are 64 bit: rows at and past byte 2^31 of the weights are the right ones."""
    return _wide(probe, 2**31 // _DIM)


def wide_scales(probe: Probe) -> Finding | None:
    """Scale addresses are 64 bit too: row 2^28 has its own scales (the table is 64 GiB, but sparse)."""
    if probe.engine != "cpu":
        raise Unsupported("a sparse table of 64 GiB exists on the host only")
    return _wide(probe, 2**31 * 32 // _DIM)


def spare_rows(probe: Probe) -> Finding | None:
    """A table with 7 rows more than its primes cover: the spare rows belong to no id."""
    weight, scales = _content(probe, 57)
    shard = probe.shard(weight, scales, heads=_HEADS, end=50)
    ids = np.array([[49, 50, 51], [56, 0, 57]], dtype=np.int32)
    return probe.rows_differ(shard, ids)


def token_counts(probe: Probe) -> Parts:
    """Token counts around tiles and sequence-parallel chunks: 0, 1, 3 … 5, 63 … 65, 127 … 129."""
    shard = replace(_table(probe, 400), head_start=1, local_heads=1)
    return _counted(probe, shard, (0, 1, 3, 4, 5, 63, 64, 65, 127, 128, 129))


def _content(probe: Probe, rows: int) -> tuple[Any, Any]:
    return synthetic_rows(0, rows, _DIM, layer=0, seed=int(probe.rng.integers(2**31)))


def _wide(probe: Probe, wrap: int) -> Finding | None:
    """Rows around 0 and around ``wrap`` of an otherwise untouched table."""
    weight, scales = _sparse(wrap + 4, _DIM), _sparse(wrap + 4, _DIM // 32)
    for low in (0, wrap - 2):
        weight[low : low + 4], scales[low : low + 4] = synthetic_rows(low, low + 4, _DIM, layer=0, seed=1)
    ids = np.array([[0, 1, wrap - 1], [wrap, wrap + 1, 2]], dtype=np.int32)
    return probe.rows_differ(probe.shard(weight, scales, heads=_HEADS), ids)


def _sparse(rows: int, columns: int) -> Any:
    """u8 [rows, columns] of zeros; a page that nobody writes costs nothing, whatever the limits on commitments."""
    descriptor = os.memfd_create("pytest-engram", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, rows * columns)
        return np.frombuffer(mmap.mmap(descriptor, rows * columns), dtype=np.uint8).reshape(rows, columns)
    finally:
        os.close(descriptor)


def _assembled(probe: Probe, ranks: Sequence[int]) -> Finding | None:
    """The outputs of all shards, in the order of ``ranks``, against the whole table's rows."""
    weight, scales, primes = _heads(probe, 24)
    ids = _head_ids(probe, primes, 3)
    expected = np.empty((3, 24, _DIM), dtype=np.uint16)
    lookup_rows(TableShard(weight, scales, 0, len(weight), 0, 24, 24), ids, expected)
    parts = [cut(weight, scales, head_shard(primes, len(ranks), rank), 24) for rank in ranks]
    outputs = [probe.lookup(part, ids)[0] for part in parts]
    return rows_differ(np.concatenate(outputs, axis=1)[:, :24], expected, ids)


def _table(probe: Probe, rows: int) -> TableShard:
    return probe.shard(*_content(probe, rows), heads=_HEADS)


def _drawn(probe: Probe, shard: TableShard, tokens: int) -> Any:
    return probe.rng.integers(shard.start, shard.end, (tokens, shard.total_heads), dtype=np.int32)


def _counted(probe: Probe, shard: TableShard, counts: Sequence[int]) -> Parts:
    """Rows of random ids, for batches of so many tokens."""
    return ((f"{count} tokens", probe.rows_differ(shard, _drawn(probe, shard, count))) for count in counts)


def _codes(probe: Probe, scale_bytes: Any, codes: Any = None) -> Finding | None:
    """One row of ``codes`` per scale byte; by default all 256 value codes, 448 in the NaN codes' place."""
    if codes is None:
        codes = np.arange(_DIM, dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] -= 1
    weight = np.tile(codes, (len(scale_bytes), 1))
    scales = np.repeat(np.asarray(scale_bytes, dtype=np.uint8)[:, None], _DIM // 32, axis=1)
    shard = probe.shard(weight, scales, heads=1)
    found = probe.rows_differ(shard, np.arange(len(weight), dtype=np.int32)[:, None])
    if found is None or found.token is None:
        return found
    return replace(found, detail=f"scale byte {scale_bytes[found.token]}: {found.detail}")


def _scaled(name: str, behaviour: str, scale_bytes: Any) -> Callable[[Probe], Finding | None]:
    def run(probe: Probe) -> Finding | None:
        drawn = isinstance(scale_bytes, int)
        return _codes(probe, probe.rng.choice(np.arange(20, 241), scale_bytes) if drawn else scale_bytes)

    run.__name__, run.__doc__ = name, behaviour
    return run


def _heads(probe: Probe, heads: int) -> tuple[Any, Any, Any]:
    """(weight, scales, primes) of a small table with one prime per head."""
    layout = EngramLayout.for_rows(50 * heads, layers=(1,), max_ngram=2, n_heads=heads)
    return *_content(probe, layout.rows(0)), layout.primes[0]


def _head_ids(probe: Probe, primes: Any, tokens: int) -> Any:
    offsets = np.cumsum(primes) - primes
    return (offsets + probe.rng.integers(0, primes, (tokens, len(primes)))).astype(np.int32)


_SCALED = [_scaled(name, *what) for name, what in _SCALES.items()]
LOOKUP_CASES = sorted(
    (
        *cases("lookup", compact=[background, _SCALED[0], bounds, strided_ids], L1=[exact_rows, background],
               L2=[*_SCALED, nan_codes], L3=[bounds], L5=[strided_ids, wide_addresses, wide_scales], L7=[spare_rows],
               L9=[token_counts], L10=[dead_rows]),
        *cases("shards", compact=[padded_heads], L4=[padded_heads, shards_assemble], L8=[head_order], L10=[dp_padding]),
    ), key=lambda case: int(case.contract[1:]),
)  # fmt: skip

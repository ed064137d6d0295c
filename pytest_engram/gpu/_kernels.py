"""The Triton kernels; the only module that imports Triton at its top, so it is itself imported inside functions."""
# ruff: noqa: N803, N806 - Triton's constants are upper case, and a kernel takes all it needs
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["rows", "start", "end", "stride_t", "stride_h"], do_not_specialize_on_alignment=["ids"])
def lookup_kernel(
    weight, scales, ids, out, rows, start, end, stride_t, stride_h, HEAD_START: tl.constexpr,
    LOCAL_HEADS: tl.constexpr, TOTAL_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See ``pytest_engram.gpu.gather.lookup``; the ids of the next tile are on their way while this one is decoded."""
    GROUPS: tl.constexpr = DIM // BLOCK
    lane = tl.arange(0, TILE)
    group = tl.arange(0, GROUPS)
    columns = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    step = tl.num_programs(0) * TILE
    first = tl.program_id(0) * TILE
    row = first + lane
    column = HEAD_START + row % LOCAL_HEADS
    live = (row < rows) & (column < TOTAL_HEADS)
    index = tl.load(ids + (row // LOCAL_HEADS).to(tl.int64) * stride_t + column.to(tl.int64) * stride_h, live, other=-1)
    for base in range(first, rows, step):
        row = base + lane
        column = HEAD_START + row % LOCAL_HEADS
        local = index.to(tl.int64) - start
        owned = (row < rows) & (column < TOTAL_HEADS) & (local >= 0) & (index < end)
        byte = tl.load(weight + local[:, None, None] * DIM + columns[None, :, :], owned[:, None, None], other=0)
        scale = tl.load(scales + local[:, None] * GROUPS + group[None, :], owned[:, None], other=0)
        ahead = row + step
        column = HEAD_START + ahead % LOCAL_HEADS
        live = (ahead < rows) & (column < TOTAL_HEADS)
        index = tl.load(
            ids + (ahead // LOCAL_HEADS).to(tl.int64) * stride_t + column.to(tl.int64) * stride_h, live, other=-1
        )
        # e4m3 has FP32's shape with a bias that is 120 smaller: sign, exponent and mantissa keep their order, and the
        # multiplication by 2^120 is exact, subnormals included; only the NaN code comes out as ±480.
        bits = ((byte.to(tl.int32) << 24) >> 4) & -2014314496
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where(tl.abs(value) == 480.0, float("nan"), value)
        power = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        result = (value * power[:, :, None]).to(tl.bfloat16)
        tl.store(out + row.to(tl.int64)[:, None, None] * DIM + columns[None, :, :], result, (row < rows)[:, None, None])


@triton.jit(do_not_specialize=["nanoseconds"])
def spin_kernel(nanoseconds):
    """Occupy the stream for that long by the GPU's global timer, one program, no memory."""
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()


@triton.jit(do_not_specialize=["count"])
def slot_kernel(tokens, dead, slots, token_map, cache, count, DEAD: tl.constexpr, TILE: tl.constexpr):
    """Write the compressed ids of a batch to its slots; a negative slot is not written (H12)."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = at < count
    slot = tl.load(slots + at, live, other=-1)
    value = tl.load(token_map + tl.load(tokens + at, live, other=0))
    value = tl.where(tl.load(dead + at, live, other=0) != 0, DEAD, value)
    tl.store(cache + slot, value, live & (slot >= 0))


@triton.jit
def request_of(starts, at, requests, steps):
    """H9: the upper bound of each token in the boundaries; what lies past the last one belongs to the last request."""
    request = tl.zeros_like(at)
    above = request + requests
    for _ in range(steps):
        middle = (request + above) // 2
        left = request < above
        right = left & (tl.load(starts + 1 + middle, left, other=0) <= at)
        request = tl.where(right, middle + 1, request)
        above = tl.where(right, above, middle)
    return tl.minimum(request, requests - 1)


@triton.jit
def cached_ids(table, cache, request, back, width, block_size, num_slots):
    """H12: what the owner of each position wrote, through the batch's block table."""
    place = tl.minimum(tl.maximum(back, 0), width.to(tl.int64) * block_size - 1)
    block = tl.load(table + request.to(tl.int64) * width + place // block_size).to(tl.int64)
    return tl.load(cache + tl.minimum(tl.maximum(block * block_size + place % block_size, 0), num_slots - 1))


@triton.jit(do_not_specialize=["count", "requests", "steps", "depth", "width", "block_size", "num_slots", "pad"])
def hash_kernel(
    tokens, positions, starts, dead, window, window_dead, table, cache, token_map, multipliers, primes, offsets, out,
    count, requests, steps, depth, width, block_size, num_slots, pad, DEAD: tl.constexpr, CACHED: tl.constexpr,
    NGRAM: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See ``pytest_engram.gpu.hash``: one program hashes TILE tokens for one layer."""
    COLUMNS: tl.constexpr = (NGRAM - 1) * HEADS
    layer = tl.program_id(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = at < count
    request = request_of(starts, at, requests, steps)
    position = tl.load(positions + at, live, other=0)
    first = tl.load(positions + tl.minimum(tl.load(starts + request), count - 1))
    head = tl.arange(0, WIDE)
    blocked = at < 0
    rolling = tl.zeros([TILE], tl.uint64)
    for shift in tl.static_range(NGRAM):  # H7: the chunk, then the window, then the slot cache, then the pad id
        back = position - shift
        inside = live & (back >= first) & (at >= shift)
        column = first - 1 - back
        seen = request.to(tl.int64) * depth + column
        known = live & (back < first) & (column < depth)
        known = known & (tl.load(window + seen, known, other=-1) >= 0)
        raw = tl.where(inside, tl.load(tokens + at - shift, inside, other=0), tl.load(window + seen, known, other=0))
        gone = tl.load(dead + at - shift, inside, other=0) | tl.load(window_dead + seen, known, other=0)
        value = tl.where(gone != 0, DEAD, tl.load(token_map + raw))
        other = tl.zeros([TILE], tl.int32) + pad
        if CACHED:
            other = cached_ids(table, cache, request, back, width, block_size, num_slots)
        value = tl.where(inside | known, value, other)
        blocked = blocked | (position < shift) | (value == DEAD)  # H6: this shift and every deeper one
        value = tl.where(blocked, pad, value).to(tl.uint64)
        rolling = rolling ^ (value * tl.load(multipliers + layer * NGRAM + shift).to(tl.uint64))
        if shift > 0:
            number = layer * COLUMNS + (shift - 1) * HEADS + head
            prime = tl.load(primes + number, head < HEADS, other=1).to(tl.uint64)
            offset = tl.load(offsets + number, head < HEADS, other=0)
            hashed = (rolling[:, None] % prime[None, :]).to(tl.int64) + offset[None, :]
            row = at.to(tl.int64)[:, None] * (tl.num_programs(1) * COLUMNS) + number[None, :]
            tl.store(out + row, hashed.to(tl.int32), live[:, None] & (head < HEADS)[None, :])

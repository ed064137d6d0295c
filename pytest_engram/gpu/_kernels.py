"""The Triton kernels; the only module that imports Triton at its top, so it is itself imported inside functions."""
# ruff: noqa: N803, N806 - Triton's constants are upper case, and a kernel takes all it needs
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(
    do_not_specialize=["rows", "start", "end", "stride_t", "stride_h"],
    do_not_specialize_on_alignment=["ids"],
)
def lookup_kernel(
    weight,
    scales,
    ids,
    out,
    rows,
    start,
    end,
    stride_t,
    stride_h,
    HEAD_START: tl.constexpr,
    LOCAL_HEADS: tl.constexpr,
    TOTAL_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
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

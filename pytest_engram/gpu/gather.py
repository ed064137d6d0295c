"""Rows of a table in HBM or registered host memory, decoded into BF16 on the GPU by one persistent Triton kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from pytest_engram import ledger
from pytest_engram.errors import UsageError

BLOCK = 32  # values that share one ue8m0 scale byte
WARPS = 8  # 256 threads hold a tile of 16 × 256 bytes as one 16-byte load each
_INTERPRETER_SMS = 4  # the interpreter's machine is imaginary, its grid is not


class Shard(Protocol):
    """The part of a table that a lookup reads; see ``pytest_engram.backends.protocol.TableShard``."""

    weight: Any
    scales: Any
    start: int
    end: int
    head_start: int
    local_heads: int
    total_heads: int


class Shape(NamedTuple):
    """The actual launch: (token, local head) rows, tiles of 16 rows, programs."""

    rows: int
    tiles: int
    grid: int


def background_cap(device: Any) -> int:
    """Half of the device's SMs: bounds the programs of a background lookup, reserves no SM for anybody."""
    return ledger.background_cap(full_grid(device))


def full_grid(device: Any) -> int:
    """One program per SM: the table dwarfs the reach of the TLB, so more programs only add misses."""
    return _INTERPRETER_SMS if device.type == "cpu" else _sms(device.index)


def lookup(shard: Shard, ids: Any, out: Any, *, cap: int | None = None, warps: int = WARPS) -> Shape:
    """Decode the rows of ``ids`` into ``out`` on the current stream and return the actual launch.

    ``shard.weight`` u8 [rows, dim] and ``shard.scales`` u8 [rows, dim // 32] are contiguous torch tensors in HBM or
    device views of registered host memory; ``ids`` int32 [T, total_heads] with any stride; ``out`` bf16
    [T, local_heads, dim], contiguous.  FP8 e4m3 → FP32 × 2^(byte − 127) → BF16, where the scale byte is shifted into
    the FP32 exponent field (contract L2: 0 gives 0.0, 255 gives infinity).  Ids outside [start, end), DEAD_ID −1
    among them, and padded heads give zeros; no row is read for them.  ``cap`` bounds the programs; None is one per SM.

    Raises:
        UsageError: ``bad-lookup`` for a shape, dtype or stride that the kernel would misread.
    """
    _check(shard, ids, out)
    made = ledger.launch(ids.shape[0], shard.local_heads, full_grid(out.device) if cap is None else cap)
    shape = Shape(made.rows, made.tiles, made.grid)
    if shape.rows:
        from pytest_engram.gpu._kernels import lookup_kernel

        lookup_kernel[(shape.grid,)](
            shard.weight, shard.scales, ids, out, shape.rows, shard.start, shard.end, ids.stride(0), ids.stride(1),
            HEAD_START=shard.head_start, LOCAL_HEADS=shard.local_heads, TOTAL_HEADS=shard.total_heads,
            DIM=out.shape[2], BLOCK=BLOCK, TILE=ledger.TILE_ROWS, num_warps=warps,
        )  # fmt: skip
    return shape


def _check(shard: Shard, ids: Any, out: Any) -> None:
    tokens, dim, rows = ids.shape[0], shard.weight.shape[-1], shard.weight.shape[0]
    wrong = (
        (
            str(ids.dtype) != "torch.int32" or tuple(ids.shape) != (tokens, shard.total_heads),
            f"ids {ids.dtype} {tuple(ids.shape)}", f"int32 [T, {shard.total_heads}]",
        ),
        (
            str(out.dtype) != "torch.bfloat16" or tuple(out.shape) != (tokens, shard.local_heads, dim),
            f"out {out.dtype} {tuple(out.shape)}", f"bfloat16 {(tokens, shard.local_heads, dim)}",
        ),
        (not out.is_contiguous(), f"out with strides {out.stride()}", "contiguous rows"),
        (_not_bytes(shard.weight) or dim & (dim - 1) != 0 or dim < BLOCK, f"weight {_words(shard.weight)}", "u8 rows"),
        (
            _not_bytes(shard.scales) or tuple(shard.scales.shape) != (rows, dim // BLOCK),
            f"scales {_words(shard.scales)}", f"u8 {(rows, dim // BLOCK)}",
        ),
        (not 0 <= shard.end - shard.start <= rows, f"ids [{shard.start}, {shard.end})", f"at most {rows} rows"),
    )  # fmt: skip
    for bad, seen, expected in wrong:
        if bad:
            raise UsageError(seen, code="bad-lookup", who="lookup", expected=expected)


def _not_bytes(tensor: Any) -> bool:
    return str(tensor.dtype) != "torch.uint8" or tensor.ndim != 2 or not tensor.is_contiguous()


def _words(tensor: Any) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"


@lru_cache
def _sms(index: int | None) -> int:
    import torch

    device = torch.cuda.current_device() if index is None else index
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

"""Rows of a table in HBM or registered host memory, decoded into BF16 on the GPU by one persistent Triton kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pytest_engram import ledger
from pytest_engram.errors import UsageError

BLOCK = 32  # values that share one ue8m0 scale byte
WARPS = 8  # 256 threads hold a tile of 16 × 256 bytes as one 16-byte load each
_INTERPRETER_SMS = 4  # the interpreter's machine is imaginary, its grid is not


def background_cap(device: Any) -> int:
    """Half of the device's SMs: bounds the programs of a background lookup, reserves no SM for anybody."""
    return ledger.background_cap(full_grid(device))


@lru_cache
def full_grid(device: Any) -> int:
    """One program per SM: the table dwarfs the reach of the TLB, so more programs only add misses."""
    if device.type == "cpu":
        return _INTERPRETER_SMS
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def lookup(shard: Any, ids: Any, out: Any, *, cap: int | None = None, warps: int = WARPS) -> ledger.LaunchShape:
    """Decode the rows of ``ids`` into ``out`` on the current stream and return the actual launch.

    ``shard`` is a :class:`~pytest_engram.backends.protocol.TableShard` whose ``weight`` u8 [rows, dim] and ``scales``
    u8 [rows, dim // 32] are contiguous torch tensors in HBM or device views of registered host memory; ``ids`` int32
    [T, total_heads] with any stride; ``out`` bf16 [T, local_heads, dim], contiguous.  FP8 e4m3 → FP32 × 2^(byte − 127)
    → BF16, where the scale byte is shifted into the FP32 exponent field (contract L2: 0 gives 0.0, 255 gives
    infinity).  Ids outside [start, end), DEAD_ID −1 among them, and padded heads give zeros; no row is read for them.
    ``cap`` bounds the programs; None is one per SM.

    Raises:
        UsageError: ``bad-lookup`` for a shape, dtype or stride that the kernel would misread.
    """
    _check(shard, ids, out)
    made = ledger.launch(ids.shape[0], shard.local_heads, full_grid(out.device) if cap is None else cap)
    if made.rows:
        from pytest_engram.gpu._kernels import lookup_kernel

        lookup_kernel[(made.grid,)](
            shard.weight, shard.scales, ids, out, made.rows, shard.start, shard.end, *ids.stride(),
            HEAD_START=shard.head_start, LOCAL_HEADS=shard.local_heads, TOTAL_HEADS=shard.total_heads,
            DIM=out.shape[2], BLOCK=BLOCK, TILE=ledger.TILE_ROWS, num_warps=warps,
        )  # fmt: skip
    return made


def _check(shard: Any, ids: Any, out: Any) -> None:
    tokens, (rows, dim) = ids.shape[0], shard.weight.shape
    wanted = {
        "ids": (ids, "int32", (tokens, shard.total_heads), True),
        "out": (out, "bfloat16", (tokens, shard.local_heads, dim), out.is_contiguous()),
        "weight": (shard.weight, "uint8", (rows, dim), shard.weight.is_contiguous()),
        "scales": (shard.scales, "uint8", (rows, dim // BLOCK), shard.scales.is_contiguous()),
    }
    for name, (tensor, dtype, shape, dense) in wanted.items():
        if str(tensor.dtype) != f"torch.{dtype}" or tuple(tensor.shape) != shape or not dense:
            seen = f"{name} {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}"
            raise _bad(seen, f"{dtype} {shape}, contiguous but for ids")
    if dim & (dim - 1) or dim < BLOCK:
        raise _bad(f"rows of {dim} values", f"a power of two from {BLOCK}")
    if not 0 <= shard.end - shard.start <= rows or shard.head_start < 0:
        raise _bad(
            f"ids [{shard.start}, {shard.end}), heads from {shard.head_start}", f"at most {rows} rows; head 0 on"
        )
    devices = {tensor.device for tensor, *_ in wanted.values()}
    if len(devices) > 1:
        raise _bad(f"tensors on {', '.join(sorted(map(str, devices)))}", "one device")


def _bad(seen: str, expected: str) -> UsageError:
    return UsageError(seen, code="bad-lookup", who="lookup", expected=expected)

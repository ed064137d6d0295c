"""Rows of a table in HBM or registered host memory, decoded into BF16 on the GPU by one persistent Triton kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pytest_engram import ledger
from pytest_engram.errors import UsageError
from pytest_engram.rows import lookup_faults

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


def lookup(shard: Any, ids: Any, out: Any, *, cap: int | None = None, warps: int = WARPS) -> ledger.Launch:
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
    for seen, expected in _faults(shard, ids, out):
        raise UsageError(seen, code="bad-lookup", who="lookup", expected=expected)
    made = ledger.launch(ids.shape[0], shard.local_heads, full_grid(out.device) if cap is None else cap)
    if made.rows:
        from pytest_engram.gpu._kernels import lookup_kernel

        lookup_kernel[(made.grid,)](
            shard.weight, shard.scales, ids, out, made.rows, shard.start, shard.end, *ids.stride(),
            HEAD_START=shard.head_start, LOCAL_HEADS=shard.local_heads, TOTAL_HEADS=shard.total_heads,
            DIM=out.shape[2], BLOCK=BLOCK, TILE=ledger.TILE_ROWS, num_warps=warps,
        )  # fmt: skip
    return made


def _faults(shard: Any, ids: Any, out: Any) -> Iterator[tuple[str, str]]:
    """(seen, expected): what no lookup could read, then what this kernel cannot."""
    yield from lookup_faults(shard, ids, out, "torch.")
    dim, scales = shard.weight.shape[1], shard.scales.shape[1]
    if dim & (dim - 1) or dim < BLOCK or scales != dim // BLOCK:
        yield f"rows of {dim} values and {scales} scales", f"a power of two from {BLOCK}, and one scale for {BLOCK}"
    devices = {str(tensor.device) for tensor in (ids, out, shard.weight, shard.scales)}
    if len(devices) > 1:
        yield f"tensors on {', '.join(sorted(devices))}", "one device"

"""The row oracle: FP8 e4m3 values × ue8m0 scales to bf16 bits, synthetic tables, and the gate (L1–L5, L11)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_engram.errors import UsageError

Bytes = NDArray[np.uint8]
Bf16 = NDArray[np.uint16]  # bit patterns

QUIET_NAN = 0x7FC0  # every NaN this oracle makes; compare with same_bits, which takes all NaN patterns as equal

_BLOCK = 512  # rows per pass: few enough for the caches, many enough that numpy's calls cost nothing
_LEAST_SCALE, _SCALES = 120, 14  # synthetic scale bytes 120 … 133, upstream's own test range
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64


def e4m3_values() -> NDArray[np.float32]:
    """The 256 FP8 e4m3 (finite-only) codes as float32; 0x7F and 0xFF are NaN."""
    code = np.arange(256, dtype=np.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code >= 128, -magnitude, magnitude).astype(np.float32)


def ue8m0_values() -> NDArray[np.float32]:
    """The 256 scale bytes as float32, shifted into the exponent field: 0 -> 0.0, 255 -> inf (L2)."""
    bits: NDArray[np.uint32] = np.arange(256, dtype=np.uint32) << np.uint32(23)
    return bits.view(np.float32)


def to_bf16(values: NDArray[np.float32]) -> Bf16:
    """bf16 bits of float32 ``values``, rounded to nearest even; every NaN becomes ``QUIET_NAN``."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), QUIET_NAN, rounded).astype(np.uint16)


def same_bits(left: Bf16, right: Bf16) -> NDArray[np.bool_]:
    """Elementwise: equal bf16 bit patterns, or NaN on both sides whatever the payload."""
    both_nan = ((left & 0x7FFF) > 0x7F80) & ((right & 0x7FFF) > 0x7F80)
    same: NDArray[np.bool_] = (left == right) | both_nan
    return same


@lru_cache(maxsize=1)
def product_table() -> Bf16:
    """u16 [65,536]: bf16(value × scale) at ``scale byte << 8 | value byte``; the product is taken in FP32 (L1)."""
    with np.errstate(invalid="ignore", over="ignore"):
        table = to_bf16(ue8m0_values()[:, None] * e4m3_values()[None, :]).ravel()
    table.flags.writeable = False
    return table


def decode_rows(weight: Bytes, scales: Bytes, out: Bf16 | None = None) -> Bf16:
    """bf16 bits u16 [n, dim] of ``weight`` u8 [n, dim] and ``scales`` u8 [n, dim // block]; ``out`` contiguous."""
    count, dim = weight.shape
    groups = scales.shape[1]
    if len(scales) != count or not groups or dim % groups:
        raise _bad(f"weight {weight.shape}, scales {scales.shape}", "scales [n, dim // block]")
    result = np.empty((count, dim), dtype=np.uint16) if out is None else out
    index = np.empty((min(_BLOCK, count), groups, dim // groups), dtype=np.uint16)
    for first in range(0, count, _BLOCK):
        part = slice(first, min(first + _BLOCK, count))
        here = index[: part.stop - first]
        high = scales[part].astype(np.uint16) << np.uint16(8)
        np.bitwise_or(weight[part].reshape(here.shape), high[:, :, None], out=here)
        np.take(product_table(), here, out=result[part].reshape(here.shape), mode="clip")
    return result


def lookup_rows(shard: Any, ids: NDArray[np.int32], out: Bf16) -> None:
    """Rows of ``ids`` int32 [T, total_heads] (any stride) decoded into ``out`` u16 [T, local_heads, dim] (contiguous).

    ``shard`` is a :class:`~pytest_engram.backends.protocol.TableShard` of contiguous numpy arrays.  Ids that it
    does not own, ``DEAD_ID`` among them, and padded heads give zeros; no row is read for them (L3, L4).
    Raises ``UsageError`` for wrong shapes, dtypes or a strided table.
    """
    for seen, expected in lookup_faults(shard, ids, out):
        raise _bad(seen, expected)
    if not out.size:
        return
    columns = np.arange(shard.head_start, shard.head_start + shard.local_heads)
    wanted = np.full((len(ids), shard.local_heads), -1, dtype=np.int64)
    real = columns < shard.total_heads
    wanted[:, real] = ids[:, columns[real]]
    flat, rows = wanted.ravel(), out.reshape(-1, out.shape[2])
    for first in range(0, len(flat), _BLOCK):
        part = flat[first : first + _BLOCK]
        _gather(shard, part, rows[first : first + len(part)])


def synthetic_rows(start: int, stop: int, dim: int, *, layer: int, seed: int, block: int = 32) -> tuple[Bytes, Bytes]:
    """(weight u8 [n, dim], scales u8 [n, dim // block]) of rows ``start`` … ``stop − 1``; see :func:`synthetic_at`."""
    return synthetic_at(np.arange(start, stop, dtype=np.int64), dim, layer=layer, seed=seed, block=block)


def synthetic_at(rows: NDArray[np.int64], dim: int, *, layer: int, seed: int, block: int = 32) -> tuple[Bytes, Bytes]:
    """The content of any row without a table: ``layer`` is the layer's index, ``rows`` int64 [n] below 2**32.

    The low nibbles of the first 8 bytes spell the row number, so no two rows of a layer agree.
    No byte is an FP8 NaN code and scales are 120 … 133, so every result is finite.  Needs no generator whose stream
    could change.
    """
    if dim % 8 or dim % block:
        raise _bad(f"dim {dim}, block {block}", "a multiple of 8 and of the block")
    number = rows.astype(np.uint64)
    key, step, keep = _pattern(dim // 8, layer, seed)
    words = number[:, None] * step
    words ^= key
    words &= keep
    words[:, 0] = (words[:, 0] & np.uint64(0x3030303030303030)) | _spread(number)
    shifts = np.arange(dim // block, dtype=np.uint64) % np.uint64(8) * np.uint64(8)
    drawn = (_splitmix(number + key[0])[:, None] >> shifts).astype(np.uint8).astype(np.uint16)
    scales = (_LEAST_SCALE + ((drawn * np.uint16(_SCALES)) >> 8)).astype(np.uint8)
    return words.view(np.uint8), scales


def gated_residual(
    hidden: Any, key: Any, value: Any, query_norm: Any, key_norm: Any, *, keep: Any = None, xp: Any = np
) -> Any:
    """hidden + sigmoid(signed sqrt of the normalised dot product) × value (L11), on arrays of module ``xp``.

    ``hidden``, ``key``, ``value`` float [T, D]; ``query_norm``, ``key_norm`` float [D]; ``keep`` bool [T] shuts the
    gate where False, so those hidden states pass unchanged.  eps 1e-20, clamp 1e-6; ``xp`` is numpy or torch.
    Raises ``UsageError`` for another mask, which would be broadcast.
    """
    dim = hidden.shape[-1]
    if keep is not None and (not str(keep.dtype).endswith("bool") or keep.shape != hidden.shape[:-1]):
        raise _bad(f"keep {keep.dtype} {tuple(keep.shape)}", f"bool {tuple(hidden.shape[:-1])}")
    hidden_rms, key_rms = (xp.sqrt((each * each).sum(-1) / dim + 1e-20) for each in (hidden, key))
    dot = (hidden * query_norm * key_norm * key).sum(-1) / hidden_rms / key_rms / dim**0.5
    root = xp.sqrt(abs(dot).clip(min=1e-6))
    gate = 1 / (1 + xp.exp(xp.where(dot < 0, root, -root)))
    if keep is not None:
        gate = gate * keep
    return hidden + gate[..., None] * value


def project(rows: Bf16, wkv: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(key, value) [T, D] of staged ``rows`` u16 [T, H, dim] through ``wkv`` float [H × dim, 2 D], the key first.

    A token's rows are one vector, head after head, as the model's ``wkv`` layer takes them; ``wkv``'s precision counts.
    """
    bits = rows.astype(np.uint32) << np.uint32(16)
    flat = bits.reshape(len(rows), len(wkv)).view(np.float32)
    both = flat.astype(wkv.dtype) @ wkv
    return both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]


def _bad(seen: str, expected: str) -> UsageError:
    return UsageError(seen, code="bad-rows", who="row oracle", expected=expected)


def lookup_faults(shard: Any, ids: Any, out: Any, kind: str = "") -> Iterator[tuple[str, str]]:
    """(seen, expected) of arrays that a lookup would misread, all of numpy or, with ``kind`` "torch.", all tensors."""
    staged = "bfloat16" if kind else "uint16"
    wanted = (("ids", ids, "int32", 2), ("weight", shard.weight, "uint8", 2), ("scales", shard.scales, "uint8", 2),
              ("out", out, staged, 3))  # fmt: skip
    for name, array, dtype, axes in wanted:
        seen = str(getattr(array, "dtype", type(array).__name__))
        if seen != f"{kind}{dtype}" or array.ndim != axes:
            yield f"{name} {seen}", f"{kind}{dtype} of {axes} axes"
        if name != "ids" and not (array.is_contiguous() if kind else array.flags.c_contiguous):
            yield f"{name} strided", "contiguous rows: else every lookup copies the whole table"
    shape = len(ids), shard.local_heads, shard.weight.shape[1]
    if ids.shape[1] != shard.total_heads or tuple(out.shape) != shape:
        yield f"ids {tuple(ids.shape)}, out {tuple(out.shape)}", f"[T, {shard.total_heads}] and {shape}"
    rows = min(len(shard.weight), len(shard.scales))
    if not 0 <= shard.end - shard.start <= rows or shard.head_start < 0:
        yield f"ids [{shard.start}, {shard.end}), heads from {shard.head_start}", f"at most {rows} rows; head 0 on"


def _gather(shard: Any, wanted: NDArray[np.int64], out: Bf16) -> None:
    owned = (wanted >= shard.start) & (wanted < shard.end)
    local = wanted[owned] - shard.start
    rows = shard.weight.take(local, axis=0), shard.scales.take(local, axis=0)
    if len(local) == len(out):  # as usual: in place, without a copy
        decode_rows(*rows, out)
    else:
        out[owned], out[~owned] = decode_rows(*rows), 0


def _splitmix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea, Flood 2014) of each element."""
    mixed: NDArray[np.uint64] = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX[1])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX[2])
    mixed ^= mixed >> np.uint64(31)
    return mixed


@lru_cache(maxsize=16)
def _pattern(words: int, layer: int, seed: int) -> tuple[NDArray[np.uint64], ...]:
    """(key, odd step, mask) u64 [words] each; the masks clear one bit of every byte, so no byte is 0x7F or 0xFF."""
    base = (seed * 0x10001 + layer * 0x5DEECE66D + 1) & (2**64 - 1)
    state = np.arange(1, 2 * words + 1, dtype=np.uint64) * np.uint64(_MIX[0]) + np.uint64(base)
    drawn = _splitmix(state)
    cleared = np.array([0x40, 0x01, 0x08, 0x04], dtype=np.uint64)[np.arange(words) % 4]
    return drawn[:words], drawn[words:] | np.uint64(1), ~(cleared * np.uint64(0x0101010101010101))


def _spread(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The 8 nibbles of a 32-bit number, one in the low half of each byte."""
    spread: NDArray[np.uint64] = number & np.uint64(0xFFFFFFFF)
    for shift, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
        spread = (spread | (spread << np.uint64(shift))) & np.uint64(mask)
    return spread

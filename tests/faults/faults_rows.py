"""Lookups and gates with one fault each: name -> (contract lines that must catch it, backend)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import Launch, TableShard
from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.hashing import padded_ids
from pytest_engram.layout import parameter_name
from pytest_engram.rows import decode_rows, e4m3_values, gated_residual, lookup_rows, project, ue8m0_values


def _lookup(fault: Callable[..., Any]) -> ReferenceBackend:
    """``fault(shard, ids, out, cap)`` writes the rows; what it returns, if anything, is the launch."""
    backend = ReferenceBackend()

    def lookup(shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        launch = ReferenceBackend().lookup(shard, ids, np.empty_like(out), cap=cap)
        return fault(shard, ids, out, cap) or launch

    backend.lookup = lookup  # type: ignore[method-assign]
    return backend


def _shard(change: Callable[[TableShard], dict[str, Any]]) -> ReferenceBackend:
    """Fields of the shard are replaced before the oracle looks up."""
    return _lookup(
        lambda shard, ids, out, _: lookup_rows(replace(shard, **change(shard)), np.ascontiguousarray(ids), out)
    )


def _ids(change: Callable[[Any, TableShard], Any]) -> ReferenceBackend:
    return _lookup(lambda shard, ids, out, _: lookup_rows(shard, np.ascontiguousarray(change(ids, shard)), out))


def _after(change: Callable[[Any, TableShard, Any], Any]) -> ReferenceBackend:
    """``change(out, shard, ids)`` alters the oracle's rows."""

    def fault(shard: TableShard, ids: Any, out: Any, _cap: Any) -> None:
        lookup_rows(shard, ids, out)
        change(out, shard, ids)

    return _lookup(fault)


def _decoded(change: Callable[[Any, Any, Any], Any]) -> ReferenceBackend:
    """``change(out, codes, scale bytes)`` alters each value of owned rows in real heads; out is a copy to return."""

    def alter(out: Any, shard: TableShard, ids: Any) -> None:
        mine = ids[:, shard.head_start :][:, : shard.local_heads]
        owned = (mine >= shard.start) & (mine < shard.end)
        rows = mine[owned].astype(np.int64) - shard.start
        if len(rows):
            scales = np.repeat(shard.scales[rows], shard.weight.shape[1] // shard.scales.shape[1], axis=-1)
            real = out[:, : mine.shape[1]]
            real[owned] = change(real[owned], shard.weight[rows], scales)

    return _after(alter)


def _truncated(_out: Any, codes: Any, scales: Any) -> Any:
    with np.errstate(all="ignore"):
        return ((e4m3_values()[codes] * ue8m0_values()[scales]).view(np.uint32) >> 16).astype(np.uint16)


def _e8m0(_out: Any, codes: Any, scales: Any, bias: int = 127) -> Any:
    with np.errstate(all="ignore"):
        exact = (e4m3_values()[codes] * 2.0 ** (scales.astype(np.float64) - bias)).astype(np.float32)
    return (exact.view(np.uint32) >> 16).astype(np.uint16)


def _first_tiles(shard: TableShard, ids: Any, out: Any, cap: int | None) -> None:
    lookup_rows(shard, ids, out)
    if cap is not None:
        out.reshape(-1, out.shape[2])[16 * cap :] = 0


def _launch(shard: TableShard, ids: Any, out: Any, _cap: Any) -> Launch:
    lookup_rows(shard, ids, out)
    return Launch(out.shape[0] * out.shape[1], out.shape[0], 1)


def _stride_blind(ids: Any, _shard: TableShard) -> Any:
    base = ids if ids.base is None else ids.base
    return base.ravel()[: ids.size].reshape(ids.shape)


def _others(shard: TableShard, ids: Any) -> Any:
    mine = ids[:, shard.head_start :][:, : shard.local_heads]
    return (mine < shard.start) | (mine >= shard.end)


def _masked_product(shard: TableShard, ids: Any, out: Any, _cap: Any) -> None:
    lookup_rows(shard, ids, out)
    first = decode_rows(shard.weight[:1], shard.scales[:1])[0]
    others = _others(shard, ids)
    out[:, : others.shape[1]][others] = np.where((first & 0x7FFF) >= 0x7F80, 0x7FC0, 0)


def _owned_only(shard: TableShard, ids: Any, out: Any, _cap: Any) -> None:
    before, others = out.copy(), _others(shard, ids)
    lookup_rows(shard, ids, out)
    real = out[:, : others.shape[1]]
    real[others] = before[:, : others.shape[1]][others]


def _real_heads(shard: TableShard, ids: Any, out: Any, _cap: Any) -> None:
    real = min(shard.local_heads, shard.total_heads - shard.head_start)
    before = out[:, real:].copy()
    lookup_rows(shard, ids, out)
    out[:, real:] = before


def _scale_wrap(shard: TableShard, ids: Any, out: Any, _cap: Any) -> None:
    """The weights of the right row with the scales of row mod 2^28, whose byte offset wraps at 2^31."""
    lookup_rows(shard, ids, out)
    local = ids.astype(np.int64) - shard.start
    for token, head in np.argwhere(local >= 2**28):
        row = local[token, head]
        if row < len(shard.weight):
            low = row - 2**28
            one = replace(shard, weight=shard.weight[row : row + 1], scales=shard.scales[low : low + 1], start=0, end=1,
                          head_start=0, local_heads=1, total_heads=1)  # fmt: skip
            lookup_rows(one, np.zeros((1, 1), np.int32), out[token : token + 1, head : head + 1])


def _output(fault: Callable[..., Any]) -> ReferenceBackend:
    """``fault(hidden, rows, wkv, query_norm, key_norm, keep)`` from rows to hidden states."""
    backend = ReferenceBackend()
    backend.output = fault  # type: ignore[attr-defined]
    return backend


def _pads(fault: Callable[..., Any]) -> ReferenceBackend:
    backend = ReferenceBackend()
    backend.padded_ids = fault  # type: ignore[assignment, method-assign]
    return backend


def _names(fault: Callable[[str], str]) -> ReferenceBackend:
    backend = ReferenceBackend()
    backend.parameter_name = fault  # type: ignore[assignment]
    return backend


def _gate(fault: Callable[..., Any]) -> ReferenceBackend:
    backend = ReferenceBackend()
    backend.gate = fault  # type: ignore[method-assign]
    return backend


def _gate_by(*, eps: float = 1e-20, clamp: float = 1e-6, sign: int = 1, scale: float = 1.0) -> ReferenceBackend:
    """The gate with other constants, in float64; ``sign`` 0 drops the root's sign, −1 turns it."""

    def gate(hidden: Any, key: Any, value: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        h, k = hidden.astype(np.float64), key.astype(np.float64)
        rms = [np.sqrt((each * each).mean(-1) + eps) for each in (h, k)]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            dot = scale * (h * k * query_norm * key_norm).sum(-1) / rms[0] / rms[1] / np.sqrt(h.shape[1])
            root = np.sqrt(np.maximum(abs(dot), clamp)) * (sign * np.where(dot < 0, -1, 1) if sign else 1)
        return (h + (keep / (1 + np.exp(-root)))[:, None] * value).astype(np.float32)

    return _gate(gate)


def _dp_major() -> ReferenceBackend:
    backend = ReferenceBackend()
    backend.shard_rank = lambda tp_rank, dp_rank, _dp_size: dp_rank * 3 + tp_rank  # type: ignore[attr-defined]
    return backend


def _last_zero(out: Any, _shard: TableShard, _ids: Any) -> None:
    if len(out) % 64 == 1:
        out[-1] = 0


def _repeat_padding(out: Any, shard: TableShard, _ids: Any) -> None:
    out[:, shard.total_heads - shard.head_start :] = out[:, :1]


FAULTS: dict[str, tuple[str, ReferenceBackend]] = {
    "the last token is not written": ("L1 L9", _lookup(lambda s, i, o, _: lookup_rows(s, i[:-1], o[:-1]))),
    "a capped grid stops early": ("L1", _lookup(_first_tiles)),
    "another launch is reported": ("L1", _lookup(_launch)),
    "scale byte 0 is 2^−127": ("L2", _decoded(lambda out, codes, scales: np.where(scales == 0, out | 1, out))),
    "scale byte 255 is NaN": ("L2", _decoded(lambda out, codes, scales: np.where(scales == 255, 0x7FC0, out))),
    "scales are one off": ("L1 L2", _decoded(lambda out, codes, scales: _e8m0(out, codes, scales, 128))),
    "scales of the next block": ("L1", _shard(lambda s: {"scales": np.roll(s.scales, -1, axis=1).copy()}
                                 if len(s.scales) < 2**20 else {})),
    "scales of the next row": ("L1", _shard(lambda s: {"scales": np.roll(s.scales, -1, axis=0).copy()}
                               if len(s.scales) < 2**20 else {})),
    "rounded toward zero": ("L2", _decoded(_truncated)),
    "subnormals are flushed": ("L2", _decoded(lambda out, codes, scales: np.where(
        ((out & 0x7F80) == 0) & (scales > 0), out & 0x8000, out))),
    "overflow saturates": ("L2", _decoded(lambda out, codes, scales: np.where(
        ((out & 0x7FFF) == 0x7F80) & (scales < 255), out - 1, out))),
    "−0.0 loses its sign": ("L2", _decoded(lambda out, codes, scales: np.where(out == 0x8000, 0, out))),
    "FP8 NaN is 448": ("L2", _decoded(lambda out, codes, scales: np.where(
        ((codes & 0x7F) == 0x7F) & (scales == 127), 0x43E0 | (out & 0x8000), out))),
    "FP8 subnormals are zero": ("L2", _decoded(lambda out, codes, scales: np.where(
        ((codes & 0x78) == 0) & (scales < 255), out & 0x8000, out))),
    "row 0 for dead ids": ("L3 L10", _ids(lambda ids, s: np.where(ids < 0, np.int32(s.start), ids))),
    "the first row for ids past the end": ("L3", _ids(lambda ids, s: np.where(ids >= s.end, np.int32(s.start), ids))),
    "row 0 times zero for dead ids": ("L3", _lookup(_masked_product)),
    "nothing is written for dead ids": ("L3 L10", _lookup(_owned_only)),
    "start is not owned": ("L3", _shard(
        lambda s: {"start": s.start + 1, "weight": s.weight[1:], "scales": s.scales[1:]})),
    "ids one row late": ("L1 L3", _ids(lambda ids, s: np.where((ids > s.start) & (ids < s.end), ids - 1, ids))),
    "end − 1 is not owned": ("L3", _shard(lambda s: {"end": s.end - 1})),
    "end is owned": ("L3 L7", _shard(lambda s: {"end": s.end + 1} if len(s.weight) > s.end - s.start else {
        "end": s.end + 1, "weight": np.concatenate([s.weight, s.weight[-1:]]),
        "scales": np.concatenate([s.scales, s.scales[-1:]])} if len(s.weight) < 2**20 else {})),
    "padded heads repeat a head": ("L4", _after(_repeat_padding)),
    "padded heads are not written": ("L4", _lookup(_real_heads)),
    "every shard starts at head 0": ("L4", _shard(lambda s: {"head_start": 0})),
    "ids' strides ignored": ("L5", _ids(_stride_blind)),
    "32-bit addresses of weights": ("L5", _ids(lambda ids, _: ids & np.int32(2**23 - 1))),
    "32-bit addresses of scales": ("L5", _lookup(_scale_wrap)),
    "spare rows are owned": ("L7", _shard(lambda s: {"end": s.start + len(s.weight)})),
    "head order DP-major": ("L8", _dp_major()),
    "a lone last token is dropped": ("L9", _after(_last_zero)),
    "padded to the largest of all hosts": ("L10", _pads(
        lambda ids, counts, group: padded_ids(ids, counts, slice(None)))),
    "padded from the smallest replica's tokens": ("L10", _pads(lambda ids, counts, group: (
        padded_ids(ids, counts, group), padded_ids(ids[: min(counts[group])], counts, group))[1])),
    "padded with row 0": ("L10", _pads(lambda ids, counts, group: np.maximum(padded_ids(ids, counts, group), 0))),
    "tokens beyond the slot are cut": ("L10", _pads(
        lambda ids, counts, group: padded_ids(ids[: max(counts[group])], counts, group))),
    "no gate": ("L11", _gate(lambda h, k, v, q, n, keep: h + keep[:, None] * v)),
    "the root has no sign": ("L11", _gate_by(sign=0)),
    "the gate is turned": ("L11", _gate_by(sign=-1)),
    "no clamp": ("L11", _gate_by(clamp=0)),
    "clamp 1e-4": ("L11", _gate_by(clamp=1e-4)),
    "eps 1e-6": ("L11", _gate_by(eps=1e-6)),
    "no eps": ("L11", _gate_by(eps=0)),
    "not divided by the width's root": ("L11", _gate_by(scale=96**0.5)),
    "norms forgotten": ("L11", _gate(
        lambda h, k, v, q, n, keep: gated_residual(h, k, v, q * 0 + 1, n * 0 + 1, keep=keep))),
    "masked tokens pass the gate": ("L11", _gate(lambda h, k, v, q, n, _: gated_residual(h, k, v, q, n))),
    "the value is projected first": ("L11", _output(lambda h, r, w, *rest: gated_residual(
        h, *project(r, w)[::-1], *rest[:2], keep=rest[2]))),
    "the projection takes heads in reverse": ("L11", _output(lambda h, r, w, *rest: gated_residual(
        h, *project(r[:, ::-1], w), *rest[:2], keep=rest[2]))),
    "one name of a scale is unknown": ("L12", _names(lambda name: name.replace(".weight_scale", ".weight_scale_inv"))),
    "every scale is an Engram table's": ("L12", _names(lambda name: parameter_name(name).replace(
        "mlp.scale", "mlp.weight_scale_inv"))),
    "masked tokens are zeroed": ("L11", _gate(
        lambda h, k, v, q, n, keep: gated_residual(h, k, v, q, n) * keep[:, None])),
}  # fmt: skip

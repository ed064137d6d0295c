"""Planted faults of lookups and gates: every lookup, shard and gate case is shown to catch one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_engram.backends.protocol import Launch, TableShard
from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.checks import CASES, check
from pytest_engram.rows import gated_residual, lookup_rows

MINE = [case for case in CASES if case.capability in ("lookup", "shards", "gate")]


def _with_lookup(fault: Callable[..., Any]) -> ReferenceBackend:
    backend = ReferenceBackend()

    def lookup(shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        launch = ReferenceBackend().lookup(shard, ids, np.empty_like(out), cap=cap)
        return fault(shard, ids, out, cap) or launch

    backend.lookup = lookup  # type: ignore[method-assign]
    return backend


def _with_gate(fault: Callable[..., Any]) -> ReferenceBackend:
    backend = ReferenceBackend()
    backend.gate = fault  # type: ignore[method-assign]
    return backend


def _oracle(shard: TableShard, ids: Any, out: Any, **change: Any) -> None:
    lookup_rows(replace(shard, **change), np.ascontiguousarray(ids), out)


def _decode_with(change: Callable[[Any, Any], Any]) -> Callable[..., None]:
    """The oracle's rows, then ``change(out, scale bytes of every value)``."""

    def fault(shard: TableShard, ids: Any, out: Any, _: Any) -> None:
        lookup_rows(shard, ids, out)
        local = np.clip(ids[:, shard.head_start :][:, : shard.local_heads] - shard.start, 0, len(shard.weight) - 1)
        scales = np.repeat(shard.scales[local], 32, axis=-1)
        codes = shard.weight[local]
        change(out[:, : local.shape[1]], scales if change.__code__.co_argcount == 2 else (scales, codes))

    return fault


def _scale0_is_tiny(out: Any, scales: Any) -> None:
    out[scales == 0] |= 1


def _scale255_is_nan(out: Any, scales: Any) -> None:
    out[scales == 255] = 0x7FC0


def _flush_subnormals(out: Any, scales: Any) -> None:
    out[((out & 0x7F80) == 0) & (scales > 0)] &= 0x8000


def _saturate(out: Any, scales: Any) -> None:
    out[((out & 0x7FFF) == 0x7F80) & (scales < 255)] -= 1


def _nan_is_finite(out: Any, scales: Any) -> None:
    out[((out & 0x7FFF) > 0x7F80) & (scales == 127)] = 0x43F0


def _zero_is_positive(out: Any, _: Any) -> None:
    out[out == 0x8000] = 0


def _skip_last(shard: TableShard, ids: Any, out: Any, _: Any) -> None:
    lookup_rows(shard, ids[:-1], out[:-1])


def _first_tiles(shard: TableShard, ids: Any, out: Any, cap: int | None) -> None:
    lookup_rows(shard, ids, out)
    if cap is not None:
        out.reshape(-1, out.shape[2])[16 * cap :] = 0


def _one_tile_too_many(shard: TableShard, ids: Any, out: Any, _: Any) -> Launch:
    lookup_rows(shard, ids, out)
    return Launch(out.shape[0] * out.shape[1], out.shape[0], 1)


def _stride_blind(shard: TableShard, ids: Any, out: Any, _: Any) -> None:
    base = ids if ids.base is None else ids.base
    lookup_rows(shard, np.ascontiguousarray(base.ravel()[: ids.size].reshape(ids.shape)), out)


def _narrow(shard: TableShard, ids: Any, out: Any, _: Any) -> None:
    lookup_rows(shard, ids & np.int32(2**23 - 1), out)


def _repeat_padding(shard: TableShard, ids: Any, out: Any, _: Any) -> None:
    lookup_rows(shard, ids, out)
    out[:, shard.total_heads - shard.head_start :] = out[:, :1]


def _odd_counts(shard: TableShard, ids: Any, out: Any, _: Any) -> None:
    lookup_rows(shard, ids, out)
    if len(out) % 64 == 1:
        out[-1] = 0


def _gate_by(*, eps: float = 1e-20, clamp: float = 1e-6, signed: bool = True) -> Callable[..., Any]:
    """The gate with other constants, in float64."""

    def gate(hidden: Any, key: Any, value: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        h, k = hidden.astype(np.float64), key.astype(np.float64)
        rms = [np.sqrt((each * each).mean(-1) + eps) for each in (h, k)]
        with np.errstate(invalid="ignore", divide="ignore"):
            dot = (h * k * query_norm * key_norm).sum(-1) / rms[0] / rms[1] / np.sqrt(h.shape[1])
        root = np.sqrt(np.maximum(abs(dot), clamp)) * (np.where(dot < 0, -1, 1) if signed else 1)
        return (h + (keep / (1 + np.exp(-root)))[:, None] * value).astype(np.float32)

    return gate


FAULTS: dict[str, tuple[ReferenceBackend, set[str]]] = {
    "the last token is not written": (_with_lookup(_skip_last), {"exact-rows", "token-counts"}),
    "a capped grid stops early": (_with_lookup(_first_tiles), {"background"}),
    "a wrong launch is reported": (_with_lookup(_one_tile_too_many), {"background"}),
    "−0.0 loses its sign": (_with_lookup(_decode_with(_zero_is_positive)), {"every-code", "scale-byte-0"}),
    "scale byte 0 is 2^−127": (_with_lookup(_decode_with(_scale0_is_tiny)), {"scale-byte-0"}),
    "scale byte 255 is NaN": (_with_lookup(_decode_with(_scale255_is_nan)), {"scale-byte-255"}),
    "subnormals are flushed": (_with_lookup(_decode_with(_flush_subnormals)), {"scale-extremes"}),
    "large products saturate": (_with_lookup(_decode_with(_saturate)), {"scale-large"}),
    "NaN codes are numbers": (_with_lookup(_decode_with(_nan_is_finite)), {"nan-codes"}),
    "end is not owned": (_with_lookup(lambda s, i, o, _: _oracle(s, i, o, end=s.end - 1)), {"bounds", "spare-rows"}),
    "start is not owned": (_with_lookup(lambda s, i, o, _: _oracle(s, i, o, start=s.start + 1, weight=s.weight[1:],
                                                                 scales=s.scales[1:])), {"bounds"}),
    "row 0 for what is not owned": (
        _with_lookup(lambda s, i, o, _: _oracle(s, np.where((i < s.start) | (i >= s.end), np.int32(s.start), i), o)),
        {"bounds", "dead-rows"},
    ),
    "padded heads repeat a head": (_with_lookup(_repeat_padding), {"padded-heads"}),
    "every shard starts at head 0": (
        _with_lookup(lambda s, i, o, _: _oracle(s, i, o, head_start=0)), {"padded-heads", "shards-assemble"},
    ),
    "strides ignored": (_with_lookup(_stride_blind), {"strided-ids"}),
    "32-bit addresses": (_with_lookup(_narrow), {"wide-addresses"}),
    "spare rows are owned": (
        _with_lookup(lambda s, i, o, _: _oracle(s, i, o, end=s.start + len(s.weight))), {"spare-rows"},
    ),
    "a lone last tile is dropped": (_with_lookup(_odd_counts), {"token-counts"}),

    "the root has no sign": (_with_gate(_gate_by(signed=False)), {"gate"}),
    "no clamp": (_with_gate(_gate_by(clamp=0)), {"gate-clamp"}),
    "eps 1e-6": (_with_gate(_gate_by(eps=1e-6)), {"gate-epsilon"}),
    "no eps": (_with_gate(_gate_by(eps=0)), {"gate-epsilon"}),
    "masked tokens pass the gate": (
        _with_gate(lambda h, k, v, q, n, _: gated_residual(h, k, v, q, n)), {"gate-closed"},
    ),
    "masked tokens are zeroed": (
        _with_gate(lambda h, k, v, q, n, keep: gated_residual(h, k, v, q, n) * keep[:, None]), {"gate-closed"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_lookup_fault_is_caught(name: str, seed: int) -> None:
    """Negative control: a backend with one fault fails the cases that exist for it, with the place and the values."""
    backend, caught_by = FAULTS[name]
    for case in (case for case in MINE if case.name in caught_by):
        sample = check(backend, case, seed=seed)
        assert not sample.passed
        assert sample.supported
        assert "Error" not in sample.detail
        assert sample.expected != sample.seen


def test_every_lookup_case_has_a_negative_control() -> None:
    """Each case of these capabilities is named by a planted fault that it must catch, here or in tests/faults."""
    elsewhere = {"head-order", "wide-scales"}
    assert {case.name for case in MINE} - elsewhere == set().union(*(by for _, by in FAULTS.values()))


def test_planting_alone_changes_no_lookup() -> None:
    """The planting machinery itself is harmless: without a fault every case passes."""
    for backend in (_with_gate(_gate_by()), _with_lookup(lambda s, i, o, _: lookup_rows(s, i, o))):
        assert [case.name for case in MINE if not check(backend, case).passed] == []

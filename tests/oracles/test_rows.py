"""The row oracle against scalar arithmetic, its speed, synthetic tables, and the gate."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_engram.backends.protocol import TableShard
from pytest_engram.errors import UsageError
from pytest_engram.rows import (
    decode_rows,
    gated_residual,
    lookup_rows,
    product_table,
    same_bits,
    synthetic_at,
    synthetic_rows,
    to_bf16,
)


def test_every_product_equals_the_scalar_one(scalar: Any) -> None:
    """L1, L2: all 65,536 pairs of value and scale byte equal plain Python arithmetic, bit by bit."""
    expected = [scalar.bf16_bits(code, scale) for scale in range(256) for code in range(256)]
    assert product_table().tolist() == expected


@pytest.mark.parametrize(
    ("scale", "code", "bits"),
    [
        (127, 0x38, 0x3F80),  # 1.0
        (0, 0x7E, 0x0000),  # byte 0 is 0.0, not 2^-127
        (0, 0xFE, 0x8000),
        (255, 0x38, 0x7F80),  # byte 255 is infinity, not NaN
        (255, 0xB8, 0xFF80),
        (255, 0x00, 0x7FC0),  # infinity times zero
        (1, 0x38, 0x0080),  # 1.18e-38, the least normal number
        (254, 0x38, 0x7F00),  # 1.70e38
        (254, 0x7E, 0x7F80),  # 448 × 2^127 overflows
        (127, 0x80, 0x8000),  # -0.0
        (127, 0x01, 0x3B00),  # the least subnormal value, 2^-9
        (1, 0x30, 0x0040),  # a subnormal product is kept
    ],
)
def test_special_products(scale: int, code: int, bits: int) -> None:
    """L2: the scale byte is shifted into the exponent field; zeros, infinities and subnormals follow from that."""
    assert product_table()[scale << 8 | code] == bits


def test_nan_codes_stay_nan() -> None:
    """L2: both FP8 NaN codes are NaN under every scale byte; NaN equals NaN, and nothing else."""
    table = product_table().reshape(256, 256)
    for code in (0x7F, 0xFF):
        assert same_bits(table[:, code], np.full(256, 0xFFC1, np.uint16)).all()
    assert not same_bits(table[:, 0x38], np.full(256, 0x7FC0, np.uint16)).any()
    assert not same_bits(np.array([0x7F80], np.uint16), np.array([0x7FC0], np.uint16)).any()
    assert not same_bits(np.array([0x0000], np.uint16), np.array([0x8000], np.uint16)).any()


def test_bf16_rounds_to_nearest_even() -> None:
    """L1: ties go to the even mantissa, up and down; what exceeds the largest bf16 becomes infinity."""
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0x7F7FFFFF, 0xFF7FFFFF], np.uint32)
    assert to_bf16(values.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F81, 0x7F80, 0xFF80]


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(0, 70), groups=st.sampled_from([1, 2, 8]), seed=st.integers(0, 2**32 - 1))
def test_rows_decode_like_the_scalar_loop(scalar: Any, rows: int, groups: int, seed: int) -> None:
    """L1: rows of any bytes decode like the scalar loop, into a given buffer too."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 256, (rows, 32 * groups), dtype=np.uint8)
    scales = rng.integers(0, 256, (rows, groups), dtype=np.uint8)
    out = np.empty(weight.shape, np.uint16)
    assert decode_rows(weight, scales, out) is out
    expected = [scalar.decode_row(w.tobytes(), s.tobytes()) for w, s in zip(weight[:3], scales[:3], strict=True)]
    assert out[:3].tolist() == expected
    assert np.array_equal(out, product_table()[np.repeat(scales.astype(int), 32, axis=1) << 8 | weight])


def test_mismatched_scales_are_refused() -> None:
    """Scales that do not divide the row, or belong to other rows, are a usage error."""
    for shape in ((3, 3), (2, 2), (3, 0)):
        with pytest.raises(UsageError, match="expected scales"):
            decode_rows(np.zeros((3, 64), np.uint8), np.zeros(shape, np.uint8))


def _shard(rows: int = 300, **fields: Any) -> TableShard:
    weight, scales = synthetic_rows(0, rows, 64, layer=0, seed=1)
    return replace(TableShard(weight, scales, 1000, 1000 + rows, 0, 4, 4), **fields)


def test_lookup_places_rows_and_zeros() -> None:
    """L3: owned ids give their row, everything else zeros; large batches cross the working set."""
    shard, rng = _shard(), np.random.default_rng(0)
    ids = rng.integers(990, 1310, (60, 4), dtype=np.int32)
    ids[3] = [-1, 2**31 - 1, 1300, 999]
    out = np.full((60, 4, 64), 7, np.uint16)
    lookup_rows(shard, ids, out)
    for token, head in np.ndindex(ids.shape):
        local = int(ids[token, head]) - 1000
        owned = 0 <= local < 300
        expected = decode_rows(shard.weight[[local]], shard.scales[[local]])[0] if owned else np.zeros(64)
        assert np.array_equal(out[token, head], expected)


def test_lookup_of_padded_heads_and_strides() -> None:
    """L4, L5: a shard reads its own columns of strided ids; columns past the true heads give zeros."""
    shard = _shard(head_start=3, local_heads=2)
    wide = np.random.default_rng(1).integers(1000, 1300, (5, 3, 8), dtype=np.int32)
    out = np.full((5, 2, 64), 7, np.uint16)
    lookup_rows(shard, wide[:, 1, ::2], out)
    local = wide[:, 1, 6] - 1000
    assert np.array_equal(out[:, 0], decode_rows(shard.weight[local], shard.scales[local]))
    assert not out[:, 1].any()


def test_lookup_of_nothing() -> None:
    """An empty batch is a lookup that writes nothing."""
    lookup_rows(_shard(), np.zeros((0, 4), np.int32), np.zeros((0, 4, 64), np.uint16))


def test_lookup_in_nothing() -> None:
    """L3: a table without rows owns no id, so every row is zero."""
    out = np.full((2, 4, 64), 7, np.uint16)
    lookup_rows(_shard(0), np.array([[-1, 0, 1000, 999]] * 2, np.int32), out)
    assert not out.any()


@pytest.mark.parametrize(
    ("ids", "out", "change"),
    [
        (np.zeros((2, 4), np.int64), np.zeros((2, 4, 64), np.uint16), {}),
        (np.zeros((2, 3), np.int32), np.zeros((2, 4, 64), np.uint16), {}),
        (np.zeros(4, np.int32), np.zeros((1, 4, 64), np.uint16), {}),
        (np.zeros((2, 4), np.int32), np.zeros((2, 4, 64), np.float32), {}),
        (np.zeros((2, 4), np.int32), np.zeros((2, 3, 64), np.uint16), {}),
        (np.zeros((2, 4), np.int32), np.zeros((2, 4, 128), np.uint16)[:, :, ::2], {}),
        (
            np.zeros((2, 4), np.int32),
            np.zeros((2, 4, 64), np.uint16),
            {"weight": np.zeros((300, 128), np.uint8)[:, ::2]},
        ),
        ([[0] * 4] * 2, np.zeros((2, 4, 64), np.uint16), {}),
        (np.zeros((2, 4), np.int32), np.zeros((2, 4, 64), np.uint16), {"end": 1301}),
        (np.zeros((2, 4), np.int32), np.zeros((2, 4, 64), np.uint16), {"end": 999}),
        (np.zeros((2, 4), np.int32), np.zeros((2, 4, 64), np.uint16), {"head_start": -1}),
        (np.zeros((2, 4), np.int32), np.zeros((2, 4, 64), np.uint16), {"scales": np.zeros((299, 2), np.uint8)}),
        (np.zeros((2, 4), np.int32), np.zeros((2, 4, 64), np.uint16), {"scales": np.zeros((300, 2), np.int8)}),
        (np.zeros((2, 4), np.int32), np.zeros((2, 4, 64), np.uint16), {"weight": bytearray(300 * 64)}),
    ],
)
def test_bad_lookups_are_refused(ids: Any, out: Any, change: dict[str, Any]) -> None:
    """Wrong types, dtypes, shapes, strided outputs or tables, and tables with fewer rows than ids are usage errors."""
    with pytest.raises(UsageError, match=r"row oracle: .*expected"):
        lookup_rows(_shard(**change), ids, out)


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 2**32 - 200), layer=st.integers(0, 3), seed=st.integers(0, 2**40))
def test_synthetic_rows_spell_their_number(start: int, layer: int, seed: int) -> None:
    """Synthetic rows are deterministic, spell their row number, hold no NaN code and have scales 120 … 133."""
    weight, scales = synthetic_rows(start, start + 100, 256, layer=layer, seed=seed)
    digits = (weight[:, :8] & 15).astype(np.int64) << 4 * np.arange(8)
    assert digits.sum(axis=1).tolist() == list(range(start, start + 100))
    assert not ((weight & 0x7F) == 0x7F).any()
    assert scales.min() >= 120
    assert scales.max() <= 133
    picked = synthetic_at(np.array([start + 99, start]), 256, layer=layer, seed=seed)
    assert np.array_equal(picked[0], weight[[99, 0]])
    assert np.array_equal(picked[1], scales[[99, 0]])


def test_synthetic_rows_differ_by_layer_and_seed() -> None:
    """Rows of another layer or seed differ in values and scales, in every row."""
    base = synthetic_rows(0, 500, 256, layer=0, seed=0)
    for other in (synthetic_rows(0, 500, 256, layer=1, seed=0), synthetic_rows(0, 500, 256, layer=0, seed=1)):
        assert (base[0] != other[0]).any(axis=1).all()
        assert (base[1] != other[1]).any(axis=1).mean() > 0.9


def test_synthetic_content_is_pinned() -> None:
    """The content is part of a table's identity: the same bytes on every machine and numpy version."""
    weight, scales = synthetic_rows(0, 1000, 256, layer=1, seed=20261)
    digest = hashlib.sha256(weight.tobytes() + scales.tobytes()).hexdigest()
    assert digest == "3b39e1d923dab6763fdaddb3df557c908a52aa386d31a04b35737ea6594f83a7"
    assert len(np.unique(weight)) > 200
    assert len(np.unique(scales)) == 14


def test_synthetic_width_must_fit() -> None:
    """A width that is no multiple of the block is a usage error."""
    with pytest.raises(UsageError, match="multiple of 8"):
        synthetic_rows(0, 1, 40, layer=0, seed=0)


@pytest.mark.alone
def test_rows_are_made_and_decoded_fast_enough() -> None:
    """Loading and decoding do not dominate: far above 100 MB/s of source bytes even on a busy core."""
    rows = 20_000
    made = _best(lambda: synthetic_rows(0, rows, 256, layer=0, seed=1))
    weight, scales = synthetic_rows(0, rows, 256, layer=0, seed=1)
    out = np.empty((rows, 256), np.uint16)
    decoded = _best(lambda: decode_rows(weight, scales, out))
    assert rows * 264 / made > 100e6
    assert rows * 264 / decoded > 100e6


def _best(run: Any) -> float:
    times = []
    for _ in range(4):
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return min(times)


def _gate_loop(
    hidden: list[float], key: list[float], value: list[float], q: list[float], k: list[float]
) -> list[float]:
    """The gate's formula for one token, in words of math.fsum."""
    dim = len(hidden)
    scale = math.sqrt(math.fsum(x * x for x in hidden) / dim + 1e-20) * math.sqrt(
        math.fsum(x * x for x in key) / dim + 1e-20
    )
    dot = math.fsum(a * b * c * d for a, b, c, d in zip(hidden, q, k, key, strict=True)) / scale / math.sqrt(dim)
    root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), -1.0 if dot < 0 else 1.0)
    return [h + v / (1 + math.exp(-root)) for h, v in zip(hidden, value, strict=True)]


@pytest.mark.parametrize("dim", [96, 257, 5120])
def test_gate_equals_the_scalar_formula(dim: int) -> None:
    """L11: the gate equals a scalar loop; a masked token passes bit by bit; float32 stays float32."""
    rng = np.random.default_rng(dim)
    hidden, key, value = rng.standard_normal((3, 4, dim))
    hidden[3] = 0
    q, k = 1 + rng.standard_normal((2, dim)) / 8
    keep = np.array([True, True, False, True])
    seen = gated_residual(hidden, key, value, q, k, keep=keep)
    for token in (0, 1, 3):
        rows = [each[token].tolist() for each in (hidden, key, value)]
        assert seen[token] == pytest.approx(_gate_loop(*rows, q.tolist(), k.tolist()), rel=1e-12)
    assert np.array_equal(seen[2], hidden[2])
    single = gated_residual(*(each.astype(np.float32) for each in (hidden, key, value, q, k)))
    assert single.dtype == np.float32
    assert single[[0, 1, 3]] == pytest.approx(seen[[0, 1, 3]], rel=1e-4, abs=1e-5)


def test_gate_takes_torch_tensors() -> None:
    """L11: torch tensors go through the same formula."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = [*rng.standard_normal((3, 4, 96)).astype(np.float32), *rng.standard_normal((2, 96)).astype(np.float32)]
    keep = np.array([True, False, True, True])
    seen = gated_residual(*map(torch.from_numpy, arrays), keep=torch.from_numpy(keep), xp=torch)
    assert seen.numpy() == pytest.approx(gated_residual(*arrays, keep=keep), rel=1e-4, abs=1e-5)

"""How fast the oracles are on one core, so that a whole run can be judged by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytest_engram.hashing import EngramLayout, HashBatch, hash_ids, synthetic_token_map
from pytest_engram.rows import decode_rows, synthetic_rows

pytestmark = pytest.mark.alone


def least(run: Callable[[], Any], good: float) -> float:
    """Seconds on its core of the quickest call within 30 s; the first that is good enough ends them."""
    best, end = float("inf"), time.monotonic() + 30
    while best >= good and time.monotonic() < end:
        begin = time.thread_time()
        run()
        best = min(best, time.thread_time() - begin)
    return best


def test_a_million_tokens_hash_in_two_seconds() -> None:
    """H5: 1 M tokens × 2 layers × 24 heads in under 2 s."""
    layout, token_map = EngramLayout.deepseek_v41(), synthetic_token_map()
    batch = HashBatch.sequence(np.random.default_rng(0).integers(0, len(token_map), 1_000_000, dtype=np.int32))
    assert least(lambda: hash_ids(layout, batch, token_map), 2) < 2


def test_rows_decode_at_a_gigabyte_per_second() -> None:
    """L1: the row oracle reads at least 1 GB/s of values and scales, and so writes nearly 2 GB/s of bf16."""
    weight, scales = synthetic_rows(0, 50_000, 256, layer=0, seed=1)
    out = np.empty(weight.shape, dtype=np.uint16)
    limit = (weight.nbytes + scales.nbytes) / 1e9
    assert least(lambda: decode_rows(weight, scales, out), limit) <= limit

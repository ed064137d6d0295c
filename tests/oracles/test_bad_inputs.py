"""What the reference does with input that is wrong or at an edge: one error, or the contract's value, per case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_engram.backends.protocol import TableShard
from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.engines.tables import table_bytes, table_views
from pytest_engram.errors import UsageError
from pytest_engram.hashing import EngramLayout, HashBatch, synthetic_token_map
from pytest_engram.rows import synthetic_rows

BACKEND, LAYOUT, MAP = ReferenceBackend(), EngramLayout.for_rows(9000, head_dim=64), synthetic_token_map()
HASHER = BACKEND.hasher(LAYOUT, MAP, slot_cache=False)
SHARD = TableShard(*synthetic_rows(0, 20, 64, layer=0, seed=1), 0, 20, 0, 4, 4)
NORMAL = np.ones((3, 64), np.float32)


def look(ids: Any, **change: Any) -> Any:
    """Rows of ``ids`` in the small shard, with fields replaced."""
    shard = replace(SHARD, **change)
    out = np.full((len(ids), shard.local_heads, 64), 7, np.uint16)
    BACKEND.lookup(shard, ids, out)
    return out


def batch(**change: Any) -> Any:
    """Ids of three tokens with fields replaced."""
    return HASHER(replace(HashBatch.sequence([1, 2, 3]), **change))


def gate(keep: Any) -> Any:
    """The gate of three tokens."""
    return BACKEND.gate(NORMAL, NORMAL, NORMAL, NORMAL[0], NORMAL[0], keep)


def on_another_device() -> Any:
    """Ids and rows of two devices."""
    torch = pytest.importorskip("torch")
    weight, scales = map(torch.from_numpy, (SHARD.weight, SHARD.scales))
    ids = torch.zeros((2, 4), dtype=torch.int32, device="meta")
    return BACKEND.lookup(replace(SHARD, weight=weight, scales=scales), ids, torch.zeros(2, 4, 64).bfloat16())


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "hash ids of another dtype": ("bad-rows", lambda: look(np.zeros((2, 4), np.int64))),
    "hash ids of another shape": ("bad-rows", lambda: look(np.zeros((2, 3), np.int32))),
    "hash ids on another device": ("bad-lookup", on_another_device),
    "token ids of another dtype": ("bad-batch", lambda: batch(token_ids=np.zeros(3, np.int64))),
    "token ids of another shape": ("bad-batch", lambda: batch(token_ids=np.zeros((3, 1), np.int32))),
    "a negative token id": ("bad-batch", lambda: batch(token_ids=np.array([1, -1, 2], np.int32))),
    "a token id beyond the map": ("bad-batch", lambda: batch(token_ids=np.array([1, len(MAP), 2], np.int32))),
    "a dead mask of another dtype": ("bad-batch", lambda: batch(dead=np.zeros(3, np.uint8))),
    "a dead mask of another shape": ("bad-batch", lambda: batch(dead=np.zeros(2, dtype=bool))),
    "a keep mask of another dtype": ("bad-rows", lambda: gate(np.ones(3, np.int32))),
    "a keep mask of another shape": ("bad-rows", lambda: gate(np.ones(1, dtype=bool))),
    "a strided table": (
        "bad-rows", lambda: look(np.zeros((2, 4), np.int32), weight=np.zeros((20, 128), np.uint8)[:, ::2])),
    "a shard of fewer rows than its ids": ("bad-rows", lambda: look(np.zeros((2, 4), np.int32), end=21)),
    "a table of fewer rows than its primes": ("bad-layout", lambda: replace(LAYOUT, num_embeddings=(100, 100))),
    "a buffer of fewer bytes than the layout": (
        "small-buffer", lambda: table_views(np.zeros(table_bytes(LAYOUT) - 1, np.uint8), LAYOUT)),
}  # fmt: skip
VALUES: dict[str, tuple[Callable[[], Any], tuple[int, ...], Any]] = {
    "zero tokens hashed": (lambda: HASHER(HashBatch.sequence([])), (0, 2, 24), None),
    "zero tokens looked up": (lambda: look(np.zeros((0, 4), np.int32)), (0, 4, 64), None),
    "zero rows": (lambda: look(np.arange(8, dtype=np.int32).reshape(2, 4), weight=SHARD.weight[:0],
                               scales=SHARD.scales[:0], end=0), (2, 4, 64), 0),
    "an id past the table": (lambda: look(np.full((2, 4), 20, np.int32)), (2, 4, 64), 0),
    "a dead id": (lambda: look(np.full((2, 4), -1, np.int32)), (2, 4, 64), 0),
    "strided ids": (lambda: look(np.arange(16, dtype=np.int32).reshape(2, 8)[:, ::2])
                    - look(np.arange(0, 16, 2, dtype=np.int32).reshape(2, 4)), (2, 4, 64), 0),
    "strided tokens": (lambda: batch(token_ids=np.repeat(np.array([1, 2, 3], np.int32), 2)[::2]) - batch(),
                       (3, 2, 24), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_input_is_refused(name: str) -> None:
    """H5, L3, L5, L7: a usage error with its code, before anything is read or written."""
    code, run = REFUSED[name]
    with pytest.raises(UsageError, match="expected") as caught:
        run()
    assert caught.value.code == code


@pytest.mark.parametrize("name", VALUES)
def test_edges_have_the_contracts_value(name: str) -> None:
    """H18, L3, L5: nothing gives nothing, what is not owned gives zeros, strides change nothing."""
    run, shape, value = VALUES[name]
    seen = run()
    assert seen.shape == shape
    assert value is None or (seen == value).all()

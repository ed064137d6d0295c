"""Layouts: prime search, scaled-down tables, head shards, refusals."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_engram.errors import UsageError
from pytest_engram.hashing import EngramLayout, head_shard, shard_rank, synthetic_token_map


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(5_000, 400_000))
def test_scaled_primes_follow_the_contract(scalar: Any, rows: int) -> None:
    """H4: primes of a scaled-down layout are the contract's search from its own start, by trial division."""
    layout = EngramLayout.for_rows(rows)
    assert layout.primes.tolist() == scalar.search_primes(layout.vocab_size, 2, 3, 8)
    assert np.array_equal(layout.offsets, np.cumsum(layout.primes, axis=1) - layout.primes)


@pytest.mark.parametrize("rows", [10**4, 10**5, 10**6, 10**7, 10**8])
def test_for_rows_is_close_and_fast(rows: int) -> None:
    """A scaled-down table never exceeds the rows that were asked for, comes close, and takes milliseconds."""
    begin = time.thread_time()  # its own work, whatever else runs
    layout = EngramLayout.for_rows(rows)
    assert time.thread_time() - begin < 1
    assert layout.num_embeddings == (layout.rows(0), layout.rows(1))
    assert rows * 0.95 <= max(layout.num_embeddings) <= rows


def test_for_rows_keeps_given_fields() -> None:
    """Layers, heads and widths of a scaled-down layout are the caller's."""
    layout = EngramLayout.for_rows(1_000, layers=(2,), n_heads=2, max_ngram=3, head_dim=64, compressed_vocab=500)
    assert (layout.columns, layout.depth, layout.head_dim, layout.layer_ids) == (4, 2, 64, (2,))
    assert layout.multipliers.shape == (1, 3)


def test_layouts_compare_by_fields() -> None:
    """Equal fields are equal layouts with equal hashes; derived arrays cannot be written."""
    left, right = EngramLayout.for_rows(10_000), EngramLayout.for_rows(10_000)
    assert left == right
    assert hash(left) == hash(right)
    assert left != EngramLayout.for_rows(20_000)
    with pytest.raises(ValueError, match="read-only"):
        left.primes[0, 0] = 1


def test_tables_may_have_spare_rows() -> None:
    """L7: a checkpoint may have more rows than the primes cover, never fewer."""
    exact = EngramLayout.for_rows(10_000)
    spare = EngramLayout(
        layer_ids=(1, 14), num_embeddings=tuple(n + 7 for n in exact.num_embeddings), vocab_size=exact.vocab_size
    )
    assert spare.rows(0) == exact.rows(0)
    with pytest.raises(UsageError, match="layer 14 has"):
        EngramLayout(layer_ids=(1, 14), num_embeddings=(exact.rows(0), exact.rows(1) - 1), vocab_size=exact.vocab_size)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_ids": ()},
        {"layer_ids": (1,)},
        {"head_dim": 100},
        {"block": 0},
        {"max_ngram": 1},
        {"n_heads": 0},
        {"vocab_size": 1},
        {"vocab_size": 90_000_000, "num_embeddings": (2**32, 2**32)},
    ],
)
def test_bad_layouts_are_refused(change: dict[str, Any]) -> None:
    """A layout that cannot exist is a usage error that says what was expected."""
    good = {"layer_ids": (1, 14), "num_embeddings": (10**6, 10**6), "vocab_size": 1_000}
    EngramLayout(**good)
    with pytest.raises(UsageError, match=r"EngramLayout: .*expected"):
        EngramLayout(**{**good, **change})


def test_too_few_rows_are_refused() -> None:
    """Below one distinct prime per layer and column there is no layout."""
    with pytest.raises(UsageError, match="at least"):
        EngramLayout.for_rows(1_000)


@pytest.mark.parametrize(("tp", "dp", "heads"), [(1, 4, 5), (2, 2, 5), (4, 1, 6), (8, 1, 6)])
def test_shards_without_heads_are_refused(tp: int, dp: int, heads: int) -> None:
    """L4: a sharding that leaves a shard without any head is refused before allocation."""
    primes = EngramLayout.for_rows(2_000, layers=(1,), max_ngram=2, n_heads=heads).primes[0]
    for rank in range(tp * dp):
        with pytest.raises(UsageError, match="shard without heads"):
            head_shard(primes, tp * dp, rank)


@pytest.mark.parametrize(("heads", "shards"), [(24, 1), (24, 2), (24, 5), (24, 8), (23, 4), (3, 3)])
def test_shards_partition_the_rows(heads: int, shards: int) -> None:
    """L4, L7: shards are consecutive whole head buckets, and their parts sum to the true rows."""
    primes = EngramLayout.for_rows(4_000, layers=(1,), max_ngram=2, n_heads=heads).primes[0]
    parts = [head_shard(primes, shards, rank) for rank in range(shards)]
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == primes.sum()
    assert sum(part.local_heads for part in parts) >= heads
    assert all(part.start < part.end for part in parts)


def test_shard_ranks_are_tp_major() -> None:
    """L8: shard rank = tp rank × dp size + dp rank."""
    assert [shard_rank(tp, dp, 3) for tp in range(2) for dp in range(3)] == list(range(6))


@pytest.mark.parametrize(("shards", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_shard_ranks_out_of_range_are_refused(shards: int, rank: int) -> None:
    """A rank outside its sharding is a usage error."""
    with pytest.raises(UsageError, match="0 ≤ rank < shards"):
        head_shard(EngramLayout.for_rows(5_000).primes[0], shards, rank)


def test_synthetic_map_covers_its_range() -> None:
    """The synthetic token map is onto the compressed ids, also where the first step divides them."""
    for compressed in (99_092, 500, 1_000_003):
        assert len(np.unique(synthetic_token_map(compressed, max(129_280, compressed)))) == compressed

"""Where the layers lie in the shared buffer, and what is written there."""

from itertools import pairwise

import numpy as np
import pytest

from pytest_engram.engines import tables
from pytest_engram.engines.tables import fill_table, full_shards, table_bytes, table_views
from pytest_engram.errors import UsageError
from pytest_engram.rows import synthetic_rows


def test_views_tile_the_buffer_on_page_boundaries(bench):
    """Each layer's weights, then its scales, begin on a 4 KiB boundary, share the buffer and never overlap."""
    views, begin = table_views(bench.buffer, bench.layout), bench.buffer.__array_interface__["data"][0]
    spans = [(a.__array_interface__["data"][0] - begin, a.nbytes) for pair in views for a in pair]
    assert all(start % 4096 == 0 for start, _ in spans)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= table_bytes(bench.layout) < spans[-1][0] + spans[-1][1] + 4096
    assert [weight.shape for weight, _ in views] == [(rows, 64) for rows in bench.layout.num_embeddings]
    assert [scales.shape[1] for _, scales in views] == [2, 2]


def test_fill_writes_the_synthetic_rows_of_each_layer(bench):
    """The content is that of the row oracle, layer by layer, across the borders of pieces."""
    for layer, (weight, scales) in enumerate(table_views(bench.buffer, bench.layout)):
        expected = synthetic_rows(0, len(weight), 64, layer=layer, seed=bench.seed)
        assert np.array_equal(weight, expected[0])
        assert np.array_equal(scales, expected[1])


def test_fill_stops_where_check_raises(bench, monkeypatch):
    """A peer's failure reaches a rank in the middle of its filling: what was not begun stays unwritten."""

    def fail():
        raise InterruptedError

    buffer = bytearray(table_bytes(bench.layout))
    monkeypatch.setattr(tables, "_CHUNK_BYTES", 64)
    with pytest.raises(InterruptedError):
        fill_table(buffer, bench.layout, bench.seed, check=fail)
    (first, _), (last, _) = table_views(buffer, bench.layout)
    assert first[0].any()
    assert not last[-1].any()


def test_small_buffer_is_refused_by_name(bench):
    """A buffer that cannot hold the layers is a usage error, not a crash inside numpy."""
    with pytest.raises(UsageError, match="expected at least") as caught:
        table_views(bench.buffer[:-1], bench.layout)
    assert caught.value.code == "small-buffer"


def test_full_shards_own_every_head(bench):
    """L3: the shard of the only rank owns [0, the primes' sum) and all hash columns."""
    shards = full_shards(table_views(bench.buffer, bench.layout), bench.layout)
    assert [(s.start, s.end) for s in shards] == [(0, bench.layout.rows(i)) for i in range(2)]
    assert {(s.head_start, s.local_heads, s.total_heads) for s in shards} == {(0, 6, 6)}

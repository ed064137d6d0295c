"""The vectorised hashing oracle against the scalar one, and its refusals."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_engram.errors import UsageError
from pytest_engram.hashing import (
    DEAD_ID,
    EngramLayout,
    HashBatch,
    SlotCache,
    dummy_ids,
    hash_ids,
    synthetic_token_map,
    window_row,
)

MODEL = EngramLayout.deepseek_v41()
MAP = synthetic_token_map()
TOKEN = st.integers(0, 129_279)


@st.composite
def chunks(draw: st.DrawFn) -> HashBatch:
    """A batch of one to four requests with windows that may be unknown, dead tokens and paged slots."""
    parts = []
    for request in range(draw(st.integers(1, 4))):
        count, start = draw(st.integers(0, 7)), draw(st.integers(0, 9))
        blocks = draw(st.permutations(range(4 * request, 4 * request + 4)))
        positions = np.arange(start, start + count)
        slots = np.array(blocks)[positions // 4] * 4 + positions % 4
        written = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        part = HashBatch.sequence(
            draw(st.lists(TOKEN, min_size=count, max_size=count)), start=start,
            dead=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
            slots=np.where(written, slots, -1), block_table=blocks, block_size=4,
        )  # fmt: skip
        part.window[0] = draw(st.lists(TOKEN | st.just(-1), min_size=3, max_size=3))
        part.window_dead[0] = draw(st.lists(st.booleans(), min_size=3, max_size=3))
        parts.append(part)
    return HashBatch.concat(parts)


@settings(max_examples=150, deadline=None)
@given(batches=st.lists(chunks(), min_size=1, max_size=3))
def test_vectorised_equals_scalar(
    scalar: Any, scalar_tables: Any, scalar_map: list[int], batches: list[HashBatch]
) -> None:
    """H5–H12: on any batches, with and without a slot cache, both implementations give the same ids."""
    cache, slots = SlotCache(64), dict[int, int]()
    for batch in batches:
        assert hash_ids(MODEL, batch, MAP).tolist() == scalar.hash_batch(scalar_tables, batch, scalar_map)
        seen = hash_ids(MODEL, batch, MAP, cache).tolist()
        assert seen == scalar.hash_batch(scalar_tables, batch, scalar_map, slots)


@settings(max_examples=40, deadline=None)
@given(tokens=st.lists(TOKEN, min_size=1, max_size=40), size=st.sampled_from([1, 2, 3, 17, 257]))
def test_any_split_gives_the_whole(tokens: list[int], size: int) -> None:
    """H10: any split of a sequence in chunks gives the ids of the whole."""
    whole = hash_ids(MODEL, HashBatch.sequence(tokens), MAP)
    for at in range(0, len(tokens), size):
        chunk = HashBatch.sequence(tokens[at : at + size], history=tokens[:at])
        assert np.array_equal(hash_ids(MODEL, chunk, MAP), whole[at : at + size])


def test_chunking_of_large_batches_is_seamless() -> None:
    """H5: a batch larger than the working set hashes like its parts."""
    tokens = np.random.default_rng(3).integers(0, 129_280, 20_000)
    whole = hash_ids(MODEL, HashBatch.sequence(tokens), MAP)
    tail = hash_ids(MODEL, HashBatch.sequence(tokens[8190:8200], history=tokens[:8190].tolist()), MAP)
    assert np.array_equal(whole[8190:8200], tail)
    assert whole.max() <= 384_016_681


@pytest.mark.alone
def test_vectorised_is_at_least_100_times_faster(scalar: Any, scalar_tables: Any, scalar_map: list[int]) -> None:
    """Per token the vectorised oracle takes at most a hundredth of the scalar loop's time."""
    tokens = np.random.default_rng(5).integers(0, 129_280, 50_000)
    small, large = HashBatch.sequence(tokens[:300]), HashBatch.sequence(tokens)
    hash_ids(MODEL, large, MAP)
    loop = vector = float("inf")
    for _ in range(400):  # the least times of interleaved rounds approach the undisturbed ones on a busy machine
        loop = min(loop, _seconds(lambda: scalar.hash_batch(scalar_tables, small, scalar_map)) / 300)
        vector = min(vector, _seconds(lambda: hash_ids(MODEL, large, MAP)) / 50_000)
        if loop / vector >= 100:
            break
    assert loop / vector >= 100


def _seconds(run: Any) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def test_window_examples() -> None:
    """H8, H13, H14: the contract's window examples."""
    assert window_row([10, 11, 12, 13], 4, known=4) == [13, 12, 11]
    assert window_row([10, 11, 12, 13, 20, 21], 6, known=4) == [-1, -1, 13]
    assert window_row([11, 12, 13, 14, 15, 16, 21, 22], 8) == [22, 21, 16]
    assert window_row([], 0) == [-1, -1, -1]


def test_empty_and_dummy_batches() -> None:
    """H17, H18: an empty batch gives [0, L, H]; a dummy batch gives DEAD_ID for 0 and 7 tokens."""
    assert hash_ids(MODEL, HashBatch.sequence([]), MAP).shape == (0, 2, 24)
    assert dummy_ids(MODEL, 0).shape == (0, 2, 24)
    assert (dummy_ids(MODEL, 7) == DEAD_ID).all()


def test_tail_padding_belongs_to_the_last_request() -> None:
    """H9: tokens behind the last boundary do not disturb the others and need no request of their own."""
    real = HashBatch.sequence([5, 6, 7])
    padded = _changed(
        real, token_ids=np.zeros(5, np.int32), positions=np.array([0, 1, 2, 0, 0]), dead=np.zeros(5, dtype=bool)
    )
    padded.token_ids[:3] = real.token_ids
    assert np.array_equal(hash_ids(MODEL, padded, MAP)[:3], hash_ids(MODEL, real, MAP))


def test_strides_do_not_matter() -> None:
    """Any stride of the inputs gives the ids of contiguous arrays."""
    plain = HashBatch.sequence(np.arange(9), history=[4, 5])
    strided = _changed(
        plain, token_ids=np.repeat(plain.token_ids, 3)[::3], positions=np.repeat(plain.positions, 2)[::2]
    )
    assert np.array_equal(hash_ids(MODEL, strided, MAP), hash_ids(MODEL, plain, MAP))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"token_ids": np.zeros(3, np.int64)}, "token_ids"),
        ({"token_ids": [1, 2, 3]}, "token_ids"),
        ({"token_ids": np.array([1, -1, 2], np.int32)}, "token_ids"),
        ({"token_ids": np.zeros((3, 1), np.int32)}, "token_ids"),
        ({"token_ids": np.array(3, np.int32)}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"positions": np.zeros(3, np.int32)}, "positions"),
        ({"positions": np.array([0, 1, -2])}, "positions"),
        ({"positions": np.arange(4)}, "positions"),
        ({"dead": np.zeros(3, np.uint8)}, "dead"),
        ({"dead": np.zeros(2, dtype=bool)}, "dead"),
        ({"window": np.full((1, 3), -2, np.int32)}, "window"),
        ({"window": np.full((2, 3), -1, np.int32)}, "window"),
        ({"window": np.full((1, 3), -1, np.int64)}, "window"),
        ({"window_dead": np.zeros((1, 2), dtype=bool)}, "window_dead"),
        ({"query_start_loc": np.array([0, 2, 1, 3], np.int32), "window": np.zeros((3, 3), np.int32),
          "window_dead": np.zeros((3, 3), dtype=bool)}, "query_start_loc"),
        ({"query_start_loc": np.array([1, 3], np.int32)}, "query_start_loc"),
        ({"query_start_loc": np.array([0, 3])}, "query_start_loc"),
        ({"query_start_loc": np.array(3, np.int32)}, "query_start_loc"),
        ({"query_start_loc": np.array([0, 4], np.int32)}, "query_start_loc"),
        ({"query_start_loc": np.array([0], np.int32), "window": np.zeros((0, 3), np.int32),
          "window_dead": np.zeros((0, 3), dtype=bool)}, "query_start_loc"),
        ({"slots": np.zeros(3, np.int32)}, "slots"),
        ({"slots": np.zeros(2, np.int64)}, "slots"),
        ({"block_table": np.zeros(2, np.int32)}, "block_table"),
        ({"block_size": 0}, "block_size"),
    ],
)  # fmt: skip
def test_bad_batches_are_refused(change: dict[str, Any], where: str) -> None:
    """Wrong dtypes, shapes, negative ids and broken boundaries are usage errors that name the field."""
    with pytest.raises(UsageError, match=rf"HashBatch, {where}: .*expected") as caught:
        _changed(HashBatch.sequence([1, 2, 3]), **change)
    assert caught.value.code == "bad-batch"


@pytest.mark.parametrize("field", ["token_ids", "window"])
def test_too_large_ids_are_refused(field: str) -> None:
    """Token ids beyond the token map are named with the map's length, in the chunk and in the window."""
    batch = HashBatch.sequence([5], history=[6])
    getattr(batch, field).flat[0] = 129_280
    with pytest.raises(UsageError, match=f"{field}: id 129280; expected below 129280"):
        hash_ids(MODEL, batch, MAP)


@pytest.mark.parametrize(
    "token_map", [MAP.astype(np.int64), MAP.astype(np.float32), MAP[:, None], np.where(MAP == 7, -1, MAP)]
)
def test_other_token_maps_are_refused(token_map: Any) -> None:
    """A map of another dtype or shape, or with a negative id, which would pass for DEAD_ID, is a usage error."""
    with pytest.raises(UsageError, match=r"token_map: .*expected"):
        hash_ids(MODEL, HashBatch.sequence([5]), token_map)


def test_a_slot_cache_needs_slots_and_table() -> None:
    """H12: a bound slot cache with a batch that has no slots is refused; so is an empty cache."""
    with pytest.raises(UsageError, match="slots and block_table: None"):
        hash_ids(MODEL, HashBatch.sequence([1]), MAP, SlotCache(4))
    with pytest.raises(UsageError, match="0 slots"):
        SlotCache(0)
    with pytest.raises(UsageError, match="slot 4; expected below 4"):
        hash_ids(MODEL, HashBatch.sequence([1], slots=[4], block_table=[0]), MAP, SlotCache(4))


def test_concat_refuses_mixtures() -> None:
    """Batches with and without slots cannot be one batch; nor can no batch at all."""
    paged = HashBatch.sequence([1], slots=[0], block_table=[0])
    with pytest.raises(UsageError, match="the same kind of batch"):
        HashBatch.concat([paged, HashBatch.sequence([1])])
    with pytest.raises(UsageError, match="at least one batch"):
        HashBatch.concat([])


def test_concat_keeps_requests() -> None:
    """H11: a flattened batch gives each request's own ids; block tables are padded to the widest."""
    left = HashBatch.sequence([1, 2], slots=[0, 1], block_table=[0])
    right = HashBatch.sequence([3], start=70, slots=[134], block_table=[1, 2])
    both = HashBatch.concat([left, right])
    assert both.query_start_loc.tolist() == [0, 2, 3]
    assert both.block_table is not None
    assert both.block_table.tolist() == [[0, 0], [1, 2]]
    expected = np.concatenate([hash_ids(MODEL, each, MAP, SlotCache(192)) for each in (left, right)])
    assert np.array_equal(hash_ids(MODEL, both, MAP, SlotCache(192)), expected)


def _changed(batch: HashBatch, **change: Any) -> HashBatch:
    fields = {name: getattr(batch, name) for name in HashBatch.__dataclass_fields__}
    return HashBatch(**{**fields, **change})

"""The contract cases of the slot cache: H7, H11–H13, H16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_engram.cases.case import Finding, Parts, Probe, cases, first, ids_differ
from pytest_engram.hashing import HashBatch, SlotCache, window_row

BLOCK = 4  # tokens per KV block: small, so that short sequences cross blocks
SLOTS = 64


def window_before_slots(probe: Probe) -> Finding | None:
    """A known window value wins over the slot cache; the cache answers only what the window does not know."""
    hasher, cache = probe.hasher(SLOTS), SlotCache(SLOTS)
    first = paged(probe.tokens(8), [3, 9, 1])
    window = np.array([[0, -1, *probe.tokens(1)]], np.int32)
    conflicting = replace(paged(probe.tokens(2), [3, 9, 1], start=8), window=window)
    return _through(probe, hasher, [first, conflicting], [probe.ids(first, cache), probe.ids(conflicting, cache)])


def slot_chunks(probe: Probe) -> Parts:
    """With the slot cache alone, any split in chunks gives the ids of the whole, across blocks and dead tokens."""
    for size in (1, 3, 5):
        whole, dead = probe.tokens(11), probe.rng.random(11) < 0.2
        chunks = [paged(whole[i : i + size], [5, 0, 8], start=i, dead=dead[i : i + size]) for i in range(0, 11, size)]
        expected = probe.ids(HashBatch.sequence(whole, dead=dead))
        parts = [expected[i : i + size] for i in range(0, 11, size)]
        yield f"chunks of {size}", _through(probe, probe.hasher(SLOTS), chunks, parts)


def slot_tables(probe: Probe) -> Finding | None:
    """Requests with different block tables in one batch read their own history only."""
    wholes, tables = [probe.tokens(9), probe.tokens(9)], [[1, 7, 4], [6, 2, 3]]
    batches = [
        HashBatch.concat([paged(w[part], t, start=part.start) for w, t in zip(wholes, tables, strict=True)])
        for part in (slice(0, 5), slice(5, 9))
    ]
    ids = [probe.ids(HashBatch.sequence(whole)) for whole in wholes]
    expected = [np.concatenate([each[part] for each in ids]) for part in (slice(0, 5), slice(5, 9))]
    return _through(probe, probe.hasher(SLOTS), batches, expected)


def slot_write_first(probe: Probe) -> Finding | None:
    """All slots of a batch are written before any is read: a later chunk of the same batch sees the earlier one."""
    whole = probe.tokens(8)
    batch = HashBatch.concat([paged(whole[4:], [2, 5], start=4), paged(whole[:4], [2, 5])])
    ids = probe.ids(HashBatch.sequence(whole))
    return probe.differs(batch, np.concatenate([ids[4:], ids[:4]]), hasher=probe.hasher(SLOTS))


def slot_padding(probe: Probe) -> Finding | None:
    """A negative slot is not written: a fully padded replay leaves every slot as it was."""
    whole = probe.tokens(6)  # its history lies in the first and the last slot, where a stray −1 would land
    first, last = paged(whole[:5], [15, 0]), paged(whole[5:], [15, 0], start=5)
    replay = replace(paged(probe.tokens(5), [15, 0]), slots=np.full(5, -1, dtype=np.int64))
    ids = probe.ids(HashBatch.sequence(whole))
    return _through(probe, probe.hasher(SLOTS), [first, replay, last], [ids[:5], None, ids[5:]])


def slot_strides(probe: Probe) -> Finding | None:
    """A strided slot mapping and a strided block table are read by their strides."""
    whole = probe.tokens(7)
    first, last = paged(whole[:6], [3, 4]), paged(whole[6:], [3, 4], start=6)
    assert first.slots is not None  # noqa: S101 - paged always gives slots
    first = replace(first, slots=np.repeat(first.slots, 2)[::2])
    last = replace(last, block_table=np.repeat(np.array([[3, 4]], dtype=np.int32), 2, axis=1)[:, ::2])
    ids = probe.ids(HashBatch.sequence(whole))
    return _through(probe, probe.hasher(SLOTS), [first, last], [ids[:6], ids[6:]])


def rollback(probe: Probe) -> Finding | None:
    """After a speculative rollback the rewritten slots count, not the rejected draft."""
    kept, draft, final = probe.tokens(6), probe.tokens(3), probe.tokens(4)
    chunks = [paged(part, [7, 1, 2], start=at) for part, at in ((kept, 0), (draft, 6), (final[:2], 6), (final[2:], 8))]
    ids = probe.ids(HashBatch.sequence(np.concatenate([kept, final])))
    drafted = probe.ids(HashBatch.sequence(np.concatenate([kept, draft])))
    return _through(probe, probe.hasher(SLOTS), chunks, [ids[:6], drafted[6:], ids[6:8], ids[8:]])


def prefix_hit(probe: Probe) -> Finding | None:
    """A request that starts behind a cached prefix reads what the prefix's owner wrote."""
    prefix, own = probe.tokens(BLOCK), probe.tokens(3)
    owner = paged(np.concatenate([prefix, probe.tokens(2)]), [6, 1])
    hit = paged(own, [6, 9], start=BLOCK)
    expected = probe.ids(HashBatch.sequence(np.concatenate([prefix, own])))[BLOCK:]
    return _through(probe, probe.hasher(SLOTS), [owner, hit], [None, expected])


def rebind(probe: Probe) -> Finding | None:
    """Binding the slot cache again drops its history, even with as many slots."""
    hasher, batch = probe.hasher(SLOTS), paged(probe.tokens(3), [2, 5], start=4)
    hasher(paged(probe.tokens(4), [2, 5]))
    hasher.bind(SLOTS)
    return probe.differs(batch, probe.ids(batch, SlotCache(SLOTS)), hasher=hasher)


def new_slots(probe: Probe) -> Finding | None:
    """A slot that nobody wrote holds compressed id 0, which is a value and blocks nothing."""
    batch = paged(probe.tokens(4), [2, 5, 7], start=6)
    return probe.differs(batch, probe.ids(batch, SlotCache(SLOTS)), hasher=probe.hasher(SLOTS))


def prompt_window(probe: Probe) -> Finding | None:
    """The V1 window knows prompt positions only; generated tokens come from the slot cache."""
    whole = probe.tokens(8)
    prompt, steps = paged(whole[:4], [3, 8]), []
    for at in range(4, 8):
        step = paged(whole[at : at + 1], [3, 8], start=at)
        steps.append(replace(step, window=np.array([window_row(whole.tolist(), at, known=4)], dtype=np.int32)))
    ids = probe.ids(HashBatch.sequence(whole))
    return _through(probe, probe.hasher(SLOTS), [prompt, *steps], [ids[:4], *(ids[i : i + 1] for i in range(4, 8))])


def fresh_instance(probe: Probe) -> Parts:
    """After a KV transfer the window alone gives the single instance's ids; without it they must differ."""
    whole = probe.tokens(9)
    expected = probe.ids(HashBatch.sequence(whole))[8:]
    probe.hasher(SLOTS)(paged(whole[:8], [3, 8, 1]))  # the prefill instance, whose slots do not travel
    decode = paged(whole[8:], [3, 8, 1], start=8)
    window = np.array([window_row(whole.tolist(), 8)], dtype=np.int32)
    yield "with the window", probe.differs(replace(decode, window=window), expected, hasher=probe.hasher(SLOTS))
    if ids_differ(probe.hasher(SLOTS)(decode), expected, probe.layout) is None:
        yield "without it", Finding(detail="no history was told", expected="other ids", seen="equal ids")


def paged(tokens: Any, table: Sequence[int], start: int = 0, dead: Any = None) -> HashBatch:
    """A chunk with slots and block table, window unknown; blocks of four tokens."""
    positions = np.arange(start, start + len(tokens))
    slots = np.asarray(table)[positions // BLOCK] * BLOCK + positions % BLOCK
    return HashBatch.sequence(
        tokens, start=start, dead=dead, slots=slots, block_table=[*table, *([0] * (3 - len(table)))], block_size=BLOCK
    )


def _through(probe: Probe, hasher: Any, batches: Sequence[HashBatch], expected: Sequence[Any]) -> Finding | None:
    """Feed the batches to one hasher in order; ``expected`` None is a batch whose output is not judged."""
    through = ((hasher(batch), ids) for batch, ids in zip(batches, expected, strict=True))
    found = (None if ids is None else ids_differ(seen, ids, probe.layout) for seen, ids in through)
    return first((f"batch {number}", each) for number, each in enumerate(found))


SLOT_CASES = cases(
    "slot-cache", compact=[slot_chunks, rollback, prefix_hit], H7=[window_before_slots], H11=[slot_tables],
    H12=[slot_chunks, slot_write_first, slot_padding, slot_strides, rollback, prefix_hit, rebind, new_slots],
    H13=[prompt_window], H16=[fresh_instance],
)  # fmt: skip

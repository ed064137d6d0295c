"""The contract cases of hash ids and slot caches: H2–H14 and H16–H18."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_engram.checks_case import Case, Finding, Probe, Unsupported, ids_differ, to_numpy
from pytest_engram.hashing import (
    IMAGE_SENTINEL_ID,
    EngramLayout,
    HashBatch,
    SlotCache,
    dummy_ids,
    window_row,
)

_BLOCK = 4  # tokens per KV block: small, so that short sequences cross blocks
_SLOTS = 64


def pad_id(probe: Probe) -> Finding | None:
    """The pad value in a hash is token_map[pad token], not the pad token's own id."""
    singles = [HashBatch.sequence([token]) for token in probe.tokens(6)]
    return probe.differs(HashBatch.concat(singles))


def multipliers(probe: Probe) -> Finding | None:
    """Each layer and shift has its own odd multiplier: a constant sequence hashes differently in every layer."""
    return probe.differs(HashBatch.sequence(np.repeat(probe.tokens(3), 5)))


def prime_ranges(probe: Probe) -> Finding | None:
    """Head h's ids lie in [offset, offset + prime), for primes searched from another start too."""
    small = EngramLayout.for_rows(12_000)  # engines test primality for real sizes: not for primes near 61
    batch = HashBatch.sequence(probe.tokens(48))
    ids = to_numpy(probe.hasher(layout=small)(batch))
    outside = np.argwhere((ids < small.offsets) | (ids >= small.offsets + small.primes))
    if len(outside):
        token, layer, head = map(int, outside[0])
        low, prime = int(small.offsets[layer, head]), int(small.primes[layer, head])
        return Finding(
            detail="id outside its head's range", token=token, head=head, layer=small.layer_ids[layer],
            expected=f"[{low}, {low + prime})", seen=str(ids[token, layer, head]),
        )  # fmt: skip
    return ids_differ(ids, probe.ids(batch, layout=small), small)


def ngrams(probe: Probe) -> Finding | None:
    """Ids are the XOR of value × multiplier, modulo the prime, plus the offset; int32 [T, L, H], 2-grams first."""
    return probe.differs(HashBatch.sequence(probe.tokens(40)))


def strided_inputs(probe: Probe) -> Finding | None:
    """Token ids, positions, masks and windows of any stride give the ids of contiguous ones."""
    plain = HashBatch.sequence(probe.tokens(12), history=probe.tokens(5), dead=probe.rng.random(12) < 0.2)
    strided = replace(
        plain,
        token_ids=np.repeat(plain.token_ids, 2)[::2],
        positions=np.repeat(plain.positions, 3)[::3],
        dead=np.repeat(plain.dead, 2)[::2],
        window=np.asfortranarray(np.repeat(plain.window, 2, axis=0))[::2],
    )
    return probe.differs(strided, probe.ids(plain))


def before_start(probe: Probe) -> Finding | None:
    """A lookback before position 0 takes the pad value even where a stale window holds a token."""
    chunks = [HashBatch.sequence(probe.tokens(4), start=start, history=probe.tokens(3)) for start in range(4)]
    return probe.differs(HashBatch.concat(chunks))


def dead_blocks_deeper(probe: Probe) -> Finding | None:
    """A dead token blocks its own shift and every deeper one, in the chunk and in the window."""
    dead = np.zeros(14, dtype=bool)
    dead[[0, 5, 6, 10]] = True
    inside = HashBatch.sequence(probe.tokens(14), dead=dead)
    windows = [
        HashBatch.sequence(probe.tokens(3), history=probe.tokens(4), history_dead=[at == i for i in range(4)])
        for at in range(1, 4)
    ]
    return probe.differs(HashBatch.concat([inside, *windows]))


def image_sentinel(probe: Probe) -> Finding | None:
    """The image sentinel is dead both in the chunk and in the window."""
    tokens, history = probe.tokens(8), probe.tokens(3)
    tokens[[2, 6]] = history[1] = IMAGE_SENTINEL_ID
    return probe.differs(HashBatch.sequence(tokens, history=history))


def unknown_window(probe: Probe) -> Finding | None:
    """Without a slot cache an unknown window value takes the pad id but does not block deeper shifts."""
    chunks = [HashBatch.sequence(probe.tokens(3), start=9, history=probe.tokens(3)) for _ in range(4)]
    for column, chunk in enumerate(chunks):
        chunk.window[0, column:] = -1
    chunks[3].window[0] = [-1, *probe.tokens(2)]
    return probe.differs(HashBatch.concat(chunks))


def window_first(probe: Probe) -> Finding | None:
    """A known window value wins over the slot cache; the cache answers only what the window does not know."""
    hasher, cache = probe.hasher(_SLOTS), SlotCache(_SLOTS)
    first = _paged(probe.tokens(8), [3, 9, 1])
    conflicting = replace(
        _paged(probe.tokens(2), [3, 9, 1], start=8),
        window=np.array([[*probe.tokens(1), -1, *probe.tokens(1)]], np.int32),
    )
    return _through(probe, hasher, [first, conflicting], [probe.ids(first, cache), probe.ids(conflicting, cache)])


def window_order(probe: Probe) -> Finding | None:
    """Window column j is the token at chunk start − 1 − j."""
    whole = probe.tokens(9)
    batch = HashBatch.sequence(whole[6:], history=whole[:6])
    return probe.differs(batch, probe.ids(HashBatch.sequence(whole))[6:])


def repeated_boundaries(probe: Probe) -> Finding | None:
    """Empty requests repeat boundaries and shift nobody's window; padding tokens behind the last are not judged."""
    real = [HashBatch.sequence(probe.tokens(3), history=probe.tokens(4)) for _ in range(2)]
    empty = [HashBatch.sequence([], history=probe.tokens(4)) for _ in range(3)]
    batch = HashBatch.concat([empty[0], real[0], empty[1], real[1], empty[2]])
    padded = replace(
        batch, token_ids=np.pad(batch.token_ids, (0, 2)), positions=np.pad(batch.positions, (0, 2)),
        dead=np.pad(batch.dead, (0, 2)),
    )  # fmt: skip
    return probe.differs(padded, probe.ids(HashBatch.concat(real)))


def chunk_invariance(probe: Probe) -> Finding | None:
    """Any split of a sequence in chunks gives the ids of the whole."""
    for size, length in ((1, 9), (2, 11), (3, 20), (17, 40), (257, 262)):
        whole = probe.tokens(length)
        dead = probe.rng.random(length) < 0.1
        expected = probe.ids(HashBatch.sequence(whole, dead=dead))
        for at in range(0, length, size):
            part = slice(at, at + size)
            chunk = HashBatch.sequence(whole[part], history=whole[:at], dead=dead[part], history_dead=dead[:at])
            if found := probe.differs(chunk, expected[part]):
                return replace(found, detail=f"chunks of {size}, chunk at {at}: {found.detail}")
    return None


def batch_invariance(probe: Probe) -> Finding | None:
    """Requests of one batch do not leak into each other, also where the second looks back past its own start."""
    chunks = [
        HashBatch.sequence(probe.tokens(5)),
        HashBatch.sequence(probe.tokens(4), start=7),
        HashBatch.sequence(probe.tokens(3), history=probe.tokens(2)),
        HashBatch.sequence(probe.tokens(2)),
    ]
    return probe.differs(HashBatch.concat(chunks), np.concatenate([probe.ids(chunk) for chunk in chunks]))


def slot_chunks(probe: Probe) -> Finding | None:
    """With the slot cache alone, any split in chunks gives the ids of the whole, across blocks and dead tokens."""
    for size in (1, 3, 5):
        whole, dead = probe.tokens(11), probe.rng.random(11) < 0.2
        chunks = [_paged(whole[i : i + size], [5, 0, 8], start=i, dead=dead[i : i + size]) for i in range(0, 11, size)]
        expected = probe.ids(HashBatch.sequence(whole, dead=dead))
        if found := _through(probe, probe.hasher(_SLOTS), chunks, [expected[i : i + size] for i in range(0, 11, size)]):
            return replace(found, detail=f"chunks of {size}: {found.detail}")
    return None


def slot_tables(probe: Probe) -> Finding | None:
    """Requests with different block tables in one batch read their own history only."""
    wholes, tables = [probe.tokens(9), probe.tokens(9)], [[1, 7, 4], [6, 2, 3]]
    batches = [
        HashBatch.concat([_paged(w[part], t, start=part.start) for w, t in zip(wholes, tables, strict=True)])
        for part in (slice(0, 5), slice(5, 9))
    ]
    ids = [probe.ids(HashBatch.sequence(whole)) for whole in wholes]
    expected = [np.concatenate([each[part] for each in ids]) for part in (slice(0, 5), slice(5, 9))]
    return _through(probe, probe.hasher(_SLOTS), batches, expected)


def slot_write_first(probe: Probe) -> Finding | None:
    """All slots of a batch are written before any is read: a later chunk of the same batch sees the earlier one."""
    whole = probe.tokens(8)
    batch = HashBatch.concat([_paged(whole[4:], [2, 5], start=4), _paged(whole[:4], [2, 5])])
    ids = probe.ids(HashBatch.sequence(whole))
    return probe.differs(batch, np.concatenate([ids[4:], ids[:4]]), hasher=probe.hasher(_SLOTS))


def slot_padding(probe: Probe) -> Finding | None:
    """A negative slot is not written: a fully padded replay leaves every slot as it was."""
    whole = probe.tokens(6)  # its history lies in the first and the last slot, where a stray −1 would land
    first, last = _paged(whole[:5], [15, 0]), _paged(whole[5:], [15, 0], start=5)
    replay = replace(_paged(probe.tokens(5), [15, 0]), slots=np.full(5, -1, dtype=np.int64))
    ids = probe.ids(HashBatch.sequence(whole))
    return _through(probe, probe.hasher(_SLOTS), [first, replay, last], [ids[:5], None, ids[5:]])


def slot_strides(probe: Probe) -> Finding | None:
    """A strided slot mapping and a strided block table are read by their strides."""
    whole = probe.tokens(7)
    first, last = _paged(whole[:6], [3, 4]), _paged(whole[6:], [3, 4], start=6)
    assert first.slots is not None  # noqa: S101 - _paged always gives slots
    first = replace(first, slots=np.repeat(first.slots, 2)[::2])
    last = replace(last, block_table=np.repeat(np.array([[3, 4]], dtype=np.int32), 2, axis=1)[:, ::2])
    ids = probe.ids(HashBatch.sequence(whole))
    return _through(probe, probe.hasher(_SLOTS), [first, last], [ids[:6], ids[6:]])


def rollback(probe: Probe) -> Finding | None:
    """After a speculative rollback the rewritten slots count, not the rejected draft."""
    kept, draft, final = probe.tokens(6), probe.tokens(3), probe.tokens(4)
    chunks = [_paged(part, [7, 1, 2], start=at) for part, at in ((kept, 0), (draft, 6), (final[:2], 6), (final[2:], 8))]
    ids = probe.ids(HashBatch.sequence(np.concatenate([kept, final])))
    drafted = probe.ids(HashBatch.sequence(np.concatenate([kept, draft])))
    return _through(probe, probe.hasher(_SLOTS), chunks, [ids[:6], drafted[6:], ids[6:8], ids[8:]])


def prefix_hit(probe: Probe) -> Finding | None:
    """A request that starts behind a cached prefix reads what the prefix's owner wrote."""
    prefix, own = probe.tokens(_BLOCK), probe.tokens(3)
    owner = _paged(np.concatenate([prefix, probe.tokens(2)]), [6, 1])
    hit = _paged(own, [6, 9], start=_BLOCK)
    expected = probe.ids(HashBatch.sequence(np.concatenate([prefix, own])))[_BLOCK:]
    return _through(probe, probe.hasher(_SLOTS), [owner, hit], [None, expected])


def rebind(probe: Probe) -> Finding | None:
    """Binding the slot cache again drops its history, even with as many slots."""
    hasher, batch = probe.hasher(_SLOTS), _paged(probe.tokens(3), [2, 5], start=4)
    hasher(_paged(probe.tokens(4), [2, 5]))
    hasher.bind(_SLOTS)
    return probe.differs(batch, probe.ids(batch, SlotCache(_SLOTS)), hasher=hasher)


def new_slots(probe: Probe) -> Finding | None:
    """A slot that nobody wrote holds compressed id 0, which is a value and blocks nothing."""
    batch = _paged(probe.tokens(4), [2, 5, 7], start=6)
    return probe.differs(batch, probe.ids(batch, SlotCache(_SLOTS)), hasher=probe.hasher(_SLOTS))


def prompt_window(probe: Probe) -> Finding | None:
    """The V1 window knows prompt positions only; generated tokens come from the slot cache."""
    whole = probe.tokens(8)
    prompt, steps = _paged(whole[:4], [3, 8]), []
    for at in range(4, 8):
        step = _paged(whole[at : at + 1], [3, 8], start=at)
        steps.append(replace(step, window=np.array([window_row(whole.tolist(), at, known=4)], dtype=np.int32)))
    ids = probe.ids(HashBatch.sequence(whole))
    return _through(probe, probe.hasher(_SLOTS), [prompt, *steps], [ids[:4], *(ids[i : i + 1] for i in range(4, 8))])


def history_window(probe: Probe) -> Finding | None:
    """The V2 window has prompt and generated tokens alike, −1 for a fresh request and for rows past the batch."""
    wholes = [probe.tokens(9), probe.tokens(1), probe.tokens(3)]
    decode = [HashBatch.sequence(whole[-1:], history=whole[:-1]) for whole in wholes]
    padding = [HashBatch.sequence([], start=0) for _ in range(2)]
    expected = np.concatenate([probe.ids(HashBatch.sequence(whole))[-1:] for whole in wholes])
    return probe.differs(HashBatch.concat([*decode, *padding]), expected)


def fresh_instance(probe: Probe) -> Finding | None:
    """After a KV transfer the window alone gives the single instance's ids; without it they must differ."""
    whole = probe.tokens(9)
    expected = probe.ids(HashBatch.sequence(whole))[8:]
    probe.hasher(_SLOTS)(_paged(whole[:8], [3, 8, 1]))  # the prefill instance, whose slots do not travel
    decode = _paged(whole[8:], [3, 8, 1], start=8)
    window = np.array([window_row(whole.tolist(), 8)], dtype=np.int32)
    if found := probe.differs(replace(decode, window=window), expected, hasher=probe.hasher(_SLOTS)):
        return found
    if ids_differ(probe.hasher(_SLOTS)(decode), expected, probe.layout) is None:
        return Finding(detail="a hasher that was told no history knows it", expected="other ids", seen="equal ids")
    return None


def dummy_batch(probe: Probe) -> Finding | None:
    """A replica without requests gives DEAD_ID everywhere and keeps no token, for 0 and 7 tokens."""
    dummy = getattr(probe.hasher(), "dummy", None)
    if dummy is None:
        raise Unsupported("the hasher has no dummy(tokens)")
    for count in (0, 7):
        ids, keep = dummy(count)
        if found := ids_differ(ids, dummy_ids(probe.layout, count), probe.layout):
            return found
        mask = to_numpy(keep)
        if mask.shape != (count,) or mask.any():
            return Finding(detail="keep mask", expected=f"{count} × False", seen=str(mask.tolist()))
    return None


def empty_batch(probe: Probe) -> Finding | None:
    """An empty batch gives int32 [0, L, H]."""
    shape = (0, len(probe.layout.layer_ids), probe.layout.columns)
    return probe.differs(HashBatch.sequence([]), np.empty(shape, dtype=np.int32))


def _paged(tokens: Any, table: Sequence[int], start: int = 0, dead: Any = None) -> HashBatch:
    """A chunk with slots and block table, window unknown; blocks of four tokens."""
    positions = np.arange(start, start + len(tokens))
    slots = np.asarray(table)[positions // _BLOCK] * _BLOCK + positions % _BLOCK
    return HashBatch.sequence(
        tokens, start=start, dead=dead, slots=slots, block_table=[*table, *([0] * (3 - len(table)))], block_size=_BLOCK
    )


def _through(probe: Probe, hasher: Any, batches: Sequence[HashBatch], expected: Sequence[Any]) -> Finding | None:
    """Feed the batches to one hasher in order; ``expected`` None is a batch whose output is not judged."""
    for number, (batch, ids) in enumerate(zip(batches, expected, strict=True)):
        seen = hasher(batch)
        if ids is not None and (found := ids_differ(seen, ids, probe.layout)):
            return replace(found, detail=f"batch {number}: {found.detail}")
    return None


HASH_CASES = (
    Case("pad-id", "H2", "hash", pad_id),
    Case("multipliers", "H3", "hash", multipliers),
    Case("prime-ranges", "H4", "hash", prime_ranges),
    Case("ngrams", "H5", "hash", ngrams, compact=True),
    Case("strided-inputs", "H5", "hash", strided_inputs),
    Case("before-start", "H6", "hash", before_start, compact=True),
    Case("dead-blocks-deeper", "H6", "hash", dead_blocks_deeper, compact=True),
    Case("image-sentinel", "H6", "hash", image_sentinel),
    Case("unknown-window", "H7", "hash", unknown_window),
    Case("window-before-slots", "H7", "slot-cache", window_first),
    Case("window-order", "H8", "hash", window_order, compact=True),
    Case("repeated-boundaries", "H9", "hash", repeated_boundaries),
    Case("chunk-invariance", "H10", "hash", chunk_invariance),
    Case("batch-invariance", "H11", "hash", batch_invariance, compact=True),
    Case("slot-tables", "H11", "slot-cache", slot_tables),
    Case("slot-chunks", "H12", "slot-cache", slot_chunks, compact=True),
    Case("slot-write-first", "H12", "slot-cache", slot_write_first),
    Case("slot-padding", "H12", "slot-cache", slot_padding),
    Case("slot-strides", "H12", "slot-cache", slot_strides),
    Case("rollback", "H12", "slot-cache", rollback, compact=True),
    Case("prefix-hit", "H12", "slot-cache", prefix_hit, compact=True),
    Case("rebind", "H12", "slot-cache", rebind),
    Case("new-slots", "H12", "slot-cache", new_slots),
    Case("prompt-window", "H13", "slot-cache", prompt_window),
    Case("history-window", "H14", "hash", history_window),
    Case("fresh-instance", "H16", "slot-cache", fresh_instance),
    Case("dummy-batch", "H17", "hash", dummy_batch),
    Case("empty-batch", "H18", "hash", empty_batch),
)

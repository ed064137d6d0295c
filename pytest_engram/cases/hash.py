"""The contract cases of hash ids without a slot cache: H1–H11, H14 and H17–H20."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from pytest_engram.backends.arrays import to_numpy
from pytest_engram.cases.case import Finding, Parts, Probe, Unsupported, cases, compare, ids_differ, refused
from pytest_engram.hashing import IMAGE_SENTINEL_ID, EngramLayout, HashBatch, dummy_ids


def token_map(probe: Probe) -> Finding | None:
    """Texts that agree but for case, accents and outer or repeated space share an id, in first-seen order."""
    texts = ("b", " The", "the", "THE", "\u00e9", "e\u0301", " ", "", "\t\n", "\ufffd", "\ufffd", "a b", "a \r b", "e",
             *map(str, range(33_000)))  # fmt: skip
    wanted = [0, 1, 1, 1, 2, 2, 3, 4, 3, 5, 6, 7, 7, 2, *range(8, 33_008)]
    ids, count = probe.optional("token_map")([(text, f"raw{index}") for index, text in enumerate(texts)])
    return compare(np.array([*ids, count]), np.array([*wanted, max(wanted) + 1]), lambda token: {"token": token})


def one_variant(probe: Probe) -> Finding | None:
    """One compiled variant of the hash kernel serves 1, 7 and 256 tokens."""
    batches = [HashBatch.sequence(probe.tokens(count), history=probe.tokens(3)) for count in (1, 7, 256)]
    made = probe.optional("hash_variants")(probe.layout, probe.token_map, batches)
    return None if made <= 1 else Finding(detail="compiled variants", expected="at most 1 new", seen=f"{made} new")


def pad_id(probe: Probe) -> Finding | None:
    """The pad value in a hash is token_map[pad token], of any width, not the pad token's own id, nor the model's."""
    batch = HashBatch.concat([HashBatch.sequence([token]) for token in probe.tokens(6)])
    other = replace(probe.layout, pad_token_id=5)  # whose compressed id has 16 bits
    return probe.differs(batch) or ids_differ(probe.hasher(layout=other)(batch), probe.ids(batch, layout=other), other)


def multipliers(probe: Probe) -> Finding | None:
    """Each layer and shift has its own odd multiplier: a constant sequence hashes differently in every layer."""
    return probe.differs(HashBatch.sequence(np.repeat(probe.tokens(3), 5)))


def prime_ranges(probe: Probe) -> Finding | None:
    """Head h's ids lie in [offset, offset + prime), for primes searched from another start too."""
    small = EngramLayout.for_rows(12_000)  # engines test primality for real sizes: not for primes near 61
    batch = HashBatch.sequence(probe.tokens(48))
    return ids_differ(probe.hasher(layout=small)(batch), probe.ids(batch, layout=small), small)


def ngrams(probe: Probe) -> Finding | None:
    """Ids are the XOR of value × multiplier, modulo the prime, plus the offset; int32 [T, L, H], 2-grams first."""
    return probe.differs(HashBatch.sequence(probe.tokens(40)))


def strided_inputs(probe: Probe) -> Finding | None:
    """Token ids, positions, masks and windows of any stride give the ids of contiguous ones."""
    plain = HashBatch.sequence(probe.tokens(12), history=probe.tokens(5), dead=probe.rng.random(12) < 0.2)
    strided = replace(
        plain, token_ids=np.repeat(plain.token_ids, 2)[::2], positions=np.repeat(plain.positions, 3)[::3],
        dead=np.repeat(plain.dead, 2)[::2], window=np.asfortranarray(np.repeat(plain.window, 2, axis=0))[::2],
    )  # fmt: skip
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


def window_order(probe: Probe) -> Finding | None:
    """Window column j is the token at chunk start − 1 − j, also where that has id 0."""
    whole = probe.tokens(9) * (np.arange(9) != 4)
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


def chunk_invariance(probe: Probe) -> Parts:
    """Any split of a sequence in chunks, of more than 8,192 tokens too, gives the ids of the whole."""
    large = probe.backend.receipt().get("mode") != "interpreter"  # which needs 2 ms for a token
    for size, length in ((1, 9), (2, 11), (3, 20), (17, 40), (257, 262), *[(8200, 8210)] * large):
        whole = probe.tokens(length)
        dead = probe.rng.random(length) < 0.1
        expected = probe.ids(HashBatch.sequence(whole, dead=dead))
        for at in range(0, length, size):
            part = slice(at, at + size)
            chunk = HashBatch.sequence(whole[part], history=whole[:at], dead=dead[part], history_dead=dead[:at])
            yield f"chunks of {size}, chunk at {at}", probe.differs(chunk, expected[part])


def batch_invariance(probe: Probe) -> Finding | None:
    """Requests of one batch do not leak into each other, also where the second looks back past its own start."""
    chunks = [
        HashBatch.sequence(probe.tokens(5)), HashBatch.sequence(probe.tokens(4), start=7),
        HashBatch.sequence(probe.tokens(3), history=probe.tokens(2)), HashBatch.sequence(probe.tokens(2)),
    ]  # fmt: skip
    return probe.differs(HashBatch.concat(chunks), np.concatenate([probe.ids(chunk) for chunk in chunks]))


def history_window(probe: Probe) -> Finding | None:
    """The V2 window has prompt and generated tokens alike, −1 for a fresh request and for rows past the batch."""
    wholes = [probe.tokens(9), probe.tokens(1), probe.tokens(3)]
    decode = [HashBatch.sequence(whole[-1:], history=whole[:-1]) for whole in wholes]
    padding = [HashBatch.sequence([], start=0) for _ in range(2)]
    expected = np.concatenate([probe.ids(HashBatch.sequence(whole))[-1:] for whole in wholes])
    return probe.differs(HashBatch.concat([*decode, *padding]), expected)


def dummy_batch(probe: Probe) -> Parts:
    """A replica without requests gives DEAD_ID everywhere and keeps no token, for 0 and 7 tokens."""
    dummy = getattr(probe.hasher(), "dummy", None)
    if dummy is None:
        raise Unsupported("the hasher has no dummy(tokens)")
    for count in (0, 7):
        ids, keep = dummy(count)
        yield "ids", ids_differ(ids, dummy_ids(probe.layout, count), probe.layout)
        yield "keep mask", compare(to_numpy(keep), np.zeros(count, dtype=bool), lambda token: {"token": token})


def empty_batch(probe: Probe) -> Finding | None:
    """An empty batch gives int32 [0, L, H]."""
    shape = (0, len(probe.layout.layer_ids), probe.layout.columns)
    return probe.differs(HashBatch.sequence([]), np.empty(shape, dtype=np.int32))


def no_window(probe: Probe) -> Finding | None:
    """Without a slot cache a batch that has no window is refused, and not hashed as if nothing had been before it."""
    chunk = HashBatch.sequence(probe.tokens(3), history=probe.tokens(4))
    bare = replace(chunk, window=chunk.window[:, :0], window_dead=chunk.window_dead[:, :0])
    return refused(partial(probe.hasher(), bare), "a batch without a window")


HASH_CASES = cases(
    "hash", compact=[ngrams, before_start, dead_blocks_deeper, window_order, batch_invariance],
    H1=[token_map], H2=[pad_id], H3=[multipliers], H4=[prime_ranges], H5=[ngrams, strided_inputs],
    H6=[before_start, dead_blocks_deeper, image_sentinel], H7=[unknown_window], H8=[window_order],
    H9=[repeated_boundaries], H10=[chunk_invariance], H11=[batch_invariance], H14=[history_window], H17=[dummy_batch],
    H18=[empty_batch], H19=[one_variant], H20=[no_window],
)  # fmt: skip

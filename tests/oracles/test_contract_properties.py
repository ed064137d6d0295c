"""What must hold for any sequence, split, batch, draft, slot table, window and shard: hypothesis against the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pytest_engram.backends.protocol import TableShard
from pytest_engram.cases.slots import BLOCK, SLOTS, paged
from pytest_engram.hashing import DEAD_ID, EngramLayout, HashBatch, SlotCache, hash_ids, synthetic_token_map, window_row
from pytest_engram.layout import head_shard, shard_rank
from pytest_engram.rows import decode_rows, gated_residual, lookup_rows, project, synthetic_rows

MODEL, MAP = EngramLayout.deepseek_v41(), synthetic_token_map()
TOKENS = st.integers(0, 129_279)
LONG = 3 * BLOCK  # tokens of the longest request: three blocks


@dataclass(frozen=True)
class Request:
    """A request's tokens with its dead spans, and its block table."""

    tokens: Any
    dead: Any
    table: list[int]

    def whole(self) -> Any:
        """The ids of the sequence as one batch."""
        return hash_ids(MODEL, HashBatch.sequence(self.tokens, dead=self.dead), MAP)

    def chunk(self, start: int, end: int, *, window: bool = False) -> HashBatch:
        """Tokens ``start`` … ``end − 1`` with slots; the window knows all before them, or nothing."""
        made = paged(self.tokens[start:end], self.table, start=start, dead=self.dead[start:end])
        if window:
            made.window[0] = window_row(self.tokens.tolist(), start)
            made.window_dead[0] = np.array(window_row(self.dead.astype(int).tolist(), start)) == 1
        return made


@st.composite
def dead_spans(draw: st.DrawFn, length: int) -> Any:
    """A mask with up to two spans of dead tokens."""
    mask = np.zeros(length, dtype=bool)
    for start, size in draw(st.lists(st.tuples(st.integers(0, length), st.integers(1, 4)), max_size=2)):
        mask[start : start + size] = True
    return mask


@st.composite
def sequences(draw: st.DrawFn, least: int = 1, blocks: Any = None) -> Request:
    """One request; ``blocks`` are the KV blocks that nobody else has."""
    tokens = np.array(draw(st.lists(TOKENS, min_size=least, max_size=LONG)), np.int32)
    table = draw(st.permutations(range(SLOTS // BLOCK) if blocks is None else blocks))[:3]
    return Request(tokens, draw(dead_spans(len(tokens))), list(table))


@st.composite
def splits(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Any split of a sequence in chunks."""
    cuts = sorted(draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    return list(zip([0, *cuts], [*cuts, length], strict=True))


@given(data=st.data(), one=sequences())
def test_any_split_gives_the_ids_of_the_whole(data: st.DataObject, one: Request) -> None:
    """H6, H8, H10, H12: chunks of any sizes, through the window and through the slot cache, with dead spans."""
    cache, whole = SlotCache(SLOTS), one.whole()
    for start, end in data.draw(splits(len(one.tokens))):
        assert np.array_equal(hash_ids(MODEL, one.chunk(start, end, window=True), MAP), whole[start:end])
        assert np.array_equal(hash_ids(MODEL, one.chunk(start, end), MAP, cache), whole[start:end])


@given(data=st.data(), kept=sequences(least=1), drafted=st.lists(TOKENS, min_size=1, max_size=5))
def test_any_accepted_part_of_a_draft_leaves_no_trace(
    data: st.DataObject, kept: Request, drafted: list[int]
) -> None:  # fmt: skip
    """H12: k of n drafted tokens are accepted, the slots of the rest are written again, once or several times."""
    cache, size = SlotCache(SLOTS), len(kept.tokens)
    start = data.draw(st.integers(0, size - 1))
    accepted = data.draw(st.integers(0, min(len(drafted), size - start)))
    draft = np.concatenate([kept.tokens[: start + accepted], np.array(drafted[accepted:], np.int32)])[:LONG]
    rejected = replace(kept, tokens=draft, dead=np.resize(kept.dead, len(draft)) & (np.arange(len(draft)) < start))
    whole = kept.whole()
    for _ in range(data.draw(st.integers(1, 2))):
        hash_ids(MODEL, kept.chunk(0, start), MAP, cache)
        hash_ids(MODEL, rejected.chunk(start, len(draft)), MAP, cache)
    assert np.array_equal(hash_ids(MODEL, kept.chunk(start, size), MAP, cache), whole[start:])


@given(data=st.data(), owner=sequences(least=BLOCK), own=st.lists(TOKENS, min_size=1, max_size=BLOCK))
def test_any_prefix_hit_reads_its_owner(data: st.DataObject, owner: Request, own: list[int]) -> None:
    """H12: a request that shares whole blocks with another one has the ids of its own whole sequence."""
    cache, shared = SlotCache(SLOTS), data.draw(st.integers(1, len(owner.tokens) // BLOCK)) * BLOCK
    free = [block for block in range(SLOTS // BLOCK) if block not in owner.table]
    tokens = np.concatenate([owner.tokens[:shared], np.array(own, np.int32)])
    hit = Request(tokens, np.resize(owner.dead, len(tokens)) & (np.arange(len(tokens)) < shared),
                   [*owner.table[: shared // BLOCK], *free[:2]])  # fmt: skip
    hash_ids(MODEL, owner.chunk(0, len(owner.tokens)), MAP, cache)
    if shared < LONG:
        assert np.array_equal(hash_ids(MODEL, hit.chunk(shared, len(tokens)), MAP, cache), hit.whole()[shared:])


@given(data=st.data(), count=st.integers(1, 4))
def test_any_batch_gives_each_request_its_own_ids(data: st.DataObject, count: int) -> None:
    """H9, H11: requests of any lengths with any slot tables, decoded together, beside empty ones."""
    cache = SlotCache(SLOTS)
    own = [range(4 * i, 4 * i + 4) for i in range(count)]
    requests = [data.draw(sequences(blocks=blocks)) for blocks in own]
    cuts = [data.draw(st.integers(0, len(one.tokens))) for one in requests]
    hash_ids(MODEL, HashBatch.concat([one.chunk(0, cut) for one, cut in zip(requests, cuts, strict=True)]), MAP, cache)
    rest = [one.chunk(cut, len(one.tokens)) for one, cut in zip(requests, cuts, strict=True)]
    expected = np.concatenate([one.whole()[cut:] for one, cut in zip(requests, cuts, strict=True)])
    assert np.array_equal(hash_ids(MODEL, HashBatch.concat(rest), MAP, cache), expected)


@given(one=sequences(least=2), at=st.integers(1, LONG), known=st.integers(0, LONG))
def test_any_window_agrees_with_the_slot_cache(one: Request, at: int, known: int) -> None:
    """H7, H13: whatever part of the history the window knows, the slot cache supplies the rest."""
    cache, at = SlotCache(SLOTS), min(at, len(one.tokens) - 1)
    hash_ids(MODEL, one.chunk(0, at), MAP, cache)
    step = one.chunk(at, at + 1)
    step.window[0] = window_row(one.tokens.tolist(), at, known=min(known, at))
    step.window_dead[0] = np.array(window_row(one.dead.astype(int).tolist(), at, known=min(known, at))) == 1
    assert np.array_equal(hash_ids(MODEL, step, MAP, cache), one.whole()[at : at + 1])


@given(data=st.data(), heads=st.integers(1, 24), tp=st.integers(1, 4), dp=st.integers(1, 4))
def test_any_shards_assemble(data: st.DataObject, heads: int, tp: int, dp: int) -> None:
    """L3, L4, L8: head shards of any shape, TP-major with DP inside, side by side give the whole table's rows."""
    shards = tp * dp
    if (shards - 1) * -(-heads // shards) >= heads:
        shards, tp, dp = 1, 1, 1
    primes = np.array([data.draw(st.integers(1, 9)) for _ in range(heads)])
    weight, scales = synthetic_rows(0, int(primes.sum()), 32, layer=0, seed=heads)
    ids = (np.cumsum(primes) - primes + [data.draw(st.integers(0, int(p) - 1)) for p in primes]).astype(np.int32)[None]
    ids[0, data.draw(st.integers(0, heads - 1))] = data.draw(st.sampled_from([DEAD_ID, int(primes.sum()), 0]))
    outputs = []
    for rank in (shard_rank(t, d, dp) for t in range(tp) for d in range(dp)):
        part = head_shard(primes, shards, rank)
        own = slice(part.start, part.end)
        out = np.full((1, part.local_heads, 32), 7, np.uint16)
        shard = TableShard(weight[own], scales[own], part.start, part.end, part.head_start, part.local_heads, heads)
        lookup_rows(shard, ids, out)
        outputs.append(out)
    ends = np.cumsum(primes)
    local = -(-heads // shards)
    for head, seen in enumerate(np.concatenate(outputs, axis=1)[0]):
        first = head // local * local
        low, high = int(ends[first] - primes[first]), int(ends[min(first + local, heads) - 1]) if head < heads else 0
        owned = head < heads and low <= ids[0, head] < high
        row = int(ids[0, head]) if owned else 0
        expected = decode_rows(weight[row : row + 1], scales[row : row + 1])[0] if owned else np.zeros(32)
        assert np.array_equal(seen, expected)


@given(data=st.data(), tokens=st.integers(0, 4), width=st.sampled_from([1, 2, 5]))
def test_projection_and_gate_equal_scalar_sums(data: st.DataObject, tokens: int, width: int, scalar: Any) -> None:
    """L11: rows through ``wkv`` and the signed-sqrt gate equal plain Python sums, token by token."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    weight, scales = synthetic_rows(0, max(1, 3 * tokens), 32, layer=0, seed=tokens)
    rows = decode_rows(weight, np.full_like(scales, 119))[: 3 * tokens].reshape(tokens, 3, 32)
    wkv, hidden = rng.standard_normal((96, 2 * width)), rng.standard_normal((tokens, width))
    norms, keep = rng.standard_normal((2, width)), rng.random(tokens) < 0.8
    seen = gated_residual(hidden, *project(rows, wkv), *norms, keep=keep)
    expected = [
        scalar.engram_output(h.tolist(), [scalar.bf16_value(int(bit)) for bit in row.ravel()], wkv.tolist(),
                             norms.tolist(), keep=bool(kept))
        for h, row, kept in zip(hidden, rows, keep, strict=True)
    ]  # fmt: skip
    assert np.allclose(seen, np.array(expected).reshape(seen.shape), rtol=1e-9, atol=1e-12)

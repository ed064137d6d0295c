"""vLLM's own kernels against the oracles: what the check set does not reach, and what the two of them disagree on."""

import threading
from contextlib import suppress

import numpy as np
import pytest

from pytest_engram import hashing, rows
from pytest_engram.backends.protocol import Backend, Launch, TableShard
from pytest_engram.cases.case import to_numpy
from pytest_engram.errors import UsageError
from pytest_engram.gates.comparison import ENGINE_MODULES
from pytest_engram.hashing import EngramLayout, HashBatch

torch = pytest.importorskip("torch", reason="vLLM's modules need torch")


@pytest.fixture(scope="module")
def layout():
    """Two layers of 24 heads with primes above 61."""
    return EngramLayout.for_rows(9000, head_dim=32)


@pytest.fixture(scope="module")
def shard(layout):
    """All rows of layer 0 as one shard."""
    count = layout.num_embeddings[0]
    weight, scales = rows.synthetic_rows(0, count, 32, layer=0, seed=1)
    return TableShard(weight, scales, 0, count, 0, 24, 24)


def test_backend_satisfies_the_protocol_and_proves_itself(vllm_backend, vllm_version):
    """The receipt has the version, one hash per file and the mode; tested bytes are labelled so."""
    assert isinstance(vllm_backend, Backend)
    receipt = vllm_backend.receipt()
    assert (receipt["version"], receipt["label"]) == (vllm_version, "tested")
    assert len(receipt["sha256:vllm/models/deepseek_v41/common/engram.py"]) == 64
    assert receipt["subject"] == ENGINE_MODULES
    assert receipt["mode"] == ("interpreter" if vllm_backend.interpreted else "compiled")
    assert ("nan-codes" in vllm_backend.differences) == vllm_backend.interpreted


def test_layout_is_the_models(vllm_backend):
    """H3, H4: vLLM's primes, offsets and multipliers of the published model are the golden ones."""
    model = EngramLayout.deepseek_v41()
    own = vllm_backend.layout(model)
    np.testing.assert_array_equal(np.reshape(own.primes, (2, 24)), model.primes)
    np.testing.assert_array_equal(own.offsets.cpu().numpy(), model.offsets)
    multipliers = vllm_backend.engine.get("compute_hash_multipliers")(model.layer_ids, 4, model.compressed_vocab)
    np.testing.assert_array_equal(multipliers.numpy(), model.multipliers)


def test_prime_61_is_skipped_by_vllm(vllm_backend):
    """H4: vLLM's primality test calls its own witness 61 composite, so layouts that search from 61 or below differ."""
    is_prime = vllm_backend.engine.get("_is_prime")
    wrong = [n for n in range(2, 2000) if is_prime(n) != all(n % d for d in range(2, int(n**0.5) + 1))]
    assert wrong == [61]


@pytest.mark.parametrize("slot_cache", [False, True])
def test_a_staged_hash_is_the_plain_one(vllm_backend, layout, slot_cache):
    """What ``on_device`` launches follows its own tensors: they are refilled in place before a graph's replay."""
    hasher = vllm_backend.hasher(layout, hashing.synthetic_token_map(), slot_cache=slot_cache)
    hasher.bind(16)
    paged = {"slots": np.arange(7), "block_table": [[0]], "block_size": 16} if slot_cache else {}
    one, other = (
        HashBatch.sequence(np.arange(7) * step, history=[5, 6, 7], dead=np.arange(7) == step, **paged)
        for step in (3, 5)
    )
    wanted = [to_numpy(hasher(batch)) for batch in (one, other)]
    launch, seen, keep = hasher.on_device(one, None)
    assert (to_numpy(seen) == one.token_ids).all()
    assert (to_numpy(keep) == ~one.dead).all()
    assert (to_numpy(launch()) == wanted[0]).all()
    for held, fresh in zip(launch.args, hasher.on_device(other, None)[0].args, strict=True):
        if held is not None:
            held.copy_(fresh)
    assert (to_numpy(launch()) == wanted[1]).all()
    assert (wanted[0] != wanted[1]).any()


@pytest.mark.parametrize("slot_cache", [False, True])
def test_empty_batch_has_the_full_shape(vllm_backend, layout, slot_cache):
    """H18: no tokens give [0, layers, heads]."""
    hasher = vllm_backend.hasher(layout, hashing.synthetic_token_map(), slot_cache=slot_cache)
    hasher.bind(8)
    batch = HashBatch.sequence([], slots=[], block_table=[[0]])
    assert tuple(hasher(batch).shape) == (0, 2, 24)


def test_slot_cache_without_slots_is_refused(vllm_backend, layout):
    """H12: a bound slot cache and a batch without slots is a named error, not vLLM's bare assertion."""
    hasher = vllm_backend.hasher(layout, hashing.synthetic_token_map(), slot_cache=True)
    with pytest.raises(UsageError, match="nothing is bound"):
        hasher(HashBatch.sequence([1], slots=[0], block_table=[[0]]))
    hasher.bind(8)
    with pytest.raises(UsageError, match="no slots"):
        hasher(HashBatch.sequence([1]))


def test_profile_run_has_no_cache(vllm_backend, layout):
    """H17: while the KV cache is unbound, vLLM says that hashing is to be skipped."""
    hasher = vllm_backend.hasher(layout, hashing.synthetic_token_map(), slot_cache=True)
    assert hasher._state.ensure_cache() is False
    hasher.bind(8)
    assert hasher._state.ensure_cache() is True


def test_launch_is_the_engines_own_arithmetic(vllm_backend, shard):
    """A cap bounds the programs of a background launch; without one the grid is the device's."""
    ids = np.full((2, 24), -1, np.int32)
    out = np.empty((2, 24, 32), np.uint16)
    assert vllm_backend.lookup(shard, ids, out, cap=2) == Launch(rows=48, tiles=3, grid=2)
    assert vllm_backend.lookup(shard, ids, out, cap=64) == Launch(rows=48, tiles=3, grid=3)
    assert vllm_backend.lookup(shard, ids, out).grid == 3
    assert vllm_backend.lookup(shard, ids[:0], out[:0]) == Launch(rows=0, tiles=0, grid=0)
    with pytest.raises(UsageError, match="at least 1 program"):
        vllm_backend.lookup(shard, ids, out, cap=0)


def _out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("fails", [False, True])
def test_lookup_keeps_no_memory_of_the_table(vllm_backend, layout, fails, monkeypatch):
    """A shared table must be unmappable after a lookup, or a failed one: only interpreter garbage refers to it."""
    import gc
    import mmap

    count = layout.num_embeddings[1]
    mapping = mmap.mmap(-1, count * 33)
    both = np.frombuffer(mapping, np.uint8)
    shard = TableShard(both[: count * 32].reshape(-1, 32), both[count * 32 :, None], 0, count, 0, 24, 24)
    if fails:
        monkeypatch.setattr(vllm_backend.engine.get("ParallelEngramEmbedding"), "lookup", _out_of_memory)
    with suppress(MemoryError):
        vllm_backend.lookup(shard, np.zeros((1, 24), np.int32), np.empty((1, 24, 32), np.uint16))
    del both, shard
    gc.collect()  # Triton's interpreter leaves reference cycles
    mapping.close()  # BufferError if a view were alive


def test_threads_do_not_disturb_each_other(vllm_backend, layout, shard):
    """A gather worker and the main computation launch at the same time, as the CPU engine does."""
    batch = HashBatch.sequence(range(6))
    ids = hashing.hash_ids(layout, batch, hashing.synthetic_token_map())
    expected = np.empty((6, 24, 32), np.uint16)
    rows.lookup_rows(shard, ids[:, 0], expected)
    hasher, wrong = vllm_backend.hasher(layout, hashing.synthetic_token_map(), slot_cache=False), []

    def gather():
        for _ in range(8):
            out = np.zeros_like(expected)
            vllm_backend.lookup(shard, ids[:, 0], out)
            wrong.append(int((out != expected).sum()))

    worker = threading.Thread(target=gather)
    worker.start()
    seen = [to_numpy(hasher(batch)) for _ in range(8)]
    worker.join()
    assert wrong == [0] * 8
    assert all((each == ids).all() for each in seen)


@pytest.mark.parametrize(("tp", "dp", "heads"), [(1, 4, 5), (2, 2, 5), (4, 1, 6), (8, 1, 6)])
def test_shards_without_heads_are_refused_before_allocation(vllm_backend, monkeypatch, tp, dp, heads):
    """L4: vLLM's constructor asserts that every shard has a head, before it allocates."""
    kind = vllm_backend.engine.get("ParallelEngramEmbedding")
    around = vllm_backend.around
    monkeypatch.setattr(around, "tp_size", tp)
    # 0.33 asks a DP group of one TP rank for its devices first: the shard count is what is tested here
    monkeypatch.setattr(kind, "_get_shard_info", lambda _: (tp * dp, 0))
    monkeypatch.setattr(kind, "_allocate_weights", lambda _: pytest.fail("allocated"))
    with pytest.raises(AssertionError, match="ranks without hash heads"):
        kind(heads, 32, (1,) * heads)


def test_shards_load_complete_head_buckets(vllm_backend, monkeypatch):
    """L7: of a checkpoint with 7 rows more than the primes cover, the shards' rows are the whole heads, in order."""
    kind, sizes, extra = vllm_backend.engine.get("ParallelEngramEmbedding"), (3, 5, 7, 2, 4), 7
    total = sum(sizes) + extra
    weight = torch.arange(total * 32, dtype=torch.int32).to(torch.uint8).view(total, 32)
    scales = torch.arange(total, dtype=torch.uint8).view(total, 1)
    around, parts = vllm_backend.around, []
    monkeypatch.setattr(around, "tp_size", 3)
    for rank in range(3):
        monkeypatch.setattr(around, "tp_rank", rank)
        table = kind(total, 32, sizes)
        for parameter, part in ((table.weight, weight), (table.weight_scale_inv, scales.view(torch.float8_e8m0fnu))):
            parameter.weight_loader(parameter, part if part is not weight else part.view(torch.float8_e4m3fn))
        expected = hashing.head_shard(np.array(sizes), 3, rank)
        assert (table.vocab_start_idx, table.vocab_end_idx) == (expected.start, expected.end)
        assert (table.head_start, table.part_n_hash_cols) == (expected.head_start, expected.local_heads)
        parts.append((table.weight.view(torch.uint8), table.weight_scale_inv))
    assert torch.equal(torch.cat([part[0] for part in parts]), weight[: sum(sizes)])
    assert torch.equal(torch.cat([part[1] for part in parts]), scales[: sum(sizes)])


@pytest.mark.parametrize(("tokens_", "tp"), [(0, 2), (1, 2), (2, 3), (3, 3), (4, 3), (65, 4)])
def test_sequence_parallel_window_is_zero_padded(vllm_backend, tokens_, tp):
    """L9: each rank keeps ceil(T / tp) tokens of every head, side by side, zero beyond the last token."""
    select = vllm_backend.engine.get("_engram_select_rows")
    gathered = vllm_backend.tensor(np.arange(tp * tokens_ * 4, dtype=np.float32).reshape(tp * tokens_, 2, 2) + 1)
    chunk = -(-tokens_ // tp)
    whole = gathered.cpu().numpy().reshape(tp, tokens_, 4).transpose(1, 0, 2).reshape(tokens_, tp * 4)
    whole = np.concatenate([whole, np.zeros((chunk * tp - tokens_, tp * 4), np.float32)])
    for rank in range(tp):
        out = vllm_backend.tensor(np.full((chunk, tp * 2, 2), np.nan, np.float32))
        select(gathered, out, tokens_, rank * chunk, 4)
        got = out.cpu().numpy().reshape(chunk, tp * 4)
        np.testing.assert_array_equal(got, whole[rank * chunk : (rank + 1) * chunk])

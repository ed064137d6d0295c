"""vLLM's own kernels against the oracles: what the check set does not reach, and what the two of them disagree on."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from pytest_engram import hashing, rows, tokens
from pytest_engram.backends.protocol import Backend, Launch, TableShard
from pytest_engram.cases.case import to_numpy
from pytest_engram.errors import UsageError
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
    assert receipt["mode"] == ("interpreter" if vllm_backend.interpreted else "compiled")
    assert bool(vllm_backend.differences) == vllm_backend.interpreted


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


@pytest.mark.parametrize("count", [0, 7])
def test_dummy_batch_is_dead(vllm_backend, layout, count):
    """H17: a replica without requests contributes dead ids and an all-false keep mask."""
    hasher = vllm_backend.hasher(layout, hashing.synthetic_token_map(), slot_cache=False)
    ids, keep = hasher._state.dummy_hashes(vllm_backend.tensor(np.zeros(count, np.int32)))
    np.testing.assert_array_equal(ids.cpu().numpy(), hashing.dummy_ids(layout, count))
    assert not keep.any()


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


def test_lookup_keeps_no_memory_of_the_table(vllm_backend, layout):
    """A shared table must be unmappable after a lookup: nothing but the interpreter's garbage refers to it."""
    import gc
    import mmap

    count = layout.num_embeddings[1]
    mapping = mmap.mmap(-1, count * 33)
    both = np.frombuffer(mapping, np.uint8)
    shard = TableShard(both[: count * 32].reshape(-1, 32), both[count * 32 :, None], 0, count, 0, 24, 24)
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


def test_head_order_is_tp_major(vllm_backend, monkeypatch):
    """L8: a rank's shard is tp_rank × dp_size + dp_rank."""
    around = vllm_backend.around
    shard_rank = vllm_backend.engine.get("engram_head_shard_rank")
    for tp_rank, dp_rank in ((0, 0), (0, 3), (2, 1)):
        monkeypatch.setattr(around, "tp_rank", tp_rank)
        monkeypatch.setattr(around, "group", SimpleNamespace(world_size=4, rank_in_group=dp_rank))
        assert shard_rank() == hashing.shard_rank(tp_rank, dp_rank, 4)


class _Peers:
    """A DP group of two replicas whose peer contributes what it is told."""

    world_size, rank_in_group = 2, 0

    def __init__(self):
        self.sent = None

    def all_gather(self, value, dim):
        self.sent = value
        return torch.cat((value, value), dim=dim)


def test_gather_pads_to_the_node_local_maximum(vllm_backend, monkeypatch):
    """L10: a replica is padded with dead ids to its own node's maximum; another node's 4096 does not matter."""
    around, peers = vllm_backend.around, _Peers()
    gather = vllm_backend.engine.get("gather_engram_hashes")
    counts = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([3, 5, 4096, 1]))
    monkeypatch.setattr(around, "group", peers)
    monkeypatch.setattr(around, "forward", SimpleNamespace(dp_metadata=counts))
    ids = torch.ones(3, 24, dtype=torch.int32)
    assert gather(ids).shape == (10, 24)
    assert peers.sent[:3].eq(1).all()
    assert peers.sent[3:].eq(-1).all()
    with pytest.raises(ValueError, match="exceeds the DP token slot"):
        gather(torch.ones(6, 24, dtype=torch.int32))
    monkeypatch.setattr(around, "forward", SimpleNamespace(dp_metadata=None))
    with pytest.raises(RuntimeError, match="needs DP token metadata"):
        gather(ids)


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


def test_gate_of_the_real_layer_passes_masked_tokens(vllm_backend):
    """L11: vLLM's gate agrees with the oracle within float32 noise, and a masked token passes bit for bit."""
    draw = np.random.default_rng(3)
    hidden, key, value = draw.standard_normal((3, 4, 257)).astype(np.float32)
    query_norm, key_norm = draw.standard_normal((2, 257)).astype(np.float32)
    keep = np.array([True, False, True, True])
    seen = vllm_backend.gate(hidden, key, value, query_norm, key_norm, keep)
    wanted = rows.gated_residual(hidden, key, value, query_norm, key_norm, keep=keep)
    np.testing.assert_allclose(seen, wanted, atol=2e-6, rtol=1e-6)
    np.testing.assert_array_equal(seen[1], hidden[1])


def test_token_map_is_vllms(vllm_backend):
    """H1: vLLM's own builder and the oracle give the same ids for texts of every kind that the contract names."""
    pytest.importorskip("tokenizers", reason="vLLM's builder normalises with tokenizers")
    texts = [" The", "the", "THE", "é", "é", "É", " ", "", "\t\n", "�", "a b", "a \r b", "ﬁ", "\ue000", "ς"]
    named = [(text, f"raw{index}") for index, text in enumerate(texts)]

    class Tokenizer:
        backend_tokenizer = property(lambda self: self)

        def __len__(self):
            return len(named)

        def decode(self, ids, skip_special_tokens):
            assert not skip_special_tokens
            return named[ids[0]][0]

        def id_to_token(self, index):
            return named[index][1]

    own, size = vllm_backend.engine.get("build_compressed_token_map")(Tokenizer())
    wanted, wanted_size = tokens.build_token_map(named)
    assert (own, size) == (wanted.tolist(), wanted_size)

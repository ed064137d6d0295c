"""vLLM's compiled kernels, its registered tables and its prefetch, on a real GPU."""

from pathlib import Path

import numpy as np
import pytest

from pytest_engram import hashing, rows
from pytest_engram.backends.protocol import TableShard
from pytest_engram.checks import CASES, check, explain

torch = pytest.importorskip("torch", reason="vLLM's modules need torch")

from pytest_engram.backends.vllm_storage import EngineLayer  # noqa: E402  after the skip

pytestmark = pytest.mark.gpu
TOKENS = 48


@pytest.fixture(scope="module")
def layout():
    """Two layers of 24 heads, about 100,000 rows each."""
    return hashing.EngramLayout.for_rows(100_000)


@pytest.fixture(scope="module")
def ids(layout):
    """Hash ids int32 [T, 2, 24] of one sequence."""
    batch = hashing.HashBatch.sequence(np.random.default_rng(5).integers(0, 129_000, TOKENS))
    return hashing.hash_ids(layout, batch, hashing.synthetic_token_map())


def content(layout, index):
    """A layer's synthetic table (weight, scales)."""
    return rows.synthetic_rows(0, layout.num_embeddings[index], layout.head_dim, layer=index, seed=9)


def expected(layout, ids, index):
    """The oracle's bf16 bits of one layer's ids."""
    weight, scales = content(layout, index)
    out = np.empty((len(ids), 24, layout.head_dim), np.uint16)
    rows.lookup_rows(TableShard(weight, scales, 0, len(weight), 0, 24, 24), ids[:, index], out)
    return out


def bits(tensor):
    """A bf16 tensor's bit patterns."""
    return tensor.cpu().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("engine", ["cpu", "cuda"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.contract}-{case.name}")
def test_compiled_engine_conforms(vllm_backend, case, engine):
    """Every case of the contract holds on the GPU, with numpy arrays and CUDA tensors, prefetch on real streams."""
    sample = check(vllm_backend, case, engine=engine)
    if not sample.supported:
        pytest.skip(sample.detail)
    assert sample.passed, explain(sample)


@pytest.mark.parametrize("storage", ["pinned", "thp", "device"])
def test_prefetch_of_two_layers_gives_the_rows(vllm_backend, layout, ids, storage):
    """P1, P3, P7: both layers' rows are exact, offloaded tables on one shared side stream, device tables inline."""
    stream = torch.cuda.Stream()
    layers = [
        EngineLayer(vllm_backend, layout, i, hidden=64, max_tokens=TOKENS, storage=storage, stream=stream)
        for i in range(2)
    ]
    for index, layer in enumerate(layers):
        layer.load(*content(layout, index))
    for part in (slice(0, TOKENS), slice(3, 10), slice(0, TOKENS)):  # a smaller batch between two equal ones
        placed = torch.from_numpy(np.ascontiguousarray(ids[part])).cuda()
        for index, layer in enumerate(layers):
            layer.prepare(placed[:, index])
        for index, layer in enumerate(layers):
            np.testing.assert_array_equal(bits(layer.embed(placed[:, index])), expected(layout, ids[part], index))
    used = [layer.module._prefetch_stream for layer in layers]
    assert used == [None if storage == "device" else stream] * 2
    assert layers[0].backing in {storage, "anon-thp", "pinned"}


def test_two_ranks_read_one_shared_table(vllm_backend, layout, ids, two_ranks):
    """S2, S4, S6: two ranks register one object, the leader loads it, both read exact rows, no file stays."""
    before = set(Path("/dev/shm").glob("vllm_engram_*"))
    backends = [vllm_backend, type(vllm_backend)(vllm_backend.name)]  # as each process has its own

    def rank(group):
        layer = EngineLayer(
            backends[group.rank], layout, 0, hidden=64, max_tokens=TOKENS, storage="shared", group=group
        )
        layer.load(*(content(layout, 0) if group.rank == 0 else (None, None)))
        placed = torch.from_numpy(np.ascontiguousarray(ids[:, 0])).cuda()
        layer.prepare(placed)
        return bits(layer.embed(placed)), layer.module.embed_tokens.weight.data_ptr(), layer.backing

    seen = two_ranks(rank)
    for got, _, _ in seen:
        np.testing.assert_array_equal(got, expected(layout, ids, 0))
    assert seen[0][1] != seen[1][1]
    assert {backing for _, _, backing in seen} == {"tmpfs"}
    assert set(Path("/dev/shm").glob("vllm_engram_*")) == before

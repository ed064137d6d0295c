"""vLLM's own shared storage and layer, run without a GPU: only CUDA's registration is played by a recorder."""

import types
from pathlib import Path

import numpy as np
import pytest

from pytest_engram import hashing, rows
from pytest_engram.backends.protocol import TableShard
from pytest_engram.errors import EngramError, NotMeasurable, UsageError

torch = pytest.importorskip("torch", reason="vLLM's storage needs torch")

from pytest_engram.backends.vllm_storage import EngineLayer  # noqa: E402  after the skip
from pytest_engram.backends.vllm_tables import EngineGroup  # noqa: E402
from pytest_engram.numa.world import RankSpec, run_world  # noqa: E402

ROWS, DIM = 8, 32


class Cuda:
    """Records registrations; ``refuse`` is a rank-independent result code."""

    def __init__(self, refuse=0):
        self.registered, self.unregistered, self._refuse = [], [], refuse

    def cudart(self):
        return self

    def cudaHostRegister(self, pointer, size, flags):
        self.registered.append(pointer)
        return types.SimpleNamespace(value=self._refuse)

    def cudaHostUnregister(self, pointer):
        self.unregistered.append(pointer)
        return types.SimpleNamespace(value=0)


class Pinned(torch.Tensor):
    def is_pinned(self, device=None):
        return True


@pytest.fixture
def world(vllm_backend, monkeypatch, two_ranks):
    """Build the real storage on both ranks at once: (storages, errors, cuda)."""
    engine = vllm_backend.engine
    kind = engine.get("DPSharedEngramStorage")

    def built(*, cuda=None, pinned=True):
        cuda = cuda or Cuda()
        monkeypatch.setitem(engine.around.torch, "cuda", cuda)
        if pinned:
            wrap = lambda array: torch.from_numpy(array).as_subclass(Pinned)  # noqa: E731
            monkeypatch.setitem(engine.around.torch, "from_numpy", wrap)
        errors = [None, None]

        def rank(group):
            try:
                return kind(ROWS, DIM, 32, EngineGroup(group))
            except RuntimeError as error:
                errors[group.rank] = str(error)

        return two_ranks(rank), errors, cuda

    before = set(Path("/dev/shm").glob("vllm_engram_*"))
    yield built
    assert set(Path("/dev/shm").glob("vllm_engram_*")) == before, "S3, S4: nothing stays in /dev/shm"


def engine_scope(backend):
    """The globals of the Engram file that has the storage."""
    return vars(next(m for m in backend.engine.entries if "DPSharedEngramStorage" in vars(m) and "mmap" in vars(m)))


def test_one_failed_mapping_fails_both_ranks(world, vllm_backend, monkeypatch):
    """S3: one peer's failed mmap is raised by both; the good rank's registration is undone."""
    import mmap

    turns = iter([True, False])

    def second_fails(*args, **kwargs):
        if next(turns):
            return mmap.mmap(*args, **kwargs)
        raise OSError(12, "Cannot allocate memory")

    fake = types.SimpleNamespace(mmap=second_fails, MAP_SHARED=mmap.MAP_SHARED)
    monkeypatch.setitem(engine_scope(vllm_backend), "mmap", fake)
    done, errors, cuda = world()
    assert done == [None, None]
    assert errors[0] == errors[1]
    assert "Cannot allocate memory" in errors[0]
    assert len(cuda.registered) == 1
    assert cuda.unregistered == cuda.registered


def test_only_the_leader_copies_and_each_load_is_a_barrier(world, two_ranks):
    """S6: ranks that load in opposite order still find every byte after their last call."""
    done, _, _ = world()
    parameters = []
    for storage in done:
        pair = [torch.nn.Parameter(part, requires_grad=False) for part in (storage.weight, storage.weight_scale_inv)]
        for parameter in pair:
            parameter.engram_vocab_start = 0
        parameters.append(pair)
    weight = torch.arange(ROWS * DIM, dtype=torch.int16).to(torch.uint8).view(ROWS, DIM)
    scales = torch.arange(ROWS, dtype=torch.uint8).view(ROWS, 1)
    loaded = (weight.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))

    def load(group):
        rank, storage = group.rank, done[group.rank]
        storage.group = EngineGroup(group)
        for part in (0, 1) if rank == 0 else (1, 0):
            storage.load_weight(parameters[rank][part], loaded[part] if rank == 0 else None)
        return storage.weight.view(torch.uint8).clone(), storage.weight_scale_inv.clone()

    seen = two_ranks(load)
    for got in seen:
        assert torch.equal(got[0], weight)
        assert torch.equal(got[1], scales)


@pytest.mark.parametrize("unpinned", [None, 1])
def test_two_processes_share_the_engines_storage(vllm_backend, vllm_version, unpinned):
    """S2, S3, S4, S6: in processes of their own the ranks share bytes and barriers, or all tell the same error."""
    if not vllm_backend.interpreted:
        pytest.skip("the two processes of a GPU machine would both take its GPU")
    specs = [RankSpec(env={"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})] * 2
    payload = {"spec": f"vllm@{vllm_version}", "unpinned": unpinned}
    entry = f"{Path(__file__).parent / 'rank_entry.py'}:share"
    seen = run_world(entry, payload, specs, deadline_s=120)
    if unpinned is None:
        assert seen == [[77, 3 * 33 * 4096, 0]] * 2
    else:
        assert seen[0] == seen[1]
        assert "EDP rank 1: RuntimeError: cudaHostRegister did not pin" in seen[0]


@pytest.fixture
def layer(vllm_backend):
    """A small real layer with a loaded table in ordinary memory: (layer, weight, scales, ids of one layer)."""
    layout = hashing.EngramLayout.for_rows(9000, head_dim=64)
    made = EngineLayer(vllm_backend, layout, 0, hidden=32, max_tokens=8, storage="device")
    count = layout.num_embeddings[0]
    table = rows.synthetic_rows(0, count, 64, layer=0, seed=1)
    made.load(*table)
    ids = hashing.hash_ids(layout, hashing.HashBatch.sequence(range(5)), hashing.synthetic_token_map())[:, 0]
    return made, *table, ids


def test_table_on_the_device_is_read_inline(layer):
    """P7, L1: without offload there is no side stream; rows are the oracle's bits, at an address that stays."""
    made, weight, scales, ids = layer
    assert made.module._prefetch_stream is None
    made.prepare(ids)
    first = made.embed(ids)
    expected = np.empty((5, 24, 64), np.uint16)
    rows.lookup_rows(TableShard(weight, scales, 0, len(weight), 0, 24, 24), ids, expected)
    np.testing.assert_array_equal(first.cpu().view(torch.int16).numpy().view(np.uint16), expected)
    made.prepare(ids[:2])
    assert made.embed(ids[:2]).data_ptr() == first.data_ptr()


def test_more_tokens_than_the_staging_buffer_is_refused(layer):
    """P6: the staging buffer has a fixed size; more tokens are an assertion, not an overflow."""
    with pytest.raises(AssertionError, match="staging buffer too small"):
        layer[0].prepare(np.zeros((9, 24), np.int32))


def test_shared_table_asks_for_cuda_and_a_group(vllm_backend, monkeypatch):
    """S8: without CUDA, or without peers, a shared table is refused before anything is allocated."""
    layout = hashing.EngramLayout.for_rows(9000)
    arguments = {"hidden": 32, "max_tokens": 8}
    if vllm_backend.interpreted:
        with pytest.raises(NotMeasurable, match="storage='device'"):
            EngineLayer(vllm_backend, layout, 0, storage="shared", **arguments)
    monkeypatch.setattr(vllm_backend, "interpreted", False)
    with pytest.raises(EngramError, match="group with size > 1") as caught:
        EngineLayer(vllm_backend, layout, 0, storage="shared", **arguments)
    assert caught.value.code == "engine-refused"
    with pytest.raises(UsageError, match="expected shared, pinned, thp, device"):
        EngineLayer(vllm_backend, layout, 0, storage="disk", **arguments)

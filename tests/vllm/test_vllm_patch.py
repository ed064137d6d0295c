"""The reference allocation order over vLLM's own storage, run without a GPU: only CUDA's registration is played."""

import ctypes
import gc
import logging
import sys
import types
from pathlib import Path

import pytest

from pytest_engram.errors import EngramError

torch = pytest.importorskip("torch", reason="vLLM's storage needs torch")
pytest.importorskip("triton", reason="vLLM's modules need Triton")

from pytest_engram.backends import load_backend, vllm_patch  # noqa: E402  after the skip
from pytest_engram.backends.vllm_tables import EngineGroup  # noqa: E402
from pytest_engram.numa import _syscalls, table  # noqa: E402
from pytest_engram.numa.topology import read_topology  # noqa: E402

ROWS, DIM = 4096, 256
NBYTES = ROWS * (DIM + DIM // 32)
NODE = read_topology().memory_nodes[0].id


class Cudart:
    """The ranges that are registered; the registration number ``refuse`` fails."""

    def __init__(self, log, refuse=None):
        self.ranges, self._log, self._refuse = {}, log, refuse

    def register(self, address, nbytes):
        self._log.append("register")
        if self._refuse == len(self.ranges):
            return 2
        self.ranges[address] = nbytes
        return 0

    def unregister(self, address):
        del self.ranges[address]
        return 0

    def text(self, code):
        return f"text of {code}"

    def clear(self):
        pass

    def pinned(self, byte):
        return any(start <= byte.ctypes.data < start + size for start, size in self.ranges.items())

    def synchronize(self):
        pass


class StockCuda:
    """What the stock code registers with."""

    def __init__(self, log):
        self._log = log

    def cudart(self):
        return self

    def cudaHostRegister(self, pointer, size, flags):
        self._log.append("stock register")
        return types.SimpleNamespace(value=0)

    def cudaHostUnregister(self, pointer):
        return types.SimpleNamespace(value=0)


class Pinned(torch.Tensor):
    def is_pinned(self, device=None):
        return True


@pytest.fixture
def world(vllm_version, monkeypatch, two_ranks, caplog):
    """Allocate the patched storage on both ranks under a policy: (storages, log of steps, cudart, warnings)."""
    backend = vllm_patch.PatchedVllmBackend(f"vllm@{vllm_version}")
    engine = backend.engine
    kind = engine.get("DPSharedEngramStorage")
    assert issubclass(kind, vllm_patch.PlacedStorage)
    log, mbind, populate = [], _syscalls.mbind, table.populate
    monkeypatch.setattr(_syscalls, "mbind", lambda *arguments: (log.append("mbind"), mbind(*arguments)))

    def touch(*arguments, write, **how):
        log.append("write" if write else "map")
        return populate(*arguments, write=write, **how)

    monkeypatch.setattr(table, "populate", touch)
    # This engine's own: stock finalizers need them after the test.
    wrap = lambda array: torch.from_numpy(array).as_subclass(Pinned)  # noqa: E731
    engine.around.torch.update(cuda=StockCuda(log), from_numpy=wrap)

    def allocated(policy, *, refuse=None):
        cudart = Cudart(log, refuse)
        monkeypatch.setattr(kind, "cudart", cudart)
        monkeypatch.setenv(vllm_patch.ENVIRONMENT, policy)
        with caplog.at_level(logging.INFO):
            storages = two_ranks(lambda group: kind(ROWS, DIM, 32, EngineGroup(group)))
        return storages, log, cudart, [record.message for record in caplog.records if record.levelname == "WARNING"]

    before = set(Path("/dev/shm").glob("vllm_engram_*"))
    yield allocated
    assert set(Path("/dev/shm").glob("vllm_engram_*")) == before, "S4: nothing stays in /dev/shm"


def test_policy_then_pages_then_registrations(world, caplog):
    """S2, S6: one rank binds and writes every page, and only then both register one object; pages are reported."""
    (leader, follower), log, cudart, warned = world(f"bind:{NODE}")
    assert log == ["mbind", "write", "register", "register"]
    assert warned == []
    assert list(cudart.ranges.values()) == [NBYTES] * 2
    leader.weight_scale_inv[3, 0] = 77
    assert follower.weight_scale_inv[3, 0] == 77
    assert f"'pages': {{{NODE}: {NBYTES // 4096}}}" in caplog.text


def test_without_a_policy_it_is_stock(world):
    """Stock order runs in both ranks, and nothing is said."""
    storages, log, cudart, warned = world("")
    assert (log, cudart.ranges, warned) == (["stock register"] * 2, {}, [])
    assert [storage.weight.shape for storage in storages] == [(ROWS, DIM)] * 2


@pytest.mark.parametrize(("policy", "why"), [("bind:x", "no node number"), ("split:2", "shares whole slices")])
def test_a_policy_that_fails_is_loudly_stock(world, policy, why):
    """A policy that cannot be had here is a warning with its reason in both ranks, and the stock allocation."""
    _, log, cudart, warned = world(policy)
    assert (log, cudart.ranges) == (["stock register"] * 2, {})
    assert [why in text for text in warned] == [True] * 2


def test_one_refused_registration_is_stock_in_both_ranks(world):
    """S3: the rank whose registration succeeded undoes it; both warn with one text that names the other rank."""
    _, log, cudart, warned = world(f"bind:{NODE}", refuse=1)
    assert log == ["mbind", "write"] + ["register"] * 2 + ["stock register"] * 2
    assert cudart.ranges == {}
    assert len(warned) == 2
    assert warned[0] == warned[1]
    assert "text of 2" in warned[0]


def test_ranks_that_were_asked_differently_stay_stock(world, monkeypatch):
    """A policy that only one worker's environment has is a warning in both and stock in both."""
    answers = iter([f"bind:{NODE}", ""])
    environ = types.SimpleNamespace(get=lambda *_: next(answers))
    monkeypatch.setattr(vllm_patch, "os", types.SimpleNamespace(environ=environ))
    _, log, _, warned = world(f"bind:{NODE}")
    assert log == ["stock register"] * 2
    assert ["differs between ranks" in text for text in warned] == [True] * 2


def test_the_last_view_unregisters(world):
    """S5: dropping the storage keeps the range registered while a view lives; the last view's end unregisters it."""
    storages, _, cudart, _ = world(f"bind:{NODE}")
    view = storages[0].weight[2:4]
    at = view.untyped_storage().data_ptr()
    storages.clear()
    gc.collect()
    assert list(cudart.ranges) == [at]
    assert ctypes.string_at(at, 1) == b"\0"
    del view
    gc.collect()
    assert cudart.ranges == {}


def test_weights_load_as_in_stock(world, two_ranks):
    """S6: the leader's checkpoint is in both ranks' storage after their last call."""
    storages, *_ = world(f"bind:{NODE}")
    parameters = [torch.nn.Parameter(storage.weight, requires_grad=False) for storage in storages]
    for parameter in parameters:
        parameter.engram_vocab_start = 0
    weight = torch.arange(ROWS * DIM, dtype=torch.int32).to(torch.uint8).view(ROWS, DIM).view(torch.float8_e4m3fn)

    def load(group):
        storage = storages[group.rank]
        storage.group = EngineGroup(group)
        storage.load_weight(parameters[group.rank], weight if group.rank == 0 else None)
        return storage.weight.view(torch.uint8).clone()

    for seen in two_ranks(load):
        assert torch.equal(seen, weight.view(torch.uint8))


def test_entry_point_patches_the_installed_engine_or_says_why_not(vllm_version, monkeypatch, caplog):
    """``register`` finds the class in either release's module, patches once, and warns where there is none."""
    backend = load_backend(f"vllm@{vllm_version}")
    module = next(one for one in backend.engine.entries if hasattr(one, "DPSharedEngramStorage"))
    stock = module.DPSharedEngramStorage
    home = next(name for name in vllm_patch.MODULES if name == module.__name__)
    for name in vllm_patch.MODULES:  # None: as if not installed
        parts = name.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        monkeypatch.setitem(sys.modules, name, module if name == home else None)
    vllm_patch.register()
    vllm_patch.register()
    assert module.DPSharedEngramStorage.__mro__[1:3] == (vllm_patch.PlacedStorage, stock)
    assert caplog.records == []
    monkeypatch.setitem(sys.modules, home, None)
    vllm_patch.register()
    assert "stock Engram placement: no DPSharedEngramStorage in" in caplog.text


def test_patched_backend_is_a_backend(vllm_version):
    """The candidate's name says that it is patched, and it satisfies the protocol."""
    try:
        backend = load_backend("pytest_engram.backends.vllm_patch:PatchedVllmBackend")
    except EngramError as error:
        pytest.skip(f"{error.seen}; the pinned release is not here")
    assert backend.name.endswith("+placed")

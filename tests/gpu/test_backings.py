"""Memory that CUDA makes, as backings, over a stand-in libcuda that really maps shared memory."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_engram.engines import backings
from pytest_engram.engines.backings import CUDA_BACKINGS, CuMem, Pinned
from pytest_engram.errors import EngramError, NotMeasurable, PlacementError, UsageError
from pytest_engram.gpu import registration
from pytest_engram.gpu.cumem import Driver, offer, receive
from pytest_engram.gpu.registration import covering, register
from pytest_engram.gpu.views import device_view
from pytest_engram.model import Moment, PlacementPlan, TablePlan
from pytest_engram.numa import _syscalls
from pytest_engram.numa.backing import BACKINGS
from pytest_engram.numa.group import SoloGroup
from pytest_engram.numa.table import build_table
from pytest_engram.numa.topology import read_topology

NODE = read_topology().memory_nodes[0].id
UNIT = 2 << 20  # the driver's granularity
NBYTES = (3 << 20) + 5


class Libcuda:
    """Virtual memory management over memfd; ``fail`` maps a function's name to its CUresult."""

    def __init__(self, fail: dict[str, int] | None = None) -> None:
        self.fail, self.calls = fail or {}, []
        self.handles: dict[int, int] = {}  # handle -> descriptor
        self.mapped: dict[int, int] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            return self.fail.get(name) or getattr(self, f"_{name}")(*arguments) or 0

        return call

    def _cuMemGetAllocationGranularity(self, unit: Any, _asked: Any, _option: int) -> None:
        unit._obj.value = UNIT

    def _cuMemCreate(self, handle: Any, nbytes: Any, asked: Any, _flags: Any) -> int:
        assert ctypes.sizeof(asked._obj) == 32  # CUmemAllocationProp
        assert (asked._obj.type, asked._obj.handles, asked._obj.where.type) == (1, 1, 3)
        if asked._obj.where.id != NODE:
            return 1
        descriptor = os.memfd_create("cumem")
        os.posix_fallocate(descriptor, 0, nbytes.value)
        return self._hold(handle, descriptor)

    def _hold(self, handle: Any, descriptor: int) -> int:
        handle._obj.value = 0x1000 + descriptor
        self.handles[handle._obj.value] = descriptor
        return 0

    def _cuMemExportToShareableHandle(self, descriptor: Any, handle: Any, kind: int, _flags: Any) -> None:
        assert kind == 1
        descriptor._obj.value = os.dup(self.handles[handle.value])

    def _cuMemImportFromShareableHandle(self, handle: Any, descriptor: Any, _kind: int) -> int:
        return self._hold(handle, os.dup(descriptor.value))

    def _cuMemAddressReserve(self, address: Any, nbytes: Any, *_: Any) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address._obj.value = self._libc.mmap(None, nbytes.value, 0, flags, -1, 0)

    def _cuMemMap(self, address: Any, nbytes: Any, _offset: Any, handle: Any, _flags: Any) -> None:
        flags = mmap.MAP_SHARED | 0x10 | 0x8000  # MAP_FIXED, MAP_POPULATE
        descriptor = self.handles[handle.value]
        at = self._libc.mmap(address.value, nbytes.value, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        assert at == address.value
        self.mapped[at] = nbytes.value

    def _cuMemSetAccess(self, _address: Any, _nbytes: Any, access: Any, count: Any) -> None:
        wanted = access if isinstance(access, ctypes.Array) else [access._obj]
        assert (ctypes.sizeof(wanted[0]), wanted[0].flags, count.value) == (12, 3, len(wanted))  # CUmemAccessDesc

    def _cuDeviceGetAttribute(self, value: Any, _number: int, _device: int) -> None:
        value._obj.value = 1

    def _cuMemGetAllocationPropertiesFromHandle(self, asked: Any, _handle: Any) -> None:
        asked._obj.type, asked._obj.where.type, asked._obj.where.id = 1, 3, NODE

    def _cuMemUnmap(self, address: Any, nbytes: Any) -> None:
        assert self.mapped.pop(address.value) == nbytes.value
        self._libc.munmap(address.value, nbytes.value)

    def _cuMemAddressFree(self, *_: Any) -> None: ...

    def _cuMemRelease(self, handle: Any) -> None:
        os.close(self.handles.pop(handle.value))

    def _cuPointerGetAttribute(self, found: Any, attribute: int, address: Any) -> None:
        assert attribute == 3
        found._obj.value = address.value

    def _cuMemHostGetDevicePointer_v2(self, found: Any, address: Any, _flags: Any) -> int:
        """Of memory that nobody registered: the mapping's start for every byte, or, by ``fail``, an error."""
        found._obj.value = next(at for at, size in self.mapped.items() if at <= address.value < at + size)
        return 0

    def _cuCtxSynchronize(self) -> None: ...

    def accessible(self) -> list[tuple[int, int]]:
        """(location type, id) of each access that was given."""
        places = [arguments[2]._obj.where for name, arguments in self.calls if name == "cuMemSetAccess"]
        return [(place.type, place.id) for place in places]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Libcuda]:
    """Both backings over one stand-in driver whose device is number 3; nothing of it is left."""
    library = Libcuda()
    for kind in CUDA_BACKINGS.values():
        monkeypatch.setattr(kind, "open_driver", staticmethod(lambda: Driver(library, 3)))
        monkeypatch.setitem(BACKINGS, kind.name, kind)
    yield library
    gc.collect()
    assert (library.handles, library.mapped) == ({}, {})


def placement(backing: str, mode: str = "bind", nodes: tuple[int, ...] = (NODE,)) -> PlacementPlan:
    """One rank, one table."""
    return PlacementPlan(policy="test", backing=backing, tables=(TablePlan(ranks=(0,), mode=mode, nodes=nodes),))


def held(table: Any) -> Any:
    """What the CUDA engine registers with."""
    return register(table.buffer, cudart=table.backing.cudart)


def test_cumem_goes_through_the_whole_protocol(cuda: Libcuda) -> None:
    """The driver places, so policy and pre-touch are not ours; the audit answers; GPU, then host are let in."""
    table = build_table(SoloGroup(), placement("cumem"), NBYTES, register=held)
    receipts = {one.step: one for one in table.receipts}
    assert "driver placed" in (receipts["policy"].not_applicable or "")
    assert "driver placed" in (receipts["populate"].not_applicable or "")
    assert receipts["map"].detail == f"{2 * UNIT} bytes on node {NODE} for {table.backing.nbytes}"
    assert table.distributions[0].pages == {NODE: table.backing.nbytes // 4096}
    assert table.distributions[0].identity.startswith(f"pytest-engram-{os.getpid()}-")  # its device names every table
    assert cuda.accessible() == [(1, 3), (3, NODE)]
    assert covering(table.address, NBYTES) is not None
    table.load(lambda buffer: buffer.fill(7), SoloGroup())
    assert table.audit(Moment.LOADED).covered_bytes == table.backing.nbytes
    kept = table.buffer[5:9]
    table.close()
    gc.collect()
    assert kept.tolist() == [7] * 4
    assert len(cuda.mapped) == 1  # mapped while a view lives


@pytest.mark.parametrize("code", [0, 1])
def test_views_of_cumem_memory_have_its_own_addresses(cuda: Libcuda, code: int) -> None:
    """The GPU reads every part of the table where the host does, though the driver's answer about registered memory
    is an error here (1) or one address for all bytes (0): it is not asked."""
    cuda.fail["cuMemHostGetDevicePointer_v2"] = code
    table = build_table(SoloGroup(), placement("cumem"), NBYTES, register=held)
    table.load(lambda buffer: buffer.fill(7), SoloGroup())
    for low, high in ((0, NBYTES), (0, 2 << 20), ((2 << 20) + 8, NBYTES), (NBYTES - 1, NBYTES)):
        part = table.buffer[low:high]
        view = device_view(part, tensor=Seen)
        assert view.data_ptr() == part.ctypes.data == table.address + low
        assert np.array_equal(np.asarray(view), part)
        del view, part
    assert [name for name, _ in cuda.calls if name == "cuMemHostGetDevicePointer_v2"] == []
    last = cumem_sharing()["pointers"](cuda, table.address, table.backing.nbytes)
    assert last["host_get"] == ([-1, -1] if code else [0, 0])  # why it would have been a split view
    assert last["attribute"] == [0, table.backing.nbytes - 1]
    table.close()


class Seen:
    """What torch's tensor does of the view: its address, its bytes, its life."""

    def __init__(self, view: Any) -> None:
        self._view, self.__array_interface__ = view, view.__cuda_array_interface__

    def data_ptr(self) -> int:
        return int(self.__array_interface__["data"][0])


def cumem_sharing() -> dict[str, Any]:
    """The script for the GPU."""
    return runpy.run_path(str(Path(__file__).with_name("cumem_sharing.py")))


def test_a_peer_imports_the_same_memory(cuda: Libcuda) -> None:
    """The leader's descriptor reaches a peer by socket; both see each other's writes; it ends with the leader."""
    leader, peer = CuMem(NBYTES), CuMem(NBYTES)
    leader.ask(placement("cumem").tables[0])
    threads = set(threading.enumerate())
    handle = leader.create()
    peer.attach(handle)
    for one in (leader, peer):
        one.map()
    leader.mapped[NBYTES - 1] = 77
    assert peer.mapped[NBYTES - 1] == 77
    assert leader.address != peer.address
    assert leader.label == peer.label != ""
    leader.close()
    for thread in threading.enumerate():
        if thread.name == "engram-cumem":
            thread.join(30)
    assert set(threading.enumerate()) <= threads
    with pytest.raises(PlacementError, match="network namespace") as caught:
        receive(handle["path"])
    assert caught.value.code == "peer-object-unreachable"
    peer.close()


def test_a_peer_that_goes_away_ends_no_offer() -> None:
    """A peer that hangs up before it has the descriptor leaves the offer to the others."""
    descriptor = os.memfd_create("offered")
    listener = offer(descriptor)
    name = listener.getsockname().decode()
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(name)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)  # of an offer that has ended nobody would hear
    try:
        received = receive(name)
    finally:
        socket.setdefaulttimeout(before)
    assert os.fstat(received).st_ino == os.fstat(descriptor).st_ino
    for each in (descriptor, received):
        os.close(each)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_every_variant_of_sharing_is_tried_and_undone(cuda: Libcuda) -> None:
    """The diagnosis for the GPU reports each step's code, reads the maker's bytes, and leaves no mapping."""
    found = cumem_sharing()
    driver = Driver(cuda, 3)
    handle, length = driver.create(NODE, NBYTES)
    descriptor = driver.export(handle)
    made = driver.map(handle, NODE, length)
    made[length - 1] = 0x5A
    assert set(found["attributes"](driver).values()) == {1}
    for name, (calls, early) in found["VARIANTS"].items():
        tried = found["attempt"](driver, os.dup(descriptor), length, NODE, calls, early=early)
        assert tried["host_sees"] is True, name
        assert tried["imported"] == [1, 3, NODE]
        assert set(tried["access"]) == {0}
    cuda.fail["cuMemSetAccess"] = 1
    assert found["attempt"](driver, os.dup(descriptor), length, NODE, calls, early=True)["access"] == [1, 1]
    cuda.fail["cuMemImportFromShareableHandle"] = 999
    assert found["attempt"](driver, os.dup(descriptor), length, NODE, calls, early=True) == {"import": 999}
    os.close(descriptor)


def test_memory_that_cannot_be_shared_is_an_absence(cuda: Libcuda) -> None:
    """A driver that opens no imported mapping is named as such in the peer; the leader's own refusal stays an error."""
    leader, peer = CuMem(NBYTES), CuMem(NBYTES)
    leader.ask(placement("cumem").tables[0])
    peer.attach(leader.create())
    cuda.fail["cuMemSetAccess"] = 1
    with pytest.raises(NotMeasurable, match=r"cuMemSetAccess.*CUresult 1.*another rank") as caught:
        peer.map()
    assert caught.value.code == "cumem-not-shared"
    with pytest.raises(PlacementError) as refused:
        leader.map()
    assert refused.value.code == "invalid-value"
    for one in (leader, peer):
        one.close()
    del caught, refused


@pytest.mark.parametrize(
    ("name", "number", "code", "kind"),
    [
        ("cuMemCreate", 2, "out-of-memory", PlacementError),
        ("cuMemCreate", 801, "no-host-numa", NotMeasurable),
        ("cuMemExportToShareableHandle", 999, "cuda-refused", PlacementError),
        ("cuMemMap", 1, "invalid-value", PlacementError),
        ("cuPointerGetAttribute", 1, "invalid-value", PlacementError),
    ],
)
def test_a_refusal_is_named(name: str, number: int, code: str, kind: type[EngramError], cuda: Libcuda) -> None:
    """Every CUresult that is no success is an error with the function's name, and nothing stays."""
    cuda.fail[name] = number
    with pytest.raises(kind, match=f"{name}.*CUresult {number}") as caught:
        build_table(SoloGroup(), placement("cumem"), NBYTES, register=held)
    assert caught.value.code == code
    for handle in list(cuda.handles):  # the process's end releases what was never mapped
        cuda._cuMemRelease(ctypes.c_ulonglong(handle))


@pytest.mark.parametrize(("mode", "nodes"), [("interleave", (NODE,)), ("default", ())])
def test_cumem_wants_one_node(mode: str, nodes: tuple[int, ...], cuda: Libcuda) -> None:
    """Other policies cannot be had of the driver: a named absence before anything is made."""
    with pytest.raises(NotMeasurable, match="the driver wants one node"):
        build_table(SoloGroup(), placement("cumem", mode, nodes), NBYTES)
    assert cuda.calls == []


def test_pinned_is_allocated_under_the_plans_policy(cuda: Libcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocation runs under the asked task policy, which is undone; its rounding is in the receipt."""
    torch = pytest.importorskip("torch", reason="pinned memory is torch's")
    seen = []

    def allocate(nbytes: int) -> Any:
        seen.append(_syscalls.get_mempolicy())
        block = mmap.mmap(-1, 1 << (nbytes - 1).bit_length())
        memory = np.frombuffer(block, dtype=np.uint8)
        memory[:] = 0
        return torch.from_numpy(memory[:nbytes])

    monkeypatch.setattr(Pinned, "allocate", staticmethod(allocate))
    before = _syscalls.get_mempolicy()
    table = build_table(SoloGroup(), placement("pinned"), NBYTES, register=held)
    assert seen == [("bind", (NODE,))]
    assert _syscalls.get_mempolicy() == before
    (mapped,) = [one.detail for one in table.receipts if one.step == "map"]
    assert mapped == f"{4 << 20} bytes mapped for {table.backing.nbytes}"
    assert table.distributions[0].pages == {NODE: table.backing.nbytes // 4096}
    assert cuda.accessible() == []
    table.close()


def test_a_failed_allocation_undoes_the_policy(cuda: Libcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no pinned memory to give, the task's own policy is in force again."""

    def allocate(_nbytes: int) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Pinned, "allocate", staticmethod(allocate))
    before = _syscalls.get_mempolicy()
    with pytest.raises(RuntimeError, match="out of memory"):
        build_table(SoloGroup(), placement("pinned"), NBYTES)
    assert _syscalls.get_mempolicy() == before != ("bind", (NODE,))


def test_only_an_asked_for_backing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the absence is named; other names stay what they are; unknown until installed."""
    monkeypatch.setattr(registration, "_absence", lambda: ("no-gpu", "the driver shows no GPU", "pass it"))
    backings.install("tmpfs", 0)
    for name in CUDA_BACKINGS:
        with pytest.raises(NotMeasurable, match="shows no GPU"):
            backings.install(name, 0)
        with pytest.raises(UsageError, match="unknown backing"):
            build_table(SoloGroup(), placement(name), NBYTES)


def test_reserved_pages_are_given_back(tmp_path: Path) -> None:
    """The lab script's pool grows by whole 2 MiB pages for its run and is what it was after an error too."""
    reserved = runpy.run_path(str(Path(__file__).with_name("backings_on_gpu.py")))["reserved_pages"]
    pool = tmp_path / "nr_hugepages"
    pool.write_text("3\n")
    with suppress(KeyError), reserved(pool, (2 << 20) + 1) as told:
        assert pool.read_text() == "5"
        assert re.match(r"2 MiB page pool: 3 before, 5 for this run, in \d+\.", told)
        raise KeyError
    assert pool.read_text() == "3\n"


def test_a_bring_up_is_registered_until_it_was_audited(make_cudart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration's time holds no unregistering: its array lives until the audit; one that nobody holds ends it."""
    torch = pytest.importorskip("torch", reason="the script empties torch's cache")
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    script = runpy.run_path(str(Path(__file__).with_name("backings_on_gpu.py")))
    scope, calls = script["bring_up"].__globals__, make_cudart()
    audit, seen = scope["audit_range"], list[list[int]]()

    class Kind(BACKINGS["memfd"]):  # type: ignore[misc]
        cudart = calls

    scope["audit_range"] = lambda *span, **how: (seen.append([*calls.ranges.values()]), audit(*span, **how))[1]
    found = script["bring_up"](Kind, script["populated"], 1 << 20, cpu=False)
    assert (seen, found["pages"]) == ([[1 << 20]], {NODE: 256})
    assert (calls.count("register"), calls.count("unregister"), calls.ranges) == (1, 1, {})
    register(np.zeros(4096, np.uint8), cudart=calls)
    assert (calls.count("register"), calls.ranges) == (2, {})


def test_the_script_for_the_gpu_runs_dry(tmp_path: Path) -> None:
    """Two ranks per backing see right rows and one content; what needs a GPU is named as not measured; rates come."""
    script = Path(__file__).with_name("backings_on_gpu.py")
    options = ["--cpu", "--gib", "0.01", "--shared-gib", "0.005", "--rounds", "2", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "backings_on_gpu.jsonl").read_text().splitlines()]
    worlds = {line["backing"]: line for line in lines if "backing" in line}
    assert {name for name in ("tmpfs", "memfd", "anon-thp") if worlds[name]["ranks"][1]["wrong"] == 0} == {
        "tmpfs", "memfd", "anon-thp"
    }  # fmt: skip
    assert [worlds[name]["not_measured"] for name in CUDA_BACKINGS] == [True] * 2
    assert sum(line.get("bring_up") == "tmpfs, populated" and line["gib_s"] > 0 for line in lines) == 2
    assert lines[-1]["same_contents"] is True

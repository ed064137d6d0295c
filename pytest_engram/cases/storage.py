"""The contract cases of shared host storage: S1–S7, S13 and S14.

A backend with the capability offers ``storage(group, nbytes, cudart, *, backing)``: one rank's
:class:`~pytest_engram.numa.shared.SharedTable` or what has its ``buffer``, ``load``, ``close`` and ``receipts``, with a
``device_view()`` of its own if need be, registered through the given calls.  Ranks are threads of this process that
meet at the real hub, so that a case sees every rank's registration and memory; only CUDA's registration is played.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pytest_engram.cases.case import Finding, Probe, Unsupported, cases, refused
from pytest_engram.errors import EngramError, NotMeasurable, PeerError
from pytest_engram.gpu.views import HostView, device_view
from pytest_engram.numa.group import Channel, LocalGroup, SoloGroup
from pytest_engram.numa.hub import Hub, Member

_DEADLINE_S = 10.0
_DELAY_S = 0.1  # of a leader that loads slowly
_SHM = "/dev/shm"  # noqa: S108 - where shared tables lie


class _Cudart:
    """Registers nothing, counts everything; ``fails`` and ``pins`` say how CUDA answers."""

    def __init__(self, *, fails: bool = False, pins: bool = True, meet: threading.Barrier | None = None) -> None:
        self._fails, self._pins, self._meet = fails, pins, meet
        self.live: list[int] = []
        self.undone: list[bool] = []  # per unregistration: the range was registered and still mapped

    def register(self, address: int, nbytes: int) -> int:  # noqa: ARG002 - CUDA's signature
        if not self._fails:
            self.live.append(address)
        if self._meet:
            self._meet.wait(_DEADLINE_S)  # every rank has been asked before any of them fails
        return 2 if self._fails else 0

    def unregister(self, address: int) -> int:
        self.undone.append(address in self.live and _is_mapped(address))
        self.live = [other for other in self.live if other != address]
        return 0

    def text(self, code: int) -> str:
        return f"cudaError {code}"

    def clear(self) -> None: ...

    def pinned(self, byte: Any) -> bool:
        return self._pins and any(0 <= byte.ctypes.data - one < _size() for one in self.live) and byte.size > 0

    def synchronize(self) -> None: ...


class _OnHost:
    """A device view whose device is the host."""

    def __init__(self, view: HostView) -> None:
        self._view = view

    def data_ptr(self) -> int:
        return int(self._view.__cuda_array_interface__["data"][0])


def world(ranks: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """Per rank its result or its error; None of one that never came back."""
    pairs = [socket.socketpair() for _ in ranks]
    members = [Member(rank, Channel(ours), None) for rank, (ours, _) in enumerate(pairs)]  # type: ignore[arg-type]
    results: list[Any] = [None] * len(ranks)

    def run(rank: int, stream: socket.socket) -> None:
        group = LocalGroup(Channel(stream), rank, len(ranks))
        try:
            results[rank] = ranks[rank](group)
            group.finish(None)
        except Exception as error:  # noqa: BLE001 - whatever ends a rank is its result
            results[rank] = error
            group.fail(error if isinstance(error, EngramError) else EngramError(str(error), code="unexpected-error"))
        finally:
            stream.shutdown(socket.SHUT_RDWR)  # the hub reads the end

    threads = [threading.Thread(target=run, args=(i, theirs), daemon=True) for i, (_, theirs) in enumerate(pairs)]
    hub = Hub(members, _DEADLINE_S, None)
    try:
        for thread in threads:
            thread.start()
        hub.serve()
    except PeerError as error:
        hub.tell(error, _DEADLINE_S)
    finally:
        for thread in threads:
            thread.join(_DEADLINE_S)
        hub.close()
        for _, theirs in pairs:
            theirs.close()
    return results


def _is_mapped(address: int) -> bool:
    spans = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def _size() -> int:
    """Bytes that no other process uses: what lies in /dev/shm with this size is ours."""
    return (1 + os.getpid() % 127) * 33 * 4096  # whole rows of 32 values and their scale


def _files(where: str = _SHM) -> int:
    count = 0
    for path in Path(where).glob("*"):  # a list of names, where there is none, too
        with suppress(FileNotFoundError):  # another program's file went meanwhile
            count += path.stat().st_size == _size()
    return count


def _all_raise(probe: Probe, nbytes: int, cudarts: Sequence[_Cudart], culprit: int) -> Finding | None:
    """Every rank raises one text that names the culprit and has its words; nothing stays registered or named."""
    make, before = probe.optional("storage"), _files()
    results = world([partial(lambda one, group: make(group, nbytes, one), one) for one in cudarts])
    _absent(results)
    if not all(isinstance(result, Exception) for result in results):
        return Finding(detail="not every rank raised", seen=str([type(result).__name__ for result in results]))
    own, told = str(results.pop(culprit)), {str(result) for result in results}
    if len(told) != 1 or f"rank {culprit}" not in (text := told.pop()) or own not in text:
        seen = " / ".join([own, *map(str, results)])
        return Finding(detail="the ranks' texts differ", expected=f"one, naming rank {culprit}", seen=seen)
    results.clear()  # an error's traceback holds frames, and those hold tables
    if any(one.live or not all(one.undone) for one in cudarts) or _files() > before:
        return Finding(detail="a registration or a file is left", seen=f"{[one.live for one in cudarts]}, {_files()}")
    return None


def _absent(results: Sequence[Any]) -> None:
    """A sandbox's refusal, or the backend's own word that it cannot here, is an absence."""
    for result in results:
        if isinstance(result, NotMeasurable) or getattr(result, "code", "") == "blocked-by-sandbox":
            raise Unsupported(str(result))


def _together(probe: Probe, run: Callable[[Any, Any], Any], **options: Any) -> list[Any]:
    """``run(group, table)`` in two ranks that share a table; raises the first error, closes the tables."""
    make = probe.optional("storage")

    def rank(group: Any) -> Any:
        table = make(group, _size(), _Cudart(), **options)
        group.barrier(step="built")
        try:
            return run(group, table)
        finally:
            table.close()

    results = world([rank, rank])
    _absent(results)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def creation_error(probe: Probe) -> Finding | None:
    """An object that the leader cannot create makes every rank raise one text that names it; nobody hangs."""
    return _all_raise(probe, 1 << 50, [_Cudart(), _Cudart()], 0)


def unpinned(probe: Probe) -> Finding | None:
    """A mapping that CUDA does not know as pinned is an error in every rank, never a silent copy."""
    return _all_raise(probe, _size(), [_Cudart(), _Cudart(pins=False)], 1)


def one_mapping(probe: Probe) -> Finding | None:
    """Every rank maps the same bytes: what one writes, the other reads."""

    def run(group: Any, table: Any) -> int:
        if group.rank == 1:
            table.buffer[-1] = 77
        group.barrier(step="written")
        return int(table.buffer[-1])

    seen = _together(probe, run)
    return None if seen == [77, 77] else Finding(detail="a private copy", expected="[77, 77]", seen=str(seen))


def undone(probe: Probe) -> Finding | None:
    """One failed registration makes all raise one text; those that succeeded are undone, no file is left."""
    meet = threading.Barrier(2)
    return _all_raise(probe, _size(), [_Cudart(meet=meet), _Cudart(fails=True, meet=meet)], 1)


def unnamed(probe: Probe) -> Finding | None:
    """No name is left in /dev/shm, neither while the table lives nor after it."""
    before = _files()
    seen = [*_together(probe, lambda _group, _table: _files()), _files()]
    return None if max(seen) <= before else Finding(detail="a file in /dev/shm", expected=str(before), seen=str(seen))


def last_view(probe: Probe) -> Finding | None:
    """Closing waits for the last view, whose end unregisters exactly once, before the memory is unmapped and freed."""
    cudart, _, before = _Cudart(), gc.collect(), _files("/proc/self/fd")  # what an earlier case left goes first
    table = _solo(probe, cudart)
    host = partial(device_view, table.buffer[4096:], pointer=lambda address: address, tensor=_OnHost)
    view, seen = getattr(table, "device_view", host)(), []
    del host
    table.close()
    seen.append(list(cudart.undone))
    del view
    seen.append(list(cudart.undone))
    table.close()
    del table
    gc.collect()
    told, wanted = f"{[*seen, cudart.undone]}, {_files('/proc/self/fd') - before} open", "[[], [True], [True]], 0 open"
    at = "unregistered when closed, without a view, without the table; descriptors"
    return None if told == wanted else Finding(detail=at, expected=wanted, seen=told)


def loaded(probe: Probe) -> Finding | None:
    """Only the leader copies, followers may pass None; after each load call every rank has that part's every byte."""
    half, read = _size() // 2, threading.Event()

    def part(number: int, buffer: Any) -> None:
        read.wait(_DELAY_S)
        buffer[half * number : half * (number + 1)] = number + 1

    def run(group: Any, table: Any) -> list[int]:
        found = []
        for number in (0, 1):
            table.load(partial(part, number) if group.rank == 0 else None, group)
            found.append(int(table.buffer[half * number]))
        read.set()
        return [*found, int(table.buffer.sum(dtype=np.int64))]

    wanted = [1, 2, 3 * half]
    seen = _together(probe, run)
    return None if seen == [wanted] * 2 else Finding(detail="bytes after load", expected=str(wanted), seen=str(seen))


def replaced(probe: Probe) -> Finding | None:
    """Putting other memory in the place of the table's is refused."""
    table = _solo(probe, _Cudart())
    try:
        return refused(lambda: setattr(table, "buffer", np.array(table.buffer)), "other memory as the table's")
    finally:
        table.close()


def placed_first(probe: Probe) -> Finding | None:
    """Every page is there before any rank registers, so registration decides nothing about placement."""
    seen = _together(probe, lambda _, table: [r.object_pages for r in table.receipts if r.step == "register"])
    full = _size() // 4096
    if seen == [[(full, full)]] * 2:
        return None
    return Finding(detail="pages of the object around registration", expected=str((full, full)), seen=str(seen))


def huge_pages(probe: Probe) -> Finding | None:
    """Results do not depend on huge pages: anonymous THP memory holds the same bytes."""
    wanted, same = (np.arange(_size()) % 251).astype(np.uint8), []
    for backing in ("tmpfs", "anon-thp"):
        table = _solo(probe, _Cudart(), backing=backing)
        table.load(partial(np.copyto, src=wanted), SoloGroup())
        same.append(bool(np.array_equal(table.buffer, wanted)))
        table.close()
    return None if all(same) else Finding(detail="right bytes with tmpfs, THP", expected="[True, True]", seen=str(same))


def _solo(probe: Probe, cudart: _Cudart, **options: Any) -> Any:
    try:
        return probe.optional("storage")(SoloGroup(), _size(), cudart, **options)
    except EngramError as error:
        _absent([error])
        raise


STORAGE_CASES = cases(
    "storage", S1=[creation_error], S2=[unpinned, one_mapping], S3=[undone], S4=[unnamed], S5=[last_view],
    S6=[loaded], S7=[replaced], S13=[placed_first], S14=[huge_pages],
)  # fmt: skip

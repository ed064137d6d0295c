"""Stand-ins for CUDA on a machine without one: streams with vector clocks, a virtual GPU clock, a cudart."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name, self.clock = cuda, name, {name: 0}

    def tick(self) -> dict[str, int]:
        """Do one more thing on this stream; what it knows to be finished, itself included."""
        self.clock[self.name] += 1
        return dict(self.clock)

    def merge(self, clock: dict[str, int]) -> None:
        self.clock = {name: max(self.clock.get(name, 0), clock.get(name, 0)) for name in {*self.clock, *clock}}

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(("wait_stream", self.name, other.name))
        self.merge(other.clock)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(("wait_event", self.name, event.number))
        self.merge(event.clock)


class FakeEvent:
    def __init__(self, cuda: FakeCuda, *, enable_timing: bool, external: bool) -> None:
        self.cuda, self.timed, self.external, self.number = cuda, enable_timing, external, len(cuda.events)
        self.clock: dict[str, int] = {}
        self.at: int | None = None
        cuda.events.append(self)

    def record(self, stream: FakeStream) -> None:
        self.clock = stream.tick()
        self.cuda.log.append(("record", stream.name, self.number))
        if self.cuda.capturing is None:
            self.at = self.cuda.now
        elif self.external:
            self.cuda.capturing.nodes.append(self._stamp)
        else:
            self.at = None  # an edge of the graph: it has no time

    def _stamp(self) -> None:
        self.at = self.cuda.now

    def synchronize(self) -> None:
        assert self.at is not None, "an event that was never recorded"
        self.cuda.log.append(("synchronize",))

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.timed
        assert other.timed
        assert self.at is not None
        assert other.at is not None
        return (other.at - self.at) / 1e6


class FakeGraph:
    """``torch.cuda.CUDAGraph``: kernels with the addresses of their capture, and nothing of the host's."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.nodes, self.replays = cuda, [], 0  # type: ignore[var-annotated]

    def replay(self) -> None:
        self.cuda.log.append(("replay",))
        self.replays += 1
        for node in self.nodes:
            node()


def _recorder(nodes: list[Callable[[], None]]) -> Any:
    """torch's operators become nodes that compute again, into the memory of their first results."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            alias = [each.alias_info for each in func._schema.returns]
            if any(each is not None and not each.is_write for each in alias):
                return made  # a view: the same memory

            def again() -> None:
                fresh = func(*args, **(kwargs or {}))
                for old, new in zip(_tensors(made), _tensors(fresh), strict=True):
                    if old is not new:
                        old.copy_(new)

            nodes.append(again)
            return made

    return Recorder()


def _tensors(found: Any) -> list[Any]:
    return [each for each in (found if isinstance(found, (tuple, list)) else [found]) if hasattr(each, "copy_")]


class FakeCuda:
    """``torch.cuda`` as far as the streams, the marks and the engine use it; kernels run when they are launched."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.events: list[FakeEvent] = []
        self.accesses: list[tuple[str, str, str, dict[str, int]]] = []
        self.now = 0  # the GPU's clock in ns; only kernels and waits advance it
        self._streams = 0
        self._current = self.Stream()
        self.capturing: FakeGraph | None = None
        self.CUDAGraph = lambda: FakeGraph(self)

    def Stream(self) -> FakeStream:
        self._streams += 1
        return FakeStream(self, f"s{self._streams}")

    def Event(self, *, enable_timing: bool = False, external: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing=enable_timing, external=external)

    @contextmanager
    def graph(self, graph: FakeGraph, *, capture_error_mode: str) -> Any:
        """What is launched here runs at each replay, over the memory that it has now."""
        assert capture_error_mode == "thread_local"
        self.capturing = graph
        try:
            with self.stream(self.Stream()), _recorder(graph.nodes):
                yield
        finally:
            self.capturing = None

    def advance(self, nanoseconds: int) -> None:
        """Let the GPU be busy that long."""
        self.now += nanoseconds

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run a kernel that torch does not know, now and at each replay of the graph that is being captured."""
        kernel()
        if self.capturing is not None:
            self.capturing.nodes.append(kernel)

    def current_stream(self) -> FakeStream:
        return self._current

    def current_device(self) -> int:
        return 0

    def synchronize(self) -> None:
        self.log.append(("synchronize",))

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def access(self, what: str, kind: str) -> None:
        """A kernel on the current stream reads ("r") or writes ("w") ``what``."""
        self.accesses.append((what, kind, self._current.name, self._current.tick()))
        self.log.append((kind, self._current.name, what))

    def races(self) -> list[tuple[str, str, str]]:
        """Pairs of accesses to one thing, one of them a write, that no event orders."""
        return [
            (a[0], f"{a[1]} on {a[2]}", f"{b[1]} on {b[2]}")
            for a, b in combinations(self.accesses, 2)
            if a[0] == b[0] and "w" in (a[1], b[1]) and b[3].get(a[2], 0) < a[3][a[2]]
        ]

    def spin(self, nanoseconds: int) -> None:
        """A kernel of known length: the virtual clock moves by exactly that, the host's by at least that."""
        time.sleep(nanoseconds / 1e9)
        self.now += nanoseconds


class FakeCudart:
    """Register and unregister with scripted codes; refuses what the real one refuses."""

    def __init__(self, *, fail_at: int | None = None, code: int = 1, pinned: bool = True, unregister_code: int = 0):
        self.fail_at, self.code, self._pinned, self.unregister_code = fail_at, code, pinned, unregister_code
        self.ranges: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.pending = 0

    def register(self, address: int, nbytes: int) -> int:
        self.calls.append(("register", nbytes))
        if sum(name == "register" for name, _ in self.calls) - 1 == self.fail_at:
            self.pending = self.code
            return self.code
        assert address not in self.ranges
        self.ranges[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        self.pending = self.unregister_code
        assert self.ranges.pop(address, None) is not None, "unregistered twice"
        return self.unregister_code

    def text(self, code: int) -> str:
        return f"text of {code}"

    def clear(self) -> None:
        self.calls.append(("clear", self.pending))
        self.pending = 0

    def pinned(self, byte: Any) -> bool:
        at = byte.ctypes.data
        return self._pinned and any(start <= at < start + size for start, size in self.ranges.items())

    def synchronize(self) -> None:
        self.calls.append(("synchronize", 0))

    def count(self, name: str) -> int:
        return sum(call == name for call, _ in self.calls)


@pytest.fixture
def fake_cuda() -> FakeCuda:
    """A fresh ``torch.cuda`` stand-in."""
    return FakeCuda()


@pytest.fixture
def make_cudart() -> type[FakeCudart]:
    """The cudart stand-in's class."""
    return FakeCudart

"""A virtual GPU: ``torch.cuda``'s streams, events and graphs on a machine without one, in virtual time.

What is launched waits until :meth:`VirtualCuda.synchronize`, which gives every operation the earliest start that its
stream and its declared dependencies allow.  What an operation writes shows at its end; if it names that tensor, it
reads at its start.  So a missing dependency shows in the results, every time and without a sleep, where what should be
waited for takes long enough: delay it.  Memory is the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

KERNEL_NS = 50_000


@dataclass(eq=False, slots=True, kw_only=True)
class _Operation:
    stream: VirtualStream
    run: Callable[[], Any] = int  # nothing
    out: Any = None
    ns: int = 0
    after: tuple[Any, ...] = ()
    start: int = 0
    end: int = 0
    late: Any = None


class VirtualStream:
    """Operations of one stream run one after the other."""

    def __init__(self, cuda: VirtualCuda) -> None:
        self.cuda, self.free_at = cuda, 0
        self.last: Any = None

    def wait_stream(self, other: VirtualStream) -> None:
        """What follows here starts after everything that was launched on ``other`` so far."""
        if self.cuda.ignored != "wait_stream":
            self.cuda.put(_Operation(stream=self, after=(other.last,)))

    def wait_event(self, event: VirtualEvent) -> None:
        """What follows here starts after the event's latest record."""
        if self.cuda.ignored != "wait_event":
            self.cuda.put(_Operation(stream=self, after=(event.at,)))

    def record(self, tensor: Any) -> None:
        """A tensor's ``record_stream``: nobody gets its memory while this stream may still read it."""
        if self.cuda.ignored != "record_stream":
            self.cuda.kept.add(tensor.untyped_storage().data_ptr())


class VirtualEvent:
    """A place in a stream."""

    at: Any = None

    def record(self, stream: VirtualStream) -> None:
        """Mark the place behind everything launched on ``stream`` so far."""
        self.at = stream.cuda.put(_Operation(stream=stream))

    def elapsed_time(self, other: VirtualEvent) -> float:
        """Milliseconds from this event to ``other``, both passed."""
        return float(other.at.end - self.at.end) / 1e6


class VirtualGraph:
    """A captured piece of work; a replay is the same operations again, behind what its stream did before."""

    def __init__(self, cuda: VirtualCuda) -> None:
        self.cuda = cuda
        self.operations: list[_Operation] = []

    def replay(self) -> None:
        """Launch the captured operations on the current stream, and let it wait for all of them."""
        cuda, copies = self.cuda, dict[Any, _Operation]()
        begin = cuda.put(_Operation(stream=cuda.current_stream()))
        for one in self.operations:
            inside = [copies[each] for each in one.after if each in copies]
            copies[one] = cuda.put(replace(one, after=(begin, *inside)))
        cuda.put(_Operation(stream=begin.stream, after=tuple(copies.values())))


class VirtualCuda:
    """As much of ``torch.cuda`` as a prefetch stream uses; ``launch`` and ``spin`` stand for kernels."""

    def __init__(self) -> None:
        self.ignored = ""  # the one kind of dependency that a negative control takes away
        self.kept: set[int] = set()  # storages that a side stream keeps from being used again
        self._current, self._queue = VirtualStream(self), list[_Operation]()
        self.Stream = lambda device=None: VirtualStream(self)  # noqa: ARG005 - torch's argument
        self.Event = lambda enable_timing=False: VirtualEvent()  # noqa: ARG005
        self.CUDAGraph = lambda: VirtualGraph(self)

    def current_stream(self) -> VirtualStream:
        """Where launches go."""
        return self._current

    @contextmanager
    def stream(self, stream: VirtualStream) -> Iterator[None]:
        """Launches inside go to ``stream``."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def graph(self, graph: VirtualGraph) -> Iterator[None]:
        """Whatever is launched inside belongs to ``graph`` and does not run now."""
        before, self._queue = self._queue, graph.operations
        try:
            yield
        finally:
            self._queue = before

    def launch(self, run: Callable[[], Any], ns: int = KERNEL_NS, *, out: Any = None) -> None:
        """Enqueue ``run``, which writes the tensor ``out``, on the current stream; without one it runs at its end."""
        self.put(_Operation(stream=self._current, run=run, ns=ns, out=out))

    def spin(self, ns: int) -> None:
        """Occupy the current stream for that long."""
        self.launch(int, ns)

    def put(self, operation: _Operation) -> _Operation:
        """Enqueue an operation on its own stream."""
        operation.stream.last = operation
        self._queue.append(operation)
        return operation

    def synchronize(self) -> None:
        """Run everything; what an operation waits for was launched before it, so one pass finds all starts."""
        done, self._queue = self._queue, []
        for one in done:
            one.start = max([one.stream.free_at, *(each.end for each in one.after if each)])
            one.end = one.stream.free_at = one.start + one.ns
        moments = [(one.end, 0, one.run if one.out is None else partial(_show, one)) for one in done]
        moments += [(one.start, 1, partial(_read, one)) for one in done if one.out is not None]
        for *_, act in sorted(moments, key=lambda moment: moment[:2]):  # what ends shows to what then starts
            act()


def _read(one: _Operation) -> None:
    """Run an operation, and keep what it wrote for its end."""
    before = one.out.clone()
    one.run()
    one.late = one.out.clone()
    one.out.copy_(before)


def _show(one: _Operation) -> None:
    one.out.copy_(one.late)

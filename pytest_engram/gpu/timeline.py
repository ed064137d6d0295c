"""Marks of one step on one time base, in integer nanoseconds of ``perf_counter_ns``.

CUDA's elapsed time is a float32 of milliseconds in steps of about half a microsecond, so each step takes its own base
event; nothing synchronises before the step's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.model import LookupMark, Span

RESOLUTION_NS = 500
_CLOCK = frozenset({"begin", "end", "wait_before", "wait_after", "gather:begin", "gather:end"})  # of every step
_TIMES = ("submit", "start", "done", "wait_before", "wait_after")
_SELF_TEST_NS = (200_000, 5_000_000)
_TOLERANCE, _LAUNCH_NS = 0.02, 20_000
_HEAD_START_NS = 1_000_000


class HostMarks:
    """Marks by the host's clock.  Unless ``full``, only the step's ends and its consumer waits are recorded."""

    def __init__(self, *, full: bool) -> None:
        self._full = full
        self._at: dict[tuple[str, int], Any] = {}
        self._spans: list[tuple[str, int]] = []
        self._edge: Any = None  # the last mark, if it ended a piece of the main stream

    def mark(self, name: str, layer: int = -1) -> None:
        """Record that ``name`` of ``layer`` is reached."""
        made = None
        if self._full or name in _CLOCK:
            made = self._at[name, layer] = self._now()
        self._edge = made if name == "wait_after" or name.endswith(":end") else None

    @contextmanager
    def span(self, name: str, layer: int) -> Iterator[None]:
        """Mark the begin and the end of a piece of the main stream; next to another, it begins with that one's end."""
        edge = self._edge
        if edge is None:
            self.mark(f"{name}:begin", layer)
        else:
            self._at[f"{name}:begin", layer] = edge
        yield
        self.mark(f"{name}:end", layer)
        self._spans.append((name, layer))

    def ns(self, name: str, layer: int = -1) -> int:
        """When the mark was reached."""
        return int(self._at[name, layer])

    def spent_ns(self, begin: str, end: str) -> int:
        """The sum over all layers of the time between two marks."""
        layers = [layer for name, layer in self._at if name == end]
        return sum(self.ns(end, layer) - self.ns(begin, layer) for layer in layers)

    def lookups(self, launches: dict[int, Any]) -> tuple[LookupMark, ...]:
        """One record per launch (rows, tiles, grid), by layer; ``submit`` is when the main stream got there."""
        ready = self.ns("hash_ready")
        return tuple(
            LookupMark(layer=layer, hash_ready=ready, rows=launch.rows, tiles=launch.tiles, grid=launch.grid,
                       **{name: self.ns(name, layer) for name in _TIMES})
            for layer, launch in sorted(launches.items())
        )  # fmt: skip

    def spans(self) -> tuple[Span, ...]:
        """The pieces of the main stream that were marked."""
        return tuple(
            Span(name=name, layer=layer, start=self.ns(f"{name}:begin", layer), end=self.ns(f"{name}:end", layer))
            for name, layer in self._spans
        )

    def _now(self) -> Any:
        return time.perf_counter_ns()


class Marks(HostMarks):
    """Events on the stream that is current: the one that launches what they bound.  Read after a synchronise.

    ``external`` events become nodes of a CUDA graph in whose capture they are recorded: each replay records them anew,
    after a new :meth:`begin`.  ``NotMeasurable`` where torch has none (before 2.8).
    """

    def __init__(self, cuda: Any, *, full: bool, external: bool = False) -> None:
        super().__init__(full=full)
        self._cuda, self._event = cuda, partial(cuda.Event, enable_timing=True)
        if external:
            self._event = _external(self._event)
        self.begin()

    def begin(self) -> None:
        """Record the base of all times, outside any capture."""
        self._base = self._cuda.Event(enable_timing=True)
        self._base.record(self._cuda.current_stream())
        self._base_ns = time.perf_counter_ns()

    def ns(self, name: str, layer: int = -1) -> int:
        """When the GPU passed the mark; an idle GPU passes the base as the host records it."""
        milliseconds: float = self._base.elapsed_time(self._at[name, layer])
        return self._base_ns + round(milliseconds * 1e6)

    def _now(self) -> Any:
        event = self._event()
        event.record(self._cuda.current_stream())
        return event


def _external(event: Any) -> Any:
    made = partial(event, external=True)
    try:
        made()
    except TypeError as error:
        raise NotMeasurable(
            f"torch.cuda.Event: {error}", code="no-external-events", who="CUDA graph", way_out="use torch 2.8 or newer"
        ) from None
    return made


def spin(nanoseconds: int) -> None:
    """Occupy the current stream for that long by the GPU's global timer; one program on one SM."""
    from pytest_engram.gpu._kernels import spin_kernel

    spin_kernel[(1,)](nanoseconds, num_warps=1)


def self_test(cuda: Any, kernel: Callable[[int], None] = spin) -> dict[int, int]:
    """Measure kernels of known length with :class:`Marks`: asked ns -> measured ns.

    Raises:
        EngramError: ``timer-self-test`` when a length is off by more than 2 % and 20 µs, or longer than the host saw.
    """
    kernel(1000)  # compiles
    return {length: _measure(cuda, kernel, length) for length in _SELF_TEST_NS}


def _measure(cuda: Any, kernel: Callable[[int], None], length: int) -> int:
    marks, begin = Marks(cuda, full=True), time.perf_counter_ns()
    kernel(_HEAD_START_NS)  # the stream is busy until everything below is enqueued: no launch latency is timed
    with marks.span("spin", -1):
        kernel(length)
    cuda.synchronize()
    host = time.perf_counter_ns() - begin
    (span,) = marks.spans()
    measured, slack = span.end - span.start, round(length * _TOLERANCE)
    if not length - slack <= measured <= min(length + slack + _LAUNCH_NS, host + RESOLUTION_NS):
        raise EngramError(
            f"a kernel of {length} ns measured {measured} ns", code="timer-self-test", who="CUDA events",
            where=f"{host} ns on the host", expected=f"{length} ns within 2 % and {_LAUNCH_NS} ns",
            way_out="record events on the launching stream; leave the GPU to this process alone",
        )  # fmt: skip
    return measured

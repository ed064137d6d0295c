"""Continuous batching under an open-loop load: the served side of the suite loop, and the clients' records."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pytest_engram.engines.protocol import Engine, StepSettings
from pytest_engram.errors import EngramError, UsageError
from pytest_engram.model import RequestRecord, ServingPlan, ServingSample
from pytest_engram.serving.batching import Stream, advance, compose, ends, schedule
from pytest_engram.serving.replay import Request

_log = logging.getLogger(__name__)


def serve(
    engine: Engine, load: Sequence[Request], plan: ServingPlan, settings: StepSettings, *, rank: int = 0,
    clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep,
) -> ServingSample:  # fmt: skip
    """Serve ``load`` in real time and return a record of every planned request.

    A request is sent at its scheduled arrival, however late the server is: TTFT counts from there, so a slow server
    cannot thin out its own load.  A failed step fails the requests in it; the rest goes on.
    """
    server = _Server(engine, load, plan, settings, clock)
    while server.open:
        if not server.turn():
            sleep(server.idle_s())
    return ServingSample(
        rank=rank, slo=plan.slo, rate=plan.rate, duration_s=server.now(), requests=tuple(map(server.record, load))
    )


def request_outputs(
    engine: Engine, load: Sequence[Request], settings: StepSettings, *, chunk: int = 64, running: int = 16,
    cached: int = 0, drafts: int = 0, told: Sequence[Sequence[int]] = (),
) -> tuple[tuple[tuple[int, ...], ...], Any]:  # fmt: skip
    """The output tokens of every request, untimed, and the hidden states float32 [tokens, D] that they are read from.

    Alike for any of these ways to serve the same requests: ``chunk`` tokens a step split the prompts; the first
    ``cached`` tokens of a prompt are a prefix hit, known but not computed here; ``drafts`` wrong speculative tokens
    follow every decode, are run and forgotten.  ``told`` are outputs that all requests go on with whatever they
    answer, so that a last bit that turns an arg-max does not part two ways.
    """
    streams = [Stream(request, computed=min(cached, len(request.prompt) - 1)) for request in load]
    states: dict[Stream, list[Any]] = {stream: [] for stream in streams}
    follow = dict(zip(streams, told, strict=False))
    while active := [stream for stream in streams if not stream.finished][:running]:
        chosen = schedule(active, chunk)
        output = engine.step(compose(chosen), settings, marks=False).output
        last = {stream: output[end - 1] for (stream, _), end in zip(chosen, ends(chosen), strict=True)}
        decoded = advance(chosen, output)
        for stream in decoded:
            states[stream].append(last[stream])
            if stream in follow:
                stream.history[-1] = follow[stream][len(states[stream]) - 1]
        if decoded and drafts:
            wrong = [stream.drafted(drafts) for stream in decoded]
            engine.step(compose(schedule(wrong, chunk)), settings, marks=False)
    return tuple(stream.outputs for stream in streams), np.array([one for stream in streams for one in states[stream]])


class _Server:
    """The clients' view and one queue in order of arrival, whose head runs; times in seconds since the load began."""

    def __init__(
        self, engine: Engine, load: Sequence[Request], plan: ServingPlan, settings: StepSettings,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._engine, self._plan, self._settings = engine, plan, settings
        self._clock, self._origin = clock, clock()
        self._future = deque(sorted(load, key=lambda request: request.arrival_s))
        self._queue: list[Stream] = []
        self._delivered: dict[int, list[float]] = {request.index: [] for request in load}
        self._status: dict[int, str] = {}

    def now(self) -> float:
        return self._clock() - self._origin

    @property
    def open(self) -> bool:
        return bool(self._future or self._queue)

    def idle_s(self) -> float:
        """Time to the next arrival; only asked when nothing runs."""
        return max(0.0, self._future[0].arrival_s - self.now()) if self._future else 0.0

    def turn(self) -> bool:
        """Drop what is too old, queue what has arrived, then run one step; False when there was nothing to run."""
        plan, now = self._plan, self.now()
        late = [stream for stream in self._queue if stream.request.arrival_s < now - plan.timeout_s]
        self._end(late, "incomplete")
        while self._future and self._future[0].arrival_s <= now:
            stream = Stream(self._future.popleft())
            if len(self._queue) < plan.max_running + plan.max_waiting:
                self._queue.append(stream)
            else:
                self._end([stream], "rejected")
        chosen = schedule(self._queue[: plan.max_running], plan.max_batch_tokens)
        if chosen:
            self._step(chosen)
        return bool(chosen)

    def record(self, request: Request) -> RequestRecord:
        """What the client of one request saw, in ms."""
        times = [1e3 * moment for moment in self._delivered[request.index]]
        return RequestRecord(
            arrival_ms=1e3 * request.arrival_s, prompt_tokens=len(request.prompt), output_tokens=len(times),
            status=self._status[request.index], ttft_ms=times[0] - 1e3 * request.arrival_s if times else None,
            itl_ms=tuple(after - before for before, after in pairwise(times)),
        )  # fmt: skip

    def _step(self, chosen: Sequence[tuple[Stream, int]]) -> None:
        try:
            result = self._engine.step(compose(chosen), self._settings, marks=False)
        except UsageError:
            raise
        except EngramError as error:
            _log.warning("a serving step failed: %s", error)
            self._end([stream for stream, _ in chosen], "failed")
            return
        decoded, now = advance(chosen, result.output), self.now()
        for stream in decoded:
            self._delivered[stream.request.index].append(now)
        self._end([stream for stream in decoded if stream.finished], "ok")

    def _end(self, streams: Sequence[Stream], status: str) -> None:
        self._status.update((stream.request.index, status) for stream in streams)
        self._queue = [stream for stream in self._queue if stream.request.index not in self._status]

"""Continuous batching under an open-loop load: the served side of the suite loop, and the clients' records."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from pytest_engram.engines.protocol import Engine, StepSettings
from pytest_engram.errors import EngramError, UsageError
from pytest_engram.model import RequestRecord, ServingPlan, ServingSample
from pytest_engram.serving.batching import Stream, advance, compose, schedule
from pytest_engram.serving.replay import Request

_log = logging.getLogger(__name__)


def serve(
    engine: Engine,
    load: Sequence[Request],
    plan: ServingPlan,
    settings: StepSettings,
    *,
    rank: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> ServingSample:
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
    engine: Engine,
    load: Sequence[Request],
    settings: StepSettings,
    *,
    chunk: int = 64,
    running: int = 16,
    cached: int = 0,
    drafts: int = 0,
) -> tuple[tuple[int, ...], ...]:
    """The output tokens of every request, untimed; equal for any of these ways to serve the same requests.

    ``chunk`` tokens a step split the prompts; the first ``cached`` tokens of a prompt are a prefix hit, known but not
    computed here; ``drafts`` speculative tokens follow every decode and are rolled back.
    """
    waiting = deque(Stream(request, computed=min(cached, len(request.prompt) - 1)) for request in load)
    streams, active = tuple(waiting), deque[Stream]()
    while waiting or active:
        while waiting and len(active) < running:
            active.append(waiting.popleft())
        chosen = schedule(active, chunk)
        decoded = advance(chosen, engine.step(compose(chosen), settings, marks=False).output)
        if drafts and decoded:
            _speculate(engine, decoded, settings, drafts, chunk)
        active = deque(stream for stream in active if not stream.finished)
    return tuple(stream.outputs for stream in streams)


def _speculate(engine: Engine, decoded: Sequence[Stream], settings: StepSettings, drafts: int, chunk: int) -> None:
    """Run wrong drafts past the end of each stream, then forget them: what a rejected speculation leaves behind."""
    for stream in decoded:
        draft = Stream(stream.request, computed=stream.computed)
        draft.history = stream.history + [(token + 1) % stream.request.vocabulary for token in stream.history[-drafts:]]
        chosen = schedule([draft], chunk)
        engine.step(compose(chosen), settings, marks=False)


class _Server:
    """The queues and the clients' view; times in seconds since the load began."""

    def __init__(
        self,
        engine: Engine,
        load: Sequence[Request],
        plan: ServingPlan,
        settings: StepSettings,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._plan, self._settings = engine, plan, settings
        self._clock, self._origin = clock, clock()
        self._future = deque(sorted(load, key=lambda request: request.arrival_s))
        self._waiting: deque[Stream] = deque()
        self._running: list[Stream] = []
        self._delivered: dict[int, list[float]] = {request.index: [] for request in load}
        self._status: dict[int, str] = {}

    def now(self) -> float:
        return self._clock() - self._origin

    @property
    def open(self) -> bool:
        return bool(self._future or self._waiting or self._running)

    def idle_s(self) -> float:
        """Time to the next arrival; only asked when nothing runs."""
        return max(0.0, self._future[0].arrival_s - self.now()) if self._future else 0.0

    def turn(self) -> bool:
        """Take what has arrived, then run one step; False when there was nothing to run."""
        now = self.now()
        self._expire(now)
        self._arrive(now)
        chosen = schedule(self._running, self._plan.max_batch_tokens)
        if not chosen:
            return False
        self._step(chosen)
        self._running = [stream for stream in self._running if stream.request.index not in self._status]
        return True

    def record(self, request: Request) -> RequestRecord:
        """What the client of one request saw, in ms."""
        times = [1e3 * moment for moment in self._delivered[request.index]]
        return RequestRecord(
            arrival_ms=1e3 * request.arrival_s,
            prompt_tokens=len(request.prompt),
            output_tokens=len(times),
            status=self._status[request.index],
            ttft_ms=times[0] - 1e3 * request.arrival_s if times else None,
            itl_ms=tuple(after - before for before, after in pairwise(times)),
        )

    def _arrive(self, now: float) -> None:
        """Queue what was sent by ``now``; beyond ``max_waiting`` it is turned away."""
        self._admit()
        while self._future and self._future[0].arrival_s <= now:
            request = self._future.popleft()
            if len(self._waiting) >= self._plan.max_waiting:
                self._status[request.index] = "rejected"
                continue
            self._waiting.append(Stream(request))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._plan.max_running:
            self._running.append(self._waiting.popleft())

    def _expire(self, now: float) -> None:
        limit = now - self._plan.timeout_s
        for stream in (*self._waiting, *self._running):
            if stream.request.arrival_s < limit:
                self._status[stream.request.index] = "incomplete"
        self._waiting = deque(stream for stream in self._waiting if stream.request.index not in self._status)
        self._running = [stream for stream in self._running if stream.request.index not in self._status]

    def _step(self, chosen: Sequence[tuple[Stream, int]]) -> None:
        try:
            result = self._engine.step(compose(chosen), self._settings, marks=False)
        except UsageError:
            raise
        except EngramError as error:
            _log.warning("a serving step failed: %s", error)
            self._status.update((stream.request.index, "failed") for stream, _ in chosen)
            return
        decoded = advance(chosen, result.output)
        now = self.now()
        for stream in decoded:
            self._delivered[stream.request.index].append(now)
            if stream.finished:
                self._status[stream.request.index] = "ok"

"""The serial prefetch stream: one side stream, one staging buffer and one event per Engram layer (contract P1–P7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_engram.errors import EngramError, UsageError

Lookup = Callable[..., Any]  # (ids, out, cap=…) -> Launch
Mark = Callable[[str], None]  # records on the current stream


class PrefetchStream:
    """Lookups of all layers run one after the other beside the main stream, ``stream``.

    A ``lane`` above 0 is another side stream, which makes them no serial queue; None is the current stream itself.
    ``staging`` bf16 [layers, max_tokens, heads, dim] is allocated once, so its addresses hold over graph replays
    (P6).  Inside a CUDA graph's capture the same calls become edges of the graph, if every submitted layer is
    consumed before the capture ends; timing events do not survive capture, so marks belong to eager steps or to
    events made with ``external=True``.
    """

    def __init__(self, layers: int, max_tokens: int, heads: int, dim: int, *, device: Any = None, cuda: Any = None):
        import torch

        self._cuda: Any = torch.cuda if cuda is None else cuda
        place = torch.device("cuda", self._cuda.current_device()) if device is None else device
        self.staging = torch.zeros((layers, max_tokens, heads, dim), dtype=torch.bfloat16, device=place)
        self.stream = self._cuda.Stream()
        self._lanes = [self.stream]
        self._done = [self._cuda.Event() for _ in range(layers)]
        self._pending: set[int] = set()

    def rows(self, layer: int, tokens: int) -> Any:
        """The staged rows bf16 [tokens, heads, dim] of a layer: valid after :meth:`consume`, until the next submit."""
        most = self.staging.shape[1]
        if tokens > most:
            raise UsageError(
                f"{tokens} tokens in a batch", code="too-many-tokens", who="prefetch stream",
                expected=f"at most {most}, the size of the staging buffer",
            )  # fmt: skip
        return self.staging[layer, :tokens]

    def submit(
        self, layer: int, ids: Any, lookup: Lookup, *, cap: int | None = None, mark: Mark | None = None,
        lane: int | None = 0,
    ) -> Any:  # fmt: skip
        """Enqueue ``lookup(ids, out, cap=cap)`` of a layer's ids int32 [T, heads] and return its launch.

        The ids, and whatever still reads the staging rows, belong to the stream that is current here.
        """
        out = self.rows(layer, len(ids))
        stream = self._lane(lane)
        self._await_producer(stream)
        self._keep(ids, stream)
        with self._cuda.stream(stream):
            if mark is not None:
                mark("start")
            launch = lookup(ids, out, cap=cap)
            if mark is not None:
                mark("done")
            self._done[layer].record(stream)
        self._pending.add(layer)
        return launch

    def consume(self, layer: int) -> None:
        """Let the current stream wait for this layer's lookup, not for later ones on the prefetch stream (P3)."""
        if layer not in self._pending:
            raise EngramError(
                f"layer {layer} is consumed without a lookup", code="not-submitted", who="prefetch stream",
                expected="submit before each consume: the event of an earlier step would let stale rows through",
            )  # fmt: skip
        self._pending.remove(layer)
        self._await_rows(self._done[layer])

    def drain(self) -> None:
        """Let the current stream wait for all that was submitted and not consumed so far, whichever layer's.

        As a wait for the stream would, but inside a capture, too, where a stream that was given nothing is foreign.
        """
        for layer in sorted(self._pending):
            self._await_rows(self._done[layer])

    def _lane(self, lane: int | None) -> Any:
        if lane is None:
            return self._cuda.current_stream()
        while lane >= len(self._lanes):
            self._lanes.append(self._cuda.Stream())
        return self._lanes[lane]

    def _await_producer(self, stream: Any) -> None:
        """P1: also keeps the lookup from overwriting rows that the previous step still reads."""
        stream.wait_stream(self._cuda.current_stream())

    def _keep(self, ids: Any, stream: Any) -> None:
        """P2: otherwise the allocator may hand the ids' memory out while the lookup reads it."""
        ids.record_stream(stream)

    def _await_rows(self, done: Any) -> None:
        self._cuda.current_stream().wait_event(done)

"""CUDA graphs of a step: the engine's own calls, captured once per batch shape, replayed over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_engram.engines.step import Ran
from pytest_engram.gpu.timeline import Marks
from pytest_engram.hashing import HashBatch


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured step; ``inputs`` are the device tensors that hold its batch, ``ran`` its results of each replay."""

    graph: Any
    inputs: tuple[Any, ...]
    trace: Marks
    ran: Ran

    def refill(self, fresh: tuple[Any, ...]) -> None:
        """Send another batch of the same shape there, outside the graph."""
        for held, new in zip(self.inputs, fresh, strict=True):
            held.copy_(new, non_blocking=True)

    def replay(self) -> Ran:
        """Launch the whole step at once."""
        self.graph.replay()
        return self.ran


def capture(cuda: Any, run: Callable[[], Ran], inputs: tuple[Any, ...], trace: Marks) -> Captured:
    """Capture ``run``, which ran eagerly before: what compiles or allocates for ever has done so."""
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may ask the device meanwhile
        ran = run()
    return Captured(graph, inputs, trace, ran)


def padded(batch: HashBatch, most: int) -> HashBatch:
    """The batch with dead tokens up to the next power of two, at most ``most``, and with as many requests.

    As in engines: the shapes of all batches of one bucket are equal, and what is added belongs to requests without
    tokens, or to nobody (contract H9).
    """
    count, requests = len(batch.token_ids), len(batch.window)
    size = min(1 << max(count - 1, 0).bit_length(), most)
    more, empty = size - count, max(size - requests, 0)
    return HashBatch(
        token_ids=_extended(batch.token_ids, more), positions=_extended(batch.positions, more),
        dead=_extended(batch.dead, more, value=True),
        query_start_loc=_extended(batch.query_start_loc, empty, value=batch.query_start_loc[-1]),
        window=_extended(batch.window, empty, value=-1),
        window_dead=_extended(batch.window_dead, empty),
        block_size=batch.block_size,
    )  # fmt: skip


def _extended(array: Any, more: int, *, value: Any = 0) -> Any:
    return np.concatenate([array, np.full((more, *array.shape[1:]), value, array.dtype)])

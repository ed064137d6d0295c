"""What an engine provides: one step of the suite loop on one rank, on one screen.

A step hashes a batch, submits the lookups of every Engram layer to one serial prefetch queue (early, or each at its
consumer), runs the layers' main compute, waits for each lookup at its own layer only, projects and gates the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_engram.backends.protocol import Backend
from pytest_engram.errors import UsageError
from pytest_engram.experiment_rules import SETTINGS
from pytest_engram.hashing import EngramLayout, HashBatch
from pytest_engram.model import Timeline, Workload


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What an arm may change; a value that no engine knows is a ``UsageError``: ``bad-submission``, ``bad-wait`` …

    ``cap`` bounds a background launch; None leaves the engine's own half-machine cap.  ``wait`` "stream": a consumer
    waits for all lookups that were submitted so far, not for its layer's only.  A batch of more than ``inline_above``
    tokens looks up at its consumers, on the main stream, under the same cap.  Two ``streams``, in turn, are no serial
    queue: the negative control.  ``graph``: the step is captured once per batch shape and replayed.
    """

    submission: str = "early"  # or "at_consumption"
    cap: int | None = None
    wait: str = "layer"  # or "stream"
    inline_above: int | None = None
    streams: int = 1
    graph: bool = False

    def __post_init__(self) -> None:
        for name in ("submission", "cap", "wait", "inline_above", "streams", "graph"):
            valid, expected = SETTINGS[name]
            if not valid(seen := getattr(self, name)):
                code = f"bad-{name.replace('_', '-')}"
                raise UsageError(f"{name} {seen!r}", code=code, who="step settings", expected=expected)

    def lane(self, table: int, tokens: int) -> int | None:
        """The side stream of a table's lookup, None for one that runs inline."""
        inline = self.inline_above is not None and tokens > self.inline_above
        return None if inline else table % self.streams


@dataclass(frozen=True, slots=True)
class StepResult:
    """``main_ns`` is the step without its consumer waits and its gathers, which ``communication_ns`` sums up.

    ``timeline`` is None for an unmarked step, ``communication_ns`` where the heads are not sharded.
    """

    step_ns: int
    main_ns: int
    output: Any  # hidden states float32 [T, D] as numpy; [0, D] where they were not asked for
    timeline: Timeline | None = None
    communication_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Everything an engine is built from.  ``tables``: one (weight u8 [rows, dim], scales u8 [rows, dim//32]) pair of
    numpy views of the shared table per Engram layer; an engine keeps views, never copies.

    ``shard``: this rank's index and the number of head shards.  With more than one the rank looks up only its own
    heads, and ``gather(out, local)`` fills ``out`` [shards, T, local heads, dim] from every rank's ``local``.
    """

    rank: int
    layout: EngramLayout
    workload: Workload
    tables: tuple[tuple[Any, Any], ...]
    token_map: Any  # int32 [vocabulary]
    backend: Backend
    cpus: tuple[int, ...]
    max_tokens: int
    seed: int
    shard: tuple[int, int] = (0, 1)
    gather: Callable[[Any, Any], None] | None = None


class Engine(Protocol):
    """One rank's suite loop."""

    name: str
    resolution_ns: int
    max_tokens: int
    staging: Any  # bf16 bits [layers, max_tokens, local heads, dim] that the lookups write, allocated once
    tolerance: float  # of a state's RMS: how far a step may be from its ``oracle``
    hold: bool  # an asynchronous engine starts a step only when all of it is enqueued: events then time the device

    def step(
        self, batch: HashBatch, settings: StepSettings, *, marks: bool, index: int = 0, output: bool = True
    ) -> StepResult:
        """Run one step; ``batch`` has at most ``max_tokens`` tokens.  Without ``output`` its states stay behind."""

    def rows(self, batch: HashBatch, settings: StepSettings) -> tuple[Any, Any]:
        """(ids int32 [T, L, H], staged rows u16 [T, L, H, dim] of all shards) as numpy, on the path of a step."""

    def oracle(self, batch: HashBatch, rows: Iterable[Any]) -> Any:
        """States [T, D] that a step over ``batch`` must give, were each layer's rows these bits u16 [T, H, dim].

        On the engine's weights, but on no path of a step; collective for no group.
        """

    def alone_ns(self, batch: HashBatch, settings: StepSettings) -> int:
        """ΣL_i of the batch's lookups with no main compute beside them: same queue and staging, never in a graph."""

    def drift(self) -> dict[str, float | str]:
        """What can drift between runs and was read just now: clocks, load, counters; a text says why one is missing."""

    def close(self) -> None:
        """Stop the queue and let go of the table."""

"""What an engine provides: one step of the suite loop on one rank, on one screen.

A step hashes a batch, submits the lookups of every Engram layer to one serial prefetch queue (early, or each at its
consumer), runs the layers' main compute, waits for each lookup at its own layer only, projects and gates the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pytest_engram.backends.protocol import Backend
from pytest_engram.hashing import EngramLayout, HashBatch
from pytest_engram.model import Timeline, Workload


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What an arm may change.  ``cap`` bounds a background launch; None leaves the engine's own half-machine cap."""

    submission: str = "early"  # or "at_consumption"
    cap: int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """``main_ns`` is the step without its consumer waits.  ``timeline`` is None for an unmarked step."""

    step_ns: int
    main_ns: int
    output: Any  # hidden states float32 [T, D] as numpy
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Everything an engine is built from.  ``tables``: one (weight u8 [rows, dim], scales u8 [rows, dim//32]) pair of
    numpy views of the shared table per Engram layer; an engine keeps views, never copies."""

    rank: int
    layout: EngramLayout
    workload: Workload
    tables: tuple[tuple[Any, Any], ...]
    token_map: Any  # int32 [vocabulary]
    backend: Backend
    cpus: tuple[int, ...]
    max_tokens: int
    seed: int


class Engine(Protocol):
    """One rank's suite loop."""

    name: str
    resolution_ns: int
    hold: bool  # an asynchronous engine starts a step only when all of it is enqueued: events then time the device

    def step(self, batch: HashBatch, settings: StepSettings, *, marks: bool, index: int = 0) -> StepResult:
        """Run one step; ``batch`` has at most ``max_tokens`` tokens."""

    def rows(self, batch: HashBatch, settings: StepSettings) -> tuple[Any, Any]:
        """(ids int32 [T, L, H], staged rows u16 [T, L, H, dim] as numpy) through the same path as a step."""

    def drift(self) -> dict[str, float]:
        """What can drift between runs and was read just now: clocks, temperatures, load."""

    def close(self) -> None:
        """Stop the queue and let go of the table."""

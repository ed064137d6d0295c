"""A ``Group`` over ``torch.distributed``: torchrun starts the ranks, on one or several hosts, for the one runner.

``python -m torch.distributed.run … -m pytest_engram.engines.torchrun PLAN.json EVIDENCE.json``; rank 0 schedules and
writes.  A failure reaches the others in their next collective.  gloo hears no sign of life: the plan's deadline bounds
how long one rank may let the others wait.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from pytest_engram import codec, runner
from pytest_engram.errors import EngramError, PeerError, UsageError
from pytest_engram.model import Plan
from pytest_engram.numa.world import load_entry

_IDLE = timedelta(days=7)  # ranks beyond a small world wait for their next one


class TorchGroup:
    """See :class:`~pytest_engram.numa.group.Group`; ``on_event`` hears every rank's events in rank 0."""

    def __init__(self, deadline_s: float, on_event: Callable[[int, Any], None] | None = None) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_IDLE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._members = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        self._on_event = on_event or (lambda _rank, _event: None)
        self._events: list[Any] = []

    def broadcast(self, obj: Any, *, step: str) -> Any:
        """Rank 0's ``obj``, in every rank."""
        return self.all_gather(obj if self.rank == 0 else None, step=step)[0]

    def barrier(self, *, step: str) -> None:
        """Return when every rank is here."""
        self.all_gather(None, step=step)

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:
        """Every rank's ``obj``, by rank."""
        frames = self._meet({"step": step, "value": obj})
        for rank, frame in enumerate(frames):
            if error := frame.get("error"):
                cause = EngramError.from_wire(error)
                raise PeerError(str(cause), code=cause.code, who=f"rank {rank}") from cause
        if len(steps := {frame["step"] for frame in frames}) > 1:
            raise PeerError(f"the ranks do not meet: {sorted(steps)}", code="ranks-do-not-meet", where=f"step {step!r}")
        return [frame["value"] for frame in frames]

    def check(self, step: str = "") -> None:
        """A peer's failure shows in the next collective."""

    def emit(self, obj: Any) -> None:
        """Send an event to rank 0: it arrives with the next collective."""
        self._events.append(obj)

    def run(self, entry: str, payload: Any) -> Any:
        """``entry`` in every rank, its results by rank; every rank raises where one failed."""
        try:
            result = load_entry(entry)(self, payload)
        except PeerError:
            raise  # everybody has it
        except Exception as error:
            known = error if isinstance(error, EngramError) else EngramError(f"{type(error).__name__}: {error}")
            with suppress(PeerError):
                self._meet({"step": "failed", "error": known.to_wire()})
            raise PeerError(str(known), code=known.code, who=f"rank {self.rank}") from error
        return self.all_gather(result, step="the end")

    def _meet(self, frame: dict[str, Any]) -> list[dict[str, Any]]:
        frames: list[Any] = [None] * self.size
        try:
            self._dist.all_gather_object(frames, {**frame, "events": self._events}, group=self._members)
        except RuntimeError as error:  # a timeout, or a connection that a dead rank closed
            seen = str(error).splitlines()[0]
            raise PeerError(seen, code="peer-deadline", who="torch.distributed", where=frame["step"]) from error
        self._events = []
        if self.rank == 0:
            for rank, each in enumerate(frames):
                for event in each["events"]:
                    self._on_event(rank, event)
        return frames


def _follow(plan: Plan) -> None:
    """A rank other than 0: take part in each world that rank 0 launches, until it has none left."""
    import torch.distributed as dist

    group = None
    while True:
        order: list[Any] = [None]
        dist.broadcast_object_list(order, src=0)
        if order[0] is None:
            return
        group = TorchGroup(plan.deadline_s)
        with suppress(PeerError):  # rank 0 has it in its evidence
            group.run(*order[0])


def main(argv: list[str] | None = None) -> int:
    """Run the plan in the ranks that torchrun started."""
    plan_path, evidence_path = (Path(name) for name in (argv or sys.argv[1:]))
    plan = codec.decode(plan_path.read_bytes(), Plan, source=str(plan_path))

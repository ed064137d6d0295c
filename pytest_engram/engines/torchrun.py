"""A ``Group`` over ``torch.distributed``: torchrun starts the ranks, on one or several hosts, for the one runner.

``python -m torch.distributed.run … -m pytest_engram.engines.torchrun PLAN.json EVIDENCE.json``; rank 0 schedules and
writes.  A failure reaches the others in their next collective.  gloo hears no sign of life: the plan's deadline bounds
how long a rank may let the others wait.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from pytest_engram import codec, runner
from pytest_engram.errors import EngramError, PeerError, UsageError
from pytest_engram.model import Plan
from pytest_engram.numa.group import Group, SoloGroup
from pytest_engram.numa.world import load_entry

_IDLE_S = 7 * 86_400  # what ranks wait for their next world, while rank 0 plans or runs alone


class TorchGroup(Group):
    """See :class:`~pytest_engram.numa.group.Group`; ``on_event`` hears every rank's events, in rank 0.

    Made in every rank of an initialised ``torch.distributed``; a collective takes at most ``deadline_s``.
    """

    def __init__(self, deadline_s: float, on_event: Callable[[int, Any], None] = lambda _rank, _event: None) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        self._on_event, self._events = on_event, list[Any]()

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:
        """Every rank's ``obj``, by rank."""
        return self._meet(step, obj)

    def check(self, step: str = "") -> None:
        """A peer's failure shows in the next collective."""

    def emit(self, obj: Any) -> None:
        """Send an event to rank 0; it travels with the next collective."""
        self._events.append(obj)

    def run(self, entry: str, payload: Any) -> list[Any]:
        """Results by rank of ``entry(group, payload)``; every rank raises the same ``PeerError`` where one fails.

        The group's connections end with it.
        """
        try:
            return self._meet("the end", self._result(entry, payload))
        finally:
            self._dist.destroy_process_group(self._ranks)

    def _result(self, entry: str, payload: Any) -> Any:
        try:
            return load_entry(entry)(self, payload)
        except PeerError:
            raise  # every rank has it
        except Exception as error:
            known = error if isinstance(error, EngramError) else EngramError(f"{type(error).__name__}: {error}")
            self._meet("failed", error=known.to_wire())  # raises, here too
            raise

    def _meet(self, step: str, value: Any = None, *, error: Any = None) -> list[Any]:
        frames: list[Any] = [None] * self.size
        events, self._events = self._events, []
        try:
            self._dist.all_gather_object(frames, (step, value, events, error), group=self._ranks)
        except RuntimeError as lost:  # the deadline, or a connection that a dead rank closed
            seen = str(lost).splitlines()[0]
            raise PeerError(seen, code="peer-deadline", who="torch.distributed", where=f"step {step!r}") from lost
        for rank, (*_, told, failure) in enumerate(frames):
            for event in told if self.rank == 0 else ():
                self._on_event(rank, event)
            if failure:
                cause = EngramError.from_wire(failure)
                raise PeerError(str(cause), code=cause.code, who=f"rank {rank}") from cause
        if len(steps := sorted({frame[0] for frame in frames})) > 1:
            raise PeerError(f"the ranks do not meet: they are at {steps}", code="ranks-do-not-meet")
        return [frame[1] for frame in frames]


def main(argv: list[str] | None = None) -> int:
    """Run a plan in the ranks that torchrun started: rank 0 is the runner, the others follow it."""
    import torch.distributed as dist

    files = argv or sys.argv[1:]
    plan = codec.decode(Path(files[0]).read_bytes(), Plan, source=files[0])
    dist.init_process_group("gloo")
    office = TorchGroup(_IDLE_S)
    if office.size != len(plan.cpus):
        seen, expected = f"{office.size} ranks", f"{len(plan.cpus)}, as planned"
        raise UsageError(seen, code="wrong-ranks", who="torchrun", expected=expected)
    os.sched_setaffinity(0, plan.cpus[office.rank])
    while office.rank and (order := office.broadcast(None, step="next world")):
        with suppress(PeerError):  # rank 0 has it in its evidence
            TorchGroup(plan.deadline_s).run(*order)
    if office.rank == 0:
        runner.main(files, launch=partial(_launch, office))
        office.broadcast(None, step="next world")
    dist.destroy_process_group()
    return 0


def _launch(office: TorchGroup, entry: str, payload: Any, ranks: Any, *, deadline_s: float, on_event: Any) -> Any:
    if len(ranks) == 1:  # the positive control: rank 0 alone
        return [load_entry(entry)(SoloGroup(partial(on_event, 0)), payload)]
    office.broadcast((entry, payload), step="next world")
    return TorchGroup(deadline_s, on_event).run(entry, payload)


if __name__ == "__main__":
    sys.exit(main())

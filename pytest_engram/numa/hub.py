"""The launcher's side of a group: collects the ranks' frames, answers collectives, notices the dead and the silent."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_engram.errors import EngramError, PeerError
from pytest_engram.numa.group import Channel, Frame

_EXIT_WAIT_S = 2.0
START_S = 120.0
UNREAPED = os.WEXITED | os.WNOWAIT | os.WNOHANG  # look only: the pid and its group stay this child's
OnEvent = Callable[[int, Any], None]


@dataclass
class Member:
    """What the hub knows of one rank."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes]
    step: str = "start"
    started: bool = False  # its entry has spoken; until then it imports, which may take long
    heard: float = field(default_factory=time.monotonic)
    waiting: list[Any] | None = None  # [value] while it waits in a collective
    done: bool = False
    gone: bool = False
    result: Any = None


class Hub:
    """Serve one world until every rank has reported its result, or raise the one ``PeerError``."""

    def __init__(self, members: Sequence[Member], deadline_s: float, on_event: OnEvent | None) -> None:
        self.members, self.deadline_s, self._on_event = members, deadline_s, on_event
        self._selector = selectors.DefaultSelector()
        for member in members:
            self._selector.register(member.channel, selectors.EVENT_READ, member)

    def serve(self) -> list[Any]:
        """Results by rank; raises ``PeerError`` naming the rank that failed, died or fell silent."""
        while owing := [member for member in self.members if not member.done]:
            for key, _ in self._selector.select(max(0.0, min(1.0, *map(self._left, owing)))):
                self._read(key.data)
            if silent := [member for member in self.members if self._left(member) < 0]:
                raise self._silence(silent)
        return [member.result for member in self.members]

    def tell(self, error: EngramError, grace_s: float) -> None:
        """Tell every rank, then wait until those that are still well have hung up, at most ``grace_s``."""
        for member in self.members:
            with contextlib.suppress(OSError):  # dead, or hung behind a full socket
                member.channel.send({"error": error.to_wire()}, 0.0)
        end = time.monotonic() + grace_s
        while (left := end - time.monotonic()) > 0 and any(not m.gone and self._left(m) >= 0 for m in self.members):
            for key, _ in self._selector.select(left):
                if key.data.channel.poll() is None:
                    self._drop(key.data)

    def close(self) -> None:
        """Hang up on every rank."""
        self._selector.close()
        for member in self.members:
            member.channel.close()

    def _left(self, member: Member) -> float:
        """Seconds until the member has been silent for too long; no end while it waits, or after its result."""
        if member.done or member.waiting is not None:
            return math.inf
        allowed = self.deadline_s if member.started else max(self.deadline_s, START_S)
        return member.heard + allowed - time.monotonic()

    def _read(self, member: Member) -> None:
        frames = member.channel.poll()
        if frames is None:
            self._drop(member)
            if not member.done:
                raise _blame(member, _death(member), code="peer-died")
        member.heard, member.started = time.monotonic(), True
        for frame in frames or ():
            self._take(member, frame)

    def _take(self, member: Member, frame: Frame) -> None:
        member.step = frame.get("step", member.step)
        if frame["op"] == "collect":
            member.waiting = [frame["value"]]
        elif frame["op"] == "event" and self._on_event:
            self._on_event(member.rank, frame["value"])
        elif frame["op"] == "done":
            member.done, member.result = True, frame["value"]
        elif frame["op"] == "error":
            cause = EngramError.from_wire(frame["error"])
            raise _blame(member, str(cause), code=cause.code) from cause
        self._answer()

    def _answer(self) -> None:
        waiting = [member for member in self.members if member.waiting is not None]
        if not waiting or any(not member.done and member.waiting is None for member in self.members):
            return
        steps = {member.rank: "the end" if member.done else member.step for member in self.members}
        if len(set(steps.values())) > 1:
            told = ", ".join(f"rank {rank} is at {step}" for rank, step in steps.items())
            raise _blame(waiting[0], f"the ranks do not meet: {told}", code="ranks-do-not-meet")
        values = [value for member in waiting for value in member.waiting or ()]
        for member in waiting:
            member.waiting, member.heard = None, time.monotonic()
            self.send(member, {"values": values}, self.deadline_s)

    def send(self, member: Member, frame: Frame, within_s: float) -> None:
        """Write a frame to one rank; ``PeerError`` (``peer-deadline``) if it has not taken it ``within_s``."""
        try:
            member.channel.send(frame, within_s)
        except TimeoutError:
            for other in self.members:  # nobody was listened to meanwhile
                other.heard = -math.inf if other is member else time.monotonic()
            raise self._silence([member]) from None
        except OSError:  # a dead rank is reported by its EOF
            pass

    def _drop(self, member: Member) -> None:
        if not member.gone:
            member.gone = True
            self._selector.unregister(member.channel)

    def _silence(self, silent: Sequence[Member]) -> PeerError:
        waiting = [f" while others wait at step {m.step!r}" for m in self.members if m.waiting is not None]
        return PeerError(
            f"nothing was heard for {self.deadline_s:g} s{''.join(waiting[:1])}", code="peer-deadline",
            who=" and ".join(f"rank {member.rank} (step {member.step!r})" for member in silent),
            expected="a collective, an event or check() in that time",
            way_out="raise the deadline, or call group.check() between pieces of long work",
        )  # fmt: skip


def exit_status(process: subprocess.Popen[bytes], within_s: float) -> int | None:
    """Its exit status, or minus the signal that ended it, without reaping it; None: not ``within_s``, or unknown."""
    end = time.monotonic() + within_s
    with contextlib.suppress(ChildProcessError):  # somebody else reaped it
        while (found := os.waitid(os.P_PID, process.pid, UNREAPED)) is None and time.monotonic() < end:
            time.sleep(0.005)
        if found is not None:
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    return None


def _death(member: Member) -> str:
    if (status := exit_status(member.process, _EXIT_WAIT_S)) is None:
        return "it closed its connection"
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it exited with status {status} before its result"


def _blame(member: Member, seen: str, *, code: str) -> PeerError:
    return PeerError(seen, code=code, who=f"rank {member.rank}", where=f"step {member.step!r}")

"""Start one process per rank, run one function in all of them, and leave no process behind.

``python -m pytest_engram.numa.world FD RANK SIZE`` is the rank's side.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest_engram.errors import EngramError, PeerError
from pytest_engram.numa import _syscalls
from pytest_engram.numa.group import Channel, LocalGroup
from pytest_engram.numa.hub import START_S, UNREAPED, Hub, Member, OnEvent, exit_status

GRACE_S = 3.0  # for well ranks to undo what they registered, after one failed
_KILL_AFTER_S = 1.0


@dataclass(frozen=True)
class RankSpec:
    """Where one rank runs: its CPUs (empty: the launcher's) and variables added to its environment."""

    cpus: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


def run_world(
    entry: str, payload: Any, ranks: Sequence[RankSpec], *, deadline_s: float, on_event: OnEvent | None = None,
) -> list[Any]:  # fmt: skip
    """Call ``entry`` ("pkg.mod:function" or "path/file.py:function") as ``function(group, payload)`` in every rank.

    Returns the JSON-able results by rank.  A rank that raises, dies or gives no sign of life for ``deadline_s`` while
    it does not wait in a collective makes every rank and this call raise the same :class:`PeerError`, whose ``code``
    is the cause's and whose ``__cause__`` is the rank's own :class:`EngramError`.  No process survives the call.
    """
    members: list[Member] = []
    try:
        for rank, spec in enumerate(ranks):
            members.append(_spawn(rank, len(ranks), spec))
        return _serve(Hub(members, deadline_s, on_event), entry, payload, ranks)
    finally:
        _end([member.process for member in members])


def _serve(hub: Hub, entry: str, payload: Any, ranks: Sequence[RankSpec]) -> list[Any]:
    start = {"entry": entry, "payload": payload, "parent": os.getpid(), "heartbeat_s": min(1.0, hub.deadline_s / 4)}
    try:
        for member, spec in zip(hub.members, ranks, strict=True):
            hub.send(member, {**start, "cpus": spec.cpus}, max(hub.deadline_s, START_S))
        results = hub.serve()
    except PeerError as error:
        hub.tell(error, GRACE_S)
        raise
    finally:
        hub.close()
    _wait([member.process for member in hub.members], GRACE_S)
    return results


def _spawn(rank: int, size: int, spec: RankSpec) -> Member:
    ours, theirs = socket.socketpair()
    environment, root = {**os.environ, **spec.env}, str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *map(str, (theirs.fileno(), rank, size))], env=environment,
            stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True,
        )  # fmt: skip
    return Member(rank=rank, channel=Channel(ours), process=process)


def _wait(processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in processes:
        exit_status(process, end - time.monotonic())


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to the process groups, which outlive a rank that forked, SIGKILL a moment later, and only then reap.

    The pid of a rank that somebody else reaped may be another process's by now: it gets no signal.
    """
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.waitid(os.P_PID, process.pid, UNREAPED)
                os.killpg(process.pid, signal_number)
        _wait(processes, _KILL_AFTER_S)
    for process in processes:
        process.wait()


def load_entry(entry: str) -> Callable[[Any, Any], Any]:
    """The function behind "pkg.mod:function" or "path/file.py:function"."""
    place, _, name = entry.rpartition(":")
    module = SimpleNamespace(**runpy.run_path(place)) if place.endswith(".py") else importlib.import_module(place)
    function: Callable[[Any, Any], Any] = getattr(module, name)
    return function


def main(arguments: Sequence[str]) -> int:
    """Run as one rank: descriptor of the socket, rank, size."""
    descriptor, rank, size = map(int, arguments)
    _syscalls.die_with_parent(signal.SIGKILL)
    channel = Channel(socket.socket(fileno=descriptor))
    while not (frames := channel.poll()):
        if frames is None:
            return 1
    start = frames[0]
    if os.getppid() != start["parent"]:  # the launcher died before it could be watched
        return 1
    group = LocalGroup(channel, rank, size, heartbeat_s=start["heartbeat_s"])
    try:
        if start["cpus"]:
            os.sched_setaffinity(0, start["cpus"])
        group.finish(load_entry(start["entry"])(group, start["payload"]))
    except BaseException as error:  # noqa: BLE001 - whatever ended this rank is reported, then the process ends
        if not isinstance(error, EngramError):
            traceback.print_exc()
            error = EngramError(f"{type(error).__name__}: {error}", code="unexpected-error")
        group.fail(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

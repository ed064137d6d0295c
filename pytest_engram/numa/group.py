"""The rendezvous of the ranks of one world: broadcast, barrier, all_gather, each with a deadline.

``LocalGroup`` speaks JSON lines over a socket pair to the hub in the launcher (``hub``).  The hub sees a killed rank at
once (EOF), a silent one after the deadline, and tells every rank; so all raise the same text.
All ranks take part in every collective, in the same order and under the same step name.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from pytest_engram.errors import EngramError, PeerError

Frame = dict[str, Any]


class Group(Protocol):
    """What a rank may ask of its peers; values are JSON-able."""

    rank: int
    size: int

    def broadcast(self, obj: Any, *, step: str) -> Any:
        """Rank 0's ``obj``, in every rank."""
        return self.all_gather(obj if self.rank == 0 else None, step=step)[0]

    def barrier(self, *, step: str) -> None:
        """Return when every rank is here."""
        self.all_gather(None, step=step)

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:
        """Every rank's ``obj``, by rank."""

    def check(self, step: str = "") -> None:
        """Raise at once if a peer failed.  Also the sign of life: call it between chunks of long work."""

    def emit(self, obj: Any) -> None:
        """Send an event to the launcher."""


class SoloGroup(Group):
    """A world of one rank in this process; events go to ``on_event``, and there is no peer that could fail."""

    rank, size = 0, 1

    def __init__(self, on_event: Callable[[Any], None] = lambda _event: None) -> None:
        self._on_event = on_event

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:  # noqa: ARG002 - the protocol's signature
        """Return ``[obj]``."""
        return [obj]

    def check(self, step: str = "") -> None:
        """Return: nobody else could fail."""

    def emit(self, obj: Any) -> None:
        """Hand the event to the callback given at construction."""
        self._on_event(obj)


class Channel:
    """JSON lines over one stream socket."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream, self._pending = stream, b""

    def fileno(self) -> int:
        """The socket's descriptor, so that a selector takes a channel as it is."""
        return self._stream.fileno()

    def send(self, frame: Frame, within_s: float | None = None) -> None:
        """Write one frame, ``TimeoutError`` or ``BlockingIOError`` if the other side does not take it ``within_s``."""
        self._stream.settimeout(within_s)
        self._stream.sendall(json.dumps(frame, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def poll(self, flags: int = 0) -> list[Frame] | None:
        """Wait for bytes (not with ``MSG_DONTWAIT``); the frames that they complete, None at the other side's end."""
        try:
            chunk = self._stream.recv(1 << 20, flags)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            chunk = b""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [json.loads(line) for line in lines] if chunk else None

    def close(self) -> None:
        """Close the socket; the other side reads EOF."""
        self._stream.close()


class LocalGroup(Group):
    """One rank's side, for one thread.  It hears of a failure when it collects, checks or sends."""

    def __init__(self, channel: Channel, rank: int, size: int, *, heartbeat_s: float = 1.0) -> None:
        self.rank, self.size, self.step = rank, size, "start"
        self._channel, self._heartbeat_s, self._last_sent = channel, heartbeat_s, time.monotonic()
        self._failure: dict[str, Any] | None = None

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:
        """Every rank's ``obj``, by rank."""
        self.step = step
        self._send("collect", value=obj, step=step)
        while not (answers := self._hear()):
            pass
        return answers[0]

    def check(self, step: str = "") -> None:
        """Raise if a peer failed; tell the hub the current step, at least every ``heartbeat_s`` when called."""
        self._hear(socket.MSG_DONTWAIT)
        changed, self.step = step not in ("", self.step), step or self.step
        if changed or time.monotonic() - self._last_sent > self._heartbeat_s:
            self._send("alive", step=self.step)

    def emit(self, obj: Any) -> None:
        """Send an event to the launcher."""
        self._send("event", value=obj)

    def finish(self, value: Any) -> None:
        """Report this rank's result; the group is over."""
        self._send("done", value=value)

    def fail(self, error: EngramError) -> None:
        """Report this rank's error; the hub tells the others."""
        with contextlib.suppress(OSError):
            self._channel.send({"op": "error", "error": error.to_wire(), "step": self.step})

    def _send(self, op: str, **frame: Any) -> None:
        self._hear(socket.MSG_DONTWAIT)
        self._last_sent = time.monotonic()
        try:
            self._channel.send({"op": op, **frame})
        except OSError:  # the hub hung up: its last word is on the way, or it is gone; both raise
            while True:
                self._hear()

    def _hear(self, flags: int = 0) -> list[list[Any]]:
        """The answer to a collective; news of a failure is raised behind it, then in every later call."""
        frames = [] if self._failure else self._channel.poll(flags)
        if frames is None:
            frames = [{"error": PeerError("the launcher is gone", code="launcher-gone", who="launcher").to_wire()}]
        self._failure = next((frame["error"] for frame in frames if "error" in frame), self._failure)
        answers = [frame["values"] for frame in frames if "values" in frame]
        if self._failure and not answers:
            raise EngramError.from_wire(self._failure)
        return answers

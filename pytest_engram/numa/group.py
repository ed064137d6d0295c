"""The rendezvous of the ranks of one world: broadcast, barrier, all_gather, each with a deadline.

``LocalGroup`` speaks length-prefixed JSON frames over a socket pair to the hub in the launcher (``hub``).  The hub sees
a killed rank at once (EOF), a silent one after the deadline, and tells every rank; so all raise the same text.
All ranks take part in every collective, in the same order and under the same step name.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from pytest_engram.errors import EngramError, PeerError

_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 20
Frame = dict[str, Any]


class Group(Protocol):
    """What a rank may ask of its peers; values are JSON-able."""

    rank: int
    size: int

    def broadcast(self, obj: Any, *, step: str) -> Any:
        """Rank 0's ``obj``, in every rank."""

    def barrier(self, *, step: str) -> None:
        """Return when every rank is here."""

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:
        """Every rank's ``obj``, by rank."""

    def check(self, step: str = "") -> None:
        """Raise at once if a peer failed.  Also the sign of life: call it between chunks of long work."""

    def emit(self, obj: Any) -> None:
        """Send an event to the launcher."""


class SoloGroup:
    """A world of one rank in this process: for fixtures and in-process use."""

    rank, size = 0, 1

    def __init__(self, on_event: Callable[[Any], None] | None = None) -> None:
        self._on_event = on_event

    def broadcast(self, obj: Any, *, step: str) -> Any:  # noqa: ARG002 - the protocol's signature
        """Return ``obj``."""
        return obj

    def barrier(self, *, step: str) -> None:
        """Return at once."""

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:  # noqa: ARG002 - the protocol's signature
        """Return ``[obj]``."""
        return [obj]

    def check(self, step: str = "") -> None:
        """There is no peer that could fail."""

    def emit(self, obj: Any) -> None:
        """Hand the event to the callback given at construction."""
        if self._on_event:
            self._on_event(obj)


class Channel:
    """Length-prefixed JSON frames over one stream socket; ``send`` is safe from several threads."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream, self._lock, self._pending = stream, threading.Lock(), bytearray()

    def fileno(self) -> int:
        """The socket's descriptor, so that a selector takes a channel as it is."""
        return self._stream.fileno()

    def send(self, frame: Frame) -> None:
        """Write one frame; NaN and infinities are refused."""
        data = json.dumps(frame, allow_nan=False, separators=(",", ":")).encode()
        with self._lock:
            self._stream.sendall(_LENGTH.pack(len(data)) + data)

    def poll(self) -> list[Frame] | None:
        """Wait for bytes and return the frames that they complete; None at the other side's end."""
        try:
            chunk = self._stream.recv(_READ_BYTES)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            return None
        self._pending += chunk
        frames = []
        while len(self._pending) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._pending)[0]
            if len(self._pending) < end:
                break
            frames.append(json.loads(bytes(self._pending[_LENGTH.size : end])))
            del self._pending[:end]
        return frames

    def close(self) -> None:
        """Close the socket; the other side reads EOF."""
        self._stream.close()


class LocalGroup:
    """One rank's side.  A receiver thread learns of a failure at once, whatever the rank is doing."""

    def __init__(self, channel: Channel, rank: int, size: int, *, heartbeat_s: float = 1.0) -> None:
        self.rank, self.size = rank, size
        self.step = "start"
        self._channel, self._heartbeat_s, self._last_sent = channel, heartbeat_s, time.monotonic()
        self._answers: list[Any] = []
        self._failure: dict[str, Any] | None = None
        self._news = threading.Condition()
        threading.Thread(target=self._listen, name="engram-group", daemon=True).start()

    def broadcast(self, obj: Any, *, step: str) -> Any:
        """Rank 0's ``obj``, in every rank."""
        return self._collect(obj if self.rank == 0 else None, step)[0]

    def barrier(self, *, step: str) -> None:
        """Return when every rank is here."""
        self._collect(None, step)

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:
        """Every rank's ``obj``, by rank."""
        return self._collect(obj, step)

    def check(self, step: str = "") -> None:
        """Raise if a peer failed; tell the hub the current step, at least every ``heartbeat_s`` when called."""
        self._raise_failure()
        changed = bool(step) and step != self.step
        self.step = step or self.step
        if changed or time.monotonic() - self._last_sent > self._heartbeat_s:
            self._send({"op": "alive", "step": self.step})

    def emit(self, obj: Any) -> None:
        """Send an event to the launcher."""
        self._raise_failure()
        self._send({"op": "event", "value": obj})

    def finish(self, value: Any) -> None:
        """Report this rank's result; the group is over."""
        self._raise_failure()
        self._send({"op": "done", "value": value})

    def fail(self, error: EngramError) -> None:
        """Report this rank's error; the hub tells the others."""
        with contextlib.suppress(OSError):
            self._channel.send({"op": "error", "error": error.to_wire(), "step": self.step})

    def _collect(self, obj: Any, step: str) -> list[Any]:
        self._raise_failure()
        self.step = step
        self._send({"op": "collect", "step": step, "value": obj})
        with self._news:
            self._news.wait_for(lambda: self._answers or self._failure)
            if self._answers:
                values: list[Any] = self._answers.pop()
                return values
        self._raise_failure()
        raise AssertionError("unreachable: woken without an answer or a failure")

    def _send(self, frame: Frame) -> None:
        self._last_sent = time.monotonic()
        try:
            self._channel.send(frame)
        except OSError:  # the hub hung up: its last word is on the way, or it is gone
            with self._news:
                self._news.wait_for(lambda: self._failure, timeout=1.0)
            self._raise_failure()
            raise

    def _listen(self) -> None:
        while (frames := self._channel.poll()) is not None:
            for frame in frames:
                self._hear(frame)
        gone = PeerError("the launcher is gone", code="launcher-gone", who="launcher")
        self._hear({"op": "failed", "error": gone.to_wire()})

    def _hear(self, frame: Frame) -> None:
        with self._news:
            if frame["op"] == "go":
                self._answers.append(frame["values"])
            else:
                self._failure = self._failure or frame["error"]
            self._news.notify_all()

    def _raise_failure(self) -> None:
        if self._failure:
            raise EngramError.from_wire(self._failure)

"""Errors that tell a person who failed, where, what was seen, what was expected, and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EngramError(Exception):
    """Base of every error this package raises on purpose.

    ``code`` is a stable machine-readable reason (kebab-case); the other fields make up the one sentence
    a person reads.  All fields are optional except ``seen``.
    """

    code = "error"

    def __init__(
        self,
        seen: str,
        *,
        code: str | None = None,
        who: str | None = None,
        where: str | None = None,
        expected: str | None = None,
        way_out: str | None = None,
    ) -> None:
        self.code = code or type(self).code
        self.seen, self.who, self.where, self.expected, self.way_out = seen, who, where, expected, way_out
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        head = ", ".join(part for part in (self.who, self.where) if part)
        text = f"{head}: {self.seen}" if head else self.seen
        if self.expected:
            text += f"; expected {self.expected}"
        if self.way_out:
            text += f". Way out: {self.way_out}"
        return text

    def to_wire(self) -> dict[str, str | None]:
        """The fields as JSON-able strings, so that a peer can raise the same error with the same text."""
        names = ("code", "seen", "who", "where", "expected", "way_out")
        return {"kind": type(self).__name__, **{name: getattr(self, name) for name in names}}

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> EngramError:
        """Rebuild the error that another process described with :meth:`to_wire`."""
        fields = dict(wire)
        kind = _KINDS.get(str(fields.pop("kind", "")), EngramError)
        return kind(str(fields.pop("seen")), **fields)


class UsageError(EngramError):
    """A user's input is wrong; known before anything is measured."""

    code = "usage"


class NotMeasurable(EngramError):  # noqa: N818 - an absence, not an error
    """This machine, build or permission set cannot produce the evidence; a named absence, not a failure."""

    code = "not-measurable"


class PlacementError(EngramError):
    """The kernel refused a placement step, or its answers contradict each other."""

    code = "placement"


class PeerError(EngramError):
    """A rank failed or died; every other rank raises the same text."""

    code = "peer"


_KINDS = {kind.__name__: kind for kind in (EngramError, UsageError, NotMeasurable, PlacementError, PeerError)}

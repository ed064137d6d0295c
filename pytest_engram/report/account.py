"""Verdicts with their evidence and what these amount to: worked out once, whoever renders it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from pytest_engram import hypotheses, recommendation
from pytest_engram.model import Adjudication, Evidence, Verdict


class Account:
    """``pairs`` are the verdicts, each with its own evidence where there is any."""

    def __init__(self, verdicts: Sequence[Verdict], evidences: Sequence[Evidence]) -> None:
        self.verdicts, self.evidences = verdicts, evidences
        self.pairs = [*hypotheses.pairs(verdicts, evidences)]

    @cached_property
    def hypotheses(self) -> tuple[Adjudication, ...]:
        """One outcome per hypothesis over all evidence."""
        return hypotheses.adjudicate(self.evidences, self.verdicts)

    @cached_property
    def advice(self) -> list[str | None]:
        """The advice that each verdict allows; None where none is asked for or nothing was measured."""
        return [recommendation.advice(one, verdict) if one else None for verdict, one in self.pairs]


def numbered(names: Iterable[str]) -> list[str]:
    """``B1``, ``B1.2``, ``A1``: a name that comes again carries its number."""
    given = list(names)
    times = [given[:place].count(name) for place, name in enumerate(given)]
    return [f"{name}.{before + 1}" if before else name for name, before in zip(given, times, strict=True)]

"""What follows from the evidence: effects, gate results, the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_engram.model.words import SCHEMA_VERSION, Claim, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A paired effect over blocks as ratio − 1, with the interval that inverts the test; raw block effects kept."""

    metric: str
    arm: str
    estimate: float | None
    low: float | None
    high: float | None
    p_value: float | None
    blocks: int
    per_block: tuple[float | None, ...] = ()  # None: A measured 0 and the candidate did not
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjudication:
    """What the evidence says of one of the four hypotheses.  It explains; no gate reads it."""

    number: int
    statement: str
    outcome: str  # "supported", "weakened" or "undecided"
    lines: tuple[str, ...]  # the evidence, one finding per line; what is missing when undecided


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """One rung of the ladder.  ``reason`` is machine-readable; the rest is for a person."""

    gate: int
    name: str
    status: Status
    reason: str
    observed: str
    threshold: str
    next_step: str
    effects: tuple[Effect, ...] = ()
    judged: bool = True  # False: reported for a `characterises` claim, does not decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The five gates of one experiment and the one status that follows from them."""

    experiment: str
    title: str
    claim: Claim
    subject: str
    status: Status
    gates: tuple[GateResult, ...]
    protocol_hash: str
    sentence: str | None = None  # the one sentence that may be printed when an `improves` claim passes
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA_VERSION

"""The few words that every record shares: schema version, statuses, claims, moments, gate names."""

from __future__ import annotations

from enum import Enum

SCHEMA_VERSION = 1  # 1: first published form of Plan, Evidence and Verdict


class Status(str, Enum):
    """What a gate, an experiment or a run may say; there is no seventh word."""

    PASS = "PASS"  # noqa: S105 - a status
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_MEASURED = "NOT_MEASURED"
    BLOCKED = "BLOCKED"
    INVALID = "INVALID"


class Claim(str, Enum):
    """``improves`` is judged by all five gates; ``characterises`` reports an effect and cannot lack a winner."""

    IMPROVES = "improves"
    CHARACTERISES = "characterises"


class Moment(str, Enum):
    """When a page distribution was taken."""

    REGISTERED = "registered"
    LOADED = "loaded"
    REPLAYED = "replayed"


GATE_NAMES = ("correctness", "treatment", "mechanism", "no_offset", "end_to_end")

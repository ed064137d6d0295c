"""The protocol's hash: what was decided before the first sample, so that nothing can be decided after it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pytest_engram import codec, schedule
from pytest_engram.model import Experiment, Plan

_PROSE = ("source", "title", "why", "direction_note")


def protocol_hash(experiment: Experiment, seed: int, extra: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of metrics, margins, blocks, claim, workload, seed and schedule; prose may be reworded.

    ``extra`` holds what the machine or the command line decided; :func:`plan_hash` reads it back from a plan.
    """
    rules = codec.to_builtins(experiment)
    order = [[run.block, run.arm] for run in schedule.make(experiment, seed)]
    for name in _PROSE:
        del rules[name]
    content = {"experiment": rules, "seed": seed, "schedule": order, "extra": codec.to_builtins(dict(extra))}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def plan_hash(plan: Plan) -> str:
    """The hash that ``plan`` must carry."""
    extra = {"rows": plan.rows, "engine": plan.engine, "backends": plan.backends}
    return protocol_hash(plan.experiment, plan.seed, extra)

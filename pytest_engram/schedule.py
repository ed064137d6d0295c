"""The randomised schedule (blocks of A, A' and every candidate) and the hash of what was decided before it ran.

The order inside a block comes from SHA-256 of (experiment, seed, block, arm), not from a random generator: no library
promises its stream across versions, and a schedule must be recomputed on another machine years later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from functools import partial
from itertools import zip_longest

from pytest_engram import codec
from pytest_engram.model import Experiment, Plan, ScheduledRun

MINIMUM_BLOCKS = 6  # 2**-5 > 2.5 %: with five blocks no one-sided signed-rank test can decide
BASE, TWIN = "A", "A'"
_PROSE = {"source", "title", "why", "direction_note"}


def base_arm(arm: str) -> str:
    """The arm whose settings ``arm`` runs with: A' is a second A."""
    return BASE if arm == TWIN else arm


def candidates(experiment: Experiment) -> tuple[str, ...]:
    """Every arm that is compared with A, in the order of the YAML."""
    return tuple(arm for arm in experiment.arms if arm != BASE)


def block_arms(experiment: Experiment) -> tuple[str, ...]:
    """The arms of one block before they are shuffled."""
    return (BASE, TWIN, *candidates(experiment))


def make(experiment: Experiment, seed: int) -> tuple[ScheduledRun, ...]:
    """``experiment.blocks`` blocks, each in its own order; only the experiment, the seed and the block decide."""
    cells = [
        (block, arm)
        for block in range(experiment.blocks)
        for arm in sorted(block_arms(experiment), key=partial(_lot, experiment.id, seed, block))
    ]
    return tuple(ScheduledRun(index=index, block=block, arm=arm) for index, (block, arm) in enumerate(cells))


def verify(schedule: Sequence[ScheduledRun], experiment: Experiment, seed: int) -> str | None:
    """None if ``schedule`` is the one that (experiment, seed) gives, else the first place where it is not."""
    pairs = zip_longest(schedule, make(experiment, seed))
    return next((f"{_words(have)} where the seed gives {_words(want)}" for have, want in pairs if have != want), None)


def complete_blocks(runs: Collection[tuple[int, str]], arms: Sequence[str]) -> tuple[int, ...]:
    """Blocks of which every arm is among ``runs``, given as (block, arm)."""
    return tuple(sorted(block for block in {block for block, _ in runs} if all((block, arm) in runs for arm in arms)))


def plan_hash(plan: Plan) -> str:
    """The hash that ``plan`` must carry: SHA-256 (hex) of metrics, margins, blocks, claim, workload, seed and schedule.

    With them goes what the machine or the command line decided; prose may be reworded.
    """
    rules = {name: rule for name, rule in codec.to_builtins(plan.experiment).items() if name not in _PROSE}
    order = [[run.block, run.arm] for run in make(plan.experiment, plan.seed)]
    extra = {"rows": plan.rows, "engine": plan.engine, "backends": plan.backends}
    content = {"experiment": rules, "seed": plan.seed, "schedule": order, "extra": extra}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _words(run: ScheduledRun | None) -> str:
    return f"run {run.index}, block {run.block}, arm {run.arm}" if run else "nothing"


def _lot(experiment: str, seed: int, block: int, arm: str) -> bytes:
    return hashlib.sha256(f"{experiment}\0{seed}\0{block}\0{arm}".encode()).digest()

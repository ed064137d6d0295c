"""The randomised schedule: blocks of A, A' and every candidate; enforced and recorded.

The order inside a block comes from SHA-256 of (experiment, seed, block, arm), not from a random generator: no library
promises its stream across versions, and a schedule must be recomputed on another machine years later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from pytest_engram.model import Experiment, ScheduledRun

MINIMUM_BLOCKS = 6  # 2**-5 > 2.5 %: with five blocks no one-sided signed-rank test can decide
BASE, TWIN = "A", "A'"


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
    arms = block_arms(experiment)
    cells = [
        (block, arm)
        for block in range(experiment.blocks)
        for arm in sorted(arms, key=lambda arm, block=block: _lot(experiment.id, seed, block, arm))  # type: ignore[misc]
    ]
    return tuple(ScheduledRun(index=index, block=block, arm=arm) for index, (block, arm) in enumerate(cells))


def verify(schedule: Sequence[ScheduledRun], experiment: Experiment, seed: int) -> str | None:
    """None if ``schedule`` is the one that (experiment, seed) gives, else the first place where it is not."""
    wanted = make(experiment, seed)
    for have, want in zip(schedule, wanted):  # noqa: B905 - lengths are compared below
        if have != want:
            return f"run {want.index} should be {want.arm} in block {want.block}, is {have.arm} in block {have.block}"
    if len(schedule) != len(wanted):
        return f"{len(schedule)} runs are scheduled, the seed gives {len(wanted)}"
    return None


def complete_blocks(runs: Iterable[tuple[int, str]], arms: Iterable[str]) -> tuple[int, ...]:
    """Blocks of which every arm is among ``runs``, given as (block, arm)."""
    found: dict[int, set[str]] = {}
    for block, arm in runs:
        found.setdefault(block, set()).add(arm)
    needed = set(arms)
    return tuple(sorted(block for block, have in found.items() if needed <= have))


def _lot(experiment: str, seed: int, block: int, arm: str) -> bytes:
    return hashlib.sha256(f"{experiment}\0{seed}\0{block}\0{arm}".encode()).digest()

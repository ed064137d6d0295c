"""How often the rule errs and how much it finds, by simulation: run noise, drift, heavy tails, good and bad schedules.

The simulated rule is the gates' own: the lower limit of ``stats`` against the margin, and the A/A test beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_engram import stats

AA_LEVEL = 0.01  # two-sided, as the experiments of this suite declare it


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One world: ``truth`` and ``margin`` are ratios − 1, ``noise`` the log sd of a run, ``drift`` the log change of
    the machine from the first to the last run."""

    title: str
    truth: float = 0.0
    margin: float = 0.0
    noise: float = 0.01
    blocks: int = 8
    drift: float = 0.0
    randomised: bool = True  # False: all of A, then all of A', then all of B
    heavy: bool = False  # Student's t with 3 degrees of freedom, scaled to the same sd


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A scenario's shares of trials: improvement declared, and declared with A/A not invalidating it."""

    scenario: Scenario
    declared: float
    passed: float
    invalidated: float
    trials: int


SCENARIOS = (
    Scenario(title="null"),
    Scenario(title="null, heavy tails", heavy=True),
    Scenario(title="truth = margin of 2 %", truth=0.02, margin=0.02),
    Scenario(title="null, drift 2 %, random blocks", drift=0.02),
    Scenario(title="null, drift 2 %, 20 random blocks", drift=0.02, blocks=20),
    Scenario(title="null, drift 2 %, A…A B…B", drift=0.02, randomised=False),
    Scenario(title="null, drift 2 %, A…A B…B, n = 20", drift=0.02, randomised=False, blocks=20),
    Scenario(title="truth +2 %", truth=0.02),
    Scenario(title="truth +2 %, noise 3 %", truth=0.02, noise=0.03),
    Scenario(title="truth +2 %, noise 3 %, 31 blocks", truth=0.02, noise=0.03, blocks=31),
    Scenario(title="truth +2 %, heavy tails, 20 blocks, noise 3 %", truth=0.02, noise=0.03, blocks=20, heavy=True),
)


def table(*, trials: int = 10_000, seed: int = 20261) -> list[Row]:
    """Every scenario, seeded on its own, so that adding one does not change the others."""
    return [simulate(scenario, trials=trials, seed=seed) for scenario in SCENARIOS]


def simulate(scenario: Scenario, *, trials: int, seed: int) -> Row:
    """``trials`` schedules of one world, judged at one-sided 2.5 % against the margin."""
    logs = _logs(np.random.default_rng([seed, *scenario.title.encode()]), scenario, trials)
    base, twin, candidate = logs[..., 0], logs[..., 1], logs[..., 2] + math.log1p(scenario.truth)
    declared = stats.lower_limits(candidate - (base + twin) / 2) > math.log1p(scenario.margin)
    level = max(AA_LEVEL, 2.0 ** (1 - scenario.blocks)) / 2  # as the gates: never below what so many blocks reach
    invalid = np.logical_or(*(stats.lower_limits(aa, level) > 0 for aa in (twin - base, base - twin)))
    return Row(
        scenario=scenario, declared=float(declared.mean()), passed=float((declared & ~invalid).mean()),
        invalidated=float(invalid.mean()), trials=trials,
    )  # fmt: skip


def _logs(rng: np.random.Generator, scenario: Scenario, trials: int) -> Any:
    """Log times, [trials, blocks, arms]: noise, and drift by when each run takes place, from 0 (first) to 1 (last)."""
    shape = (trials, scenario.blocks, 3)
    noise = rng.standard_t(3, shape) / math.sqrt(3) if scenario.heavy else rng.standard_normal(shape)
    clock = np.linspace(0, 1, 3 * scenario.blocks)
    in_blocks = rng.permuted(np.broadcast_to(clock.reshape(-1, 3), shape), axis=2)
    return scenario.noise * noise + scenario.drift * (in_blocks if scenario.randomised else clock.reshape(3, -1).T)


def render(rows: Sequence[Row]) -> str:
    """A Markdown table; "declared" is an error under a null and the power under a true effect."""
    lines = [
        f"Simulated, {rows[0].trials:,} schedules each; declared at one-sided {stats.ALPHA:.1%} against the margin.",
        "",
        "| world | blocks | noise per run | declared | declared and A/A sound | A/A invalidates |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.scenario.title} | {row.scenario.blocks} | {row.scenario.noise:.0%} | {row.declared:.1%} "
        f"| {row.passed:.1%} | {row.invalidated:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)

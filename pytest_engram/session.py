"""What one pytest session knows: its choices, its experiments, and one outcome per experiment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from pytest_engram import engines, experiment, gates, planning, schedule
from pytest_engram.engines.tables import table_bytes
from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.model import Evidence, Experiment, Problem, Status, Topology, Verdict
from pytest_engram.numa import capacity

MEASUREMENT_MARKERS = frozenset({"numa", "overlap", "serving"})
DEFAULT_EXPERIMENTS = Path(str(resources.files("pytest_engram.fixtures") / "experiments"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One experiment's verdict, and its evidence where any was taken."""

    verdict: Verdict
    evidence: Evidence | None = None


class Session:
    """Lazily measured outcomes; ``option`` looks an option up by its long name."""

    def __init__(self, option: Callable[[str], Any], *, tell: Callable[[str], None] = lambda _text: None) -> None:
        self.option, self.tell = option, tell
        self.outcomes: dict[str, Outcome] = {}
        self.forced: Problem | None = None  # e.g. benchmarks disabled, an xdist worker: nothing may be measured

    @cached_property
    def experiments(self) -> dict[str, Experiment]:
        """The experiments of ``--engram-experiments``, or the suite's own."""
        return load_experiments(self.option("--engram-experiments"))

    @cached_property
    def topology(self) -> Topology:
        """This machine, GPUs as sysfs and the drivers answer."""
        return this_machine()

    @cached_property
    def choices(self) -> planning.Choices:
        """The command line's choices; an engine that was named and cannot run is an error, never a fallback."""
        return planning.Choices(
            engine=engines.choose(self.option("--engram-engine")),
            engines=engines.availability(),
            backend=self.option("--engram-backend"),
            candidate=self.option("--engram-candidate"),
            rows=self.option("--engram-rows"),
            blocks=self.option("--engram-pairs"),
            seed=self.option("--engram-seed"),
        )

    @property
    def enforcing(self) -> bool:
        """Whether verdicts set the exit code."""
        return bool(self.option("--engram-gate") == "enforce")

    def outcome(self, identifier: str) -> Outcome:
        """Measure the experiment once per session and judge it."""
        if identifier not in self.outcomes:
            self.outcomes[identifier] = self._measure(self.experiments[identifier])
        return self.outcomes[identifier]

    def preflight(self, identifiers: list[str]) -> None:
        """Refuse, before the first run, a table that does not fit; what cannot be measured here is left for later."""
        for identifier in identifiers:
            with contextlib.suppress(NotMeasurable):
                plan = planning.make_plan(self.experiments[identifier], self.topology, self.choices)
                size = table_bytes(planning.layout_for(plan))
                for placement in plan.placements.values():
                    capacity.check_capacity(
                        placement, size, capacity.live_memory(), capacity.shm_free(), capacity.cgroup_free()
                    )

    def _measure(self, chosen: Experiment) -> Outcome:
        if self.forced is not None:
            return Outcome(gates.not_measured(chosen, self.forced))
        try:
            plan = planning.make_plan(chosen, self.topology, self.choices)
            self._budget(plan)
        except NotMeasurable as absent:
            problem = Problem(code=absent.code, message=absent.seen, who=absent.who or "", status=Status.NOT_MEASURED)
            return Outcome(gates.not_measured(chosen, problem))
        from pytest_engram.runner import run

        evidence = run(plan, progress=_Progress(self.tell, plan))
        prior = [outcome.verdict for outcome in self.outcomes.values()]
        return Outcome(gates.evaluate(evidence, prior=prior), evidence)

    def _budget(self, plan: Any) -> None:
        budget = self.option("--engram-time-budget")
        needed = planning.minimum_seconds(plan)
        if budget is not None and needed > budget:
            raise NotMeasurable(
                f"needs at least {needed:.0f} s by its own schedule, --engram-time-budget allows {budget:.0f} s",
                code="over-time-budget", who=plan.experiment.id, way_out="raise the budget; fewer blocks decide less",
            )  # fmt: skip

    def judge_requirements(self) -> None:
        """Judge again, with every other verdict at hand, what rests on other experiments; measures nothing."""
        for identifier, outcome in list(self.outcomes.items()):
            if outcome.evidence is not None and outcome.evidence.plan.experiment.requires:
                prior = [verdict for verdict in self.verdicts() if verdict is not outcome.verdict]
                self.outcomes[identifier] = Outcome(gates.evaluate(outcome.evidence, prior=prior), outcome.evidence)

    def verdicts(self) -> list[Verdict]:
        """In the order in which they were reached."""
        return [outcome.verdict for outcome in self.outcomes.values()]

    def evidences(self) -> Iterator[Evidence]:
        """Those that were taken."""
        return (outcome.evidence for outcome in self.outcomes.values() if outcome.evidence is not None)


def this_machine() -> Topology:
    """The topology here; drivers are asked beside sysfs, which a virtual machine leaves empty."""
    from pytest_engram.gpu.nvml import gpu_sources
    from pytest_engram.numa.topology import read_topology

    return read_topology(gpu_sources=gpu_sources())


def load_experiments(paths: list[str] | None = None) -> dict[str, Experiment]:
    """The experiments of the given files and folders, or the suite's own."""
    return experiment.load_all([Path(path) for path in paths] if paths else [DEFAULT_EXPERIMENTS])


def check_ids(asked: list[str], known: dict[str, Experiment]) -> None:
    """Raise ``UsageError`` for an experiment id that no file declares."""
    for name in asked:
        if name not in known:
            raise UsageError(f"{name!r}", code="unknown-experiment", expected=f"one of {', '.join(known)}")


class _Progress:
    """Turns the runner's events into lines that say where the schedule stands."""

    def __init__(self, tell: Callable[[str], None], plan: Any) -> None:
        from pytest_engram.report.terminal import run_line

        self._line, self._tell, self._plan, self._done, self._start = run_line, tell, plan, 0, time.monotonic()

    def __call__(self, kind: str, value: Any) -> None:
        if kind != "run":
            return
        self._done += 1
        spent = time.monotonic() - self._start
        eta = spent / self._done * (len(self._plan.schedule) - self._done)
        self._tell(self._line(self._plan.experiment.id, self._done, len(self._plan.schedule), value, eta))


def parse_requirements(text: str | None, known: dict[str, Experiment]) -> dict[str, int]:
    """``B1:4,A3:1`` -> the gate that each experiment must reach; raises ``UsageError`` for anything else."""
    required: dict[str, int] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, gate = part.partition(":")
        if name not in known or not gate.isdigit() or int(gate) > 4:
            raise UsageError(
                repr(part), code="bad-require", where="--engram-require",
                expected=f"EXPERIMENT:GATE with one of {', '.join(known)} and a gate 0 to 4", way_out="e.g. B1:4",
            )  # fmt: skip
        required[name] = int(gate)
    return required


def check_numbers(rows: str | None, blocks: int | None) -> None:
    """Raise ``UsageError`` for a row count or a number of blocks that cannot be."""
    if rows is not None and rows != "full" and not (rows.isdigit() and int(rows) > 0):
        raise UsageError(repr(rows), code="bad-rows", where="--engram-rows", expected="a positive number, or full")
    if blocks is not None and blocks < schedule.MINIMUM_BLOCKS:
        raise UsageError(
            f"{blocks} blocks", code="too-few-blocks", where="--engram-pairs",
            expected=f"at least {schedule.MINIMUM_BLOCKS}: with fewer no signed-rank test can reach 2.5 %",
        )  # fmt: skip


def parse_duration(text: str) -> float:
    """``90``, ``90s``, ``10m`` or ``1h`` in seconds."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UsageError(repr(text), code="bad-duration", expected="a positive time such as 90s, 10m or 1h")
    return seconds


"""What one pytest session knows: its choices, its experiments, and one outcome per experiment."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from pytest_engram import engines, experiment, gates, planning, runner, schedule
from pytest_engram.backends import load_backend
from pytest_engram.engines.tables import table_bytes
from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.gpu.nvml import gpu_sources
from pytest_engram.layout import EngramLayout
from pytest_engram.model import Evidence, Experiment, Plan, Problem, Status, Topology, Verdict
from pytest_engram.numa import capacity
from pytest_engram.numa.topology import read_topology
from pytest_engram.report.terminal import run_line

DEFAULT_EXPERIMENTS = Path(str(resources.files("pytest_engram.fixtures") / "experiments"))
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One experiment's verdict, and its evidence where any was taken."""

    verdict: Verdict
    evidence: Evidence | None = None


class Session:
    """Lazily measured outcomes; ``option`` looks an option up by its long name."""

    def __init__(self, option: Callable[[str], Any], *, tell: Callable[[str], None] = lambda _text: None) -> None:
        self.option, self.tell = option, tell
        self.selected: set[str] = set()  # the experiments that owe a verdict
        self.outcomes: dict[str, Outcome] = {}
        self.user: dict[str, str] = {}  # fingerprint entries of the project's own hooks
        self.forced: Problem | None = None  # e.g. benchmarks disabled, an xdist worker: nothing may be measured

    def check_options(self) -> None:
        """What the user named must exist before anything is collected; defaults cost nothing here."""
        check_numbers(*map(self.option, ("--engram-rows", "--engram-pairs", "--engram-seed")))
        parse_duration(self.option("--engram-time-budget"))
        for spec in {self.option("--engram-backend"), self.option("--engram-candidate")} - {None, "reference"}:
            load_backend(spec)
        if self.option("--engram-experiments") or self.option("--engram-require"):
            self.required()

    def required(self) -> dict[str, int]:
        """The gates that ``--engram-require`` names."""
        return parse_requirements(self.option("--engram-require"), self.experiments)

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
            engine=engines.choose(self.option("--engram-engine")), engines=engines.availability(),
            backend=self.option("--engram-backend"), candidate=self.option("--engram-candidate"),
            rows=self.option("--engram-rows"), blocks=self.option("--engram-pairs"), seed=self.option("--engram-seed"),
        )  # fmt: skip

    def outcome(self, identifier: str) -> Outcome:
        """Measure the experiment once per session and judge it, after those selected ones that it requires."""
        if identifier not in self.outcomes:
            for name in self.experiments[identifier].requires:
                if name in self.selected:
                    self.outcome(name)
            self.outcomes[identifier] = self._measure(self.experiments[identifier])
        return self.outcomes[identifier]

    def preflight(self) -> None:
        """Refuse, before the first run, a table that does not fit; what cannot be measured here is left for later."""
        for identifier in sorted(self.selected):
            with contextlib.suppress(NotMeasurable):
                plan = planning.make_plan(self.experiments[identifier], self.topology, self.choices)
                size = table_bytes(planning.layout_for(plan))
                free = capacity.live_memory(), capacity.shm_free(), capacity.cgroup_free()
                for placement in plan.placements.values():
                    capacity.check_capacity(placement, size, *free)

    def _measure(self, chosen: Experiment) -> Outcome:
        if self.forced is not None:
            return Outcome(gates.not_measured(chosen, self.forced))
        try:
            plan = replace(planning.make_plan(chosen, self.topology, self.choices), user=self.user)
            self._check_budget(plan)
        except NotMeasurable as absent:
            problem = Problem(code=absent.code, message=absent.seen, who=absent.who or "", status=Status.NOT_MEASURED)
            return Outcome(gates.not_measured(chosen, problem))
        evidence = runner.run(plan, progress=_progress(self.tell, plan))
        return Outcome(gates.evaluate(evidence, prior=self.verdicts()), evidence)

    def _check_budget(self, plan: Plan) -> None:
        budget, needed = parse_duration(self.option("--engram-time-budget")), planning.minimum_seconds(plan)
        if budget is not None and needed > budget:
            seen = f"needs at least {needed:.0f} s by its own schedule, --engram-time-budget allows {budget:.0f} s"
            way = "raise the budget; fewer blocks decide less"
            raise NotMeasurable(seen, code="over-time-budget", who=plan.experiment.id, way_out=way)

    def verdicts(self) -> list[Verdict]:
        """In the order in which they were reached."""
        return [outcome.verdict for outcome in self.outcomes.values()]


def this_machine() -> Topology:
    """The topology here; drivers are asked beside sysfs, which a virtual machine leaves empty."""
    return read_topology(gpu_sources=gpu_sources())


def load_experiments(paths: Iterable[str | Path] | None = None) -> dict[str, Experiment]:
    """The experiments of the given files and folders, or the suite's own."""
    return experiment.load_all([Path(path) for path in paths or (DEFAULT_EXPERIMENTS,)])


def check_ids(asked: Iterable[str], known: dict[str, Experiment]) -> None:
    """Raise ``UsageError`` for an experiment id that no file declares."""
    for name in asked:
        if name not in known:
            raise UsageError(f"{name!r}", code="unknown-experiment", expected=f"one of {', '.join(known)}")


_LARGE = 4 << 30  # bytes of a table whose bring-up takes long enough to want a word


def _progress(tell: Callable[[str], None], plan: Plan) -> Callable[[str, Any], None]:
    """Turns the runner's events into lines that say where the schedule stands."""
    numbers, total, start, tenths = count(1), len(plan.schedule), time.monotonic(), [0]

    def show(kind: str, value: Any) -> None:
        if kind == "run" and (done := next(numbers)) <= total:  # the positive control stands in no schedule
            eta = (time.monotonic() - start) / done * (total - done)
            tell(run_line(plan.experiment.id, done, total, value, eta))
        elif kind == "pages" and value[1] >= _LARGE and value[0] * 10 // value[1] > tenths[0]:
            tenths[0] = value[0] * 10 // value[1]
            tell(f"{plan.experiment.id}  pages placed {value[0] >> 20} of {value[1] >> 20} MiB")

    return show


def parse_requirements(text: str | None, known: Collection[str]) -> dict[str, int]:
    """``B1:4,A3:1`` -> the gate that each experiment must reach; raises ``UsageError`` for anything else."""
    required: dict[str, int] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, gate = part.partition(":")
        if name not in known or gate not in tuple("01234"):
            expected = f"EXPERIMENT:GATE with one of {', '.join(known)} and a gate 0 to 4, e.g. B1:4"
            raise UsageError(repr(part), code="bad-require", where="--engram-require", expected=expected)
        required[name] = max(int(gate), required.get(name, 0))
    return required


def check_numbers(rows: str | None, blocks: int | None, seed: int) -> None:
    """Raise ``UsageError`` for a row count, a number of blocks or a seed that cannot be."""
    if not 0 <= seed < 1 << 63:
        raise UsageError(str(seed), code="bad-seed", where="--engram-seed", expected="0 to 2**63 - 1")
    most = max(EngramLayout.deepseek_v41().num_embeddings)
    if rows is not None and rows != "full" and not (rows.isdecimal() and 0 < int(rows) <= most):
        raise UsageError(repr(rows), code="bad-rows", where="--engram-rows", expected=f"1 to {most}, or full")
    if blocks is not None and blocks < schedule.MINIMUM_BLOCKS:
        expected = f"at least {schedule.MINIMUM_BLOCKS}: with fewer no signed-rank test can reach 2.5 %"
        raise UsageError(f"{blocks} blocks", code="too-few-blocks", where="--engram-pairs", expected=expected)


def parse_duration(text: str | None) -> float | None:
    """``90``, ``90s``, ``10m`` or ``1h`` in seconds; None for no text."""
    match = re.fullmatch(r"(\d+\.?\d*)([smh]?)", text or "")
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if text is not None and not seconds:
        raise UsageError(repr(text), code="bad-duration", where="--engram-time-budget", expected="a time: 90s or 10m")
    return seconds or None

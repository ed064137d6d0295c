"""Where pytest's hooks meet the session: selection, settlement of items, files, exit code."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from pytest_engram import gates
from pytest_engram.backends import load_backend
from pytest_engram.errors import EngramError, UsageError
from pytest_engram.model import Problem, Status, Verdict
from pytest_engram.session import (
    MEASUREMENT_MARKERS,
    Outcome,
    Session,
    check_numbers,
    parse_duration,
    parse_requirements,
)

GATE_PROPERTY = "engram_status"


class Edge:
    """One per pytest session.  On an xdist worker it only refuses to measure."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker = hasattr(config, "workerinput")
        self.session = Session(self._option, tell=self._tell)
        self.selected: set[str] = set()
        self.correctness = {"passed": 0, "other": 0}
        self.foreign_failures = 0
        self.owed = False  # some item, perhaps on a worker, spoke for a gate
        self.section: dict[str, Any] | None = None
        self._budget = parse_duration(text) if (text := config.getoption("--engram-time-budget")) else None
        self._check_options()
        # Our own section is written even where pytest-benchmark, which would warn, writes nothing.
        warnings.filterwarnings("ignore", message="Not saving anything, no benchmarks have been run")
        self._refuse_xdist()
        self._forbid()

    def _option(self, name: str) -> Any:
        return self._budget if name == "--engram-time-budget" else self.config.getoption(name)

    def _check_options(self) -> None:
        """What the user named must exist before anything is collected; defaults cost nothing here."""
        option = self.config.getoption
        check_numbers(option("--engram-rows"), option("--engram-pairs"))
        for spec in {option("--engram-backend"), option("--engram-candidate")} - {None, "reference"}:
            load_backend(spec)
        if option("--engram-experiments") or option("--engram-require"):
            parse_requirements(option("--engram-require"), self.session.experiments)

    def _refuse_xdist(self) -> None:
        """Parallel workers would measure each other: `-n` with a `-m` that names measurement is refused."""
        expression = self.config.getoption("-m", "") or ""
        distributed = self.config.getoption("dist", "no") != "no" or self.config.getoption("numprocesses", None)
        if self.worker or not distributed or not expression:
            return
        matches = Expression.compile(expression).evaluate
        named = {marker for marker in MEASUREMENT_MARKERS if matches(_only(marker))}
        if named and not matches(_only("")):
            raise UsageError(
                f"-m {expression!r} names measurement ({', '.join(sorted(named))})", code="measurement-under-xdist",
                where="-n", expected="measurements alone in one process", way_out="drop -n, or use -m correctness",
            )  # fmt: skip

    def _forbid(self) -> None:
        reason = None
        if self.worker:
            reason = ("xdist-worker", "an xdist worker shares the machine with its siblings")
        elif any(self.config.getoption(f"benchmark_{word}", default=False) for word in ("disable", "skip", "only")):
            reason = ("benchmarks-disabled", "benchmarks are disabled, skipped or filtered by a --benchmark option")
        if reason:
            self.session.forced = Problem(code=reason[0], message=reason[1], status=Status.NOT_MEASURED)

    def _tell(self, text: str) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        if reporter is None or capture is None or self.config.getoption("verbose") < 0:
            return
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(text)

    # ------------------------------------------------------------ selection

    def parametrise(self, metafunc: pytest.Metafunc, variables: Sequence[str]) -> None:
        """One item per experiment; with `engram_arm`, one per experiment and arm."""
        chosen = [e for e in self.session.experiments.values() if e.variable in variables]
        if "engram_arm" in metafunc.fixturenames:
            pairs = [(e.id, arm) for e in chosen for arm in _arms(e.arms)]
            metafunc.parametrize(
                ("engram_experiment", "engram_arm"), pairs, indirect=True, ids=[f"{e}-{arm}" for e, arm in pairs]
            )
        else:
            metafunc.parametrize("engram_experiment", [e.id for e in chosen], indirect=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which experiments this run owes a verdict."""
        for item in session.items:
            callspec = getattr(item, "callspec", None)
            if callspec and "engram_experiment" in callspec.params and "engram_arm" not in callspec.params:
                self.selected.add(callspec.params["engram_experiment"])
        if self.session.forced is None:
            try:
                self.session.preflight(sorted(self.selected))
            except EngramError as error:
                raise pytest.UsageError(str(error)) from None

    # ----------------------------------------------------------- settlement

    def settle(self, outcome: Outcome, record: Any) -> None:
        """Turn a verdict into the item's outcome; the exit code is set once, at the end."""
        from pytest_engram.report.terminal import ladder

        verdict = outcome.verdict
        record(GATE_PROPERTY, verdict.status.value)
        record("engram_reason", _deciding(verdict))
        if verdict.status in (Status.NOT_MEASURED, Status.BLOCKED):
            pytest.skip(f"{verdict.status.value}: {_deciding(verdict)}")
        if verdict.status is not Status.PASS and self.session.enforcing:
            pytest.fail("\n".join(ladder(verdict)), pytrace=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what the exit code needs: real failures apart from gates, correctness that really passed."""
        gate = dict(report.user_properties).get(GATE_PROPERTY)
        self.owed |= gate is not None
        if report.failed and gate is None:
            self.foreign_failures += 1
        if "correctness" in report.keywords and (report.when == "call" or report.skipped):
            self.correctness["passed" if report.passed and not hasattr(report, "wasxfail") else "other"] += 1

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Say the gate's own word where pytest would say passed or failed."""
        gate = dict(getattr(report, "user_properties", ())).get(GATE_PROPERTY)  # a collection report has none
        if gate is None or report.when != "call":
            return None
        category = "failed" if report.failed else "skipped" if report.skipped else "passed"
        return category, gate[0], f"GATE {gate}"

    # ----------------------------------------------------------------- end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the run's files and set the exit code, once, in the controller."""
        if self.worker:
            return
        for missing in sorted(self.selected - self.session.outcomes.keys()):
            problem = Problem(code="never-ran", message="selected but never ran", status=Status.NOT_MEASURED)
            self.session.outcomes[missing] = Outcome(gates.not_measured(self.session.experiments[missing], problem))
        self.session.judge_requirements()
        self._write()
        session.exitstatus = self._exit_code(int(exitstatus))

    def _exit_code(self, pytest_code: int) -> int:
        if pytest_code in (2, 3, 4) or (pytest_code == 5 and not self.selected):
            return pytest_code
        if pytest_code == 1 and self.foreign_failures:
            return 1
        if not self.session.outcomes:
            nothing_passed = self.owed or (self.correctness["other"] and not self.correctness["passed"])
            return gates.EXIT_NOT_MEASURED if nothing_passed and pytest_code == 0 else pytest_code
        if not self.session.enforcing:
            return 1 if pytest_code == 1 else 0
        required = parse_requirements(self.config.getoption("--engram-require"), self.session.experiments)
        return gates.exit_code(self.session.verdicts(), required or None) or (1 if pytest_code == 1 else 0)

    def _write(self) -> None:
        from pytest_engram.report import benchmark, files

        if not self.session.outcomes:
            return
        folder = Path(self.config.getoption("--engram-report") or f"reports/run-{time.strftime('%Y%m%d-%H%M%S')}")
        evidences = list(self.session.evidences())
        self.folder = self.config.rootpath / folder
        self.section = files.RunFolder(self.folder).write(
            self.session.verdicts(), evidences, command=["pytest", *sys.argv[1:]]
        )
        for verdict in self.session.verdicts():
            self.config.hook.pytest_engram_verdict(config=self.config, verdict=verdict)
        if target := benchmark.json_path(self.config):
            benchmark.add_engram_section(target, self.section)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The ladders, one per experiment, and where the report lies."""
        from pytest_engram.report.terminal import colours, ladder, summary

        if self.worker or not self.session.outcomes:
            return
        terminalreporter.section("engram gates")
        markup, verdicts = colours(self.config.get_terminal_writer()), self.session.verdicts()
        ladders = [line for verdict in verdicts for line in (*ladder(verdict, markup=markup), "")]
        for line in (*ladders, *summary(verdicts, markup=markup)):
            terminalreporter.write_line(line)
        if self.section is not None:
            terminalreporter.write_line(f"report: {self.folder}")


def _only(marker: str) -> Any:
    """A matcher of items that carry this marker and no other."""
    return lambda name, /, **_parameters: name == marker


def _arms(arms: dict[str, Any]) -> list[str]:
    return ["A", "A'", *(name for name in arms if name != "A")]


def _deciding(verdict: Verdict) -> str:
    gate = next((g for g in verdict.gates if g.judged and g.status is not Status.PASS), None)
    return f"{gate.reason}: {gate.observed}" if gate else "all gates passed"


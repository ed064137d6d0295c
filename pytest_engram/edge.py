"""Where pytest's hooks meet the session: selection, settlement of items, files, exit code."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from functools import cached_property
from typing import Any, NoReturn

import pytest
from _pytest.mark.expression import Expression

from pytest_engram import gates
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.model import Evidence, Problem, Status, Verdict
from pytest_engram.report import benchmark, records, terminal
from pytest_engram.report.account import Account
from pytest_engram.session import Outcome, Session

MEASUREMENT_MARKERS = ("numa", "overlap", "serving")
GATE_PROPERTY = "engram_status"


class Edge:
    """One per pytest session.  On an xdist worker it only refuses to measure."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.option = config, config.getoption
        self.worker = hasattr(config, "workerinput")
        self.enforcing = self.option("--engram-gate") == "enforce"  # whether verdicts set the exit code
        self.session = Session(self.option, tell=self._tell)
        self.correctness = {"passed": 0, "other": 0}
        self.foreign_failures = 0
        self.owed = False  # some item, perhaps on a worker, spoke for a gate
        self.folder = config.rootpath / (self.option("--engram-report") or time.strftime("reports/run-%Y%m%d-%H%M%S"))
        sys.path.append(str(config.invocation_params.dir))  # a backend may lie there; the peers, run by `-m`, find it
        self.session.check_options()
        if target := benchmark.json_path(config):  # pytest-benchmark opens it only at the very end
            target.parent.mkdir(parents=True, exist_ok=True)
        # Our own section is written even where pytest-benchmark, which would warn, writes nothing.
        warnings.filterwarnings("ignore", message="Not saving anything, no benchmarks have been run")
        self._refuse_xdist()
        self._forbid()

    def _refuse_xdist(self) -> None:
        """Parallel workers would measure each other: `-n` with a `-m` that names measurement is refused."""
        expression = self.option("-m", "") or ""
        distributed = self.option("dist", "no") != "no" or self.option("numprocesses", None)
        if self.worker or not distributed or not expression:
            return
        matches = Expression.compile(expression).evaluate
        named = [marker for marker in MEASUREMENT_MARKERS if matches(_only(marker))]
        if named and not matches(_only("")):
            seen, way = f"-m {expression!r} names measurement ({', '.join(named)})", "drop -n, or use -m correctness"
            raise UsageError(seen, code="measurement-under-xdist", where="-n", expected="one process", way_out=way)

    def _forbid(self) -> None:
        disabled = any(self.option(f"benchmark_{word}", default=False) for word in ("disable", "skip", "only"))
        found = [("xdist-worker", "an xdist worker shares the machine with its siblings")] * self.worker
        found += [("benchmarks-disabled", "benchmarks are disabled, skipped or filtered by an option")] * disabled
        for code, message in found[:1]:
            self.session.forced = Problem(code=code, message=message, status=Status.NOT_MEASURED)

    def _tell(self, text: str) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        if reporter is None or capture is None or self.option("verbose") < 0:
            return
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(text)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One item per experiment that changes a marked variable; with `engram_arm`, one per experiment and arm."""
        marker = metafunc.definition.get_closest_marker("engram_experiments")
        if marker is None or "engram_experiment" not in metafunc.fixturenames:
            return
        chosen = [each for each in self.session.experiments.values() if each.variable in marker.args]
        names, cases = ["engram_experiment"], [[each.id] for each in chosen]
        if "engram_arm" in metafunc.fixturenames:
            names.append("engram_arm")
            cases = [[each.id, arm] for each in chosen for arm in dict.fromkeys(("A", "A'", *each.arms))]
        metafunc.parametrize(names, cases, indirect=True, ids=["-".join(case) for case in cases])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which experiments this run owes a verdict; refuse what cannot fit before the first sample."""
        for item in session.items:
            params = getattr(getattr(item, "callspec", None), "params", {})
            if "engram_experiment" in params and "engram_arm" not in params:
                self.owed = True
                if isinstance(params["engram_experiment"], str):  # else no experiment changes what this item is for
                    self.session.selected.add(params["engram_experiment"])
        if self.session.selected and not self.worker and not self.option("collectonly", default=False):
            self._check_folder()
        if self.session.forced is None:
            for answer in self.config.hook.pytest_engram_provenance(config=self.config):
                self.session.user |= {str(key): str(value) for key, value in answer.items()}
            try:
                self.session.preflight()
            except EngramError as error:
                raise pytest.UsageError(str(error)) from None

    def _check_folder(self) -> None:
        """Where the report will go must be writable before anything is measured."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise pytest.UsageError(f"--engram-report: {error}; expected: a folder that can be written") from None

    def settle(self, outcome: Outcome, item: pytest.Item) -> None:
        """Turn a verdict into the item's outcome; the exit code is set once, at the end."""
        verdict, text = outcome.verdict, "\n".join(terminal.ladder(outcome.verdict))
        # Not by `record_property`, which warns for the default JUnit family although its file holds the properties.
        found = {GATE_PROPERTY: verdict.status.value, "engram_reason": _deciding(verdict), "engram_ladder": text}
        item.user_properties += found.items()
        if verdict.status in (Status.NOT_MEASURED, Status.BLOCKED):
            _skip(verdict)
        if verdict.status is not Status.PASS and self.enforcing:
            pytest.fail(text, pytrace=False)

    def evidence(self, outcome: Outcome) -> Evidence:
        """What was measured; without it, skip as the experiment's own item does."""
        return outcome.evidence or _skip(outcome.verdict)

    def publish(self, outcome: Outcome, arm: str, request: pytest.FixtureRequest) -> None:
        """Replay an arm's samples through pytest-benchmark."""
        try:
            benchmark.publish(request, self.evidence(outcome), arm)
        except NotMeasurable as absent:
            pytest.skip(f"{Status.NOT_MEASURED.value}: {absent}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what the exit code needs: real failures apart from gates, correctness that really passed."""
        gate = dict(report.user_properties).get(GATE_PROPERTY)
        self.owed |= gate is not None
        self.foreign_failures += report.failed and gate is None
        if "correctness" in report.keywords and (report.when == "call" or report.skipped):
            self.correctness["passed" if report.passed and not hasattr(report, "wasxfail") else "other"] += 1

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Say the gate's own word where pytest would say passed or failed; a skip's reason says it already."""
        gate = dict(getattr(report, "user_properties", ())).get(GATE_PROPERTY)  # a collection report has none
        if gate is None or report.when != "call" or report.skipped:
            return None
        category = report.outcome if report.failed or gate == Status.PASS.value else f"gate {gate}"
        return category, gate[0], f"GATE {gate}"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the run's files and set the exit code, once, in the controller."""
        if self.worker or exitstatus in (3, 4) or self.option("collectonly", default=False):
            return
        message = "interrupted before it ended: run it again" if exitstatus == 2 else "selected but never ran"
        for missing in sorted(self.session.selected - self.session.outcomes.keys()):
            problem = Problem(code="never-ran", message=message, status=Status.NOT_MEASURED)
            self.session.outcomes[missing] = Outcome(gates.not_measured(self.session.experiments[missing], problem))
        if self.session.outcomes:
            self._write()
        session.exitstatus = self._exit_code(int(exitstatus))

    def _exit_code(self, pytest_code: int) -> int:
        if pytest_code in (2, 3, 4) or (pytest_code == 5 and not self.session.selected):
            return pytest_code
        if pytest_code == 1 and self.foreign_failures:
            return 1
        if not self.session.outcomes:
            owed = self.owed or (self.enforcing and self.option("--engram-require"))
            nothing_passed = owed or (self.correctness["other"] and not self.correctness["passed"])
            return gates.EXIT_NOT_MEASURED if nothing_passed and pytest_code == 0 else pytest_code
        code = gates.exit_code(self.session.verdicts(), self.session.required() or None) if self.enforcing else 0
        return code or int(pytest_code == 1)

    @cached_property
    def account(self) -> Account:
        """What the session measured, first asked for when nothing more is."""
        found = [outcome.evidence for outcome in self.session.outcomes.values() if outcome.evidence is not None]
        return Account(self.session.verdicts(), found)

    def _write(self) -> None:
        section = records.write_run(self.folder, self.account, command=["pytest", *sys.argv[1:]])
        for verdict in self.account.verdicts:
            self.config.hook.pytest_engram_verdict(config=self.config, verdict=verdict)
        if target := benchmark.json_path(self.config):
            benchmark.add_engram_section(target, section)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The ladders, one per experiment, and where the report lies."""
        if self.worker or not self.session.outcomes:
            return
        terminalreporter.section("engram gates")
        markup, verdicts = terminal.colours(self.config.get_terminal_writer()), self.account.verdicts
        lines = [line for verdict in verdicts for line in (*terminal.ladder(verdict, markup=markup), "")]
        lines += [*terminal.explained(self.account), *terminal.summary(verdicts, markup=markup)]
        for line in (*lines, f"report: {self.folder}"):
            terminalreporter.write_line(line)


def _only(marker: str) -> Any:
    """A matcher of items that carry this marker and no other."""
    return lambda name, /, **_parameters: name == marker


def _deciding(verdict: Verdict) -> str:
    gate = terminal.stopped_at(verdict)
    return f"{gate.reason}: {gate.observed}" if gate else "all gates passed"


def _skip(verdict: Verdict) -> NoReturn:
    """One place and one text for every item of an experiment, which pytest's summary then folds into one line."""
    pytest.skip(f"{verdict.experiment} {verdict.status.value}: {_deciding(verdict)}")

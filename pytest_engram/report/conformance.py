"""The conformance table: every contract line against every engine version, through the one check set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_engram.backends.protocol import Backend
from pytest_engram.checks import CASES, check, explain
from pytest_engram.model import CorrectnessSample
from pytest_engram.report.markdown import table

OUTCOMES = ("fail", "declared difference", "pass", "not supported")  # the first that occurs on a line is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One engine version: its receipt, its declarations and one (outcome, sample) per case, in the order of cases."""

    name: str
    receipt: dict[str, str]
    differences: dict[str, str]
    results: tuple[tuple[str, CorrectnessSample], ...]

    def line(self, contract: str) -> str:
        """The contract line's outcome, with the count of its cases where not all of them agree."""
        mine = [outcome for outcome, sample in self.results if sample.contract == contract]
        first = min(mine, key=OUTCOMES.index)
        count = mine.count(first)
        return first if count == len(mine) else f"{first} ({count} of {len(mine)})"

    @property
    def failed(self) -> bool:
        """Whether a case failed that is neither declared nor unsupported."""
        return any(outcome == "fail" for outcome, _ in self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """What was asked, once per engine version."""

    seed: int
    columns: tuple[Column, ...]

    @property
    def failed(self) -> bool:
        """Whether any version broke a line of the contract."""
        return any(column.failed for column in self.columns)


def conformance(backends: Sequence[Backend], seed: int = 0, *, engine: str | None = None) -> Conformance:
    """Run all cases on every backend (``engine`` as in :func:`~pytest_engram.checks.check`); never raises for one."""
    return Conformance(seed=seed, columns=tuple(_column(backend, seed, engine) for backend in backends))


def render(result: Conformance) -> str:
    """Markdown: the table, what failed and what is declared, and the receipts that prove what ran."""
    return "\n".join(_lines(result))


def _column(backend: Backend, seed: int, engine: str | None) -> Column:
    results = []
    for case in CASES:
        sample = check(backend, case, seed=seed, engine=engine)
        declared = {case.name, case.contract} & set(backend.differences) and case.capability in backend.capabilities
        results.append((_outcome(sample, declared=bool(declared)), sample))
    return Column(
        name=backend.name, receipt=backend.receipt(), differences=dict(backend.differences), results=tuple(results)
    )


def _outcome(sample: CorrectnessSample, *, declared: bool) -> str:
    if sample.passed:
        return "pass"
    if sample.supported:
        return "fail"
    return "declared difference" if declared else "not supported"


def _lines(result: Conformance) -> Iterator[str]:
    yield from (f"# Engram contract conformance (seed {result.seed})", "")
    contracts = list(dict.fromkeys(case.contract for case in CASES))
    head = ("line", "cases", *(column.name for column in result.columns))
    yield from table(head, [(line, _cases(line), *(c.line(line) for c in result.columns)) for line in contracts])
    for column in result.columns:
        yield from _notes(column)


def _cases(contract: str) -> str:
    return ", ".join(case.name for case in CASES if case.contract == contract)


def _notes(column: Column) -> Iterator[str]:
    yield from (f"## {column.name}", "")
    shown = [(outcome, sample) for outcome, sample in column.results if outcome != "pass"]
    yield from table(("outcome", "what was seen"), [(outcome, explain(sample)) for outcome, sample in shown])
    yield from table(("declared for", "difference"), column.differences.items())
    yield from table(("receipt", "value"), column.receipt.items())

"""The conformance table: every contract line against every engine version, through the one check set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from pytest_engram.backends import load_backend
from pytest_engram.backends.protocol import Backend
from pytest_engram.checks import CASES, check, explain
from pytest_engram.model import CorrectnessSample
from pytest_engram.report.markdown import table

OUTCOMES = ("fail", "declared difference", "pass", "not supported")  # the first that occurs on a line is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One engine version, and one (outcome, sample) per case in the order of cases."""

    backend: Backend
    results: tuple[tuple[str, CorrectnessSample], ...]

    def line(self, contract: str) -> str:
        """The contract line's outcome, with the count of its cases where not all of them agree."""
        mine = [outcome for outcome, sample in self.results if sample.contract == contract]
        first = min(mine, key=OUTCOMES.index)
        count = mine.count(first)
        return first if count == len(mine) else f"{first} ({count} of {len(mine)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """What was asked, once per engine version."""

    seed: int
    columns: tuple[Column, ...]

    @property
    def failed(self) -> bool:
        """Whether, for any version, a case failed that is neither declared nor unsupported."""
        return any(outcome == "fail" for column in self.columns for outcome, _ in column.results)


def conformance_main(specs: Sequence[str], out: TextIO, engine: str | None = None) -> int:
    """Write the table of the backends that ``specs`` name (``vllm@0.33.0``); 1 if one of them broke a line, else 0."""
    result = conformance([load_backend(spec) for spec in specs], engine=engine)
    out.write(render(result))
    return int(result.failed)


def conformance(backends: Sequence[Backend], seed: int = 0, *, engine: str | None = None) -> Conformance:
    """Run all cases on every backend (``engine`` as in :func:`~pytest_engram.checks.check`); never raises for one."""
    columns = []
    for backend in backends:
        samples = [check(backend, case, seed=seed, engine=engine) for case in CASES]
        columns.append(Column(backend=backend, results=tuple((_outcome(sample), sample) for sample in samples)))
    return Conformance(seed=seed, columns=tuple(columns))


def render(result: Conformance) -> str:
    """Markdown: the table, what failed and what is declared, and the receipts that prove what ran."""
    return "\n".join(_lines(result))


def _outcome(sample: CorrectnessSample) -> str:
    if sample.passed or sample.supported:
        return "pass" if sample.passed else "fail"
    return "declared difference" if sample.detail.startswith("declared difference") else "not supported"


def _lines(result: Conformance) -> Iterator[str]:
    yield from (f"# Engram contract conformance (seed {result.seed})", "")
    cases: dict[str, list[str]] = {}
    for case in CASES:
        cases.setdefault(case.contract, []).append(case.name)
    head = ("line", "cases", *(column.backend.name for column in result.columns))
    yield from table(head, [(line, ", ".join(cases[line]), *(c.line(line) for c in result.columns)) for line in cases])
    for column in result.columns:
        yield from (f"## {column.backend.name}", "")
        shown = [(outcome, explain(sample)) for outcome, sample in column.results if outcome != "pass"]
        yield from table(("outcome", "what was seen"), shown)
        yield from table(("declared for", "difference"), column.backend.differences.items())
        yield from table(("receipt", "value"), column.backend.receipt().items())

"""The conformance table: every contract line against every engine version, through the one check set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_engram.backends.protocol import Backend
from pytest_engram.checks import CASES, check, explain
from pytest_engram.model import CorrectnessSample
from pytest_engram.report.markdown import table

OUTCOMES = ("fail", "declared difference", "pass", "not supported")  # the first that occurs on a line is shown
SEED = 0
Column = tuple[Backend, list[tuple[str, CorrectnessSample]]]  # one engine version, (outcome, sample) in order of cases


def conformance(backends: Sequence[Backend], *, engine: str | None = None) -> list[Column]:
    """Run all cases on every backend (``engine`` as in :func:`~pytest_engram.checks.check`); never raises for one."""
    found = [(backend, [check(backend, case, seed=SEED, engine=engine) for case in CASES]) for backend in backends]
    return [(backend, [(_outcome(sample), sample) for sample in samples]) for backend, samples in found]


def failed(columns: Sequence[Column]) -> bool:
    """Whether, for any version, a case failed that is neither declared nor unsupported."""
    return any(outcome == "fail" for _, results in columns for outcome, _ in results)


def render(columns: Sequence[Column]) -> str:
    """Markdown: the table, what failed and what is declared, and the receipts that prove what ran."""
    return "\n".join(_lines(columns))


def _line(column: Column, contract: str) -> str:
    """The contract line's outcome, with the count of its cases where not all of them agree."""
    mine = [outcome for outcome, sample in column[1] if sample.contract == contract]
    first = min(mine, key=OUTCOMES.index)
    return first if mine.count(first) == len(mine) else f"{first} ({mine.count(first)} of {len(mine)})"


def _outcome(sample: CorrectnessSample) -> str:
    if sample.passed or sample.supported:
        return "pass" if sample.passed else "fail"
    return "declared difference" if sample.detail.startswith("declared difference") else "not supported"


def _lines(columns: Sequence[Column]) -> Iterator[str]:
    yield from (f"# Engram contract conformance (seed {SEED})", "")
    cases: dict[str, list[str]] = {}
    for case in CASES:
        cases.setdefault(case.contract, []).append(case.name)
    head = ("line", "cases", *(backend.name for backend, _ in columns))
    yield from table(head, [(line, ", ".join(cases[line]), *(_line(one, line) for one in columns)) for line in cases])
    for backend, results in columns:
        yield from (f"## {backend.name}", "")
        told = [(said, explain(one)) for said, one in results if said != "pass"]
        yield from table(("outcome", "what was seen"), told)
        yield from table(("declared for", "difference"), backend.differences.items())
        yield from table(("receipt", "value"), backend.receipt().items())

"""Every line of the contract is a case of the one check set, and runs."""

from __future__ import annotations

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.checks import CASES, check

LINES = {
    *(f"H{number}" for number in range(1, 21) if number != 15),
    *(f"L{number}" for number in range(1, 13) if number != 6),
    *(f"S{number}" for number in range(1, 15) if number != 11),
    *(f"P{number}" for number in range(1, 10)),
}
ELSEWHERE = {
    "H19": "compiled variants exist only where a GPU compiles; there `pytest-engram conformance --engine cuda` runs it",
    "S12": "runs, and shows the declared difference that this package refuses what a cgroup would kill",
}


def test_every_contract_line_is_a_case() -> None:
    """Each number of the contract has a case, and no case claims a number that does not exist."""
    assert {case.contract for case in CASES} == LINES


def test_every_contract_line_runs_on_the_reference_backend() -> None:
    """Without a GPU each number but those listed with a reason has a case that runs, and all that run pass."""
    samples = [check(ReferenceBackend(), case) for case in CASES]
    assert {sample.contract for sample in samples if sample.passed} == LINES - set(ELSEWHERE)
    assert [sample.case for sample in samples if sample.supported and not sample.passed] == []

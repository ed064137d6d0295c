"""Every case of the one check set; ids carry the contract number: ``H6-dead-blocks-deeper``."""

from __future__ import annotations

import pytest

from pytest_engram.backends.protocol import Backend
from pytest_engram.cases.case import Case
from pytest_engram.checks import CASES, check, explain

pytestmark = pytest.mark.correctness


@pytest.mark.parametrize("case", CASES, ids=[f"{case.contract}-{case.name}" for case in CASES])
def test_contract(engram_backend: Backend, case: Case, pytestconfig: pytest.Config) -> None:
    """H1–H20, L1–L12, S1–S14, P1–P9: the system under test does what the contract's line says, on its own engine."""
    seed = int(pytestconfig.getoption("engram_seed", default=None) or 0)
    sample = check(engram_backend, case, seed=seed)
    if not sample.supported:
        pytest.skip(f"not supported by this backend: {sample.detail}")
    assert sample.passed, f"{explain(sample)}\n{case.contract} says: {case.behaviour}"

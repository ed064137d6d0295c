"""Every case of the one check set, by capability; ids carry the contract number: ``H6-dead-blocks-deeper``."""

from __future__ import annotations

import pytest

from pytest_engram.backends.protocol import Backend
from pytest_engram.checks import CASES, Case, check, explain

pytestmark = pytest.mark.correctness


def _cases(capability: str) -> pytest.MarkDecorator:
    chosen = [case for case in CASES if case.capability == capability]
    return pytest.mark.parametrize("case", chosen, ids=[f"{case.contract}-{case.name}" for case in chosen])


@pytest.fixture(scope="session")
def case_seed(pytestconfig: pytest.Config) -> int:
    """Seed of the drawn inputs: ``--engram-seed``, else 0."""
    return int(pytestconfig.getoption("engram_seed", default=None) or 0)


def _judge(backend: Backend, case: Case, seed: int) -> None:
    sample = check(backend, case, seed=seed)
    if not sample.supported:
        pytest.skip(f"not supported by this backend: {sample.detail}")
    assert sample.passed, f"{explain(sample)}\n{case.contract} says: {case.behaviour}"


@_cases("hash")
def test_hash_ids(engram_backend: Backend, case: Case, case_seed: int) -> None:
    """H2–H18: hash ids equal the oracle's over windows, dead tokens, chunks and batches."""
    _judge(engram_backend, case, case_seed)


@_cases("slot-cache")
def test_slot_cache(engram_backend: Backend, case: Case, case_seed: int) -> None:
    """H7, H11–H13, H16: history through the slot cache equals the whole sequence's."""
    _judge(engram_backend, case, case_seed)


@_cases("lookup")
def test_lookup(engram_backend: Backend, case: Case, case_seed: int) -> None:
    """L1–L3, L5, L7, L9, L10: rows are bit-exact, zeros where nothing is owned, whatever the shape and stride."""
    _judge(engram_backend, case, case_seed)


@_cases("shards")
def test_shards(engram_backend: Backend, case: Case, case_seed: int) -> None:
    """L4, L8: head shards pad with zeros and assemble in TP-major order."""
    _judge(engram_backend, case, case_seed)


@_cases("gate")
def test_gate(engram_backend: Backend, case: Case, case_seed: int) -> None:
    """L11: the gate's formula, its clamp and eps, and masked tokens that pass unchanged."""
    _judge(engram_backend, case, case_seed)


@_cases("prefetch")
def test_prefetch(engram_backend: Backend, case: Case, case_seed: int) -> None:
    """P1–P3, P5–P7, P9: one serial queue whose rows are right because nobody reads or writes too early."""
    _judge(engram_backend, case, case_seed)


@_cases("storage")
def test_storage(engram_backend: Backend, case: Case, case_seed: int) -> None:
    """S1–S7, S13, S14: one shared copy, registered after it is placed, undone on failure and after the last view."""
    _judge(engram_backend, case, case_seed)

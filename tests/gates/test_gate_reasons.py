"""Every reason of the table is reached by evidence that is broken in exactly one way."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_engram import gates

edits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("edits.py"))))
CASES, reason = edits.cases()


@reason("contract-kept", 0)
@reason("treatment-delivered", 1)
@reason("moved-as-predicted", 2)
@reason("not-slowed", 3)
@reason("improved", 4)
def _sound(lab, change):
    return lab.evidence("B1")


@reason("earlier-gate", 1)
def _blocked_by_gate_0(lab, change):
    return change(lab.evidence(), edits.edit(correctness_after=()), edits.is_b)


@pytest.mark.parametrize(("code", "gate", "build"), CASES.values(), ids=CASES)
def test_reason_is_reached(reached, code, gate, build):
    """Evidence broken in one way stops at its own gate, with its own reason, that reason's status and a next step."""
    reached(code, gate, build)


def test_no_reason_is_unreachable():
    """The table has no row that no evidence can reach, and no test names a reason that the table lacks."""
    files = Path(__file__).parent.glob("test_gate_[0-9r]*.py")  # of every gate, and this one
    found = [code for file in files for code, _, _ in runpy.run_path(str(file))["CASES"].values()]
    assert set(found) == gates.REASONS.keys()

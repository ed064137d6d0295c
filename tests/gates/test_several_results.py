"""A required experiment that was measured more than once."""

from dataclasses import replace
from itertools import permutations

from pytest_engram import gates
from pytest_engram.model import Status


def test_a_required_result_that_did_not_pass_speaks(lab):
    """One PASS among several results of a required experiment is not enough in any order; all of them PASS is."""
    evidence, required = lab.evidence("B1", requires=("A1",)), gates.evaluate(lab.evidence("A1"))
    passed, failed = (replace(required, status=status) for status in (Status.PASS, Status.FAIL))
    for prior in permutations((passed, failed, passed)):
        rung = gates.evaluate(evidence, prior=prior).gates[4]
        assert (rung.status, rung.reason) == (Status.BLOCKED, "requires-unmet")
    assert gates.evaluate(evidence, prior=(passed, passed)).gates[4].status is Status.PASS

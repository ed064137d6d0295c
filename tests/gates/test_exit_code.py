"""What verdicts mean to the shell."""

from dataclasses import replace

import pytest

from pytest_engram import gates, session
from pytest_engram.model import GATE_NAMES, Claim, GateResult, Status, Verdict


def _verdict(name, *found, judged=(True,) * 5):
    """A verdict whose gates have the given statuses; BLOCKED to the end."""
    row = [*found, *[Status.BLOCKED] * (5 - len(found))]
    rungs = tuple(
        GateResult(gate=n, name=GATE_NAMES[n], status=s, reason="r", observed="", threshold="", next_step="", judged=j)
        for n, (s, j) in enumerate(zip(row, judged, strict=True))
    )
    status = next((r.status for r in rungs if r.judged and r.status is not Status.PASS), Status.PASS)
    return Verdict(
        experiment=name, title="", claim=Claim.IMPROVES, subject="suite loop", status=status, gates=rungs,
        protocol_hash="",
    )  # fmt: skip


PASS = _verdict("P", *[Status.PASS] * 5)
FAIL = _verdict("F", Status.PASS, Status.FAIL)
OPEN = _verdict("O", Status.PASS, Status.PASS, Status.INCONCLUSIVE)
ABSENT = _verdict("N", Status.NOT_MEASURED)
BLOCKED = _verdict("K", Status.PASS, Status.PASS, Status.PASS, Status.PASS, Status.BLOCKED)
INVALID = _verdict("I", Status.PASS, Status.INVALID)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([PASS], 0),
        ([PASS, OPEN], 11),
        ([OPEN, ABSENT], 12),
        ([BLOCKED], 12),
        ([ABSENT, FAIL, OPEN], 10),
        ([FAIL, INVALID, PASS], 13),
        ([], 12),
    ],
)
def test_precedence(verdicts, code):
    """13 > 10 > 12 > 11 > 0, and nothing at all is not green."""
    assert gates.exit_code(verdicts) == code


@pytest.mark.parametrize(
    ("required", "code"),
    [
        ({"P": 4}, 0),
        ({"F": 0}, 0),
        ({"F": 1}, 10),
        ({"F": 4}, 10),
        ({"O": 1}, 0),
        ({"O": 2}, 11),
        ({"K": 3}, 0),
        ({"K": 4}, 12),
        ({"P": 4, "I": 1}, 13),
        ({"missing": 0}, 12),
        ({"P": 4, "missing": 0}, 12),
    ],
)
def test_required_gates_decide_alone(required, code):
    """A required experiment must reach its gate; others are reported only; one that is missing is not measured."""
    assert gates.exit_code([PASS, FAIL, OPEN, ABSENT, BLOCKED, INVALID], required) == code


def test_reported_gates_do_not_decide():
    """An unjudged gate of a `characterises` claim does not fail a requirement."""
    row = [Status.PASS, Status.PASS, Status.INCONCLUSIVE, Status.INCONCLUSIVE, Status.INCONCLUSIVE]
    reported = _verdict("C", *row, judged=(True, True, False, False, False))
    assert gates.exit_code([reported], {"C": 4}) == 0


def test_a_verdict_without_its_gates_was_not_measured():
    """A truncated verdict cannot satisfy a requirement."""
    assert gates.exit_code([replace(PASS, gates=PASS.gates[:3])], {"P": 4}) == 12


def test_one_bad_result_of_two_decides():
    """Two results of one experiment: the worse one decides, required or not."""
    both = [PASS, replace(FAIL, experiment="P")]
    assert gates.exit_code(both) == gates.exit_code(both, {"P": 4}) == 10


def test_the_highest_gate_that_is_required_counts():
    """An experiment named twice must reach the higher gate, whatever the order."""
    assert (
        session.parse_requirements("B1:4,B1:0", ["B1"]) == session.parse_requirements("B1:0,B1:4", ["B1"]) == {"B1": 4}
    )

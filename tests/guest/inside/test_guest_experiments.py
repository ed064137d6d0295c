"""A1 and A2 through the real runner and the real gates: placement is proven, and nothing is decided from its times."""

from __future__ import annotations

import time

import guestkit
import pytest

from pytest_engram import codec, experiment, gates, planning, runner
from pytest_engram.model import Status, Verdict
from pytest_engram.session import this_machine


def measured(name: str) -> Verdict:
    """The verdict of the whole schedule and its positive control."""
    chosen = experiment.load(guestkit.HERE / f"{name}.yaml")
    choices = planning.Choices(engine="cpu", engines={"cpu": None}, deadline_s=30.0 * guestkit.SLOW)
    plan = planning.make_plan(chosen, this_machine(), choices)
    start = time.monotonic()
    evidence = runner.run(plan, progress=lambda kind, run: kind == "run" and told(name, run.arm, start))
    codec.write_atomic(guestkit.OUT / f"{name}.evidence.json", codec.encode(evidence))
    return gates.evaluate(evidence)


def told(name: str, arm: str, start: float) -> None:
    """Progress on the serial console."""
    print(f"{name} {arm} {time.monotonic() - start:.0f} s", flush=True)


@pytest.mark.parametrize("name", ["A1", "A2"])
def test_placement_is_proven_and_nothing_else(name: str) -> None:
    """Gates 0 and 1 pass on real page distributions; no far memory is found, so nothing is decided."""
    verdict = measured(name)
    for gate in verdict.gates[:3]:
        guestkit.say("experiments", name, f"gate {gate.gate}", gate.status.value, gate.reason, gate.observed)
    assert [gate.status for gate in verdict.gates[:2]] == [Status.PASS, Status.PASS]
    assert verdict.status in (Status.INCONCLUSIVE, Status.INVALID)
    assert verdict.sentence is None

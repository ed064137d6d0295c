"""A1 and A2 through the real runner and the real gates: placement is proven, and nothing is decided from its times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import guestkit
import pytest

from pytest_engram import codec, experiment, gates, planning, runner
from pytest_engram.model import Status, Verdict
from pytest_engram.session import this_machine


def measured(name: str, tell: Callable[[str], None]) -> Verdict:
    """The verdict of the whole schedule and its positive control."""
    chosen = experiment.load(guestkit.HERE / f"{name}.yaml")
    choices = planning.Choices(engine="cpu", engines={"cpu": None})
    plan = replace(planning.make_plan(chosen, this_machine(), choices), deadline_s=30.0 * guestkit.SLOW)
    start = time.monotonic()

    def progress(kind: str, run: Any) -> None:
        if kind == "run":
            tell(f"{name} {run.arm} {time.monotonic() - start:.0f} s")

    evidence = runner.run(plan, progress=progress)
    codec.write_atomic(guestkit.OUT / f"{name}.evidence.json", codec.encode(evidence))
    return gates.evaluate(evidence)


@pytest.mark.parametrize("name", ["A1", "A2"])
def test_placement_is_proven_and_nothing_else(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Gates 0 and 1 pass on real page distributions; no far memory is found, so nothing is decided."""

    def tell(line: str) -> None:
        with capfd.disabled():
            print(line, flush=True)

    verdict = measured(name, tell)
    for gate in verdict.gates[:3]:
        guestkit.say("experiments", name, f"gate {gate.gate}", gate.status.value, gate.reason, gate.observed)
    assert [gate.status for gate in verdict.gates[:2]] == [Status.PASS, Status.PASS]
    assert verdict.status in (Status.INCONCLUSIVE, Status.INVALID)
    assert verdict.sentence is None

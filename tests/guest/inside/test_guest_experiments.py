"""A1 and A2 through the real runner and the real gates: placement is proven, and nothing is decided from its times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import guestkit
import pytest

from pytest_engram import codec, experiment, gates, planning, runner
from pytest_engram.model import Experiment, Status, Verdict
from pytest_engram.session import this_machine

PATCH = Path(__file__).parents[3] / "fixtures" / "experiments" / "more" / "placement-patch.yaml"


def measured(name: str, chosen: Experiment, tell: Callable[[str], None], **backends: Any) -> Verdict:
    """The verdict of the whole schedule and its positive control."""
    choices = planning.Choices(engine="cpu", engines={"cpu": None}, **backends)
    plan = replace(planning.make_plan(chosen, this_machine(), choices), deadline_s=30.0 * guestkit.SLOW)
    start = time.monotonic()

    def progress(kind: str, run: Any) -> None:
        if kind == "run":
            tell(f"{name} {run.arm} {time.monotonic() - start:.0f} s")

    evidence = runner.run(plan, progress=progress)
    codec.write_atomic(guestkit.OUT / f"{name}.evidence.json", codec.encode(evidence))
    return gates.evaluate(evidence)


@pytest.fixture
def tell(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """A line on the guest's console at once."""

    def line(text: str) -> None:
        with capfd.disabled():
            print(text, flush=True)

    return line


def proven(name: str, verdict: Verdict) -> None:
    """Gates 0 and 1 passed and nothing more was decided."""
    for gate in verdict.gates[:3]:
        guestkit.say("experiments", name, f"gate {gate.gate}", gate.status.value, gate.reason, gate.observed)
    assert [gate.status for gate in verdict.gates[:2]] == [Status.PASS, Status.PASS]
    assert verdict.status in (Status.INCONCLUSIVE, Status.INVALID)
    assert verdict.sentence is None


@pytest.mark.parametrize("name", ["A1", "A2"])
def test_placement_is_proven_and_nothing_else(name: str, tell: Callable[[str], None]) -> None:
    """Gates 0 and 1 pass on real page distributions; no far memory is found, so nothing is decided."""
    proven(name, measured(name, experiment.load(guestkit.HERE / f"{name}.yaml"), tell))


def test_a_patch_moves_the_table_that_each_build_allocates(tell: Callable[[str], None]) -> None:
    """Base against candidate, each with its own table: stock pages in one object, patched ones beside each rank."""
    chosen, small = experiment.load(PATCH), experiment.load(guestkit.HERE / "A1.yaml")
    chosen = replace(chosen, workload=small.workload, serving=None, end_to_end=(), guards=(), blocks=1, cooldown_s=0)
    verdict = measured("placement-patch", chosen, tell, backend="guestkit:StockOrder", candidate="reference")
    proven("placement-patch", verdict)
    assert "B: rank 0 N0 100.0%, rank 1 N1 100.0%" in verdict.gates[1].observed

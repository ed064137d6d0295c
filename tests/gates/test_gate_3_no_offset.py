"""Gate 3: the main path did not pay."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_engram.model import Workload

edits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("edits.py"))))
CASES, reason = edits.cases()


def _grown(metric_shift):
    """A' shifted against A in every block."""

    def change(run):
        sample = run.compute[0]
        return replace(run, compute=(replace(sample, main_ns=(int(sample.main_ns[0] * metric_shift),)),))

    return change


@reason("aa-differs", 3)
def _twin_computes_longer(lab, change):
    return change(lab.evidence(), _grown(1.05), lambda run: run.arm == "A'")


@reason("slowed", 3)
def _smallest_wait_slowest_main(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": -2.0, "main_compute": 0.2, "goodput": 0.01}})


@reason("slowing-not-excluded", 3)
def _at_the_margin(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": -0.5, "main_compute": 0.0487, "goodput": 0.1}})


@reason("metric-absent", 3)
def _collectives_of_one_run_are_lost(lab, change):
    def gathered(run):
        times = None if run.index == 5 else (1000 + run.index,)
        return replace(run, compute=tuple(replace(one, communication_ns=times) for one in run.compute))

    return change(edits.placed(lab), gathered)


@reason("metric-absent", 3)
def _silent_about_collectives(lab, change):
    evidence = edits.placed(lab, workload=Workload(engram_layers=(1, 6), tokens=64, tensor_parallel=True))
    return change(evidence, lambda run: replace(run, compute=tuple(
        replace(sample, communication_absent=None) for sample in run.compute)))  # fmt: skip


@reason("no-winner", 3)
def _characterised_as_slower(lab, change):
    return lab.evidence("A1", effects={"B": {"main_compute": 0.2}}, by_rank={"B": {0: 0.3, 1: -0.3}})


@pytest.mark.parametrize(("code", "gate", "build"), CASES.values(), ids=CASES)
def test_reason_is_reached(reached, code, gate, build):
    """Evidence broken in one way stops at its own gate, with its own reason, that reason's status and a next step."""
    reached(code, gate, build)

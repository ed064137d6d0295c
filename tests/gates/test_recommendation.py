"""The recommendation's own levels: each with data just beyond them, which a looser rule would recommend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_engram import gates, hypotheses, recommendation
from pytest_engram.model import Status, Workload

ARMS = {"A": {"cap": None}, "B8": {"cap": 8}, "B16": {"cap": 16}}
GOOD = {"B16": {"step": -0.06}, "B8": {"step": 0.1}}


def advised(evidence):
    """The line of the report."""
    return recommendation.advice(evidence, gates.evaluate(evidence))


def shortened(lab, change, arms, against):
    """Steps that are 1 to 8 % shorter over 8 blocks, but longer in the one whose size has the rank ``against``."""

    def edit(run):
        if run.arm in ("A", "A'"):
            return run
        rank = run.block + 1
        step = round(12_000_000 * (1 + 0.01 * (rank if rank == against else -rank)))
        return replace(run, compute=tuple(replace(one, step_ns=(step,)) for one in run.compute))

    return change(lab.evidence("B2", arms=arms, effects={}, blocks=8), edit)


@pytest.mark.parametrize(("against", "resolved"), [(3, True), (4, False)])
def test_a_step_is_resolved_at_the_level_of_the_interval(lab, change, against, resolved):
    """p = 0.039 is below the two-sided 5 %, p = 0.055 is not."""
    one = {name: ARMS[name] for name in ("A", "B8")}
    assert advised(shortened(lab, change, one, against)).startswith("recommended") == resolved


def test_several_caps_share_the_level(lab, change):
    """What is resolved for one cap alone, p = 0.039, is not for two, of which the better one would be taken."""
    assert advised(shortened(lab, change, ARMS, 3)).startswith("no recommendation: no shorter step is resolved")
    assert advised(shortened(lab, change, ARMS, 1)).startswith("recommended")


@pytest.mark.parametrize(("longer", "named"), [(3, False), (9, True)])
def test_layers_that_hardly_differ_are_not_named(lab, change, longer, named):
    """Of 100 ns, 3 are no slower layer and 9 are one."""

    def edit(run):
        line = run.overlap[0].timelines[0]
        first, *others = line.spans
        line = replace(line, spans=(replace(first, end=first.end + longer), *others))
        return replace(run, overlap=(replace(run.overlap[0], timelines=(line,)),))

    evidence = change(lab.evidence("B2", arms=ARMS, effects=GOOD), edit, lambda run: run.arm == "B8")
    line = advised(evidence)
    assert line.startswith("recommended: cap 16")
    assert ("layers 0 +9.0 % under cap 8" in line, "layers" in line) == (named, named)


def test_an_invalid_gate_that_only_reports_forbids_it(lab, change):
    """A claim that characterises is not recommended from where A differs from A itself."""

    def longer(run):
        return replace(run, compute=tuple(replace(one, main_ns=(2 * one.main_ns[0],)) for one in run.compute))

    evidence = lab.evidence("B2", arms=ARMS, effects=GOOD)
    assert advised(evidence).startswith("recommended: cap 16")
    invalid = change(evidence, longer, lambda run: run.arm == "A'")
    assert advised(invalid) == "no recommendation: gate 3 no_offset is INVALID: aa-differs"


def test_repeated_rows_are_said(lab):
    """A recommendation over repeated rows says that the gain may be cache."""
    said = "repeated rows: the gain may be cache"
    assert said in advised(lab.evidence("B2", arms=ARMS, effects=GOOD, workload=Workload(reuse="repeated")))
    assert said not in advised(lab.evidence("B2", arms=ARMS, effects=GOOD))


def test_a_step_that_differs_from_itself_forbids_it(lab, change):
    """No gate judges the step's A/A, so the advice and the hypotheses do: steps of A' that are longer void both."""

    def longer(run):
        return replace(run, compute=tuple(replace(one, step_ns=(one.step_ns[0] * 11 // 10,)) for one in run.compute))

    evidence = change(lab.evidence("B2", arms=ARMS, effects=GOOD), longer, lambda run: run.arm == "A'")
    verdict = gates.evaluate(evidence)
    assert verdict.status is Status.PASS
    assert advised(evidence).startswith("no recommendation: aa-differs: step: A' differs from A by +10.00 %, p = ")
    assert "aa-differs" in hypotheses.adjudicate([evidence], [verdict])[3].lines[0]

"""Gate 2: whether timings may be judged, and whether the mechanism moved."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_engram import gates
from pytest_engram.model import MetricRule, Problem, Status

edits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("edits.py"))))
CASES, reason = edits.cases()


@reason("not-a-serial-queue", 2)
def _two_streams(lab, change):
    return lab.evidence("more/B1-streams", effects={})


@reason("not-a-serial-queue", 2)
def _two_streams_whose_lookups_never_met(lab, change):
    return edits.b_runs_as_a(change, lab.evidence("more/B1-streams", effects={}))


@reason("no-schedule", 2)
def _without_schedule(lab, change):
    evidence = lab.evidence()
    return replace(evidence, plan=replace(evidence.plan, schedule=()))


@reason("too-few-blocks", 2)
def _five_blocks(lab, change):
    evidence = lab.evidence()
    return replace(evidence, runs=evidence.runs[:15])


@reason("too-few-blocks", 2)
def _one_run_left_out(lab, change):
    evidence = lab.evidence()
    return replace(evidence, runs=evidence.runs[:-1])


@reason("machine-drifted", 2)
def _clock_fell(lab, change):
    return change(lab.evidence(), edits.edit(drift={"cpu_mhz": 2400.0}), lambda run: run.block > 4)


@reason("throttled", 2)
def _too_hot(lab, change):
    return change(lab.evidence(), edits.edit(drift={"throttle_reasons": 0x40}), lambda run: run.block > 4)


@reason("not-a-serial-queue", 2)
def _lookups_overlap(lab, change):
    def earlier(mark):
        return replace(mark, start=mark.start - 500_000) if mark.layer == 6 else mark

    return change(lab.evidence(), edits.with_marks(earlier), edits.is_b)


@reason("not-a-serial-queue", 2)
def _consumer_ran_ahead(lab, change):
    return change(
        lab.evidence(), edits.with_marks(lambda mark: replace(mark, wait_after=mark.done - 100_000)), edits.is_b
    )


@reason("not-a-serial-queue", 2)
def _kernel_of_negative_length(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, start=mark.done + 10)), edits.is_b)


def _linked(rate, **fields):
    """A run whose link carries ``rate`` bytes per second; ``fields`` of its overlap samples."""
    return lambda run: replace(
        run, drift={**run.drift, "link_bytes_per_s": rate}, overlap=tuple(replace(s, **fields) for s in run.overlap)
    )


@reason("faster-than-link", 2)
def _cached_rows(lab, change):
    return change(lab.evidence(), _linked(1e8))


@reason("no-positive-control", 2)
def _control_left_out(lab, change):
    return replace(edits.placed(lab), control=())


@reason("interpreted-kernels", 2)
def _interpreted_candidate(lab, change):
    return change(lab.evidence("patch"), edits.with_print(**{"backend.mode": "interpreter"}), edits.is_b)


@reason("emulated-cpu", 2)
def _emulated_processor(lab, change):
    return replace(lab.evidence(), provenance={"cpu.model": {"value": "QEMU TCG CPU version 2.5+"}})


@reason("control-without-difference", 2)
def _near_and_far_alike(lab, change):
    evidence = edits.placed(lab)
    near = next(run for run in evidence.control if run.arm == "control-0")
    alike = tuple(replace(run, overlap=near.overlap) for run in evidence.control)
    return replace(evidence, control=alike)


@reason("control-without-difference", 2)
def _far_is_faster(lab, change):
    evidence = edits.placed(lab)
    names = {"control-0": "control-1", "control-1": "control-0"}
    return replace(evidence, control=tuple(replace(run, arm=names[run.arm]) for run in evidence.control))


@reason("distance-unknown", 2)
def _readers_node_unknown(lab, change):
    return replace(edits.placed(lab), provenance={"topology": None})


@reason("distance-unknown", 2)
def _readers_cpu_is_on_no_node(lab, change):
    machine = lab.topology()
    bare = replace(machine, nodes=tuple(replace(node, cpus=()) for node in machine.nodes))
    return replace(edits.placed(lab), provenance=lab.provenance(bare))


@reason("no-predicted-change", 2)
def _all_ranks_on_one_side_of_equal_nodes(lab, change):
    evidence = edits.placed(lab)
    machine = lab.topology()
    flat = tuple(replace(node, distances={0: 10, 1: 10}) for node in machine.nodes)
    return replace(evidence, provenance=lab.provenance(replace(machine, nodes=flat)))


@reason("aa-differs", 2)
def _twin_waits_longer(lab, change):
    longer = edits.with_marks(lambda mark: replace(mark, wait_before=mark.wait_before - 100_000))
    return change(lab.evidence(), longer, lambda run: run.arm == "A'")


@reason("aa-differs", 2)
def _twin_waits_longer_in_all_of_six_blocks(lab, change):
    """Six blocks cannot reach the level of 1 %: the least that they can reach, 1/32, is enough."""
    longer = edits.with_marks(lambda mark: replace(mark, wait_before=mark.wait_before - 100_000))
    return change(lab.evidence(blocks=6), longer, lambda run: run.arm == "A'")


@reason("mechanism-not-shown", 2)
def _wait_unchanged(lab, change):
    return lab.evidence(effects={"B": {"goodput": 0.2}})


@reason("mechanism-refuted", 2)
def _wait_grew(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": 0.3, "goodput": 0.2}})


@reason("mechanism-refuted", 2)
def _far_rank_lost(lab, change):
    return lab.evidence("A3", effects={"B": {"exposed_wait": 0.2, "goodput": 0.1}}, by_rank={"B": {1: 0.3}})


@reason("metric-absent", 2)
def _no_mechanism_samples(lab, change):
    return change(lab.evidence("patch"), edits.without_marks, lambda run: run.block == 3)


@reason("metric-absent", 2)
def _lookups_start_before_they_are_ready(lab, change):
    """Within the timer's resolution no contradiction, but a wait of less than nothing has no ratio."""
    evidence = lab.evidence(mechanism=(MetricRule(metric="queueing", direction="down"),))
    return change(evidence, edits.with_marks(lambda mark: replace(mark, hash_ready=mark.start + 20)))


@pytest.mark.parametrize(("code", "gate", "build"), CASES.values(), ids=CASES)
def test_reason_is_reached(reached, code, gate, build):
    """Evidence broken in one way stops at its own gate, with its own reason, that reason's status and a next step."""
    reached(code, gate, build)


def test_an_absent_metric_says_why_and_where(lab, change):
    """The reason is that of the run which lacks the metric, not of the first one of its block."""
    bare = change(lab.evidence("patch"), edits.without_marks, lambda run: (run.block, run.arm) == (3, "B"))
    assert gates.evaluate(bare).gates[2].observed.endswith(": no marked step with a lookup (block 3)")


@pytest.mark.parametrize("lost", ["marks", "distances"])
def test_what_characterises_needs_an_effect(lab, change, lost):
    """A1 without marks, or without distances, has no effect to report: its gate 2 is judged, and NOT_MEASURED."""
    evidence = lab.evidence("A1")
    assert gates.evaluate(evidence).status is Status.PASS
    bare = change(evidence, edits.without_marks) if lost == "marks" else replace(evidence, provenance={})
    verdict = gates.evaluate(bare)
    assert (verdict.status, verdict.gates[2].judged) == (Status.NOT_MEASURED, True)


@pytest.mark.parametrize("lost", ["problem", "no time"])
def test_a_control_pair_without_a_reading_does_not_count(lab, lost):
    """Of six pairs one with a problem, or with lookups of 0 ns, leaves five, which cannot show a difference."""
    evidence = edits.placed(lab)
    assert gates.evaluate(evidence).gates[2].status is Status.PASS
    died = edits.edit(problems=(Problem(code="rank-died", message="it left", status=Status.INVALID),))
    spoil = died if lost == "problem" else edits.with_marks(lambda mark: replace(mark, start=mark.done))
    control = tuple(spoil(run) if run.index == 4 else run for run in evidence.control)
    rung = gates.evaluate(replace(evidence, control=control)).gates[2]
    assert (rung.reason, "5 pairs" in rung.observed) == ("control-without-difference", True)

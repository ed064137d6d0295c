"""Gate 1: samples, conditions, and every treatment but a placement."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

edits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("edits.py"))))
CASES, reason = edits.cases()


@reason("samples-not-as-planned", 1)
def _half_the_requests(lab, change):
    return change(lab.evidence(), lambda run: replace(run, serving=tuple(
        replace(load, requests=load.requests[:60]) for load in run.serving)), edits.is_b)  # fmt: skip


@reason("undeclared-difference", 1)
def _another_grid_in_the_twin(lab, change):
    return change(lab.evidence("B2"), edits.with_marks(lambda mark: replace(mark, grid=5)), lambda run: run.arm == "A'")


@reason("no-timelines", 1)
def _launches_of_one_rank_only(lab, change):
    return change(
        lab.evidence("B2", ranks=2), edits.sampled("overlap", 1, timelines=()), lambda run: run.arm == "cap16"
    )


@reason("undeclared-difference", 1)
def _another_kernel_in_b(lab, change):
    return change(lab.evidence(), edits.with_print(**{"machine.kernel": "6.13"}), edits.is_b)


@reason("undeclared-difference", 1)
def _another_grid_in_b(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, grid=96)), edits.is_b)


@reason("no-fingerprint", 1)
def _no_print(lab, change):
    return change(lab.evidence(), edits.edit(fingerprint={}), lambda run: run.index == 3)


@reason("no-treatment", 1)
def _caps_above_the_tiles(lab, change):
    return lab.evidence("B2", arms={"A": {"cap": 96}, "B": {"cap": 132}}, effects={"B": {}}, engine="cuda")


def _rows_less(mark):
    return replace(mark, rows=mark.rows // 2)


@reason("undeclared-difference", 1)
def _candidate_looks_half_the_rows_up(lab, change):
    return change(lab.evidence(), edits.with_marks(_rows_less), edits.is_b)


@reason("undeclared-difference", 1)
def _other_rows_are_no_cap(lab, change):
    arms = {"A": {"cap": 96}, "B": {"cap": 132}}
    return change(lab.evidence("B2", arms=arms, effects={}, engine="cuda"), edits.with_marks(_rows_less), edits.is_b)


@reason("no-treatment", 1)
def _marks_too_coarse_to_tell_the_arms_apart(lab, change):
    return change(lab.evidence(noise=0.0), edits.sampled("overlap", resolution_ns=1_000_000))


@reason("no-treatment", 1)
def _first_layer_alone_is_submitted_alike(lab, change):
    """Between the compute of layer 0 and the first wait: right for an early arm and for a late one."""
    evidence = lab.evidence(effects={})
    chosen = replace(evidence.plan.experiment, workload=replace(evidence.plan.experiment.workload, engram_layers=(1,)))
    plan = lab.plan(chosen)
    line = next(run for run in evidence.runs if run.arm == "A").overlap[0].timelines[0]
    alone = edits.sampled("overlap", timelines=(replace(line, lookups=line.lookups[:1]),))
    one_hash = edits.with_print(protocol=plan.protocol_hash)
    return change(replace(evidence, plan=plan), lambda run: one_hash(alone(run)))


@reason("graph-not-as-asked", 1)
def _one_arm_of_another_experiment_replays(lab, change):
    return change(lab.evidence(), lambda run: replace(run, drift={**run.drift, "graph_replays": 24.0}), edits.is_b)


@reason("no-timelines", 1)
def _unmarked(lab, change):
    return change(lab.evidence(), edits.without_marks, edits.is_b)


@reason("no-timelines", 1)
def _no_launches(lab, change):
    return change(lab.evidence("B2", engine="cuda"), edits.without_marks, lambda run: run.arm == "cap16")


@reason("submission-not-as-asked", 1)
def _early_arm_submits_late(lab, change):
    return change(
        lab.evidence(), edits.with_marks(lambda mark: replace(mark, submit=mark.wait_before + 100)), edits.is_b
    )


def _submitted_after_the_first_wait(lab, change, ns):
    def late(run):
        first = min(mark.wait_before for mark in run.overlap[0].timelines[0].lookups)
        return edits.with_marks(lambda mark: replace(mark, submit=first + ns))(run)

    return change(lab.evidence(), late, edits.is_b)


@reason("treatment-delivered", 1)
def _submitted_within_the_timers_resolution(lab, change):
    return _submitted_after_the_first_wait(lab, change, 50)


@reason("submission-not-as-asked", 1)
def _submitted_beyond_the_timers_resolution(lab, change):
    return _submitted_after_the_first_wait(lab, change, 51)


@reason("submission-not-as-asked", 1)
def _submitted_after_its_own_layer_began(lab, change):
    def begun(run):
        line = run.overlap[0].timelines[0]
        spans = (replace(span, start=500) if span.layer == 1 else span for span in line.spans)
        return edits.timed(spans=tuple(spans))(run)

    return change(lab.evidence(), begun, edits.is_b)


@reason("submission-not-as-asked", 1)
def _submitted_after_its_consumer_went_on(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, submit=mark.wait_after + 1)),
                  lambda run: run.arm == "A'")  # fmt: skip


@reason("submission-not-as-asked", 1)
def _late_arm_submits_early(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, submit=950)), lambda run: run.arm == "A'")


@reason("submission-not-as-asked", 1)
def _inline_arm_keeps_prefetching(lab, change):
    return edits.b_runs_as_a(change, lab.evidence("more/B1-inline", effects={}))


@reason("submission-not-as-asked", 1)
def _small_batch_looked_up_inline(lab, change):
    return change(lab.evidence("more/B1-inline", effects={}), edits.with_point(16, early=False), edits.is_b)


@reason("no-treatment", 1)
def _threshold_above_every_batch(lab, change):
    return lab.evidence("more/B1-inline", arms={"A": {"inline_above": None}, "B": {"inline_above": 4096}}, effects={})


@reason("wait-not-as-asked", 1)
def _stream_arm_waits_for_its_layer(lab, change):
    return change(
        lab.evidence("more/B1-wait", effects={}), edits.with_marks(lambda m: replace(m, wait_after=m.done)), edits.is_b
    )


@reason("treatment-delivered", 1)
def _stream_has_nothing_later_yet(lab, change):
    """What is submitted after a wait began is not waited for."""

    def later(mark):
        return replace(mark, wait_after=mark.done) if mark.layer == 1 else replace(mark, submit=mark.start)

    return change(lab.evidence("more/B1-wait", effects={}), edits.with_marks(later), edits.is_b)


@reason("treatment-delivered", 1)
def _stream_done_within_the_timers_resolution(lab, change):
    sooner = edits.with_marks(lambda mark: replace(mark, wait_after=mark.wait_after - 50))
    return change(lab.evidence("more/B1-wait", effects={}), sooner, edits.is_b)


@reason("no-treatment", 1)
def _layer_arm_waits_for_the_stream(lab, change):
    last = edits.with_marks(lambda mark: replace(mark, wait_after=2_100_000))
    return change(lab.evidence("more/B1-wait", effects={}, noise=0.0), last, lambda run: run.arm != "B")


def _one_step_ahead(lab, change, arms):
    """The layer arm went on ahead of the stream in one marked step of all its runs."""
    last = edits.with_marks(lambda mark: replace(mark, wait_after=2_100_000))
    evidence = lab.evidence("more/B1-wait", arms=arms, effects={}, noise=0.0)
    layer = next(arm for arm in "AB" if arms[arm]["wait"] == "layer")
    return change(evidence, last, lambda run: (run.arm, run.block) != (layer, 3))


@reason("treatment-delivered", 1)
def _base_went_on_once(lab, change):
    return _one_step_ahead(lab, change, {"A": {"wait": "layer"}, "B": {"wait": "stream"}})


@reason("treatment-delivered", 1)
def _candidate_went_on_once(lab, change):
    return _one_step_ahead(lab, change, {"A": {"wait": "stream"}, "B": {"wait": "layer"}})


@reason("no-timelines", 1)
def _wait_without_marks(lab, change):
    return change(lab.evidence("more/B1-wait", effects={}), edits.without_marks, edits.is_b)


@reason("graph-not-as-asked", 1)
def _graph_fell_back_to_eager(lab, change):
    evidence = lab.evidence("cuda/B1-graph", effects={}, engine="cuda")
    return change(evidence, lambda run: replace(run, drift={**run.drift, "graph_replays": 0.0}), edits.is_b)


@reason("graph-not-as-asked", 1)
def _replays_in_the_eager_arm(lab, change):
    evidence = lab.evidence("cuda/B1-graph", effects={}, engine="cuda")
    return change(evidence, lambda run: replace(run, drift={**run.drift, "graph_replays": 1.0}), lambda r: r.arm == "A")


@reason("graph-not-as-asked", 1)
def _replays_not_counted(lab, change):
    return change(lab.evidence("cuda/B1-graph", effects={}, engine="cuda"), edits.edit(drift={}), edits.is_b)


@reason("graph-not-as-asked", 1)
def _eager_steps_not_counted(lab, change):
    return change(
        lab.evidence("cuda/B1-graph", effects={}, engine="cuda"), edits.edit(drift={}), lambda r: r.arm == "A"
    )


@reason("cap-not-obeyed", 1)
def _cap_ignored(lab, change):
    evidence = lab.evidence("B2", engine="cuda")
    return change(evidence, edits.with_marks(lambda mark: replace(mark, grid=66)), lambda run: run.arm == "cap16")


@reason("no-receipts", 1)
def _backend_without_receipt(lab, change):
    def drop(run):
        kept = {key: value for key, value in run.fingerprint.items() if not key.startswith("backend.")}
        return replace(run, fingerprint=kept)

    return change(lab.evidence("patch"), drop, edits.is_b)


@reason("identical-code", 1)
def _candidate_is_the_base(lab, change):
    return change(lab.evidence("patch"), edits.with_print(**{"backend.commit": "base"}), edits.is_b)


@pytest.mark.parametrize(("code", "gate", "build"), CASES.values(), ids=CASES)
def test_reason_is_reached(reached, code, gate, build):
    """Evidence broken in one way stops at its own gate, with its own reason, that reason's status and a next step."""
    reached(code, gate, build)

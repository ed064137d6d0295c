"""Every reason of the table is reached by evidence that is broken in exactly one way."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_engram import gates
from pytest_engram.gates.correctness import explain
from pytest_engram.model import (
    CorrectnessSample,
    MetricRule,
    Moment,
    Problem,
    ScheduledRun,
    Status,
    TablePlan,
    Workload,
)

edits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("edits.py"))))
CASES = {}


def reason(code, gate):
    """Register a function (lab, change) -> Evidence, or (Evidence, prior), under the reason it must give."""

    def keep(build):
        CASES[f"{code}:{build.__name__}"] = (code, gate, build)
        return build

    return keep


def _is_b(run):
    return run.arm == "B"


def _b_runs_as_a(change, evidence):
    """The marked steps of B are A's own."""
    base = next(run for run in evidence.runs if run.arm == "A")
    return change(evidence, edits.edit(overlap=base.overlap), _is_b)


def _placed(lab, **kw):
    """A sound A3: the far rank gains by a copy of its own."""
    return lab.evidence("A3", effects={"B": {"goodput": 0.1}}, by_rank={"B": {1: -0.3}}, **kw)


# ---------------------------------------------------------------- passing rungs


@reason("contract-kept", 0)
@reason("treatment-delivered", 1)
@reason("moved-as-predicted", 2)
@reason("not-slowed", 3)
@reason("improved", 4)
def _sound(lab, change):
    return lab.evidence("B1")


# ---------------------------------------------------------------- gate 0


@reason("contract-broken", 0)
def _wrong_row(lab, change):
    bad = CorrectnessSample(case="rows", contract="L1", passed=False, token=3, head=7, layer=14, expected="0", seen="1")
    return change(
        lab.evidence(), edits.with_cases("correctness_after", lambda old: (*old, bad)), lambda run: run.index == 9
    )


def _stop(change, evidence, after):
    """Every run later than ``after`` was not run, because a row was wrong."""
    stop = Problem(code="stopped-after-correctness", message="an earlier run gave wrong rows", status=Status.BLOCKED)
    return change(evidence, edits.edit(problems=(stop,)), lambda run: run.index > after)


@reason("stopped-after-correctness", 0)
def _cut_short(lab, change):
    return _stop(change, lab.evidence(), 5)


@reason("no-correctness", 0)
def _unchecked_after(lab, change):
    return change(lab.evidence(), edits.edit(correctness_after=()), _is_b)


@reason("no-correctness", 0)
def _nothing_supported(lab, change):
    def unsupported(samples):
        return tuple(replace(sample, supported=False) for sample in samples)

    return change(lab.evidence(), edits.with_cases("correctness_before", unsupported), _is_b)


@reason("cases-missing", 0)
def _candidate_checks_less(lab, change):
    return change(lab.evidence(), edits.with_cases("correctness_before", lambda old: old[1:]), _is_b)


@reason("no-correctness", 0)
def _one_run_unchecked(lab, change):
    return change(lab.evidence(), edits.edit(correctness_before=()), lambda run: run.index == 9)


@reason("cases-missing", 0)
def _checked_on_one_rank_of_two(lab, change):
    return change(lab.evidence(ranks=2), edits.edit(correctness_after=lab.cases()), lambda run: run.index == 9)


def _cases_without(lab, change, lost):
    kept = tuple(sample for sample in lab.cases() if not lost(sample))
    return change(lab.evidence(), edits.edit(correctness_before=kept, correctness_after=kept))


@reason("cases-missing", 0)
def _engine_never_checked(lab, change):
    return _cases_without(lab, change, lambda sample: sample.case == "engine-edges")


@reason("cases-missing", 0)
def _no_hash_line(lab, change):
    return _cases_without(lab, change, lambda sample: sample.contract.startswith("H"))


@reason("cases-missing", 0)
def _hash_lines_that_no_backend_supports(lab, change):
    def unsupported(samples):
        return tuple(replace(one, supported=one.supported and one.contract[0] != "H") for one in samples)

    both = edits.with_cases("correctness_before", unsupported), edits.with_cases("correctness_after", unsupported)
    return change(change(lab.evidence(), both[0]), both[1])


@reason("cases-missing", 0)
def _outputs_in_one_run_only(lab, change):
    outputs = CorrectnessSample(case="engine-outputs", contract="L11", passed=True)
    return change(
        lab.evidence(), edits.with_cases("correctness_after", lambda old: (*old, outputs)), lambda r: r.index == 9
    )


def _placed_without(lab, change, contract):
    def less(samples):
        return tuple(sample for sample in samples if sample.contract != contract)

    drop = [edits.with_cases(name, less) for name in ("correctness_before", "correctness_after")]
    return change(change(_placed(lab), drop[0]), drop[1])


@reason("storage-not-checked", 0)
def _no_storage_case(lab, change):
    return _placed_without(lab, change, "S6")


@reason("storage-not-checked", 0)
def _replay_not_even_asked_for(lab, change):
    return _placed_without(lab, change, "P5")


@reason("protocol-changed", 0)
def _margin_moved_afterwards(lab, change):
    evidence = lab.evidence()
    looser = replace(evidence.plan.experiment, alpha=0.05)
    return replace(evidence, plan=replace(evidence.plan, experiment=looser))


@reason("protocol-changed", 0)
def _run_of_another_protocol(lab, change):
    return change(lab.evidence(), edits.with_print(protocol="0" * 64), lambda run: run.index == 5)


@reason("schedule-altered", 0)
def _schedule_of_one_arm_after_the_other(lab, change):
    evidence = lab.evidence()
    order = tuple(
        ScheduledRun(index=8 * n + block, block=block, arm=arm) for n, arm in enumerate("AXB") for block in range(8)
    )
    return replace(evidence, plan=replace(evidence.plan, schedule=order))


@reason("schedule-altered", 0)
def _runs_out_of_order(lab, change):
    evidence = lab.evidence()
    return replace(evidence, runs=evidence.runs[::-1])


@reason("schedule-altered", 0)
def _clock_out_of_order(lab, change):
    return change(lab.evidence(), edits.edit(started_at="2026-11-20T09:00:00Z"), lambda run: run.index == 5)


@reason("schedule-altered", 0)
def _time_that_cannot_be_read(lab, change):
    return change(lab.evidence(), edits.edit(started_at="yesterday"), lambda run: run.index == 5)


@reason("unscheduled-run", 0)
def _repeated_run(lab, change):
    evidence = lab.evidence()
    return replace(evidence, runs=(*evidence.runs, evidence.runs[-1]))


# ---------------------------------------------------------------- gate 1


@reason("samples-not-as-planned", 1)
def _half_the_requests(lab, change):
    return change(lab.evidence(), lambda run: replace(run, serving=tuple(
        replace(load, requests=load.requests[:60]) for load in run.serving)), _is_b)  # fmt: skip


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
    return change(lab.evidence(), edits.with_print(**{"machine.kernel": "6.13"}), _is_b)


@reason("undeclared-difference", 1)
def _another_grid_in_b(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, grid=96)), _is_b)


@reason("undeclared-difference", 1)
def _regrouped_without_saying(lab, change):
    evidence = lab.evidence("A1", effects={"B": {}}, by_rank={"B": {0: 0.3, 1: -0.3}})
    return change(evidence, edits.with_print(groups="[[0], [1]]"), _is_b)


@reason("no-fingerprint", 1)
def _no_print(lab, change):
    return change(lab.evidence(), edits.edit(fingerprint={}), lambda run: run.index == 3)


@reason("pages-not-audited", 1)
def _moment_missing(lab, change):
    return change(
        _placed(lab), edits.with_audits(lambda a: None if (a.rank, a.moment) == (1, Moment.LOADED) else a), _is_b
    )


@reason("pages-not-audited", 1)
def _no_route_answered(lab, change):
    return change(_placed(lab), edits.with_audits(lambda audit: replace(audit, routes=())), _is_b)


@reason("pages-not-covered", 1)
def _half_covered(lab, change):
    return change(
        _placed(lab), edits.with_audits(lambda audit: replace(audit, covered_bytes=audit.table_bytes // 2)), _is_b
    )


def _lost(lab, change, lost):
    def lose(audit):
        (node, count), *_ = audit.pages.items()
        return replace(audit, pages={node: count - lost}, unplaced={"ENOENT": lost})

    return change(_placed(lab), edits.with_audits(lose), _is_b)


@reason("pages-unplaced", 1)
def _eleven_of_ten_thousand_pages_not_resident(lab, change):
    return _lost(lab, change, 11)


@reason("treatment-delivered", 1)
def _nine_of_ten_thousand_pages_not_resident(lab, change):
    return _lost(lab, change, 9)


@reason("not-as-asked", 1)
def _policy_is_not_placement(lab, change):
    return change(_placed(lab), edits.with_audits(lambda audit: replace(audit, pages={0: 5000, 1: 5000})), _is_b)


@reason("not-as-asked", 1)
def _moved_after_load(lab, change):
    def migrate(audit):
        return replace(audit, pages={0: 9000, 1: 1000}) if audit.moment is Moment.REPLAYED else audit

    return change(_placed(lab), edits.with_audits(migrate), lambda run: run.index == 4)


def _in_huge_pages(lab, change, huge_bytes):
    """B1 over anonymous huge pages, of which the kernel gave so many bytes."""
    hold = {**lab.experiment("B1").hold, "backing": "anon-thp"}
    return change(lab.evidence("B1", hold=hold), edits.with_audits(lambda audit: replace(audit, huge_bytes=huge_bytes)))


@reason("pages-not-huge", 1)
def _base_pages_instead(lab, change):
    return _in_huge_pages(lab, change, 0)


@reason("pages-not-huge", 1)
def _huge_pages_unknown(lab, change):
    return _in_huge_pages(lab, change, None)


@reason("treatment-delivered", 1)
def _huge_but_for_an_odd_end(lab, change):
    return _in_huge_pages(lab, change, 38 << 20)


@reason("not-as-asked", 1)
def _interleave_that_leans(lab, change):
    evidence = lab.evidence("A2", effects={"B": {}}, by_rank={"B": {0: 0.2, 1: -0.2}})
    return change(evidence, edits.with_audits(lambda audit: replace(audit, pages={0: 5400, 1: 4600})), _is_b)


@reason("not-shared", 1)
def _private_copy(lab, change):
    def own(audit):
        return replace(audit, identity="0:99") if audit.rank == 1 else audit

    return change(_placed(lab), edits.with_audits(own), lambda run: run.arm == "A")


@reason("not-shared", 1)
def _anonymous_memory_for_two_ranks(lab, change):
    return change(
        _placed(lab), edits.with_audits(lambda audit: replace(audit, identity="anon")), lambda run: run.arm == "A"
    )


@reason("not-separate", 1)
def _one_object_for_both_sockets(lab, change):
    return change(_placed(lab), edits.with_audits(lambda audit: replace(audit, identity="0:40")), _is_b)


@reason("no-treatment", 1)
def _default_lands_where_bind_does(lab, change):
    arms = {"A": {"policy": "default"}, "B": {"policy": "bind:0"}}
    return lab.evidence("A1", arms=arms, effects={"B": {}})


@reason("no-treatment", 1)
def _caps_above_the_tiles(lab, change):
    return lab.evidence("B2", arms={"A": {"cap": 96}, "B": {"cap": 132}}, effects={"B": {}}, engine="cuda")


def _rows_less(mark):
    return replace(mark, rows=mark.rows // 2)


@reason("undeclared-difference", 1)
def _candidate_looks_half_the_rows_up(lab, change):
    return change(lab.evidence(), edits.with_marks(_rows_less), _is_b)


@reason("undeclared-difference", 1)
def _other_rows_are_no_cap(lab, change):
    arms = {"A": {"cap": 96}, "B": {"cap": 132}}
    return change(lab.evidence("B2", arms=arms, effects={}, engine="cuda"), edits.with_marks(_rows_less), _is_b)


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
    return change(lab.evidence(), lambda run: replace(run, drift={**run.drift, "graph_replays": 24.0}), _is_b)


@reason("no-timelines", 1)
def _unmarked(lab, change):
    return change(lab.evidence(), edits.without_marks, _is_b)


@reason("no-timelines", 1)
def _no_launches(lab, change):
    return change(lab.evidence("B2", engine="cuda"), edits.without_marks, lambda run: run.arm == "cap16")


@reason("submission-not-as-asked", 1)
def _early_arm_submits_late(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, submit=mark.wait_before + 100)), _is_b)


def _submitted_after_the_first_wait(lab, change, ns):
    def late(run):
        first = min(mark.wait_before for mark in run.overlap[0].timelines[0].lookups)
        return edits.with_marks(lambda mark: replace(mark, submit=first + ns))(run)

    return change(lab.evidence(), late, _is_b)


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

    return change(lab.evidence(), begun, _is_b)


@reason("submission-not-as-asked", 1)
def _submitted_after_its_consumer_went_on(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, submit=mark.wait_after + 1)),
                  lambda run: run.arm == "A'")  # fmt: skip


@reason("submission-not-as-asked", 1)
def _late_arm_submits_early(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, submit=950)), lambda run: run.arm == "A'")


@reason("submission-not-as-asked", 1)
def _inline_arm_keeps_prefetching(lab, change):
    return _b_runs_as_a(change, lab.evidence("more/B1-inline", effects={}))


@reason("submission-not-as-asked", 1)
def _small_batch_looked_up_inline(lab, change):
    return change(lab.evidence("more/B1-inline", effects={}), edits.with_point(16, early=False), _is_b)


@reason("no-treatment", 1)
def _threshold_above_every_batch(lab, change):
    return lab.evidence("more/B1-inline", arms={"A": {"inline_above": None}, "B": {"inline_above": 4096}}, effects={})


@reason("wait-not-as-asked", 1)
def _stream_arm_waits_for_its_layer(lab, change):
    return change(
        lab.evidence("more/B1-wait", effects={}), edits.with_marks(lambda m: replace(m, wait_after=m.done)), _is_b
    )


@reason("treatment-delivered", 1)
def _stream_has_nothing_later_yet(lab, change):
    """What is submitted after a wait began is not waited for."""

    def later(mark):
        return replace(mark, wait_after=mark.done) if mark.layer == 1 else replace(mark, submit=mark.start)

    return change(lab.evidence("more/B1-wait", effects={}), edits.with_marks(later), _is_b)


@reason("treatment-delivered", 1)
def _stream_done_within_the_timers_resolution(lab, change):
    sooner = edits.with_marks(lambda mark: replace(mark, wait_after=mark.wait_after - 50))
    return change(lab.evidence("more/B1-wait", effects={}), sooner, _is_b)


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
    return change(lab.evidence("more/B1-wait", effects={}), edits.without_marks, _is_b)


@reason("graph-not-as-asked", 1)
def _graph_fell_back_to_eager(lab, change):
    evidence = lab.evidence("cuda/B1-graph", effects={}, engine="cuda")
    return change(evidence, lambda run: replace(run, drift={**run.drift, "graph_replays": 0.0}), _is_b)


@reason("graph-not-as-asked", 1)
def _replays_in_the_eager_arm(lab, change):
    evidence = lab.evidence("cuda/B1-graph", effects={}, engine="cuda")
    return change(evidence, lambda run: replace(run, drift={**run.drift, "graph_replays": 1.0}), lambda r: r.arm == "A")


@reason("graph-not-as-asked", 1)
def _replays_not_counted(lab, change):
    return change(lab.evidence("cuda/B1-graph", effects={}, engine="cuda"), edits.edit(drift={}), _is_b)


@reason("graph-not-as-asked", 1)
def _eager_steps_not_counted(lab, change):
    return change(
        lab.evidence("cuda/B1-graph", effects={}, engine="cuda"), edits.edit(drift={}), lambda r: r.arm == "A"
    )


@reason("not-a-serial-queue", 2)
def _two_streams(lab, change):
    return lab.evidence("more/B1-streams", effects={})


@reason("not-a-serial-queue", 2)
def _two_streams_whose_lookups_never_met(lab, change):
    return _b_runs_as_a(change, lab.evidence("more/B1-streams", effects={}))


@reason("cap-not-obeyed", 1)
def _cap_ignored(lab, change):
    evidence = lab.evidence("B2", engine="cuda")
    return change(evidence, edits.with_marks(lambda mark: replace(mark, grid=66)), lambda run: run.arm == "cap16")


@reason("no-receipts", 1)
def _backend_without_receipt(lab, change):
    def drop(run):
        kept = {key: value for key, value in run.fingerprint.items() if not key.startswith("backend.")}
        return replace(run, fingerprint=kept)

    return change(lab.evidence("patch"), drop, _is_b)


@reason("identical-code", 1)
def _candidate_is_the_base(lab, change):
    return change(lab.evidence("patch"), edits.with_print(**{"backend.commit": "base"}), _is_b)


# ---------------------------------------------------------------- gate 2


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

    return change(lab.evidence(), edits.with_marks(earlier), _is_b)


@reason("not-a-serial-queue", 2)
def _consumer_ran_ahead(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, wait_after=mark.done - 100_000)), _is_b)


@reason("not-a-serial-queue", 2)
def _kernel_of_negative_length(lab, change):
    return change(lab.evidence(), edits.with_marks(lambda mark: replace(mark, start=mark.done + 10)), _is_b)


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
    return replace(_placed(lab), control=())


@reason("interpreted-kernels", 2)
def _interpreted_candidate(lab, change):
    return change(lab.evidence("patch"), edits.with_print(**{"backend.mode": "interpreter"}), _is_b)


@reason("emulated-cpu", 2)
def _emulated_processor(lab, change):
    return replace(lab.evidence(), provenance={"cpu.model": {"value": "QEMU TCG CPU version 2.5+"}})


@reason("control-without-difference", 2)
def _near_and_far_alike(lab, change):
    evidence = _placed(lab)
    near = next(run for run in evidence.control if run.arm == "control-0")
    alike = tuple(replace(run, overlap=near.overlap) for run in evidence.control)
    return replace(evidence, control=alike)


@reason("control-without-difference", 2)
def _far_is_faster(lab, change):
    evidence = _placed(lab)
    names = {"control-0": "control-1", "control-1": "control-0"}
    return replace(evidence, control=tuple(replace(run, arm=names[run.arm]) for run in evidence.control))


@reason("distance-unknown", 2)
def _readers_node_unknown(lab, change):
    return replace(_placed(lab), provenance={"topology": None})


@reason("distance-unknown", 2)
def _readers_cpu_is_on_no_node(lab, change):
    machine = lab.topology()
    bare = replace(machine, nodes=tuple(replace(node, cpus=()) for node in machine.nodes))
    return replace(_placed(lab), provenance=lab.provenance(bare))


@reason("no-predicted-change", 2)
def _all_ranks_on_one_side_of_equal_nodes(lab, change):
    evidence = _placed(lab)
    machine = lab.topology()
    flat = tuple(replace(node, distances={0: 10, 1: 10}) for node in machine.nodes)
    return replace(evidence, provenance=lab.provenance(replace(machine, nodes=flat)))


def _grown(metric_shift):
    """A' shifted against A in every block."""

    def change(run):
        sample = run.compute[0]
        return replace(run, compute=(replace(sample, main_ns=(int(sample.main_ns[0] * metric_shift),)),))

    return change


@reason("aa-differs", 2)
def _twin_waits_longer(lab, change):
    longer = edits.with_marks(lambda mark: replace(mark, wait_before=mark.wait_before - 100_000))
    return change(lab.evidence(), longer, lambda run: run.arm == "A'")


@reason("aa-differs", 2)
def _twin_waits_longer_in_all_of_six_blocks(lab, change):
    """Six blocks cannot reach the level of 1 %: the least that they can reach, 1/32, is enough."""
    longer = edits.with_marks(lambda mark: replace(mark, wait_before=mark.wait_before - 100_000))
    return change(lab.evidence(blocks=6), longer, lambda run: run.arm == "A'")


@reason("aa-differs", 3)
def _twin_computes_longer(lab, change):
    return change(lab.evidence(), _grown(1.05), lambda run: run.arm == "A'")


@reason("mechanism-not-shown", 2)
def _wait_unchanged(lab, change):
    return lab.evidence(effects={"B": {"goodput": 0.2}})


@reason("mechanism-refuted", 2)
def _wait_grew(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": 0.3, "goodput": 0.2}})


@reason("mechanism-refuted", 2)
def _far_rank_lost(lab, change):
    return lab.evidence("A3", effects={"B": {"exposed_wait": 0.2, "goodput": 0.1}}, by_rank={"B": {1: 0.3}})


# ---------------------------------------------------------------- gates 3 and 4


@reason("slowed", 3)
def _smallest_wait_slowest_main(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": -2.0, "main_compute": 0.2, "goodput": 0.01}})


@reason("slowing-not-excluded", 3)
def _at_the_margin(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": -0.5, "main_compute": 0.0487, "goodput": 0.1}})


@reason("metric-absent", 2)
def _no_mechanism_samples(lab, change):
    return change(lab.evidence("patch"), edits.without_marks, lambda run: run.block == 3)


@reason("metric-absent", 2)
def _lookups_start_before_they_are_ready(lab, change):
    """Within the timer's resolution no contradiction, but a wait of less than nothing has no ratio."""
    evidence = lab.evidence(mechanism=(MetricRule(metric="queueing", direction="down"),))
    return change(evidence, edits.with_marks(lambda mark: replace(mark, hash_ready=mark.start + 20)))


@reason("metric-absent", 3)
def _collectives_of_one_run_are_lost(lab, change):
    def gathered(run):
        times = None if run.index == 5 else (1000 + run.index,)
        return replace(run, compute=tuple(replace(one, communication_ns=times) for one in run.compute))

    return change(_placed(lab), gathered)


@reason("metric-absent", 3)
def _silent_about_collectives(lab, change):
    evidence = _placed(lab, workload=Workload(engram_layers=(1, 6), tokens=64, tensor_parallel=True))
    return change(evidence, lambda run: replace(run, compute=tuple(
        replace(sample, communication_absent=None) for sample in run.compute)))  # fmt: skip


@reason("metric-absent", 4)
def _too_few_for_p99(lab, change):
    return lab.evidence(requests=99)


@reason("failed-requests", 4)
def _one_request_failed(lab, change):
    def fail(request):
        return replace(request, status="failed") if request.arrival_ms == 3 else request

    return change(lab.evidence(), edits.with_requests(fail), lambda run: run.index == 7)


@reason("aa-differs", 4)
def _twins_first_tokens_come_later(lab, change):
    """The base of a guard would be the mean of two that differ, and a candidate worse than A could keep it."""
    late = edits.with_requests(lambda request: replace(request, ttft_ms=1.3 * request.ttft_ms))
    return change(lab.evidence(), late, lambda run: run.arm == "A'")


@reason("no-successful-requests", 4)
def _limits_out_of_reach(lab, change):
    return change(lab.evidence(), edits.with_requests(lambda request: replace(request, ttft_ms=1e6)))


@reason("improvement-not-shown", 4)
def _goodput_unchanged(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": -0.5}}, seed=12)


@reason("not-improved", 4)
def _goodput_fell(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": -0.5, "goodput": -0.05}})


@reason("guard-broken", 4)
def _rejects_more(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": -0.5, "goodput": 0.2, "rejected": 6}})


@reason("guard-not-shown", 4)
def _tail_at_the_margin(lab, change):
    return lab.evidence(effects={"B": {"exposed_wait": -0.5, "goodput": 0.2, "itl": 0.0198}})


@reason("requires-unmet", 4)
def _without_a1_and_b1(lab, change):
    return _placed(lab)


@reason("no-winner", 3)
def _characterised_as_slower(lab, change):
    return lab.evidence("A1", effects={"B": {"main_compute": 0.2}}, by_rank={"B": {0: 0.3, 1: -0.3}})


@reason("earlier-gate", 1)
def _blocked_by_gate_0(lab, change):
    return _unchecked_after(lab, change)


@pytest.mark.parametrize(("code", "gate", "build"), CASES.values(), ids=CASES)
def test_reason_is_reached(lab, change, code, gate, build):
    """Evidence broken in one way stops at its own gate, with its own reason, that reason's status and a next step."""
    verdict = gates.evaluate(build(lab, change))
    result = verdict.gates[gate]
    assert (result.reason, result.status) == (code, gates.REASONS[code][0])
    before = [earlier for earlier in verdict.gates[:gate] if earlier.judged]
    assert code == "earlier-gate" or all(earlier.status is Status.PASS for earlier in before)
    if result.judged and result.status is not Status.PASS and code != "earlier-gate":
        assert verdict.status is result.status
        assert all(later.reason == "earlier-gate" for later in verdict.gates[gate + 1 :])
    if result.status is not Status.PASS:
        assert result.next_step


def test_no_reason_is_unreachable():
    """The table has no row that no evidence can reach, and no test names a reason that the table lacks."""
    assert {code for code, _, _ in CASES.values()} == gates.REASONS.keys()


def test_messages_name_the_place(lab, change):
    """A broken contract names arm, run, moment, case, layer, token, head, expected and seen."""
    observed = gates.evaluate(_wrong_row(lab, change)).gates[0].observed
    for word in ("run 9", "after", "L1 rows", "layer 14", "token 3", "head 7", "expected 0, seen 1"):
        assert word in observed
    assert explain(CorrectnessSample(case="rows", contract="L1", passed=False, token=3)) == "L1 rows: token 3"


def test_an_absent_metric_says_why_and_where(lab, change):
    """The reason is that of the run which lacks the metric, not of the first one of its block."""
    bare = change(lab.evidence("patch"), edits.without_marks, lambda run: (run.block, run.arm) == (3, "B"))
    assert gates.evaluate(bare).gates[2].observed.endswith(": no marked step with a lookup (block 3)")


def test_a_wrong_row_fails_though_it_cut_the_schedule_short(lab, change):
    """Runs that were not run after a wrong row, and a rank that died of it, leave gate 0 FAIL at the wrong row."""
    evidence = _stop(change, _wrong_row(lab, change), 9)
    died = Problem(code="rank-died", message="rank 0 left", status=Status.INVALID)
    for cut in (evidence, replace(evidence, problems=(died,)), replace(evidence, runs=evidence.runs[:10])):
        verdict = gates.evaluate(cut)
        assert (verdict.status, verdict.gates[0].reason) == (Status.FAIL, "contract-broken")
        assert "run 9" in verdict.gates[0].observed
    unseen = replace(_cut_short(lab, change), problems=(died,))
    assert gates.evaluate(unseen).status is Status.FAIL


@pytest.mark.parametrize("status", [Status.INVALID, Status.NOT_MEASURED, Status.FAIL, Status.BLOCKED])
def test_a_problem_stands_in_for_its_run(lab, change, status):
    """A run that ended in a problem gives the experiment the problem's status and code, never a gap."""
    lost = Problem(code="rank-died", message="rank 1 was killed", who="rank 1", status=status)
    evidence = change(lab.evidence(), edits.edit(problems=(lost,)), lambda run: run.index == 4)
    first = gates.evaluate(evidence).gates[0]
    assert (first.status, first.reason) == (status, "rank-died")
    assert first.next_step


def test_the_worst_problem_speaks(lab):
    """Of several problems the worst is the status, whatever their order; it names who and where, each once."""
    absent = Problem(code="no-node", message="one node", status=Status.NOT_MEASURED)
    void = Problem(code="rank-died", message="rank 1 was killed", who="rank 1", where="load", status=Status.INVALID)
    for problems in ((absent, void), (void, absent)):
        rung = gates.evaluate(replace(lab.evidence(), problems=problems)).gates[0]
        assert (rung.status, rung.observed) == (Status.INVALID, "load: rank 1 was killed")


def test_a_problem_can_never_pass(lab):
    """A problem that calls itself PASS is INVALID."""
    lost = Problem(code="odd", message="odd", status=Status.PASS)
    assert gates.evaluate(replace(lab.evidence(), problems=(lost,))).status is Status.INVALID


def test_a_placement_without_a_plan_is_not_audited(lab):
    """An arm for which no placement was planned cannot have been delivered."""
    evidence = lab.evidence("A1", effects={"B": {}})
    bare = replace(evidence, plan=replace(evidence.plan, placements={"A": evidence.plan.placements["A"]}))
    assert gates.evaluate(bare).gates[1].reason == "pages-not-audited"


def test_a_rank_without_a_table_is_not_audited(lab):
    """Tables that leave a rank out leave its pages unasked: the treatment is shown on every rank or not at all."""
    evidence = lab.evidence("A1", effects={"B": {}})
    alone = {
        arm: replace(one, tables=tuple(replace(table, ranks=(0,)) for table in one.tables))
        for arm, one in evidence.plan.placements.items()
    }
    gate = gates.evaluate(replace(evidence, plan=replace(evidence.plan, placements=alone))).gates[1]
    assert (gate.reason, gate.status) == ("pages-not-audited", Status.NOT_MEASURED)
    assert "ranks [1]" in gate.observed


@pytest.mark.parametrize("lost", ["marks", "distances"])
def test_what_characterises_needs_an_effect(lab, change, lost):
    """A1 without marks, or without distances, has no effect to report: its gate 2 is judged, and NOT_MEASURED."""
    evidence = lab.evidence("A1")
    assert gates.evaluate(evidence).status is Status.PASS
    bare = change(evidence, edits.without_marks) if lost == "marks" else replace(evidence, provenance={})
    verdict = gates.evaluate(bare)
    assert (verdict.status, verdict.gates[2].judged) == (Status.NOT_MEASURED, True)


def test_weighted_interleave_is_judged_by_its_weights():
    """3:1 over two nodes is 75 % and 25 %, within the tolerance of an interleave."""
    from pytest_engram.gates.placement import as_asked
    from pytest_engram.model import PageDistribution

    table = TablePlan(ranks=(0,), mode="weighted-interleave", nodes=(0, 1), weights=(3, 1))
    audit = PageDistribution(
        rank=0, moment=Moment.LOADED, table=0, identity="0:1", address=0, table_bytes=40_960_000, page_bytes=4096,
        pages={0: 7500, 1: 2500}, unplaced={}, covered_bytes=40_960_000, policy_text="", routes=("move_pages",),
    )  # fmt: skip
    assert as_asked(table, audit)
    assert not as_asked(table, replace(audit, pages={0: 5000, 1: 5000}))


def test_one_failed_base_leaves_a_sentence(lab, change):
    """A measured 0 in one A makes an infinite A/A effect: the open verdict keeps its words, without a warning."""

    def none_good(run):
        late = tuple(replace(one, ttft_ms=1e6) for one in run.serving[0].requests)
        return replace(run, serving=(replace(run.serving[0], requests=late),))

    evidence = lab.evidence(effects={"B": {"exposed_wait": -0.5}}, noise=0.02)
    verdict = gates.evaluate(change(evidence, none_good, lambda run: run.block == 2 and run.arm == "A"))
    assert verdict.gates[4].reason == "improvement-not-shown"


@pytest.mark.parametrize("lost", ["problem", "no time"])
def test_a_control_pair_without_a_reading_does_not_count(lab, lost):
    """Of six pairs one with a problem, or with lookups of 0 ns, leaves five, which cannot show a difference."""
    evidence = _placed(lab)
    assert gates.evaluate(evidence).gates[2].status is Status.PASS
    died = edits.edit(problems=(Problem(code="rank-died", message="it left", status=Status.INVALID),))
    spoil = died if lost == "problem" else edits.with_marks(lambda mark: replace(mark, start=mark.done))
    control = tuple(spoil(run) if run.index == 4 else run for run in evidence.control)
    rung = gates.evaluate(replace(evidence, control=control)).gates[2]
    assert (rung.reason, "5 pairs" in rung.observed) == ("control-without-difference", True)

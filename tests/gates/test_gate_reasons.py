"""Every reason of the table is reached by evidence that is broken in exactly one way."""

import math
from dataclasses import replace

import pytest

from pytest_engram import gates
from pytest_engram.model import (
    CorrectnessSample,
    Moment,
    Problem,
    ScheduledRun,
    Slo,
    Status,
    SweepSample,
    TablePlan,
    Workload,
)

CASES = {}


def reason(code, gate):
    """Register a function (lab, change) -> Evidence, or (Evidence, prior), under the reason it must give."""

    def keep(build):
        CASES[f"{code}:{build.__name__}"] = (code, gate, build)
        return build

    return keep


def _is_b(run):
    return run.arm == "B"


def _edit(**fields):
    return lambda run: replace(run, **fields)


def _b_runs_as_a(change, evidence):
    """The marked steps of B are A's own."""
    base = next(run for run in evidence.runs if run.arm == "A")
    return change(evidence, _edit(overlap=base.overlap), _is_b)


def _with_print(**values):
    return lambda run: replace(run, fingerprint={**run.fingerprint, **values})


def _with_cases(where, make):
    return lambda run: replace(run, **{where: make(getattr(run, where))})


def _with_audits(make):
    """Replace every page distribution by ``make(audit)``; None drops it."""

    def change(run):
        placed = (
            replace(sample, distributions=tuple(new for a in sample.distributions if (new := make(a)) is not None))
            for sample in run.placement
        )
        return replace(run, placement=tuple(placed))

    return change


def _with_marks(make):
    """Replace every lookup mark by ``make(mark)``."""

    def change(run):
        overlap = (
            replace(s, timelines=tuple(replace(t, lookups=tuple(map(make, t.lookups))) for t in s.timelines))
            for s in run.overlap
        )
        return replace(run, overlap=tuple(overlap))

    return change


def _without_marks(run):
    """A run whose steps were not marked."""
    return replace(run, overlap=tuple(replace(sample, timelines=()) for sample in run.overlap))


def _with_point(tokens, *, early):
    """A sweep's point whose marked step is the run's own, of another size: with early lookups or without."""

    def change(run):
        line = run.overlap[0].timelines[0]
        if early:
            marks = tuple(replace(mark, submit=950 + n) for n, mark in enumerate(line.lookups))
            spans = tuple(replace(span, start=1000, end=1900) for span in line.spans if span.layer == 0)
            line = replace(line, lookups=marks, spans=spans)
        point = SweepSample(
            rank=0, tokens=tokens, peers=1, lookup_ns=(1,), exposed_ns=(0,), main_ns=(1,), quiet_main_ns=(1,),
            source_bytes=1, timeline=replace(line, tokens=tokens),
        )  # fmt: skip
        return replace(run, sweep=(point,))

    return change


def _with_requests(make):
    def change(run):
        return replace(run, serving=tuple(replace(s, requests=tuple(map(make, s.requests))) for s in run.serving))

    return change


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
    return change(lab.evidence(), _with_cases("correctness_after", lambda old: (*old, bad)), lambda run: run.index == 9)


def _stop(change, evidence, after):
    """Every run later than ``after`` was not run, because a row was wrong."""
    stop = Problem(code="stopped-after-correctness", message="an earlier run gave wrong rows", status=Status.BLOCKED)
    return change(evidence, _edit(problems=(stop,)), lambda run: run.index > after)


@reason("stopped-after-correctness", 0)
def _cut_short(lab, change):
    return _stop(change, lab.evidence(), 5)


@reason("no-correctness", 0)
def _unchecked_after(lab, change):
    return change(lab.evidence(), _edit(correctness_after=()), _is_b)


@reason("no-correctness", 0)
def _nothing_supported(lab, change):
    def unsupported(samples):
        return tuple(replace(sample, supported=False) for sample in samples)

    return change(lab.evidence(), _with_cases("correctness_before", unsupported), _is_b)


@reason("cases-missing", 0)
def _candidate_checks_less(lab, change):
    return change(lab.evidence(), _with_cases("correctness_before", lambda old: old[1:]), _is_b)


@reason("no-correctness", 0)
def _one_run_unchecked(lab, change):
    return change(lab.evidence(), _edit(correctness_before=()), lambda run: run.index == 9)


@reason("cases-missing", 0)
def _checked_on_one_rank_of_two(lab, change):
    return change(lab.evidence(ranks=2), _edit(correctness_after=lab.cases()), lambda run: run.index == 9)


def _cases_without(lab, change, lost):
    kept = tuple(sample for sample in lab.cases() if not lost(sample))
    return change(lab.evidence(), _edit(correctness_before=kept, correctness_after=kept))


@reason("cases-missing", 0)
def _engine_never_checked(lab, change):
    return _cases_without(lab, change, lambda sample: sample.case == "engine-edges")


@reason("cases-missing", 0)
def _no_hash_line(lab, change):
    return _cases_without(lab, change, lambda sample: sample.contract.startswith("H"))


@reason("cases-missing", 0)
def _outputs_in_one_run_only(lab, change):
    outputs = CorrectnessSample(case="engine-outputs", contract="L11", passed=True)
    return change(lab.evidence(), _with_cases("correctness_after", lambda old: (*old, outputs)), lambda r: r.index == 9)


@reason("storage-not-checked", 0)
def _no_storage_case(lab, change):
    def less(samples):
        return tuple(sample for sample in samples if sample.contract != "S6")

    drop = [_with_cases(name, less) for name in ("correctness_before", "correctness_after")]
    return change(change(_placed(lab), drop[0]), drop[1])


@reason("protocol-changed", 0)
def _margin_moved_afterwards(lab, change):
    evidence = lab.evidence()
    looser = replace(evidence.plan.experiment, alpha=0.05)
    return replace(evidence, plan=replace(evidence.plan, experiment=looser))


@reason("protocol-changed", 0)
def _run_of_another_protocol(lab, change):
    return change(lab.evidence(), _with_print(protocol="0" * 64), lambda run: run.index == 5)


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
    return change(lab.evidence(), _edit(started_at="2026-11-20T09:00:00Z"), lambda run: run.index == 5)


@reason("schedule-altered", 0)
def _time_that_cannot_be_read(lab, change):
    return change(lab.evidence(), _edit(started_at="yesterday"), lambda run: run.index == 5)


@reason("unscheduled-run", 0)
def _repeated_run(lab, change):
    evidence = lab.evidence()
    return replace(evidence, runs=(*evidence.runs, evidence.runs[-1]))


# ---------------------------------------------------------------- gate 1


def _sampled(field, rank=0, **fields):
    """A run in which the fields of one rank's sample are others."""
    return lambda run: replace(run, **{field: tuple(
        replace(one, **fields) if one.rank == rank else one for one in getattr(run, field))})  # fmt: skip


def _timed(**fields):
    """A run in which the fields of every timeline are others."""

    def change(run):
        lines = (tuple(replace(line, **fields) for line in one.timelines) for one in run.overlap)
        overlap = (replace(one, timelines=made) for one, made in zip(run.overlap, lines, strict=True))
        return replace(run, overlap=tuple(overlap))

    return change


def _layer_lost(run):
    line = run.overlap[0].timelines[0]
    return _sampled("overlap", timelines=(replace(line, lookups=line.lookups[1:]),))(run)


def _loaded(make):
    """A run whose loads are ``make(load)``."""
    return lambda run: replace(run, serving=tuple(map(make, run.serving)))


def _first_twice(load):
    return replace(load, requests=(load.requests[0], *load.requests[:-1]))


POINT = SweepSample(
    rank=0, tokens=16, peers=1, lookup_ns=(1,), exposed_ns=(0,), main_ns=(1,), quiet_main_ns=(1,), source_bytes=1
)  # fmt: skip
UNPLANNED = {
    "no overlap": _edit(overlap=()), "no compute": _edit(compute=()), "no load": _edit(serving=()),
    "rank 0 twice": lambda run: replace(run, overlap=(*run.overlap[:1], *run.overlap)),
    "rank 1 without compute": lambda run: replace(run, compute=run.compute[:1]),
    "rank 1 without load": lambda run: replace(run, serving=run.serving[:1]),
    "unmarked tokens": _sampled("compute", tokens=1), "unmarked tokens of rank 1": _sampled("compute", 1, tokens=1),
    "marked tokens": _timed(tokens=1), "marks of another rank": _timed(rank=0), "no lookup": _timed(lookups=()),
    "a layer less": _layer_lost, "more steps": _sampled("compute", step_ns=(1, 1), main_ns=(1, 1)),
    "fewer main times": _sampled("compute", main_ns=()), "step of 0 ns": _sampled("compute", step_ns=(0,)),
    "main of −1 ns": _sampled("compute", main_ns=(-1,)), "endless step": _sampled("compute", step_ns=(math.inf,)),
    "other reuse": _sampled("overlap", state="repeated"), "no bytes": _sampled("overlap", source_bytes=0),
    "nothing distinct": _sampled("overlap", distinct_bytes=0),
    "more distinct than read": _sampled("overlap", distinct_bytes=811_009),
    "distinct in one run": _sampled("overlap", distinct_bytes=811_008),
    "timer of 0 ns": _sampled("overlap", resolution_ns=0), "timer of 1 s": _sampled("overlap", resolution_ns=10**9),
    "sweep without rank 1": _edit(sweep=(replace(POINT, peers=2),)),
    "sweep without bytes": _edit(sweep=(replace(POINT, source_bytes=0),)),
    "fewer requests": _loaded(lambda load: replace(load, requests=load.requests[:100])),
    "one request twice": _loaded(_first_twice),
    "wider limits": _loaded(lambda load: replace(load, slo=Slo(ttft_ms=1e9, itl_ms=1e9))),
    "another rate": _loaded(lambda load: replace(load, rate=1.0)),
    "shorter than its arrivals": _loaded(lambda load: replace(load, duration_s=0.1)),
    "later arrivals": _loaded(lambda load: replace(load, requests=tuple(
        replace(one, arrival_ms=one.arrival_ms + 1) for one in load.requests))),
    "a link of 0 B/s": _edit(drift={"graph_replays": 0.0, "link_bytes_per_s": 0.0}),
}  # fmt: skip


@reason("samples-not-as-planned", 1)
def _half_the_requests(lab, change):
    return change(lab.evidence(), UNPLANNED["fewer requests"], _is_b)


@pytest.mark.parametrize("broken", UNPLANNED.values(), ids=UNPLANNED)
def test_samples_are_those_that_were_planned(lab, change, broken):
    """One run that measured anything else than the plan orders voids the experiment at gate 1; as planned it passes."""
    evidence = lab.evidence(ranks=2)
    assert gates.evaluate(evidence).gates[1].status is Status.PASS
    rung = gates.evaluate(change(evidence, broken, lambda run: run.index == 7)).gates[1]
    assert (rung.reason, rung.status) == ("samples-not-as-planned", Status.INVALID)
    assert "run 7" in rung.observed


@reason("undeclared-difference", 1)
def _another_grid_in_the_twin(lab, change):
    return change(lab.evidence("B2"), _with_marks(lambda mark: replace(mark, grid=5)), lambda run: run.arm == "A'")


@reason("no-timelines", 1)
def _launches_of_one_rank_only(lab, change):
    return change(lab.evidence("B2", ranks=2), _sampled("overlap", 1, timelines=()), lambda run: run.arm == "cap16")


@reason("undeclared-difference", 1)
def _another_kernel_in_b(lab, change):
    return change(lab.evidence(), _with_print(**{"machine.kernel": "6.13"}), _is_b)


@reason("undeclared-difference", 1)
def _another_grid_in_b(lab, change):
    return change(lab.evidence(), _with_marks(lambda mark: replace(mark, grid=96)), _is_b)


@reason("undeclared-difference", 1)
def _regrouped_without_saying(lab, change):
    evidence = lab.evidence("A1", effects={"B": {}}, by_rank={"B": {0: 0.3, 1: -0.3}})
    return change(evidence, _with_print(groups="[[0], [1]]"), _is_b)


@reason("no-fingerprint", 1)
def _no_print(lab, change):
    return change(lab.evidence(), _edit(fingerprint={}), lambda run: run.index == 3)


@reason("pages-not-audited", 1)
def _moment_missing(lab, change):
    return change(_placed(lab), _with_audits(lambda a: None if (a.rank, a.moment) == (1, Moment.LOADED) else a), _is_b)


@reason("pages-not-audited", 1)
def _no_route_answered(lab, change):
    return change(_placed(lab), _with_audits(lambda audit: replace(audit, routes=())), _is_b)


@reason("pages-not-covered", 1)
def _half_covered(lab, change):
    return change(_placed(lab), _with_audits(lambda audit: replace(audit, covered_bytes=audit.table_bytes // 2)), _is_b)


@reason("pages-unplaced", 1)
def _not_resident(lab, change):
    def lose(audit):
        (node, count), *_ = audit.pages.items()
        return replace(audit, pages={node: count - 500}, unplaced={"ENOENT": 500})

    return change(_placed(lab), _with_audits(lose), _is_b)


@reason("not-as-asked", 1)
def _policy_is_not_placement(lab, change):
    return change(_placed(lab), _with_audits(lambda audit: replace(audit, pages={0: 5000, 1: 5000})), _is_b)


@reason("not-as-asked", 1)
def _moved_after_load(lab, change):
    def migrate(audit):
        return replace(audit, pages={0: 9000, 1: 1000}) if audit.moment is Moment.REPLAYED else audit

    return change(_placed(lab), _with_audits(migrate), lambda run: run.index == 4)


def _in_huge_pages(lab, change, huge_bytes):
    """B1 over anonymous huge pages, of which the kernel gave so many bytes."""
    hold = {**lab.experiment("B1").hold, "backing": "anon-thp"}
    return change(lab.evidence("B1", hold=hold), _with_audits(lambda audit: replace(audit, huge_bytes=huge_bytes)))


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
    return change(evidence, _with_audits(lambda audit: replace(audit, pages={0: 5400, 1: 4600})), _is_b)


@reason("not-shared", 1)
def _private_copy(lab, change):
    def own(audit):
        return replace(audit, identity="0:99") if audit.rank == 1 else audit

    return change(_placed(lab), _with_audits(own), lambda run: run.arm == "A")


@reason("not-shared", 1)
def _anonymous_memory_for_two_ranks(lab, change):
    return change(_placed(lab), _with_audits(lambda audit: replace(audit, identity="anon")), lambda run: run.arm == "A")


@reason("not-separate", 1)
def _one_object_for_both_sockets(lab, change):
    return change(_placed(lab), _with_audits(lambda audit: replace(audit, identity="0:40")), _is_b)


@reason("no-treatment", 1)
def _default_lands_where_bind_does(lab, change):
    arms = {"A": {"policy": "default"}, "B": {"policy": "bind:0"}}
    return lab.evidence("A1", arms=arms, effects={"B": {}})


@reason("no-treatment", 1)
def _caps_above_the_tiles(lab, change):
    return lab.evidence("B2", arms={"A": {"cap": 96}, "B": {"cap": 132}}, effects={"B": {}}, engine="cuda")


@reason("no-timelines", 1)
def _unmarked(lab, change):
    return change(lab.evidence(), _without_marks, _is_b)


@reason("no-timelines", 1)
def _no_launches(lab, change):
    return change(lab.evidence("B2", engine="cuda"), _without_marks, lambda run: run.arm == "cap16")


@reason("submission-not-as-asked", 1)
def _early_arm_submits_late(lab, change):
    return change(lab.evidence(), _with_marks(lambda mark: replace(mark, submit=mark.wait_before + 100)), _is_b)


@reason("submission-not-as-asked", 1)
def _submitted_after_its_own_layer_began(lab, change):
    def begun(run):
        line = run.overlap[0].timelines[0]
        return _timed(spans=tuple(replace(span, start=500) if span.layer == 1 else span for span in line.spans))(run)

    return change(lab.evidence(), begun, _is_b)


@reason("submission-not-as-asked", 1)
def _submitted_after_its_consumer_went_on(lab, change):
    return change(lab.evidence(), _with_marks(lambda mark: replace(mark, submit=mark.wait_after + 1)),
                  lambda run: run.arm == "A'")  # fmt: skip


@reason("submission-not-as-asked", 1)
def _late_arm_submits_early(lab, change):
    return change(lab.evidence(), _with_marks(lambda mark: replace(mark, submit=950)), lambda run: run.arm == "A'")


@reason("submission-not-as-asked", 1)
def _inline_arm_keeps_prefetching(lab, change):
    return _b_runs_as_a(change, lab.evidence("more/B1-inline", effects={}))


@reason("submission-not-as-asked", 1)
def _small_batch_looked_up_inline(lab, change):
    return change(lab.evidence("more/B1-inline", effects={}), _with_point(16, early=False), _is_b)


@reason("no-treatment", 1)
def _threshold_above_every_batch(lab, change):
    return lab.evidence("more/B1-inline", arms={"A": {"inline_above": None}, "B": {"inline_above": 4096}}, effects={})


@reason("wait-not-as-asked", 1)
def _stream_arm_waits_for_its_layer(lab, change):
    return change(lab.evidence("more/B1-wait", effects={}), _with_marks(lambda m: replace(m, wait_after=m.done)), _is_b)


@reason("treatment-delivered", 1)
def _stream_has_nothing_later_yet(lab, change):
    """What is submitted after a wait began is not waited for."""

    def later(mark):
        return replace(mark, wait_after=mark.done) if mark.layer == 1 else replace(mark, submit=mark.start)

    return change(lab.evidence("more/B1-wait", effects={}), _with_marks(later), _is_b)


@reason("treatment-delivered", 1)
def _stream_done_within_the_timers_resolution(lab, change):
    sooner = _with_marks(lambda mark: replace(mark, wait_after=mark.wait_after - 30))
    return change(lab.evidence("more/B1-wait", effects={}), sooner, _is_b)


@reason("no-treatment", 1)
def _layer_arm_waits_for_the_stream(lab, change):
    last = _with_marks(lambda mark: replace(mark, wait_after=2_100_000))
    return change(lab.evidence("more/B1-wait", effects={}, noise=0.0), last, lambda run: run.arm != "B")


@reason("no-timelines", 1)
def _wait_without_marks(lab, change):
    return change(lab.evidence("more/B1-wait", effects={}), _without_marks, _is_b)


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
    return change(lab.evidence("cuda/B1-graph", effects={}, engine="cuda"), _edit(drift={}), _is_b)


@reason("not-a-serial-queue", 2)
def _two_streams(lab, change):
    return lab.evidence("more/B1-streams", effects={})


@reason("not-a-serial-queue", 2)
def _two_streams_whose_lookups_never_met(lab, change):
    return _b_runs_as_a(change, lab.evidence("more/B1-streams", effects={}))


@reason("cap-not-obeyed", 1)
def _cap_ignored(lab, change):
    evidence = lab.evidence("B2", engine="cuda")
    return change(evidence, _with_marks(lambda mark: replace(mark, grid=66)), lambda run: run.arm == "cap16")


@reason("no-receipts", 1)
def _backend_without_receipt(lab, change):
    def drop(run):
        kept = {key: value for key, value in run.fingerprint.items() if not key.startswith("backend.")}
        return replace(run, fingerprint=kept)

    return change(lab.evidence("patch"), drop, _is_b)


@reason("identical-code", 1)
def _candidate_is_the_base(lab, change):
    return change(lab.evidence("patch"), _with_print(**{"backend.commit": "base"}), _is_b)


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
    return change(lab.evidence(), _edit(drift={"cpu_mhz": 2400.0}), lambda run: run.block > 4)


@reason("throttled", 2)
def _too_hot(lab, change):
    return change(lab.evidence(), _edit(drift={"throttle_reasons": 0x40}), lambda run: run.block > 4)


@reason("not-a-serial-queue", 2)
def _lookups_overlap(lab, change):
    def earlier(mark):
        return replace(mark, start=mark.start - 500_000) if mark.layer == 6 else mark

    return change(lab.evidence(), _with_marks(earlier), _is_b)


@reason("not-a-serial-queue", 2)
def _consumer_ran_ahead(lab, change):
    return change(lab.evidence(), _with_marks(lambda mark: replace(mark, wait_after=mark.done - 100_000)), _is_b)


@reason("not-a-serial-queue", 2)
def _kernel_of_negative_length(lab, change):
    return change(lab.evidence(), _with_marks(lambda mark: replace(mark, start=mark.done + 10)), _is_b)


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
    return change(lab.evidence("patch"), _with_print(**{"backend.mode": "interpreter"}), _is_b)


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
    longer = _with_marks(lambda mark: replace(mark, wait_before=mark.wait_before - 100_000))
    return change(lab.evidence(), longer, lambda run: run.arm == "A'")


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
    return change(lab.evidence("patch"), _without_marks, lambda run: run.block == 3)


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

    return change(lab.evidence(), _with_requests(fail), lambda run: run.index == 7)


@reason("no-successful-requests", 4)
def _limits_out_of_reach(lab, change):
    return change(lab.evidence(), _with_requests(lambda request: replace(request, ttft_ms=1e6)))


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
    evidence = change(lab.evidence(), _edit(problems=(lost,)), lambda run: run.index == 4)
    first = gates.evaluate(evidence).gates[0]
    assert (first.status, first.reason) == (status, "rank-died")
    assert first.next_step


def test_a_problem_can_never_pass(lab):
    """A problem that calls itself PASS is INVALID."""
    lost = Problem(code="odd", message="odd", status=Status.PASS)
    assert gates.evaluate(replace(lab.evidence(), problems=(lost,))).status is Status.INVALID


def test_a_placement_without_a_plan_is_not_audited(lab):
    """An arm for which no placement was planned cannot have been delivered."""
    evidence = lab.evidence("A1", effects={"B": {}})
    bare = replace(evidence, plan=replace(evidence.plan, placements={"A": evidence.plan.placements["A"]}))
    assert gates.evaluate(bare).gates[1].reason == "pages-not-audited"


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

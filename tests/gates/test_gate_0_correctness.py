"""Gate 0: a broken contract, a missing case, an altered record."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_engram import gates
from pytest_engram.gates.correctness import explain
from pytest_engram.model import CorrectnessSample, Problem, ScheduledRun, Status

edits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("edits.py"))))
CASES, reason = edits.cases()


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
    return change(lab.evidence(), edits.edit(correctness_after=()), edits.is_b)


@reason("no-correctness", 0)
def _nothing_supported(lab, change):
    def unsupported(samples):
        return tuple(replace(sample, supported=False) for sample in samples)

    return change(lab.evidence(), edits.with_cases("correctness_before", unsupported), edits.is_b)


@reason("cases-missing", 0)
def _candidate_checks_less(lab, change):
    return change(lab.evidence(), edits.with_cases("correctness_before", lambda old: old[1:]), edits.is_b)


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
    return change(change(edits.placed(lab), drop[0]), drop[1])


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


@pytest.mark.parametrize(("code", "gate", "build"), CASES.values(), ids=CASES)
def test_reason_is_reached(reached, code, gate, build):
    """Evidence broken in one way stops at its own gate, with its own reason, that reason's status and a next step."""
    reached(code, gate, build)


def test_messages_name_the_place(lab, change):
    """A broken contract names arm, run, moment, case, layer, token, head, expected and seen."""
    observed = gates.evaluate(_wrong_row(lab, change)).gates[0].observed
    for word in ("run 9", "after", "L1 rows", "layer 14", "token 3", "head 7", "expected 0, seen 1"):
        assert word in observed
    assert explain(CorrectnessSample(case="rows", contract="L1", passed=False, token=3)) == "L1 rows: token 3"


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

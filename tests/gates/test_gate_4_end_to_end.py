"""Gate 4: goodput, guards, and what is required beforehand."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_engram import gates

edits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("edits.py"))))
CASES, reason = edits.cases()


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
    return edits.placed(lab)


@pytest.mark.parametrize(("code", "gate", "build"), CASES.values(), ids=CASES)
def test_reason_is_reached(reached, code, gate, build):
    """Evidence broken in one way stops at its own gate, with its own reason, that reason's status and a next step."""
    reached(code, gate, build)


def test_one_failed_base_leaves_a_sentence(lab, change):
    """A measured 0 in one A makes an infinite A/A effect: the open verdict keeps its words, without a warning."""

    def none_good(run):
        late = tuple(replace(one, ttft_ms=1e6) for one in run.serving[0].requests)
        return replace(run, serving=(replace(run.serving[0], requests=late),))

    evidence = lab.evidence(effects={"B": {"exposed_wait": -0.5}}, noise=0.02)
    verdict = gates.evaluate(change(evidence, none_good, lambda run: run.block == 2 and run.arm == "A"))
    assert verdict.gates[4].reason == "improvement-not-shown"

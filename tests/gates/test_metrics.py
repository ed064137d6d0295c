"""Each metric reads its own samples, pools or separates ranks, and is absent with a reason."""

from dataclasses import replace

import pytest

from pytest_engram import metrics
from pytest_engram.model import ComputeSample, RequestRecord, Slo


@pytest.fixture(scope="module")
def run(lab):
    """One run of B1's base arm without noise."""
    evidence = lab.evidence("B1", noise=0.0)
    return next(run for run in evidence.runs if run.arm == "A")


@pytest.fixture(scope="module")
def empty(run):
    """The same run without a sample."""
    return replace(run, overlap=(), compute=(), serving=())


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("lookup", 1e6), ("exposed_wait", 4e5), ("queueing", 0.0), ("main_compute", 1e7), ("step", 1.2e7),
        ("goodput", 50.0), ("rejection_rate", 0.0), ("itl_p95", 5.0), ("itl_p99", 5.0),
        ("source_bandwidth", 811_008 / 2e-3), ("waited", 4e5),
    ],
)  # fmt: skip
def test_readings(run, metric, expected):
    """Every metric gives the number that its samples were made with."""
    assert metrics.value(run, metric) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_absence_has_a_reason(empty, metric):
    """Without samples a metric is absent and says why; it is never 0."""
    reading = metrics.measure(empty, metric)
    assert reading.value is None
    assert reading.reason


def test_tails_need_enough_samples(run):
    """P99 of 99 requests is absent, naming both counts; with 100 it exists."""
    sample = run.serving[0]
    few = replace(run, serving=(replace(sample, requests=sample.requests[:99]),))
    enough = replace(run, serving=(replace(sample, requests=sample.requests[:100]),))
    assert metrics.measure(few, "ttft_p99").reason == "99 samples, P99 needs 100"
    assert metrics.value(enough, "ttft_p99") is not None
    assert metrics.value(few, "ttft_p95") is not None


def test_ranks_are_pooled_or_read_alone(run):
    """``name`` pools the ranks, ``name@1`` reads rank 1, an absent rank is absent."""
    slow = ComputeSample(rank=1, tokens=64, step_ns=(40,), main_ns=(30,))
    both = replace(run, compute=(ComputeSample(rank=0, tokens=64, step_ns=(20,), main_ns=(10,)), slow))
    assert [metrics.value(both, name) for name in ("main_compute", "main_compute@1", "main_compute@0")] == [20, 30, 10]
    assert metrics.value(both, "main_compute@2") is None


def test_a_step_s_lookups_and_waits_are_summed(run):
    """ΣL_i and ΣE_i of one step; the median of ΣL_i over steps, absent where no step looked up."""
    sample = run.overlap[0]
    assert metrics.totals(sample.timelines[0]) == (2_000_000, 400_000)
    assert metrics.busy_ns(sample) == 2e6
    assert metrics.busy_ns(replace(sample, timelines=())) is None


def test_communication_absent_on_one_rank_keeps_its_reason(run):
    """The sample's own reason for having no collectives is handed on."""
    assert metrics.measure(run, "communication").reason == "one rank has no collectives"


@pytest.mark.parametrize(
    ("request_fields", "good"),
    [
        ({"ttft_ms": 10.0, "itl_ms": (5.0, 5.0)}, True),
        ({"ttft_ms": 10.1, "itl_ms": (5.0,)}, False),
        ({"ttft_ms": 10.0, "itl_ms": (1.0, 9.2)}, False),
        ({"ttft_ms": 10.0, "itl_ms": (1.0, 8.9)}, True),
        ({"ttft_ms": 10.0}, True),
        ({"ttft_ms": None}, False),
        ({"ttft_ms": 1.0, "status": "failed"}, False),
    ],
)
def test_goodput_counts_requests_within_both_limits(request_fields, good):
    """TTFT and the mean token gap must keep the limits, and the request must have ended well."""
    fields = {"arrival_ms": 0.0, "prompt_tokens": 1, "output_tokens": 2, "status": "ok", **request_fields}
    assert metrics.meets(RequestRecord(**fields), Slo(ttft_ms=10.0, itl_ms=5.0)) is good


def test_rejections_count_every_request_that_did_not_end_well(run):
    """Rejected, failed and incomplete over planned."""
    sample = run.serving[0]
    states = ["rejected", "failed", "incomplete", *["ok"] * 17]
    requests = tuple(replace(r, status=state) for r, state in zip(sample.requests, states, strict=False))
    assert metrics.value(replace(run, serving=(replace(sample, requests=requests),)), "rejection_rate") == 0.15


def test_a_load_of_no_duration_has_no_rate(run):
    """Requests over 0 s are no load: absent with a reason."""
    reading = metrics.measure(replace(run, serving=(replace(run.serving[0], duration_s=0.0),)), "goodput")
    assert reading == metrics.Reading(None, "no open-loop load was served")


def test_unknown_metric_is_an_error(run):
    """A name that the table does not have is never read as absent."""
    with pytest.raises(KeyError):
        metrics.measure(run, "luck")

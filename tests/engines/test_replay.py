"""Loads and fixed batches: decided by the plan and the seed alone."""

from itertools import islice

import numpy as np
import pytest

from pytest_engram.model import ServingPlan, Slo, Workload
from pytest_engram.serving.replay import fixed_batches, make_load


def plan(**fields):
    """A load of 400 requests."""
    base = {"rate": 50.0, "requests": 400, "prompt_tokens": (8, 24), "output_tokens": (2, 4)}
    return ServingPlan(**base, slo=Slo(ttft_ms=100, itl_ms=50), **fields)


def test_load_is_fixed_by_its_seed():
    """The same plan and seed give the same requests; another seed gives others."""
    assert make_load(plan(), 3, 1000) == make_load(plan(), 3, 1000)
    assert make_load(plan(), 3, 1000) != make_load(plan(), 4, 1000)


def test_load_does_not_depend_on_the_server():
    """Limits of the server change neither arrivals nor tokens."""
    assert make_load(plan(max_batch_tokens=8, max_running=1, max_waiting=0), 3, 1000) == make_load(plan(), 3, 1000)


def test_load_has_the_shape_that_was_asked_for():
    """Poisson gaps have the rate's mean and spread, fixed ones none; lengths fill their closed ranges."""
    load = make_load(plan(), 3, 1000)
    gaps = np.diff([0.0, *(request.arrival_s for request in load)])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.2)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.25)
    assert {len(request.prompt) for request in load} == set(range(8, 25))
    assert {request.output_tokens for request in load} == {2, 3, 4}
    assert 0 <= min(min(r.prompt) for r in load) < max(max(r.prompt) for r in load) < 1000
    fixed = make_load(plan(arrivals="fixed"), 3, 1000)
    assert [request.arrival_s for request in fixed] == pytest.approx([(i + 1) / 50 for i in range(400)])


def test_states_of_fixed_batches():
    """Low-reuse draws fresh tokens every step, repeated keeps the first ones; both start alike, by the seed."""
    fresh, same = (list(islice(fixed_batches(Workload(tokens=32), 1, 9000, s), 3)) for s in ("low-reuse", "repeated"))
    assert all(np.array_equal(batch.token_ids, same[0].token_ids) for batch in same)
    assert np.array_equal(fresh[0].token_ids, same[0].token_ids)
    assert np.mean(fresh[0].token_ids == fresh[1].token_ids) < 0.1
    assert all(len(batch.token_ids) == 32 and (batch.window >= 0).all() for batch in fresh)

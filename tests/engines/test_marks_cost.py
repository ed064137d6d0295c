"""What marks cost: paired steps with and without them, in random order, beside nothing else."""

import random
import time
from itertools import islice
from statistics import median

import pytest

from pytest_engram.engines.protocol import StepSettings
from pytest_engram.gpu.timeline import HostMarks
from pytest_engram.model import Workload
from pytest_engram.serving.replay import fixed_batches

pytestmark = pytest.mark.alone
STEP_NS, LIMIT, PAIRS, MOST, Z = 5_000_000, 0.01, 200, 1600, 1.645


def cost(engine, batches):
    """(median step ns without marks, median of the paired differences in ns, its upper one-sided 95 % bound).

    The bound is the order statistic that the sign test gives: no pair is left out and none weighs more than its rank.
    A machine that others disturb needs more pairs until its bound is as near to the median: at most ``MOST``.
    """
    order, plain, differences = random.Random(7), [], []  # noqa: S311 - an order, no secret
    for number in range(-20, MOST):
        batch, step = batches[number % len(batches)], {}
        for marks in order.sample((True, False), 2):
            step[marks] = engine.step(batch, StepSettings(), marks=marks).step_ns
        if number >= 0:
            plain.append(step[False])
            differences.append(step[True] - step[False])
        if number + 1 in (PAIRS, 2 * PAIRS, 4 * PAIRS, MOST):
            pairs = number + 1
            upper = sorted(differences)[min(pairs - 1, round((pairs + Z * pairs**0.5) / 2))]
            if upper <= LIMIT * median(plain):
                break
    return median(plain), median(differences), upper


@pytest.fixture
def workbench(bench):
    """(engine, batches) whose step takes at least five milliseconds."""
    engine = bench.engine(hidden=512, layers=16, gemms_per_layer=2, tokens=64)
    return engine, list(islice(fixed_batches(Workload(tokens=64), 3, bench.vocabulary, "low-reuse"), 8))


def test_marks_cost_at_most_one_percent(workbench, record_property):
    """Marks cost at most 1 % of a step of 5 ms or more, by the upper bound of paired steps."""
    step, middle, upper = cost(*workbench)
    record_property("marks_cost", f"{middle / 1e3:.1f} us (upper bound {upper / 1e3:.1f}) of {step / 1e6:.2f} ms")
    print(f"marks: {middle / 1e3:.1f} µs, at most {upper / 1e3:.1f} µs, of {step / 1e6:.2f} ms ({upper / step:.2%})")
    assert step >= STEP_NS
    assert upper <= LIMIT * step


@pytest.mark.slow
def test_expensive_marks_are_seen(workbench, monkeypatch):
    """Negative control: marks that each take 10 µs more cost more than 1 %, and the same comparison says so."""
    honest = HostMarks._now

    def slow(self):
        end = time.perf_counter_ns() + 10_000 * self._full
        while time.perf_counter_ns() < end:
            pass
        return honest(self)

    monkeypatch.setattr(HostMarks, "_now", slow)
    step, middle, _ = cost(*workbench)
    assert middle > LIMIT * step

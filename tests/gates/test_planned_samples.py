"""Gate 1 takes the samples that were planned and no others."""

import math
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_engram import gates
from pytest_engram.model import Slo, Status, SweepSample

edits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("edits.py"))))


def _layer_lost(run):
    line = run.overlap[0].timelines[0]
    return edits.sampled("overlap", timelines=(replace(line, lookups=line.lookups[1:]),))(run)


def _doubled(run):
    return edits.sampled("overlap", timelines=run.overlap[0].timelines * 2)(run)


def _loaded(make):
    """A run whose loads are ``make(load)``."""
    return lambda run: replace(run, serving=tuple(map(make, run.serving)))


def _every_other_backwards(run):
    return run if run.index % 2 else _loaded(lambda load: replace(load, requests=load.requests[::-1]))(run)


def _first_twice(load):
    return replace(load, requests=(load.requests[0], *load.requests[:-1]))


POINT = SweepSample(
    rank=0, tokens=16, peers=1, lookup_ns=(1,), exposed_ns=(0,), main_ns=(1,), quiet_main_ns=(1,), source_bytes=1
)  # fmt: skip
UNPLANNED = {
    "no overlap": edits.edit(overlap=()), "no compute": edits.edit(compute=()), "no load": edits.edit(serving=()),
    "rank 0 twice": lambda run: replace(run, overlap=(*run.overlap[:1], *run.overlap)),
    "rank 1 without compute": lambda run: replace(run, compute=run.compute[:1]),
    "rank 1 without load": lambda run: replace(run, serving=run.serving[:1]),
    "unmarked tokens": edits.sampled("compute", tokens=1),
    "unmarked tokens of rank 1": edits.sampled("compute", 1, tokens=1),
    "marked tokens": edits.timed(tokens=1), "marks of another rank": edits.timed(rank=0),
    "no lookup": edits.timed(lookups=()),
    "a layer less": _layer_lost, "more steps": edits.sampled("compute", step_ns=(1, 1), main_ns=(1, 1)),
    "fewer main times": edits.sampled("compute", main_ns=()), "step of 0 ns": edits.sampled("compute", step_ns=(0,)),
    "main of −1 ns": edits.sampled("compute", main_ns=(-1,)),
    "endless step": edits.sampled("compute", step_ns=(math.inf,)),
    "other reuse": edits.sampled("overlap", state="repeated"), "no bytes": edits.sampled("overlap", source_bytes=0),
    "nothing distinct": edits.sampled("overlap", distinct_bytes=0),
    "more distinct than read": edits.sampled("overlap", distinct_bytes=811_009),
    "distinct in one run": edits.sampled("overlap", distinct_bytes=811_008),
    "timer of 0 ns": edits.sampled("overlap", resolution_ns=0),
    "timer coarser than 1 ms": edits.sampled("overlap", resolution_ns=10**6 + 1),
    "sweep without rank 1": edits.edit(sweep=(replace(POINT, peers=2),)),
    "sweep without bytes": edits.edit(sweep=(replace(POINT, source_bytes=0),)),
    "sweep without bytes of rank 1": edits.edit(sweep=(
        replace(POINT, peers=2), replace(POINT, peers=2, rank=1, source_bytes=0))),
    "fewer requests": _loaded(lambda load: replace(load, requests=load.requests[:100])),
    "one request twice": _loaded(_first_twice),
    "wider limits": _loaded(lambda load: replace(load, slo=Slo(ttft_ms=1e9, itl_ms=1e9))),
    "another rate": _loaded(lambda load: replace(load, rate=1.0)),
    "shorter than its arrivals": _loaded(lambda load: replace(load, duration_s=0.1)),
    "later arrivals": _loaded(lambda load: replace(load, requests=tuple(
        replace(one, arrival_ms=one.arrival_ms + 1) for one in load.requests))),
    "the same step twice": _doubled,
    "prompts of one token": edits.with_requests(lambda one: replace(one, prompt_tokens=1)),
    "answers cut short": edits.with_requests(lambda one: replace(one, output_tokens=2, itl_ms=one.itl_ms[:1])),
    "a token without a time": edits.with_requests(lambda one: replace(one, itl_ms=one.itl_ms[1:])),
    "no first token": edits.with_requests(lambda one: replace(one, ttft_ms=None)),
    "first token before its request": edits.with_requests(lambda one: replace(one, ttft_ms=-1.0)),
    "endless gap": edits.with_requests(lambda one: replace(one, itl_ms=(*one.itl_ms[1:], math.inf))),
    "a counter that is no number": edits.edit(drift={"graph_replays": 0.0, "x.throttle_reasons": math.nan}),
    "a link of 0 B/s": edits.edit(drift={"graph_replays": 0.0, "link_bytes_per_s": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("broken", UNPLANNED.values(), ids=UNPLANNED)
def test_samples_are_those_that_were_planned(lab, change, broken):
    """One run that measured anything else than the plan orders voids the experiment at gate 1; as planned it passes."""
    evidence = lab.evidence(ranks=2)
    assert gates.evaluate(evidence).gates[1].status is Status.PASS
    rung = gates.evaluate(change(evidence, broken, lambda run: run.index == 7)).gates[1]
    assert (rung.reason, rung.status) == ("samples-not-as-planned", Status.INVALID)
    assert "run 7" in rung.observed


ALIKE = ("no bytes", "nothing distinct", "more distinct than read", "fewer requests", "one request twice")


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_wrong_in_every_run_is_wrong(lab, change, name):
    """What cannot be is found though no run differs from the first."""
    rung = gates.evaluate(change(lab.evidence(), UNPLANNED[name])).gates[1]
    assert (rung.reason, "the first run" in rung.observed) == ("samples-not-as-planned", False)


EDGES = {
    "the finest timer": edits.sampled("overlap", resolution_ns=1),
    "every byte distinct": edits.sampled("overlap", distinct_bytes=811_008),
    "one distinct byte": edits.sampled("overlap", distinct_bytes=1),
    "a first token at once": edits.with_requests(lambda one: replace(one, ttft_ms=0.0)),
    "requests in another order": _every_other_backwards,
    "as long as its arrivals": _loaded(lambda load: replace(load, duration_s=0.119)),
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
def test_samples_at_the_edge_are_samples(lab, change, edge):
    """The last value that is possible passes gate 1 in every run; what lies beyond it does not (see above)."""
    assert gates.evaluate(change(lab.evidence(), edge)).gates[1].status is Status.PASS

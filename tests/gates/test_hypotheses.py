"""The four hypotheses and the recommendation: written rules, each with data that flips it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_engram import gates, hypotheses, recommendation, sweeps
from pytest_engram.model import Span, Status, SweepSample

CAPS = {"A": {"cap": None}, "B16": {"cap": 16}, "B96": {"cap": 96}, "B132": {"cap": 132}}
AS_LONG = {"A": 4, "A'": 3}  # how many first blocks have lookups among peers that are no longer than alone
STEAL = {"exposed_wait": -1.0, "main_compute": 0.3}


def asked(evidence, number):
    """The adjudication of one hypothesis over one evidence and its own verdict."""
    return hypotheses.adjudicate([evidence], [gates.evaluate(evidence)])[number - 1]


def over_timelines(run, change):
    """The run with ``change(timeline)`` in place of every timeline."""
    overlap = tuple(replace(one, timelines=tuple(map(change, one.timelines))) for one in run.overlap)
    return replace(run, overlap=overlap)


def marks(**shift):
    """A change that moves the named marks of every lookup by so many ns."""

    def change(line):
        moved = [replace(m, **{name: getattr(m, name) + by for name, by in shift.items()}) for m in line.lookups]
        return replace(line, lookups=tuple(moved))

    return change


def ahead(ns):
    """A change that lets every consumer wait from ``ns`` before its lookup is done."""
    return lambda line: replace(line, lookups=tuple(replace(m, wait_before=m.done - ns) for m in line.lookups))


def slow_layers(line):
    """Layers 0 and 1 take 2 µs longer each."""
    return replace(line, spans=tuple(replace(span, end=span.end + 2000) for span in line.spans))


def in_arm(change, evidence, arm, edit):
    """The evidence with the timelines of one arm edited."""
    return change(evidence, lambda run: over_timelines(run, edit), lambda run: run.arm == arm)


def test_without_evidence_everything_is_undecided():
    """Nothing measured decides nothing, and each hypothesis says what is missing."""
    found = hypotheses.adjudicate([], [])
    assert [(one.number, one.outcome) for one in found] == [(n, "undecided") for n in (1, 2, 3, 4)]
    assert all("not measured" in one.lines[0] for one in found)


@pytest.mark.parametrize(
    ("effects", "slow", "outcome"),
    [
        ({**STEAL, "step": 0.0}, True, "supported"),
        ({**STEAL, "step": 0.2}, True, "supported"),
        ({**STEAL, "step": -0.1}, True, "undecided"),  # part of the gain survives
        ({**STEAL, "step": 0.0}, False, "undecided"),  # no earlier layer slowed down
        ({"exposed_wait": 0.0, "main_compute": 0.3, "step": 0.2}, True, "undecided"),  # no wait shrank
        ({"exposed_wait": -1.0, "main_compute": 0.0, "step": -0.1}, True, "weakened"),
        ({"exposed_wait": -1.0, "main_compute": 0.03, "step": -0.1}, False, "weakened"),  # the experiment's own margin
        ({"exposed_wait": -1.0, "main_compute": 0.0, "step": 0.0}, True, "undecided"),
    ],
)
def test_prefetch_that_steals(lab, change, effects, slow, outcome):
    """Hypothesis 4: a shorter wait with slower layers and no gain supports it, steady compute and a gain weaken it."""
    evidence = lab.evidence("B1", effects={"B": effects})
    evidence = in_arm(change, evidence, "B", slow_layers) if slow else evidence
    found = asked(evidence, 4)
    assert found.outcome == outcome
    assert found.lines[0].startswith("B1: submission early against submission at consumption: exposed_wait ")
    assert "main_compute" in found.lines[0]


@pytest.mark.parametrize(("layer", "outcome"), [(6, "supported"), (7, "undecided")])
def test_what_the_prefetch_delays_ends_with_its_last_layer(lab, change, layer, outcome):
    """Hypothesis 4: of the layers that slow down the last Engram layer, 6, counts and the one behind it does not."""

    def behind(run):
        span = Span(name="compute", layer=layer, start=0, end=9000 if run.arm == "B" else 1000)
        at = [replace(span, start=t.end, end=t.end + span.end) for one in run.overlap for t in one.timelines]
        return over_timelines(run, lambda line: replace(line, spans=(*line.spans, *at)))

    assert asked(change(lab.evidence("B1", effects={"B": {**STEAL, "step": 0.0}}), behind), 4).outcome == outcome


def test_the_larger_grid_is_the_one_that_may_steal(lab, change):
    """Hypothesis 4: a smaller cap that waits longer and is no slower end to end shows that A's larger grid steals."""
    effects = {"B16": {"exposed_wait": 0.7, "main_compute": -0.2, "step": -0.05}}
    evidence = lab.evidence("B2", effects=effects, arms={"A": {"cap": None}, "B16": {"cap": 16}})
    found = asked(change(evidence, lambda run: over_timelines(run, slow_layers), lambda run: run.arm != "B16"), 4)
    assert found.outcome == "supported"
    assert found.lines[0].startswith("B2: cap 66 (default) against cap 16: ")


def test_caps_without_a_treatment_or_without_marks_steal_nothing(lab, change):
    """Hypothesis 4: a cap that left the grid alone, and one with an unmarked run, are named and decide nothing."""
    arms = {"A": {"cap": None}, "same": {"cap": 66}, "small": {"cap": 8}}

    def unmarked(run):
        return replace(run, overlap=tuple(replace(one, timelines=()) for one in run.overlap))

    evidence = lab.evidence("B2", arms=arms, effects={})
    found = asked(change(evidence, unmarked, lambda run: (run.arm, run.block) == ("small", 2)), 4)
    assert found.outcome == "undecided"
    assert all(": no treatment, or not every run has waits" in line for line in found.lines)
    assert len(found.lines) == 2


@pytest.mark.parametrize(("arms", "outcome"), [(("A", "B96"), "weakened"), (tuple(CAPS), "undecided")])
def test_every_further_candidate_asks_for_more(lab, change, arms, outcome):
    """Hypothesis 4: nine blocks with p = 5/512 decide for one candidate at 2.5 %, not for one of three."""
    base = lab.evidence("B2", effects={}, arms={arm: CAPS[arm] for arm in arms})
    effects = {0: 0.05, 1: -0.02, 2: -0.02}

    def steps(run):
        ns = round(1.2e7 * math.exp(effects.get(run.block, -0.1)))
        return replace(run, compute=tuple(replace(one, step_ns=(ns,)) for one in run.compute))

    assert asked(change(base, steps, lambda run: run.arm == "B96"), 4).outcome == outcome


@pytest.mark.parametrize(
    ("edit", "outcome"),
    [
        (marks(hash_ready=-30_000), "supported"),  # not done, and submitted 30 µs after its hashes
        (marks(), "undecided"),  # not done, but submitted at once
        (ahead(0), "weakened"),
        (ahead(50), "weakened"),  # within the timer's resolution
        (ahead(51), "undecided"),
    ],
)
def test_lead_of_the_prefetch(lab, change, edit, outcome):
    """Hypothesis 3: late by more than the timer's 50 ns and submittable earlier supports it, done in time weakens."""
    found = asked(in_arm(change, lab.evidence("B1"), "B", edit), 3)
    assert found.outcome == outcome
    assert "n = 8 runs" in found.lines[0]
    assert ("could be submitted 30.1 µs earlier" in found.lines[0]) == (outcome == "supported")


@pytest.mark.parametrize(("steps", "outcome"), [(4, "undecided"), (9, "undecided"), (10, "weakened")])
def test_a_lookup_that_is_late_now_and_then(lab, change, steps, outcome):
    """Hypothesis 3: one late step in four, or in nine, is neither often nor rare, one in ten is rare."""

    def mixed(run):
        overlap = [replace(one, timelines=(one.timelines[0], *map(ahead(0), one.timelines[1:]))) for one in run.overlap]
        return replace(run, overlap=tuple(overlap))

    assert asked(change(lab.evidence("B1", steps=steps), mixed, lambda run: run.arm == "B"), 3).outcome == outcome


def test_hashes_that_come_after_compute_are_a_window(lab, change):
    """Hypothesis 3: a lookup cannot be earlier than its hashes, but hashes need not wait for main compute."""
    begun = in_arm(change, lab.evidence("B1"), "B", lambda line: replace(line, spans=(
        replace(line.spans[0], start=-40_000), *line.spans[1:])))  # fmt: skip
    assert asked(begun, 3).outcome == "supported"


def peers(longer, *, tokens=2048, alone=1_000_000, size=10_000_000):
    """A change of a run: both ranks' lookups, alone and then together, ``longer`` times as long."""

    def add(run):
        among = alone * longer * (1.02 if run.index % 2 else 0.98)
        cells = [(0, 1, alone), (0, 2, among), (1, 2, among)]
        sweep = tuple(
            SweepSample(rank=rank, tokens=tokens, peers=count, lookup_ns=(round(ns),) * 3,
                        exposed_ns=(0,) * 3, main_ns=(1,) * 3, quiet_main_ns=(1,) * 3, source_bytes=size)
            for rank, count, ns in cells
        )  # fmt: skip
        return replace(run, sweep=(*run.sweep, *sweep))

    return add


@pytest.mark.parametrize(
    ("longer", "outcome", "word"),
    [
        (1.4, "supported", "2,048 tokens, 2 peers against 1: lookup +"),
        (1.0, "weakened", "n = 16 runs"),
        (2.0, "undecided", "saturated, or something else is shared"),
        (1.05, "undecided", "aggregate bytes/s +"),
    ],
)
def test_contention_of_peers(lab, change, longer, outcome, word):
    """Hypothesis 2: more bytes and longer lookups support it, lookups that stay weaken it."""
    found = asked(change(lab.evidence("B1", ranks=2), peers(longer)), 2)
    assert (found.outcome, word in found.lines[0]) == (outcome, True)


def test_one_peer_alone_is_no_contention(lab, change):
    """Hypothesis 2: lookups of one rank alone, beside no others of their size, weaken nothing."""

    def alone(run):
        swept = peers(1.0)(run).sweep
        return replace(run, sweep=tuple(one for one in swept if one.peers == 1))

    found = asked(change(lab.evidence("B1", ranks=2), alone), 2)
    assert (found.outcome, "one peer alone was not measured" in found.lines[0]) == ("undecided", True)


def test_every_further_size_asks_for_more(lab, change):
    """Hypothesis 2: 9 of 16 runs (p ≈ 0.02) decide for one size at 2.5 %, and for neither of two."""

    def add(**size):
        return lambda run: peers(1.0 if run.block < AS_LONG[run.arm] else 1.4, **size)(run)

    one = change(lab.evidence("B1", ranks=2), add(), lambda run: run.arm != "B")
    assert asked(one, 2).outcome == "supported"
    two = change(one, add(tokens=1024, alone=500_000, size=5_000_000), lambda run: run.arm != "B")
    assert asked(two, 2).outcome == "undecided"


def test_a_run_without_its_sweep_is_left_out(lab, change):
    """Hypothesis 2: runs are paired with themselves, and the line says how many there are."""
    found = asked(change(lab.evidence("B1", ranks=2), peers(1.4), lambda run: (run.block, run.arm) != (3, "A")), 2)
    assert (found.outcome, "n = 15 runs" in found.lines[0]) == ("supported", True)


def test_a_cell_needs_bytes_and_every_rank(lab):
    """Ranks that read nothing, or are not all on record, are no measurement of peers at work."""
    run = lab.evidence("B1", ranks=2).runs[0]
    assert {key for key in sweeps.cells(peers(1.4)(run), 2) if key[0] == 2048} == {(2048, 1), (2048, 2)}
    assert {key for key in sweeps.cells(peers(1.4, size=0)(run), 2) if key[0] == 2048} == set()
    alone = replace(run, sweep=peers(1.4)(run).sweep[:2])
    assert {key for key in sweeps.cells(alone, 2) if key[0] == 2048} == {(2048, 1)}


def test_a_launch_bound_batch_does_not_speak(lab, change):
    """Hypothesis 2: a single token's lookup is its launch; only the large batch decides."""
    both = change(change(lab.evidence("B1", ranks=2), peers(1.0)), peers(1.4, tokens=1, alone=9_000))
    found = asked(both, 2)
    assert found.outcome == "weakened"
    assert any("bound by its launch" in line for line in found.lines)


def test_sizes_that_disagree_decide_nothing(lab, change):
    """Hypothesis 2: support at one size and weakening at another is said, not voted on."""
    both = change(change(lab.evidence("B1", ranks=2), peers(1.0)), peers(1.4, tokens=256, alone=125_000))
    found = asked(both, 2)
    assert (found.outcome, found.lines[-1]) == ("undecided", "some of this supports it and some weakens it")


@pytest.mark.parametrize(
    ("by_rank", "traffic", "main", "outcome"),
    [
        ({0: 0.3, 1: -0.3}, {"": 2.0, "rank1.": 0.4}, 0.0, "supported"),
        ({0: 0.3, 1: -0.3}, {"": 2.0, "rank1.": 0.4}, 0.04, "supported"),
        ({0: 0.3, 1: -0.3}, {"": 2.0, "rank1.": 0.4}, 0.06, "undecided"),  # main compute moved, too
        ({0: 0.0, 1: 0.0}, {"": 2.0, "rank1.": 0.4}, 0.0, "weakened"),
        ({0: 0.3, 1: -0.3}, {"": 1.0, "rank1.": 0.4}, 0.0, "supported"),  # by rank 1's own counter
        ({0: 0.3, 1: -0.3}, {"": 1.0, "rank1.": 1.0}, 0.0, "undecided"),
        ({0: 0.3, 1: -0.3}, {}, 0.0, "undecided"),
    ],
)
def test_remote_placement(lab, change, by_rank, traffic, main, outcome):
    """Hypothesis 1: lookups and cross-socket traffic must move with the pages; without a counter nothing follows."""

    def count(run):
        found = {f"{rank}cross_socket_bytes": 1e9 * (ratio if run.arm == "B" else 1) for rank, ratio in traffic.items()}
        return replace(
            run, drift={**run.drift, **found}, drift_absent={} if found else {"cross_socket": "no permission"}
        )

    evidence = lab.evidence("A1", effects={"B": {"main_compute": main}}, by_rank={"B": by_rank})
    found = asked(change(evidence, count), 1)
    assert found.outcome == outcome
    assert ("no permission" in found.lines[0]) == (not traffic)


def test_unknown_distances_predict_nothing(lab):
    """Hypothesis 1: where no distance is known, each rank is named with what is missing."""
    found = asked(replace(lab.evidence("A1", effects={"B": {}}), provenance={}), 1)
    assert [line.split(",")[0] for line in found.lines] == [f"A1: B: rank {n} at an unknown distance" for n in (0, 1)]
    assert all("nothing is predicted" in line for line in found.lines)


@pytest.mark.parametrize("number", [3, 4])
def test_what_may_not_be_judged_decides_nothing(lab, change, number):
    """A broken contract, or too few blocks, leaves the same timings undecided and says why."""
    evidence = lab.evidence("B1", effects={"B": {"exposed_wait": -20.0, "main_compute": 0.0, "step": -0.1}})
    assert asked(evidence, number).outcome == "weakened"
    case = replace(evidence.runs[0].correctness_after[0], passed=False)
    wrong = change(evidence, lambda run: replace(run, correctness_after=(case,)))
    short = replace(evidence, runs=tuple(run for run in evidence.runs if run.block < 4))
    for broken, word in ((wrong, "contract-broken"), (short, "too-few-blocks")):
        found = asked(broken, number)
        assert (found.outcome, word in found.lines[0]) == ("undecided", True)


def test_what_was_not_recorded_is_called_absent(lab, change):
    """Hypothesis 4: without spans of the layers nothing is shown of them, and the line says that they are absent."""
    evidence = lab.evidence("B2", arms={"A": {"cap": None}, "B16": {"cap": 16}}, effects={"B16": STEAL})
    bare = change(evidence, lambda run: over_timelines(run, lambda line: replace(line, spans=())))
    found = asked(bare, 4)
    assert (found.outcome, "layers up to the last consumer absent" in found.lines[0]) == ("undecided", True)
    assert "absent" not in asked(evidence, 4).lines[0]


def test_what_voids_timings_is_found_once(lab, monkeypatch):
    """Hypotheses 3 and 4 ask the same of B1's timings; its comparisons are made for the first one."""
    evidence, asked_for, validity = lab.evidence("B1"), [], sweeps.validity
    monkeypatch.setattr(sweeps, "validity", lambda case: asked_for.append(case) or validity(case))
    hypotheses.adjudicate([evidence], [gates.evaluate(evidence)])
    assert len(asked_for) == 1


def advised(evidence):
    """The recommendation or None, and the line that stands in the report."""
    line = recommendation.advice(evidence, gates.evaluate(evidence))
    said, _, found = (line or "").partition("recommended: ")
    return found if found and not said else None, line


def test_the_shortest_step_is_recommended(lab, change):
    """The best cap with its interval, the others, equal grids by name, and the layers that pay under the others."""
    evidence = lab.evidence("B2", arms=CAPS, effects={"B16": {"step": -0.06}, "B96": {"step": 0.1}})
    evidence = change(evidence, lambda run: over_timelines(run, slow_layers), lambda run: run.arm == "B96")
    found, line = advised(evidence)
    assert found.startswith("cap 16 −5.8 % step time, 95 % CI [−5.8, −5.8] against cap 66 (default)")
    assert "cap 96 +10.5 % [+10.5, +10.5]" in found
    assert "cap 96 and cap 132: one grid, no treatment" in found
    assert "in layers" not in found
    assert "layers 0, 1–15 +" in found
    assert line == f"recommended: {found}"
    assert "speed" not in line


def test_the_base_stays_where_everything_else_is_longer(lab):
    """A is recommended only if every other step is shown to be longer."""
    found, _ = advised(lab.evidence("B2", arms=CAPS, effects={"B16": {"step": 0.06}, "B96": {"step": 0.1}}))
    assert found.startswith("cap 66 (default) stays: every other step is longer")
    assert advised(lab.evidence("B2", arms=CAPS, effects={"B96": {"step": 0.1}}))[0] is None


def test_no_recommendation_says_why(lab, change):
    """Without a resolved step, with a broken contract or without a treatment there is none; placements ask for none."""
    plain = lab.evidence("B2", arms=CAPS, effects={})
    assert advised(plain)[1].startswith("no recommendation: no shorter step is resolved: cap 16 +0.0 %")
    good = lab.evidence("B2", arms=CAPS, effects={"B16": {"step": -0.06}, "B96": {"step": 0.1}})
    wrong = change(good, lambda run: replace(run, fingerprint={**run.fingerprint, "machine.kernel": str(run.index)}))
    assert advised(wrong) == (None, "no recommendation: gate 1 treatment is INVALID: undeclared-difference")
    alike = lab.evidence("B2", arms={"A": {"cap": 96}, "B132": {"cap": 132}}, effects={"B132": {"step": -0.06}})
    assert "no-treatment" in advised(alike)[1]
    assert advised(lab.evidence("A1"))[1] is None


def test_a_claimed_improvement_is_recommended_only_by_all_gates(lab):
    """A shorter step at the price of main compute is not recommended, and the gate that forbids it is named."""
    good = {"exposed_wait": -1.0, "step": -0.1, "goodput": 0.1}
    assert advised(lab.evidence("B1", effects={"B": good}))[0].startswith("submission early −9.5 % step time")
    found, why = advised(lab.evidence("B1", effects={"B": {**good, "main_compute": 0.3}}))
    assert found is None
    assert "gate 3 no_offset is FAIL: slowed" in why
    assert gates.evaluate(lab.evidence("B1", effects={"B": {"main_compute": 0.3}})).status is not Status.PASS

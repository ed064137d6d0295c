"""The ladder as a whole: order, claims, several candidates, the sentence, purity, files."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pytest_engram import codec, gates, metrics, stats
from pytest_engram.model import Claim, Evidence, MetricRule, Problem, Status, SweepSample, Verdict, Workload
from pytest_engram.queueing import queue_report

PASSED_PRIOR = ("A1", "B1")


def _verdict_of(name, status):
    return Verdict(
        experiment=name, title=name, claim=Claim.IMPROVES, subject="suite loop", status=status, gates=(),
        protocol_hash="",
    )  # fmt: skip


def _statuses(verdict):
    return [gate.status.value for gate in verdict.gates]


def test_a_working_change_passes_with_one_sentence(lab):
    """All five gates PASS, and the sentence names effect, interval, blocks, load and subject."""
    verdict = gates.evaluate(lab.evidence("B1"))
    assert _statuses(verdict) == ["PASS"] * 5
    assert verdict.sentence.startswith("B1: goodput +22.")
    for part in ("95 % CI +2", " … +2", "over 8 blocks at the same SLO and load; subject: suite loop."):
        assert part in verdict.sentence


@pytest.mark.parametrize(
    ("said", "subject"),
    [
        (("engine modules", "engine modules"), "engine modules"), (("engine modules", None), "suite loop"),
        (("served engine", "served engine"), "suite loop"),
    ],
    ids=str,
)  # fmt: skip
def test_the_subject_is_what_the_receipts_say(lab, change, said, subject):
    """Engine modules are named where every arm's receipt says so; no receipt makes a served engine of the loop."""

    def tell(run):
        word = said[run.arm == "B"]
        return replace(run, fingerprint=run.fingerprint | ({"backend.subject": word} if word else {}))

    verdict = gates.evaluate(change(lab.evidence("patch"), tell))
    assert verdict.subject == subject
    assert f"subject: {subject}." in verdict.sentence


def test_no_sentence_without_all_five(lab):
    """A change that is not shown end to end has no sentence, however much its wait shrank."""
    verdict = gates.evaluate(lab.evidence("B1", effects={"B": {"exposed_wait": -3.0}}, seed=12))
    assert (verdict.status, verdict.sentence) == (Status.INCONCLUSIVE, None)
    assert any("80 % power" in note for note in verdict.notes)


def test_an_open_result_says_what_its_noise_would_find(lab):
    """The noise is one run's, from A' against A, and the effect is the least that so many blocks find with it."""
    evidence = lab.evidence("B1", effects={"B": {"exposed_wait": -3.0}}, noise=0.02, seed=12)
    value = {(run.block, run.arm): metrics.value(run, "goodput") for run in evidence.runs}
    noise = np.std([math.log(value[block, "A'"] / value[block, "A"]) for block in range(8)], ddof=1) / math.sqrt(2)
    least = 100 * stats.detectable_effect(noise, 8)
    said = f"goodput: noise {noise:.1%} per run; 8 blocks find +{least:.1f} % with 80 % power"
    assert said in gates.evaluate(evidence).notes


def test_the_word_is_never_used(lab, change):
    """The gates never say speed-up; a passed claim has its sentence and nothing else."""
    everything = codec.encode(gates.evaluate(lab.evidence("B1"))).decode() + str(gates.REASONS)
    assert "speed" not in everything.lower()


def test_the_first_failure_blocks_the_rest(lab):
    """No later gate is decided, or even looked at, after one that is not PASS."""
    verdict = gates.evaluate(
        lab.evidence("B1", effects={"B": {"exposed_wait": -1.0, "main_compute": 0.3, "goodput": 0.2}})
    )
    assert _statuses(verdict) == ["PASS", "PASS", "PASS", "FAIL", "BLOCKED"]
    assert verdict.gates[4].effects == ()


def test_a_slower_main_path_is_shown_beside_the_shorter_step(lab):
    """Gate 3 judges main compute and says, unjudged, what became of the whole step; both stand in one line."""
    effects = {"exposed_wait": -1.0, "main_compute": math.log(1.219), "step": math.log(0.956)}
    gate = gates.evaluate(lab.evidence("B1", effects={"B": effects}, noise=1e-4)).gates[3]
    assert gate.status is Status.FAIL
    assert gate.observed.startswith("main_compute +21.9 % (p = ")
    assert gate.observed.endswith("; step −4.4 % (not judged)")
    assert {effect.metric for effect in gate.effects} == {"main_compute"}


def test_smallest_exposed_wait_does_not_win(lab):
    """A cap with almost no exposed wait and no end-to-end gain stops before the last gate is passed."""
    effects = {"B": {"exposed_wait": math.log(14 / 2634), "main_compute": 0.15, "goodput": 0.01}}
    assert gates.evaluate(lab.evidence("B1", effects=effects)).status is Status.FAIL


def test_characterises_needs_no_winner(lab):
    """Without any effect A1 still passes: gates 2 to 4 are reported, not judged, and nothing is declared."""
    verdict = gates.evaluate(lab.evidence("A1", effects={"B": {}}))
    assert verdict.status is Status.PASS
    assert [gate.judged for gate in verdict.gates] == [True, True, False, False, False]
    assert all(gate.effects for gate in verdict.gates[2:])
    assert verdict.sentence is None


def test_characterises_says_when_ranks_are_symmetric(lab):
    """One rank nearer and one farther: the effect per rank follows the distances and there is no winner to expect."""
    verdict = gates.evaluate(lab.evidence("A1", effects={"B": {}}, by_rank={"B": {0: 0.3, 1: -0.3}}))
    by_metric = {effect.metric: effect.estimate for effect in verdict.gates[2].effects}
    assert by_metric["lookup@0"] > 0.3
    assert by_metric["lookup@1"] < -0.2
    assert any("no winner" in note for note in verdict.notes)


def test_characterises_is_still_invalid_when_a_differs_from_a(lab, change):
    """Validity is judged for every claim."""

    def longer(run):
        sample = run.overlap[0]
        line = sample.timelines[0]
        marks = tuple(replace(mark, wait_before=mark.wait_before - 200_000) for mark in line.lookups)
        return replace(run, overlap=(replace(sample, timelines=(replace(line, lookups=marks),)),))

    evidence = change(lab.evidence("B2", engine="cuda"), longer, lambda run: run.arm == "A'")
    verdict = gates.evaluate(evidence)
    assert (verdict.status, verdict.gates[2].judged) == (Status.INVALID, True)


def test_a3_needs_a1_and_b1(lab):
    """Per-socket copies pass only beside a passed A1 and a passed B1; one of them failed is not enough."""
    evidence = lab.evidence("A3", effects={"B": {"goodput": 0.1}}, by_rank={"B": {1: -0.3}})
    good = [_verdict_of(name, Status.PASS) for name in PASSED_PRIOR]
    assert gates.evaluate(evidence, prior=good).status is Status.PASS
    half = gates.evaluate(evidence, prior=[good[0], _verdict_of("B1", Status.FAIL)])
    assert (half.status, half.gates[4].observed, half.sentence) == (Status.BLOCKED, "B1 FAIL", None)


def test_only_candidates_that_pass_are_named(lab):
    """Of two candidates one slows the main path: the other one alone is in the sentence."""
    arms = {"A": {"cap": None}, "slow": {"cap": 8}, "good": {"cap": 16}}
    gain = {"lookup": -0.3, "exposed_wait": -0.5, "goodput": 0.2}
    effects = {"slow": {**gain, "main_compute": 0.3}, "good": gain}
    evidence = lab.evidence("B2", arms=arms, effects=effects, engine="cuda", claim=Claim.IMPROVES)
    verdict = gates.evaluate(evidence)
    assert verdict.status is Status.PASS
    assert "good goodput" in verdict.sentence
    assert "slow: goodput +" in verdict.gates[4].observed
    assert "slow" not in verdict.sentence


def test_a_rung_that_only_reports_narrows_nothing(lab):
    """A claim that characterises reports gate 3 for every treated cap, also for one that gate 2 did not see move."""
    effects = {"moved": {"lookup": -0.3, "exposed_wait": -0.5, "main_compute": 0.3}, "still": {}}
    arms = {"A": {"cap": None}, "moved": {"cap": 8}, "still": {"cap": 16}}
    rungs = gates.evaluate(lab.evidence("B2", arms=arms, effects=effects, engine="cuda")).gates
    assert [(rung.reason, rung.judged) for rung in rungs[2:4]] == [("moved-as-predicted", False), ("not-slowed", False)]


def test_untreated_caps_drop_out(lab):
    """A cap that left the grid as it was is no treatment: it is noted and has no effect to show."""
    arms = {"A": {"cap": None}, "same": {"cap": 66}, "small": {"cap": 8}}
    verdict = gates.evaluate(lab.evidence("B2", arms=arms, effects={}, engine="cuda"))
    assert verdict.gates[1].status is Status.PASS
    assert "same: no treatment, the same grid as A" in verdict.notes
    assert {effect.arm for gate in verdict.gates for effect in gate.effects} == {"small"}


def test_caps_with_one_grid_are_merged(lab, change):
    """Caps above the tiles of a small batch ran alike: the first stays in, the other is named as no treatment."""
    arms = {"A": {"cap": 4}, "B8": {"cap": 96}, "B16": {"cap": 132}, "B33": {"cap": 33}}
    verdict = gates.evaluate(lab.evidence("B2", arms=arms, effects={}, engine="cuda"))
    assert verdict.gates[1].status is Status.PASS
    said = [note for note in verdict.notes if "no treatment" in note]
    assert said == ["B16: no treatment, the same grid as B8"]
    assert {effect.arm for gate in verdict.gates for effect in gate.effects} == {"B8", "B33"}


@pytest.mark.parametrize("name", ["more/B1-inline", "more/B1-wait", "cuda/B1-graph"])
def test_what_engines_do_today_is_a_treatment(lab, name):
    """Inline lookups, a wait for the stream, replayed graphs: delivered, and a `characterises` claim has no load."""
    verdict = gates.evaluate(lab.evidence(name, effects={}, engine="cuda" if "cuda" in name else "cpu"))
    assert (verdict.gates[1].reason, verdict.status) == ("treatment-delivered", Status.PASS)
    assert verdict.gates[4].reason == "metric-absent"


def test_the_side_of_the_threshold_is_said_per_size(lab, change):
    """Batches of both sides are checked and named; the workload's own decides whether there was a treatment."""

    def small(run):
        early = next(one for one in lab.evidence("more/B1-inline", effects={}).runs if one.arm == "A")
        line = replace(early.overlap[0].timelines[0], tokens=16)
        point = SweepSample(rank=0, tokens=16, peers=1, lookup_ns=(1,), exposed_ns=(1,), main_ns=(1,),
                            quiet_main_ns=(1,), source_bytes=1, timeline=line)  # fmt: skip
        return replace(run, sweep=(point,))

    gate = gates.evaluate(change(lab.evidence("more/B1-inline", effects={}), small)).gates[1]
    assert gate.status is Status.PASS
    assert gate.observed.startswith("A early, B at_consumption at 64 tokens, early at 16 tokens, in ")


def test_a_lookup_of_no_time_is_no_contradiction(lab):
    """A lookup shorter than the timer's tick reads 0 ns, which a serial queue can do; −1 ns it cannot."""
    line = lab.evidence("B1").runs[0].overlap[0].timelines[0]
    for ns, serial in ((0, True), (-1, False)):
        marks = tuple(replace(mark, start=mark.done - ns) for mark in line.lookups)
        assert queue_report(replace(line, lookups=marks)).serial is serial


def test_two_streams_are_void_though_they_are_what_was_asked(lab):
    """The negative control delivers its treatment, its marks show the overlap, and gate 2 voids it all the same."""
    verdict = gates.evaluate(lab.evidence("more/B1-streams", effects={}))
    assert verdict.gates[1].observed.endswith("A in 0 of 8, A' in 0 of 8, B in 8 of 8")
    assert (verdict.status, verdict.gates[2].reason) == (Status.INVALID, "not-a-serial-queue")
    assert "overlaps the lookup of layer 1" in verdict.gates[2].observed


@pytest.mark.parametrize(
    ("key", "fields", "void"),
    [
        ("link_bytes_per_s", {}, True),
        ("rank1.link_bytes_per_s", {}, True),
        ("link_bytes_per_s", {"distinct_bytes": 190_000}, False),
        ("link_bytes_per_s", {"distinct_bytes": 210_000}, True),
        ("pcie_rx_kb_per_s", {}, False),
    ],
)
def test_the_floor_is_of_distinct_rows(lab, change, key, fields, void):
    """2 ms of lookups at 0.1 GB/s carry 200,000 bytes: more distinct ones are void, repeated ones prove nothing."""

    def linked(run):
        overlap = tuple(replace(sample, **fields) for sample in run.overlap)
        return replace(run, drift={**run.drift, key: 1e8}, overlap=overlap)

    effects = {"B": {"exposed_wait": -0.5, "goodput": 0.2}}  # lookups as long as A's
    verdict = gates.evaluate(change(lab.evidence("B1", effects=effects), linked))
    assert (verdict.gates[2].reason == "faster-than-link") == void


@pytest.mark.parametrize(("distinct", "void"), [(None, False), (190_000, False), (210_000, True)])
def test_repeated_rows_have_the_floor_of_their_distinct_ones(lab, change, distinct, void):
    """Where the workload repeats rows only the distinct ones must cross the link; uncounted ones prove nothing."""

    def linked(run):
        overlap = tuple(replace(sample, distinct_bytes=distinct) for sample in run.overlap)
        return replace(run, drift={**run.drift, "link_bytes_per_s": 1e8}, overlap=overlap)

    effects = {"B": {"exposed_wait": -0.5, "goodput": 0.2}}
    evidence = lab.evidence("B1", effects=effects, workload=Workload(reuse="repeated"))
    assert (gates.evaluate(change(evidence, linked)).gates[2].reason == "faster-than-link") == void


def test_the_links_best_run_is_the_floor(lab, change):
    """One run with a slow link does not void lookups that the link carries at its best."""

    def linked(run):
        return replace(run, drift={**run.drift, "link_bytes_per_s": 1e9 if run.index else 1e8})

    evidence = lab.evidence("B1", effects={"B": {"exposed_wait": -0.5, "goodput": 0.2}})
    assert gates.evaluate(change(evidence, linked)).status is Status.PASS


def test_repeated_rows_are_named_wherever_the_subject_is(lab):
    """A gain over repeated rows may be cache: the one sentence and the verdict's subject say so."""
    verdict = gates.evaluate(lab.evidence("B1", workload=Workload(reuse="repeated")))
    assert verdict.sentence.endswith("subject: suite loop, repeated rows: the gain may be cache.")
    assert "cache" not in gates.evaluate(lab.evidence("B1")).sentence


@pytest.mark.parametrize(("key", "value"), [("rank1.sm_mhz", 900.0), ("rank1.throttle_reasons", 64.0)])
def test_the_other_ranks_drift_too(lab, change, key, value):
    """A clock that falls, or a throttled board, voids the run on whichever rank it is."""
    quiet = {"rank1.sm_mhz": 1980.0, "rank1.throttle_reasons": 0.0}
    steady = change(lab.evidence("B1"), lambda run: replace(run, drift={**run.drift, **quiet}))
    assert gates.evaluate(steady).status is Status.PASS
    late = change(steady, lambda run: replace(run, drift={**run.drift, key: value}), lambda run: run.block > 4)
    assert gates.evaluate(late).gates[2].reason in ("machine-drifted", "throttled")


@pytest.mark.parametrize(
    ("bits", "runs", "status"),
    [*[(bit, 3, Status.INVALID) for bit in (0x08, 0x20, 0x40, 0x80)], (0x80, 2, Status.PASS), (0x04, 24, Status.PASS)],
)
def test_how_often_a_board_may_slow_down(lab, change, bits, runs, status):
    """Heat or the board in 3 of 24 runs is too much, in 2 it is not; a power cap is no fault in any."""
    hot = change(lab.evidence("B1"), lambda run: replace(
        run, drift={**run.drift, "throttle_reasons": float(bits * (run.index < runs))}))  # fmt: skip
    assert gates.evaluate(hot).status is status


@pytest.mark.parametrize(("mhz", "status"), [(2620.0, Status.PASS), (2600.0, Status.INVALID)])
def test_how_far_a_clock_may_fall(lab, change, mhz, status):
    """From 3,000 MHz a clock may fall to one of which that is at most 115 %, and no further."""
    late = change(lab.evidence("B1"), lambda run: replace(run, drift={"cpu_mhz": mhz}), lambda run: run.block > 4)
    assert gates.evaluate(late).status is status


def test_only_collectives_may_be_not_applicable(lab):
    """Gate 3 excuses one rank from collectives; any other guard without a sample stays an absence."""
    rules = (
        MetricRule(metric="main_compute", direction="down", margin=0.05),
        MetricRule(metric="goodput", direction="up"),
    )
    for asked, reason in ((rules[:1], "not-slowed"), (rules, "metric-absent")):
        assert gates.evaluate(lab.evidence("more/B1-wait", effects={}, no_offset=asked)).gates[3].reason == reason


def test_shared_heads_owe_their_collectives_time(lab, change):
    """Where ranks share the heads, communication is compared in gate 3; without its samples that gate cannot pass."""
    shared = Workload(engram_layers=(1, 6), tokens=64, tensor_parallel=True)
    evidence = lab.evidence("A1", effects={"B": {}}, by_rank={"B": {0: 0.3, 1: -0.3}}, workload=shared)
    assert gates.evaluate(evidence).gates[3].reason == "metric-absent"

    def gathered(run):
        return replace(run, compute=tuple(replace(s, communication_ns=(1000 + run.index,)) for s in run.compute))

    gate = gates.evaluate(change(evidence, gathered)).gates[3]
    assert "communication" in {effect.metric for effect in gate.effects}


def test_many_candidates_share_the_level(lab):
    """The best of twenty useless candidates does not pass: Holm over candidates and metrics."""
    arms = {"A": {"cap": None}, **{f"c{n}": {"cap": n} for n in range(1, 21)}}
    won = 0
    for seed in range(12):
        evidence = lab.evidence(
            "B2", arms=arms, effects={}, engine="cuda", claim=Claim.IMPROVES, blocks=11, seed=seed, aa_level=0.001
        )
        won += gates.evaluate(evidence).gates[2].status is Status.PASS
    assert won == 0


def test_null_changes_rarely_pass_a_gate(lab):
    """Useless changes: of 60 schedules at most a handful look like a moved mechanism (2.5 % expected)."""
    found = [gates.evaluate(lab.evidence("B1", effects={}, seed=seed)).gates[2].status for seed in range(60)]
    assert found.count(Status.PASS) <= 5
    assert found.count(Status.INCONCLUSIVE) >= 45


@pytest.mark.parametrize("blocks", [3, 6])
def test_zero_goodput_in_the_base_is_a_measured_zero(lab, change, blocks):
    """A base that serves nothing well in some blocks leaves an interval that is open above, not a NaN."""

    def none_good(run):
        late = tuple(replace(r, ttft_ms=1e6) for r in run.serving[0].requests)
        return replace(run, serving=(replace(run.serving[0], requests=late),))

    evidence = change(lab.evidence("B1"), none_good, lambda run: run.block < blocks and run.arm != "B")
    verdict = gates.evaluate(evidence)
    effect = verdict.gates[4].effects[0]
    assert verdict.status is Status.PASS
    assert f"CI {100 * effect.low:+.1f} … +∞]" in verdict.sentence
    assert effect.high is None
    assert effect.low > 0
    assert effect.per_block.count(None) == blocks
    assert effect.note == f"A measured 0 in {blocks} blocks"
    assert codec.decode(codec.encode(verdict), Verdict) == verdict


def test_a_json_round_trip_changes_nothing(lab):
    """Evidence from a file gives the same verdict as evidence in memory; the verdict survives a file too."""
    for name in ("A3", "B1", "B2"):
        evidence = lab.evidence(name, engine="cuda" if name == "B2" else "cpu")
        verdict = gates.evaluate(evidence)
        again = gates.evaluate(codec.decode(codec.encode(evidence), Evidence))
        assert again == verdict
        assert codec.decode(codec.encode(verdict), Verdict) == verdict


def test_evaluation_is_pure(lab):
    """Judging twice gives equal verdicts and leaves the evidence as it was."""
    evidence = lab.evidence("B1")
    before = codec.encode(evidence)
    assert gates.evaluate(evidence) == gates.evaluate(evidence)
    assert codec.encode(evidence) == before


def test_an_unmeasured_experiment_says_why_at_gate_0(lab):
    """NOT_MEASURED carries the problem's code and words; the other gates are BLOCKED."""
    problem = Problem(code="too-few-memory-nodes", message="needs two memory NUMA nodes", status=Status.NOT_MEASURED)
    verdict = gates.not_measured(lab.experiment("A1"), problem)
    assert _statuses(verdict) == ["NOT_MEASURED", *["BLOCKED"] * 4]
    assert verdict.gates[0].reason == "too-few-memory-nodes"
    assert "two memory NUMA nodes" in verdict.gates[0].observed
    assert verdict.status is Status.NOT_MEASURED


def test_empty_evidence_is_never_green(lab):
    """No runs at all: NOT_MEASURED."""
    assert gates.evaluate(replace(lab.evidence("B1"), runs=())).status is Status.NOT_MEASURED


@pytest.mark.parametrize("change_of", ["alpha", "blocks", "aa_level"])
def test_protocol_hash_covers_the_rules(lab, change_of):
    """Whatever decides is in the hash; prose is not."""
    chosen = lab.experiment("B1")
    other = replace(chosen, **{change_of: 9 if change_of == "blocks" else 0.02})
    plan = lab.plan(chosen)
    assert plan.protocol_hash == gates.plan_hash(plan)
    changed = [{"experiment": other}, {"seed": 1}, {"rows": 5}, {"engine": "cuda"}, {"backends": {"A": "x"}}]
    assert plan.protocol_hash not in {gates.plan_hash(replace(plan, **fields)) for fields in changed}
    reworded = replace(plan, experiment=replace(chosen, why="because", source="elsewhere"))
    turned = replace(plan, backends=dict(reversed(plan.backends.items())))
    assert plan.protocol_hash == gates.plan_hash(reworded) == gates.plan_hash(turned)
    with pytest.raises(ValueError, match="Out of range"):
        gates.plan_hash(replace(plan, rows=math.nan))


def test_drift_over_random_blocks_is_harmless(lab, change):
    """A machine that slows down steadily changes neither arm against the other: the ladder passes and stays honest."""

    def slower(run):
        factor = np.exp(0.002 * run.index)
        compute = replace(run.compute[0], main_ns=(int(run.compute[0].main_ns[0] * factor),))
        return replace(run, compute=(compute,))

    assert gates.evaluate(change(lab.evidence("B1"), slower)).status is Status.PASS

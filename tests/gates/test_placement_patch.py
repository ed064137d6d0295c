"""Base against candidate where each build allocates its own tables: gate 1 asks the kernel where the pages lie."""

from dataclasses import replace

import pytest

from pytest_engram import experiment_rules, gates, hypotheses
from pytest_engram.model import Status

NAME = "more/placement-patch"
HOLD = {"policy": "bind:1", "placement_by": "engine", "backing": "tmpfs", "submission": "early", "cap": None}


def pages(arms, nodes, only=lambda run: True):
    """Every audit of these arms shows ``nodes``: NUMA node -> pages."""

    def moved(run):
        if run.arm not in arms or not only(run):
            return run
        placed = [
            replace(sample, distributions=tuple(replace(audit, pages=nodes) for audit in sample.distributions))
            for sample in run.placement
        ]
        return replace(run, placement=tuple(placed))

    return moved


@pytest.fixture
def patched(lab, change):
    """The stock build leaves all pages on node 0, the patch is asked for node 1 and obeys."""
    evidence = lab.evidence(NAME, hold=HOLD, effects={"B": {}}, by_rank={"B": {0: 0.3, 1: -0.3}})
    return change(evidence, pages(("A", "A'"), {0: 10_000}))


def test_the_stock_build_need_not_obey_the_patch_must(patched, change):
    """What is asked of the patch alone: stock pages elsewhere are the treatment, and its own elsewhere are a fault."""
    rung = gates.evaluate(patched).gates[1]
    assert (rung.status, rung.reason) == (Status.PASS, "treatment-delivered")
    assert "A: rank 0 N0 100.0%, rank 1 N0 100.0%; B: rank 0 N1 100.0%" in rung.observed
    disobeyed = gates.evaluate(change(patched, pages("B", {0: 10_000}, lambda run: run.block == 3))).gates[1]
    assert (disobeyed.status, disobeyed.reason) == (Status.FAIL, "not-as-asked")


def test_a_patch_that_moves_nothing_is_no_treatment(patched, change):
    """Receipts that differ are not enough: pages where the stock build had them, too, were not moved by the patch."""
    rung = gates.evaluate(change(patched, pages(("A", "A'"), {1: 10_000}))).gates[1]
    assert (rung.status, rung.reason) == (Status.FAIL, "no-treatment")


def test_the_direction_is_each_ranks_own(patched, change):
    """Gate 2 predicts from the pages: who comes nearer must gain; wandering stock pages count by their mean."""
    rung = gates.evaluate(patched).gates[2]
    assert rung.status is Status.PASS
    assert "rank 0 farther in B, rank 1 nearer in B" in rung.threshold
    wander = change(patched, pages(("A", "A'"), {1: 10_000}, lambda run: run.block % 2))
    assert "rank 0 farther in B, rank 1 nearer in B" in gates.evaluate(wander).gates[2].threshold
    everywhere = change(patched, pages(("A", "A'"), {1: 10_000}, lambda run: run.block != 0))
    assert gates.evaluate(everywhere).gates[1].reason == "treatment-delivered"


def test_stock_pages_are_those_of_a_and_of_its_twin(lab, change):
    """Effects are against the mean of A and A', so pages are, too: each on a node of its own, they lie as if spread."""
    evidence = lab.evidence(NAME, hold={**HOLD, "policy": "interleave"})
    for twin, reason, words in ((0, "treatment-delivered", "N0 100.0%"), (1, "no-treatment", "N0 50.0%/N1 50.0%")):
        stock = change(change(evidence, pages("A", {0: 10_000})), pages(("A'",), {twin: 10_000}))
        rung = gates.evaluate(stock).gates[1]
        assert rung.reason == reason
        assert f"A: rank 0 {words}" in rung.observed


def test_pages_of_the_stock_build_are_audited_all_the_same(patched, change):
    """Not obeying is the stock build's right, not being looked at is not."""
    blind = change(patched, lambda run: replace(run, placement=()), lambda run: run.arm == "A")
    assert gates.evaluate(blind).gates[1].reason == "pages-not-audited"


def test_an_engines_table_may_begin_inside_a_page(patched, change):
    """What covers the table are all pages that it touches, one more where it begins inside one, and not one fewer."""
    for pages_there, reason in ((10_001, "treatment-delivered"), (10_000, "pages-not-covered")):
        inside = change(patched, lambda run, count=pages_there: replace(run, placement=tuple(
            replace(sample, distributions=tuple(
                replace(audit, address=audit.address + 64, pages={0: count}, covered_bytes=4096 * count)
                for audit in sample.distributions)) for sample in run.placement)),
            lambda run: run.arm == "A")  # fmt: skip
        assert gates.evaluate(inside).gates[1].reason == reason


def test_storage_cases_belong_to_gate_0(patched, change):
    """Tables that the builds allocate themselves put storage and replay in question."""
    assert patched.plan.storage_in_question
    bare = change(patched, lambda run: replace(run, correctness_before=(), correctness_after=tuple(
        case for case in run.correctness_after if not case.contract.startswith("S"))))  # fmt: skip
    bare = change(bare, lambda run: replace(run, correctness_before=run.correctness_after))
    assert gates.evaluate(bare).gates[0].reason == "storage-not-checked"


def test_an_arm_is_one_build(patched, change):
    """Builds differ between the arms and nowhere else: a receipt that changes from one run to the next is found."""
    assert gates.evaluate(patched).gates[1].status is Status.PASS
    for arms, key in (("B", "backend.commit"), (("A", "A'"), "backend.commit@1")):
        edited = change(patched, lambda run, key=key: replace(run, fingerprint={**run.fingerprint, key: "edited"}),
                        lambda run, arms=arms: run.arm in arms and run.block == 3)  # fmt: skip
        rung = gates.evaluate(edited).gates[1]
        assert (rung.status, rung.reason) == (Status.INVALID, "undeclared-difference")
        assert key in rung.observed


def test_kernels_interpreted_on_one_rank_keep_no_time(patched, change):
    """A rank whose own receipt says interpreter voids the timings, though rank 0 compiled; compiled ranks do not."""
    for mode, reason in (("cuda", "moved-as-predicted"), ("interpreter", "interpreted-kernels")):
        said = {"backend.mode": "cuda", "backend.mode@1": mode}
        told = change(patched, lambda run, said=said: replace(run, fingerprint=run.fingerprint | said))
        assert gates.evaluate(told).gates[2].reason == reason


def test_builds_under_a_mount_lie_where_it_says(lab, change):
    """``placement_by: mount`` holds the pages of both builds: one that allocates elsewhere is no fair comparison."""
    evidence = lab.evidence(NAME, hold={**HOLD, "placement_by": "mount"})
    assert gates.evaluate(evidence).gates[1].reason == "treatment-delivered"
    for arm in "AB":
        assert gates.evaluate(change(evidence, pages(arm, {0: 10_000}))).gates[1].reason == "not-as-asked"


def test_copies_do_not_speak_of_distance(lab, change):
    """Hypothesis 1 is heard where the patch moves one table; a patch that makes copies changes more than distance."""
    for policy, says in (("bind:1", "supported"), ("per-socket", "undecided")):
        evidence = lab.evidence(NAME, hold={**HOLD, "policy": policy}, effects={"B": {}}, by_rank={"B": {1: -0.3}})
        evidence = change(evidence, pages(("A", "A'"), {0: 10_000}))
        near = change(evidence, lambda run: replace(run, drift={
            **run.drift, "rank1.cross_socket_in_bytes": 1e6 if run.arm == "B" else 1e9}))  # fmt: skip
        verdict = gates.evaluate(near)
        assert verdict.gates[1].status is Status.PASS
        found = hypotheses.adjudicate([near], [verdict])[0]
        assert found.outcome == says, found.lines


def test_placement_precedes_the_first_page(lab):
    """``placement_by: engine`` between two builds needs a fresh allocation per run and a policy to obey; between
    submissions it needs neither."""
    chosen = lab.experiment(NAME)
    assert experiment_rules.places(chosen)
    (fault,) = experiment_rules.faults(replace(chosen, unit="replay"))
    assert fault.where == ("unit",)
    (fault,) = experiment_rules.faults(replace(chosen, hold={**chosen.hold, "policy": "default"}))
    assert fault.where == ("hold", "policy")
    other = lab.experiment("B1")
    assert not [*experiment_rules.faults(replace(other, hold={**other.hold, "placement_by": "engine"}))]
    assert not experiment_rules.places(replace(other, hold={**other.hold, "placement_by": "engine"}))

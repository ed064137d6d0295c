"""Gate 1 of placement: pages audited, as asked, shared as planned."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_engram import gates
from pytest_engram.gates.placement import as_asked
from pytest_engram.model import Moment, PageDistribution, Status, TablePlan

edits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("edits.py"))))
CASES, reason = edits.cases()


@reason("undeclared-difference", 1)
def _regrouped_without_saying(lab, change):
    evidence = lab.evidence("A1", effects={"B": {}}, by_rank={"B": {0: 0.3, 1: -0.3}})
    return change(evidence, edits.with_print(groups="[[0], [1]]"), edits.is_b)


@reason("pages-not-audited", 1)
def _moment_missing(lab, change):
    return change(
        edits.placed(lab),
        edits.with_audits(lambda a: None if (a.rank, a.moment) == (1, Moment.LOADED) else a),
        edits.is_b,
    )


@reason("pages-not-audited", 1)
def _no_route_answered(lab, change):
    return change(edits.placed(lab), edits.with_audits(lambda audit: replace(audit, routes=())), edits.is_b)


@reason("pages-not-covered", 1)
def _half_covered(lab, change):
    return change(
        edits.placed(lab),
        edits.with_audits(lambda audit: replace(audit, covered_bytes=audit.table_bytes // 2)),
        edits.is_b,
    )


def _lost(lab, change, lost):
    def lose(audit):
        (node, count), *_ = audit.pages.items()
        return replace(audit, pages={node: count - lost}, unplaced={"ENOENT": lost})

    return change(edits.placed(lab), edits.with_audits(lose), edits.is_b)


@reason("pages-unplaced", 1)
def _eleven_of_ten_thousand_pages_not_resident(lab, change):
    return _lost(lab, change, 11)


@reason("treatment-delivered", 1)
def _nine_of_ten_thousand_pages_not_resident(lab, change):
    return _lost(lab, change, 9)


@reason("not-as-asked", 1)
def _policy_is_not_placement(lab, change):
    return change(
        edits.placed(lab), edits.with_audits(lambda audit: replace(audit, pages={0: 5000, 1: 5000})), edits.is_b
    )


@reason("not-as-asked", 1)
def _moved_after_load(lab, change):
    def migrate(audit):
        return replace(audit, pages={0: 9000, 1: 1000}) if audit.moment is Moment.REPLAYED else audit

    return change(edits.placed(lab), edits.with_audits(migrate), lambda run: run.index == 4)


def _in_huge_pages(lab, change, huge_bytes):
    """B1 over anonymous huge pages, of which the kernel gave so many bytes."""
    hold = {**lab.experiment("B1").hold, "backing": "anon-thp"}
    return change(lab.evidence("B1", hold=hold), edits.with_audits(lambda audit: replace(audit, huge_bytes=huge_bytes)))


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
    return change(evidence, edits.with_audits(lambda audit: replace(audit, pages={0: 5400, 1: 4600})), edits.is_b)


@reason("not-shared", 1)
def _private_copy(lab, change):
    def own(audit):
        return replace(audit, identity="0:99") if audit.rank == 1 else audit

    return change(edits.placed(lab), edits.with_audits(own), lambda run: run.arm == "A")


@reason("not-shared", 1)
def _anonymous_memory_for_two_ranks(lab, change):
    return change(
        edits.placed(lab), edits.with_audits(lambda audit: replace(audit, identity="anon")), lambda run: run.arm == "A"
    )


@reason("not-separate", 1)
def _one_object_for_both_sockets(lab, change):
    return change(edits.placed(lab), edits.with_audits(lambda audit: replace(audit, identity="0:40")), edits.is_b)


@reason("no-treatment", 1)
def _default_lands_where_bind_does(lab, change):
    arms = {"A": {"policy": "default"}, "B": {"policy": "bind:0"}}
    return lab.evidence("A1", arms=arms, effects={"B": {}})


@pytest.mark.parametrize(("code", "gate", "build"), CASES.values(), ids=CASES)
def test_reason_is_reached(reached, code, gate, build):
    """Evidence broken in one way stops at its own gate, with its own reason, that reason's status and a next step."""
    reached(code, gate, build)


def test_a_placement_without_a_plan_is_not_audited(lab):
    """An arm for which no placement was planned cannot have been delivered."""
    evidence = lab.evidence("A1", effects={"B": {}})
    bare = replace(evidence, plan=replace(evidence.plan, placements={"A": evidence.plan.placements["A"]}))
    assert gates.evaluate(bare).gates[1].reason == "pages-not-audited"


def test_a_rank_without_a_table_is_not_audited(lab):
    """Tables that leave a rank out leave its pages unasked: the treatment is shown on every rank or not at all."""
    evidence = lab.evidence("A1", effects={"B": {}})
    alone = {
        arm: replace(one, tables=tuple(replace(table, ranks=(0,)) for table in one.tables))
        for arm, one in evidence.plan.placements.items()
    }
    gate = gates.evaluate(replace(evidence, plan=replace(evidence.plan, placements=alone))).gates[1]
    assert (gate.reason, gate.status) == ("pages-not-audited", Status.NOT_MEASURED)
    assert "ranks [1]" in gate.observed


def test_weighted_interleave_is_judged_by_its_weights():
    """3:1 over two nodes is 75 % and 25 %, within the tolerance of an interleave."""
    table = TablePlan(ranks=(0,), mode="weighted-interleave", nodes=(0, 1), weights=(3, 1))
    audit = PageDistribution(
        rank=0, moment=Moment.LOADED, table=0, identity="0:1", address=0, table_bytes=40_960_000, page_bytes=4096,
        pages={0: 7500, 1: 2500}, unplaced={}, covered_bytes=40_960_000, policy_text="", routes=("move_pages",),
    )  # fmt: skip
    assert as_asked(table, audit)
    assert not as_asked(table, replace(audit, pages={0: 5000, 1: 5000}))

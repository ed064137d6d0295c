"""Several results of a required experiment: whose verdict the one that needs it is judged by."""

from __future__ import annotations

from dataclasses import replace

from pytest_engram.report import results
from pytest_engram.report.account import Account
from pytest_engram.report.records import write_run


def test_a_runs_own_result_stands_before_its_kins(tmp_path, make_evidence, make_verdict):
    """A3 of a run with its own B1 hears that one alone, whatever the order of the files; without one it hears kin."""
    heard = {}

    def evaluate(evidence, prior=()):
        key = evidence.plan.experiment.id, evidence.plan.seed
        heard[key] = [verdict.sentence for verdict in prior if verdict.experiment == "B1"]
        made = make_verdict(experiment=key[0], protocol_hash=evidence.plan.protocol_hash)
        return replace(made, sentence=f"of seed {evidence.plan.seed}")

    def run(name, seed, *ids):
        made = [make_evidence(one, requires=("B1",) if one == "A3" else ()) for one in ids]
        made = [replace(one, plan=replace(one.plan, seed=seed)) for one in made]
        write_run(tmp_path / name, Account([evaluate(one) for one in made], made))

    run("both", 1, "A3", "B1")
    run("b1", 2, "B1")
    run("a3", 3, "A3")
    for names in (("both", "b1", "a3"), ("a3", "b1", "both")):
        heard.clear()
        results.gate_files([tmp_path / name for name in names], evaluate=evaluate)
        assert heard["A3", 1] == ["of seed 1"]
        assert sorted(heard["A3", 3]) == ["of seed 1", "of seed 2"]

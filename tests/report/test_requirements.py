"""Required experiments among result files: which verdicts the one that needs them is judged by, and in which order."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from pytest_engram import cli, gates
from pytest_engram.errors import UsageError
from pytest_engram.model import Status
from pytest_engram.report import records
from pytest_engram.report.account import Account
from pytest_engram.report.records import write_run


def test_a_runs_own_result_stands_before_its_kins(monkeypatch, tmp_path, make_evidence, make_verdict, gate_files):
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

    monkeypatch.setattr(gates, "evaluate", evaluate)
    run("both", 1, "A3", "B1")
    run("b1", 2, "B1")
    run("a3", 3, "A3")
    for names in (("both", "b1", "a3"), ("a3", "b1", "both")):
        heard.clear()
        gate_files([tmp_path / name for name in names])
        assert heard["A3", 1] == ["of seed 1"]
        assert sorted(heard["A3", 3]) == ["of seed 1", "of seed 2"]


@pytest.fixture
def strict(monkeypatch, make_verdict):
    """A stand-in for gates.evaluate: BLOCKED until every required experiment passed."""

    def evaluate(evidence, prior=()):
        chosen, passed = evidence.plan.experiment, {one.experiment for one in prior if one.status is Status.PASS}
        made = make_verdict() if passed >= set(chosen.requires) else make_verdict("BLOCKED", at=4)
        return replace(made, experiment=chosen.id, protocol_hash=evidence.plan.protocol_hash)

    monkeypatch.setattr(gates, "evaluate", evaluate)
    return evaluate


@pytest.mark.parametrize("names", [*permutations(("A3", "A1", "B1"))])
@pytest.mark.parametrize("apart", [True, False])
def test_what_is_required_is_judged_first_however_deep(tmp_path, make_evidence, strict, names, apart, gate_files):
    """A3 needs A1, which needs B1: in files of any order, of one run or of three, all pass; without B1 neither does."""
    needs, prior = {"A3": ("A1",), "A1": ("B1",), "B1": ()}, []
    made = {name: make_evidence(name, requires=needs[name]) for name in names}
    for name in ("B1", "A1", "A3"):
        prior.append(strict(made[name], prior))
        if apart:  # a run of its own, which knows no other
            write_run(tmp_path / name, Account([strict(made[name])], [made[name]]))
    if not apart:
        by_name = {verdict.experiment: verdict for verdict in prior}
        write_run(tmp_path / "run", Account([by_name[name] for name in names], [*made.values()]))
    paths = [tmp_path / name for name in names] if apart else [tmp_path / "run"]
    assert {verdict.status for verdict in gate_files(paths)[0]} == {Status.PASS}
    if apart:
        left, code, _ = gate_files([path for path in paths if path.name != "B1"])
        assert ({verdict.status for verdict in left}, code) == ({Status.BLOCKED}, 12)


def test_what_another_run_lifts_lifts_what_rests_on_it(tmp_path, make_evidence, strict, gate_files):
    """A3 and A1 of one run were BLOCKED for want of B1: beside its file A1 passes and so does A3, no contradiction."""
    run = [make_evidence("A1", requires=("B1",)), make_evidence("A3", requires=("A1",))]
    write_run(tmp_path / "run", Account([strict(one) for one in run], run))
    write_run(tmp_path / "b1", Account([strict(make_evidence("B1"))], [make_evidence("B1")]))
    assert gate_files([tmp_path / "run"])[1] == 12
    verdicts, code, _ = gate_files([tmp_path / "run", tmp_path / "b1"])
    assert ({verdict.status for verdict in verdicts}, code) == ({Status.PASS}, 0)


def test_a_circle_of_requirements_is_refused(tmp_path, make_evidence, strict, gate_files):
    """Results that require each other have no order in which they could be judged."""
    pair = [make_evidence("A1", requires=("B1",)), make_evidence("B1", requires=("A1",))]
    write_run(tmp_path, Account([strict(one) for one in pair], pair))
    with pytest.raises(UsageError, match="required by each other") as caught:
        gate_files([tmp_path])
    assert caught.value.code == "bad-experiment"


def test_a_file_is_read_once(tmp_path, make_evidence, make_verdict, monkeypatch):
    """``--require`` and ``--write-trace`` take what was read for the gates."""
    evidence, seen, read = make_evidence("mine"), [], records._read
    write_run(tmp_path, Account([make_verdict("NOT_MEASURED", at=0, experiment="mine")], []))
    write_run(tmp_path / "run", Account([], [evidence]))
    monkeypatch.setattr(records, "_read", lambda file: seen.append(file.name) or read(file))
    options = ["--require", "mine:4", "--write-trace", str(tmp_path / "trace.json")]
    cli.main(["gate", str(tmp_path / "run"), *options])
    assert sorted(seen) == ["evidence-mine.json", "verdict.json"]

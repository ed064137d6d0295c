"""The run folder, reading it back, and the gates once more over files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_engram import cli, codec, gates
from pytest_engram.errors import UsageError
from pytest_engram.model import Evidence, Status, SweepSample
from pytest_engram.report import records, results
from pytest_engram.report.account import Account
from pytest_engram.report.records import write_run


def _refuse(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture
def judge(monkeypatch, make_verdict):
    """A stand-in for gates.evaluate: passes everything, and remembers what it was given."""

    def evaluate(evidence, prior=()):
        evaluate.calls.append((evidence.plan.experiment.id, [verdict.experiment for verdict in prior]))
        return make_verdict(experiment=evidence.plan.experiment.id, protocol_hash=evidence.plan.protocol_hash)

    evaluate.calls = []
    monkeypatch.setattr(gates, "evaluate", evaluate)
    return evaluate


@pytest.fixture
def folder(tmp_path, make_evidence, judge):
    """A run folder with the experiment B1."""
    evidence = make_evidence()
    write_run(tmp_path / "run", Account([judge(evidence)], [evidence]), command=["pytest", "-m", "overlap"])
    judge.calls.clear()
    return tmp_path / "run"


def test_the_folder_holds_strict_json_and_a_report(folder):
    """verdict.json, evidence-B1.json and report.md are there, and the strictest reader takes both JSON files."""
    assert sorted(path.name for path in folder.iterdir()) == ["evidence-B1.json", "report.md", "verdict.json"]
    section = json.loads((folder / "verdict.json").read_text(), parse_constant=_refuse)["engram"]
    assert section["schema"] == records.SECTION_SCHEMA
    assert section["verdicts"][0]["status"] == "PASS"
    assert section["evidence_files"] == ["evidence-B1.json"]
    assert section["command"] == ["pytest", "-m", "overlap"]
    assert "pytest -m overlap" in (folder / "report.md").read_text()


def test_evidence_survives_the_disk(folder, make_evidence):
    """The evidence that is read back equals what was written."""
    (result,) = records.read_results([folder])
    assert result.evidence == codec.decode(codec.encode(make_evidence()), Evidence)
    assert result.stored is not None
    assert result.experiment == "B1"


def test_a_second_evidence_of_an_experiment_gets_its_own_file(tmp_path, make_evidence, judge, gate_files):
    """Nothing overwrites anything; both come back and neither is pooled with the other."""
    pair = [make_evidence(), make_evidence()]
    write_run(tmp_path, Account([judge(each) for each in pair], pair))
    assert (tmp_path / "evidence-B1.2.json").exists()
    verdicts, _code, lines = gate_files([tmp_path])
    assert [verdict.experiment for verdict in verdicts] == ["B1", "B1"]
    assert "B1: 2 results, shown side by side and not pooled" in lines
    assert [line.split()[0] for line in lines[-2:]] == ["B1", "B1.2"]
    assert f"  B1.2  {tmp_path}" in lines


def test_the_verdict_file_stands_for_its_run(folder, judge):
    """`gate verdict.json`, the folder and the shell's glob all name the same one result."""
    by_folder = records.read_results([folder])
    assert records.read_results([folder / "verdict.json"]) == by_folder
    assert records.read_results([*folder.glob("*.json"), folder]) == by_folder


def test_a_gate_run_is_green_and_prints_its_ladder(folder, judge, gate_files):
    """The negative control of everything below: an untouched folder gives its verdict again and exit code 0."""
    verdicts, code, lines = gate_files([folder])
    assert ([verdict.status for verdict in verdicts], code) == ([Status.PASS], 0)
    assert lines[1].startswith("B1  Submit early")
    assert judge.calls == [("B1", [])]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", ["verdict.json", "evidence-B1.json"])
def test_a_truncated_file_is_an_error_at_its_position(folder, judge, name, share, gate_files):
    """A file that was cut anywhere is a usage error that names file, line and column; never a verdict."""
    data = (folder / name).read_bytes().rstrip()
    (folder / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UsageError, match=r"line \d+ column \d+") as caught:
        gate_files([folder])
    assert caught.value.where == str(folder / name)
    assert caught.value.code in {"bad-json", "empty-file"}


def _edit(path, change):
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize("schema", [2, 0, "1", 1.0, True, None])
def test_an_unknown_schema_is_refused(folder, judge, schema, gate_files):
    """A section, an evidence or a verdict of another schema version is refused and never guessed at."""
    places = {
        "verdict.json": [lambda tree: tree["engram"], lambda tree: tree["engram"]["verdicts"][0]],
        "evidence-B1.json": [lambda tree: tree],
    }
    for name, parts in places.items():
        good = (folder / name).read_text()
        for part in parts:
            _edit(folder / name, lambda tree, part=part: part(tree).update(schema=schema))
            with pytest.raises(UsageError, match=r"\.schema is") as caught:
                gate_files([folder])
            assert caught.value.code == "unknown-schema"
            (folder / name).write_text(good)
    assert gate_files([folder])[1] == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [('{"benchmarks": []}', "no-engram-section"), ("[]", "no-engram-section"), ('{"engram": 3}', "no-engram-section"),
     ('{"engram": {"schema": 1, "verdicts": {}}}', "bad-json"),
     ('{"engram": {"schema": 1, "verdicts": [], "evidence": [3]}}', "bad-json"),
     ('{"engram": {"schema": 1, "verdicts": [{"schema": 1}], "evidence": []}}', "bad-json")],
)  # fmt: skip
def test_files_that_are_not_ours_are_refused(tmp_path, judge, text, code, gate_files):
    """A benchmark file without the section, and a section without its parts, name the file and the field."""
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        gate_files([path])
    assert (caught.value.code, str(path) in str(caught.value)) == (code, True)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda e: e.update(arms={}), "B1.arms"), (lambda e: e.update(variable=""), "B1.variable"),
        (lambda e: e.update(ranks=10**9), "B1.ranks"), (lambda e: e["hold"].update(backing="floppy"), "hold.backing"),
    ],
)  # fmt: skip
def test_an_experiment_that_no_file_may_say_is_refused(folder, judge, edit, named, gate_files):
    """Evidence whose experiment breaks the rules of experiments names the file and the place, and is not judged."""
    path = folder / "evidence-B1.json"
    tree = json.loads(path.read_text())
    edit(tree["plan"]["experiment"])
    path.write_text(json.dumps(tree))
    with pytest.raises(UsageError) as caught:
        gate_files([path])
    assert (caught.value.code, named in str(caught.value), str(path) in str(caught.value)) == (
        "bad-experiment", True, True,
    )  # fmt: skip


def test_an_empty_folder_is_an_error(tmp_path, judge, gate_files):
    """No result is not a green result."""
    with pytest.raises(UsageError, match=r"no verdict\.json"):
        gate_files([tmp_path])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda v: v.update(status="FAIL"), "status = FAIL"),
        (lambda v: v.update(sentence="a speed-up"), "sentence"),
        (lambda v: v["gates"][2].update(status="INCONCLUSIVE"), "gate 2 status"),
        (lambda v: v["gates"].pop(), "gate 4 status"),
        (lambda v: v.update(protocol_hash="dead"), "protocol_hash"),
    ],
)
def test_an_edited_verdict_is_found_out(folder, judge, change, named, gate_files):
    """A stored verdict that its evidence does not give is an error that names the field."""
    _edit(folder / "verdict.json", lambda tree: change(tree["engram"]["verdicts"][0]))
    with pytest.raises(UsageError, match="B1 says") as caught:
        gate_files([folder])
    assert named in caught.value.seen
    assert caught.value.code == "verdict-differs"


def test_an_edited_effect_is_found_out_but_not_its_last_bit(
    monkeypatch, tmp_path, make_evidence, characterised, gate_files
):
    """Effects are compared too; another numpy's last bit is not another verdict."""
    monkeypatch.setattr(gates, "evaluate", lambda evidence, prior: characterised)
    write_run(tmp_path, Account([characterised], [make_evidence("A1")]))
    effect = ("engram", "verdicts", 0, "gates", 2, "effects", 0)

    def set_estimate(value):
        def change(tree):
            for key in effect:
                tree = tree[key]
            tree["estimate"] = value

        _edit(tmp_path / "verdict.json", change)

    set_estimate(-0.031 * (1 + 1e-15))
    assert gate_files([tmp_path])[1] == 0
    set_estimate(-0.0311)
    with pytest.raises(UsageError, match="gate 2 B lookup estimate"):
        gate_files([tmp_path])


def test_a_verdict_without_its_evidence_is_not_measured(folder, judge, gate_files):
    """Deleting the evidence does not leave a green verdict behind."""
    (folder / "evidence-B1.json").unlink()
    verdicts, code, _ = gate_files([folder])
    assert verdicts[0].status is Status.NOT_MEASURED
    assert verdicts[0].gates[0].reason == "no-evidence"
    assert code == 12


def test_what_was_never_measured_keeps_its_reason(tmp_path, make_verdict, gate_files):
    """A run without evidence claims nothing: judged again it says why, and only NOT_MEASURED is taken at its word."""
    why = {"reason": "too-few-memory-nodes", "observed": "needs two memory NUMA nodes, found one"}
    for status, reason in (("NOT_MEASURED", "too-few-memory-nodes"), ("PASS", "no-evidence")):
        write_run(tmp_path / status, Account([make_verdict(status, at=0, gate=why)], []))
        (verdict,), code, _ = gate_files([tmp_path / status])
        assert (verdict.status, verdict.gates[0].reason, code) == (Status.NOT_MEASURED, reason, 12)
        assert {gate.status for gate in verdict.gates[1:]} == {Status.BLOCKED}


def test_required_experiments_are_judged_first(tmp_path, make_evidence, judge, gate_files):
    """A3 sees A1 and B1 of its own run, whatever the order of the files."""
    run = [make_evidence("A3", requires=("A1", "B1")), make_evidence("A1"), make_evidence("B1")]
    write_run(tmp_path, Account([judge(each) for each in run], run))
    judge.calls.clear()
    gate_files([tmp_path])
    assert judge.calls[-1] == ("A3", ["A1", "B1"])


@pytest.mark.parametrize("differs", [("protocol", ["B1"]), ("machine.cpu", []), ("backend.commit", [])])
def test_another_file_counts_only_with_an_equal_fingerprint(
    tmp_path, make_evidence, make_run, judge, differs, gate_files
):
    """A3 may rest on B1 of another file, unless the machine or the build differs."""
    run, (key, seen) = make_run(), differs
    b1, a3 = make_evidence("B1"), make_evidence("A3", requires=("B1",))
    a3 = replace(a3, runs=(replace(run, fingerprint={**run.fingerprint, key: "other"}),))
    for name, evidence in (("b", b1), ("a", a3)):
        write_run(tmp_path / name, Account([judge(evidence)], [evidence]))
    judge.calls.clear()
    gate_files([tmp_path / "a", tmp_path / "b"])
    assert judge.calls[-1] == ("A3", seen)


def _baseline(tmp_path, judge, evidences):
    write_run(tmp_path / "base", Account([judge(each) for each in evidences], evidences))
    return tmp_path / "base"


def test_an_equal_baseline_is_shown_and_decides_nothing(tmp_path, folder, judge, make_evidence, gate_files):
    """The negative control: with the same case on both sides the run stays green and both statuses are printed."""
    base = _baseline(tmp_path, judge, [make_evidence()])
    verdicts, code, lines = gate_files([folder], baseline=base)
    assert (len(verdicts), code) == (1, 0)
    assert "  B1  PASS → PASS" in lines


def test_a_case_missing_in_the_baseline_is_not_measured(tmp_path, folder, judge, make_evidence, gate_files):
    """X1: a renamed or new case is NOT_MEASURED by name, and so is one that this run left out."""
    base = _baseline(tmp_path, judge, [make_evidence("A1")])
    verdicts, code, lines = gate_files([folder], baseline=base)
    assert [(v.experiment, v.status.value, v.gates[0].reason) for v in verdicts[1:]] == [
        ("B1", "NOT_MEASURED", "baseline-lacks-case"),
        ("A1", "NOT_MEASURED", "case-left-out"),
    ]
    assert code == 12
    assert any("B1" in line and "NOT_MEASURED" in line for line in lines)


def test_a_baseline_of_another_kind_is_not_comparable(tmp_path, folder, judge, make_evidence, make_run, gate_files):
    """Another machine or rule is named and not compared; another build of the backend is what it is for."""
    base = _baseline(tmp_path, judge, [make_evidence(alpha=0.05)])
    verdicts, _, _ = gate_files([folder], baseline=base)
    assert verdicts[-1].gates[0].reason == "baseline-not-comparable"
    assert "alpha (0.05 against 0.025)" in verdicts[-1].gates[0].observed
    run = make_run()
    older = (replace(run, fingerprint={**run.fingerprint, "backend.commit": "01d"}),)
    base = _baseline(tmp_path, judge, [make_evidence(runs=older)])
    assert gate_files([folder], baseline=base)[1] == 0


def test_required_gates_decide_the_exit(folder, judge, make_evidence, make_verdict, gate_files):
    """`require` narrows the exit to its experiments; one that is not there is never green."""
    assert gate_files([folder], require={"B1": 4})[1] == 0
    assert gate_files([folder], require={"A1": 1})[1] == 12


def test_the_report_is_rendered_again(folder, tmp_path, judge, gate_files):
    """`markdown` writes the page of the re-evaluated verdicts."""
    gate_files([folder], markdown=tmp_path / "again.md")
    assert "## B1" in (tmp_path / "again.md").read_text()


def test_a_crash_while_writing_leaves_the_old_file(folder, monkeypatch):
    """Atomic: when the disk fails in the middle, the old file stands whole and no scrap stays beside it."""
    path = folder / "verdict.json"
    before, names = path.read_bytes(), sorted(folder.iterdir())

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="disk full"):
        codec.write_atomic(path, b"{}")
    assert (path.read_bytes(), sorted(folder.iterdir())) == (before, names)


def test_a_section_embeds_or_names_its_evidence(folder, make_evidence, make_verdict):
    """A section stands alone unless its evidence lies in files beside it; NaN in provenance is null and listed."""
    whole = records.engram_section(Account([make_verdict()], [make_evidence()]), {"load": float("nan")})
    assert len(whole["evidence"]) == 1
    assert (whole["provenance"]["load"], whole["replaced"]) == (None, ["$.engram.provenance.load"])
    named = json.loads((folder / "verdict.json").read_text())["engram"]
    assert (named["evidence"], named["evidence_files"]) == ([], ["evidence-B1.json"])


def test_an_absent_case_blocks_the_gates_behind_it(make_verdict):
    """The verdict of a missing case has five gates, says nothing, and the next step names the case."""
    verdict = results.absent(make_verdict(sentence="a speed-up"), "no-evidence", "nothing")
    assert [gate.status.value for gate in verdict.gates] == ["NOT_MEASURED", *["BLOCKED"] * 4]
    assert (verdict.status, verdict.sentence) == (Status.NOT_MEASURED, None)
    assert "B1" in verdict.gates[0].next_step


def test_hypotheses_and_advice_travel(folder, judge, make_evidence, gate_files):
    """The section holds them; over several files `gate` adjudicates once, over all of them."""
    section = json.loads((folder / "verdict.json").read_text())["engram"]
    assert [(one["number"], one["outcome"]) for one in section["hypotheses"]] == [
        (n, "undecided") for n in (1, 2, 3, 4)
    ]
    assert section["advice"][0].startswith("no recommendation: ")
    write_run(folder.parent / "b2", Account([judge(make_evidence("B2"))], [make_evidence("B2")]))
    _, _, lines = gate_files([folder, folder.parent / "b2"])
    text = " ".join(" ".join(lines).split())
    assert text.count("hypotheses (they explain, no gate reads them)") == 1
    assert text.count("no recommendation: ") == 2


def test_figures_lie_beside_the_page(tmp_path, judge, make_evidence, make_run, gate_files):
    """A run folder and `gate --markdown` both write the maps that their pages show."""
    cell = SweepSample(rank=0, tokens=8, peers=1, lookup_ns=(9,), exposed_ns=(0,), main_ns=(3,), quiet_main_ns=(2,),
                       source_bytes=2112)  # fmt: skip
    evidence = make_evidence(runs=(make_run(0, "A", sweep=(cell,)),))
    write_run(tmp_path / "run", Account([judge(evidence)], [evidence]))
    gate_files([tmp_path / "run"], markdown=tmp_path / "again" / "page.md")
    for page in (tmp_path / "run" / "report.md", tmp_path / "again" / "page.md"):
        assert "(interference-B1.svg)" in page.read_text()
        assert (page.parent / "interference-B1.svg").read_text().startswith("<svg")


def test_an_older_run_of_a_required_experiment_lifts_the_block(
    monkeypatch, tmp_path, make_evidence, make_verdict, gate_files
):
    """A3 was BLOCKED in its own run; beside B1's folder it is judged anew, and that is no contradiction."""

    def evaluate(evidence, prior=()):
        met = {one.experiment for one in prior} >= set(evidence.plan.experiment.requires)
        made = make_verdict(*(() if met else ("BLOCKED",)), at=5 if met else 4)
        return replace(made, experiment=evidence.plan.experiment.id, protocol_hash=evidence.plan.protocol_hash)

    monkeypatch.setattr(gates, "evaluate", evaluate)
    for evidence in (make_evidence("A3", requires=("B1",)), make_evidence("B1")):
        folder = tmp_path / evidence.plan.experiment.id
        write_run(folder, Account([evaluate(evidence)], [evidence]))
    assert gate_files([tmp_path / "A3"])[1] == 12
    assert gate_files([tmp_path / "A3", tmp_path / "B1"])[1] == 0


def test_a_stored_verdict_without_gates_is_not_measured(tmp_path, make_verdict, gate_files):
    """A verdict that names no gate and has no evidence is an absence, not a traceback."""
    write_run(tmp_path, Account([make_verdict("NOT_MEASURED", gates=())], []))
    verdicts, code, _ = gate_files([tmp_path])
    assert (verdicts[0].gates[0].reason, code) == ("no-evidence", 12)


def test_what_cannot_be_judged_is_said(monkeypatch, folder, gate_files):
    """Evidence that no run can have written (pages of 0 bytes) is one sentence that names run and experiment."""
    monkeypatch.setattr(gates, "evaluate", lambda evidence, prior: 1 // 0)
    with pytest.raises(UsageError, match="B1 cannot be judged: ZeroDivisionError") as caught:
        gate_files([folder])
    assert (caught.value.code, str(folder) in str(caught.value)) == ("bad-evidence", True)


def test_a_plan_of_another_schema_is_refused(folder, judge, gate_files):
    """The plan inside an evidence has a schema of its own."""
    tree = json.loads((folder / "evidence-B1.json").read_text())
    tree["plan"]["schema"] = 99
    (folder / "evidence-B1.json").write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=r"evidence\[0\].plan.schema is 99"):
        gate_files([folder])


def test_an_empty_section_says_so(tmp_path, gate_files):
    """A file without any experiment is NOT_MEASURED in words, too."""
    write_run(tmp_path, Account([], []))
    _, code, lines = gate_files([tmp_path])
    assert (code, lines[-1]) == (12, "NOT_MEASURED  no experiment is in there")


@pytest.mark.parametrize("option", [["--require", "mine:4"], ["--baseline", "x"], ["--markdown", "x"]])
def test_nothing_is_judged_without_files(tmp_path, capsys, option):
    """A trace alone is explained; what asks for a verdict beside it is refused, never a silent 0."""
    assert cli.main(["gate", "--trace", str(tmp_path / "t.json"), *option]) == 4
    assert "nothing to judge" in capsys.readouterr().err


def test_an_experiment_of_the_users_own_can_be_required(tmp_path, make_evidence, make_verdict, capsys):
    """Offline the files say which experiments there are; an id that neither they nor the suite know is refused."""
    write_run(tmp_path, Account([make_verdict("NOT_MEASURED", at=0, experiment="mine")], []))
    assert cli.main(["gate", str(tmp_path), "--require", "mine:4"]) == 12
    assert cli.main(["gate", str(tmp_path), "--require", "other:4"]) == 4
    assert "mine" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["loop", "x" * 5000])
def test_paths_that_lead_nowhere_are_one_line(tmp_path, capsys, path):
    """A link to itself and an endless name are refused like any file that cannot be read."""
    (tmp_path / "loop").symlink_to("loop")
    assert cli.main(["gate", str(tmp_path / path)]) == 4
    assert capsys.readouterr().err.startswith("pytest-engram: error: ")


def test_a_report_that_cannot_be_written_is_one_line(folder, tmp_path, capsys):
    """``--markdown`` onto a folder."""
    assert cli.main(["gate", str(folder), "--markdown", str(tmp_path)]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_a_number_beyond_64_bits_is_refused(folder, judge, gate_files):
    """An integer that no counter of ours can reach names the file, before any arithmetic overflows."""
    tree = json.loads((folder / "evidence-B1.json").read_text())
    tree["runs"][0]["compute"][0]["step_ns"] = [10**400]
    (folder / "evidence-B1.json").write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=r"evidence-B1\.json: 10000000000000000000… is larger"):
        gate_files([folder])

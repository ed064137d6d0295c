"""What other tools get from a run: JUnit properties, the short summary, the project's own provenance."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_engram import session

ROOT = Path(__file__).parents[2]
CONFTEST = """
    def pytest_engram_provenance(config):
        return {"lab.nps": 4}

    def pytest_engram_verdict(config, verdict):
        with open("verdicts.log", "a") as log:
            print(verdict.experiment, verdict.status.value, file=log)
"""
ITEMS = """
    import pytest

    pytestmark = [pytest.mark.overlap, pytest.mark.engram_experiments("submission", "policy")]

    def test_arm(engram_publish):
        engram_publish()

    def test_gates(engram_settle):
        engram_settle()

    def test_evidence(engram_evidence, engram_experiment):
        assert engram_evidence.plan.experiment == engram_experiment
        assert len(engram_evidence.runs) == 18
"""
TINY = """
id: T1
title: submission at the smallest scale
why: the shortest schedule that is a real one
claim: characterises
subject: suite loop
variable: submission
arms:
  A: {submission: at_consumption}
  B: {submission: early}
hold: {policy: default, backing: memfd, cap: null, grid: background}
direction_note: none expected at this size
unit: replay
ranks: 1
blocks: 6
cooldown_s: 0
aa_level: 0.01
alpha: 0.025
mechanism:
  - {metric: exposed_wait, direction: down, margin: 0.0}
no_offset:
  - {metric: main_compute, direction: down, margin: 0.02}
end_to_end: []
guards: []
workload: {hidden: 32, layers: 3, engram_layers: [1, 2], tokens: 8, steps: 2, warmup: 1, rows: 127100,
           reuse: low-reuse, gemms_per_layer: 1}
"""


def run(folder, *arguments):
    """One pytest run in its own process, in a project of its own, not as the xdist worker that this may be."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += ["--junitxml=junit.xml", "--engram-report=run"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env={**clean, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def properties(folder):
    """Item name -> its JUnit properties."""
    cases = ET.parse(folder / "junit.xml").iter("testcase")  # noqa: S314 - written by the run above
    return {case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in cases}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(process, folder) of one tiny experiment that is really measured, and of one that needs 99 NUMA nodes."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "conftest.py").write_text(CONFTEST.replace("\n    ", "\n"))
    (folder / "test_tiny.py").write_text(ITEMS.replace("\n    ", "\n"))
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "T1.yaml").write_text(TINY)
    far = (ROOT / "fixtures/experiments/A1.yaml").read_text().replace("memory_nodes: 2", "memory_nodes: 99")
    (folder / "A1.yaml").write_text(far)
    options = [f"--engram-experiments={folder / name}.yaml" for name in ("T1", "A1")]
    return run(folder, "-ra", "--engram-engine=cpu", "--engram-gate=report", *options), folder


def test_junit_carries_each_verdict(measured):
    """In report mode too, the item of an experiment has status, reason and the whole ladder as JUnit properties."""
    done, folder = measured
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads((folder / "run/verdict.json").read_text())["engram"]["verdicts"]
    assert {verdict["experiment"] for verdict in verdicts} == {"T1", "A1"}
    for verdict in verdicts:
        found = properties(folder)[f"test_gates[{verdict['experiment']}]"]
        assert found["engram_status"] == verdict["status"]
        stopped = [gate["reason"] for gate in verdict["gates"] if gate["judged"] and gate["status"] != "PASS"]
        assert found["engram_reason"].startswith(stopped[0] if stopped else "all gates passed")
        rungs = found["engram_ladder"].splitlines()
        assert [line.split()[0] for line in rungs if line[2:3].isdigit()] == list("01234")
        assert found["engram_ladder"] in done.stdout
    assert properties(folder)["test_arm[T1-A]"] == {}


def test_an_absence_is_one_line(measured):
    """Every item of an experiment that is not measured is skipped with one text that names it; no other is skipped."""
    done, _ = measured
    skipped = [line for line in done.stdout.splitlines() if line.startswith(("SKIPPED", "GATE"))]
    assert {line.partition(": ")[2].partition(" needs")[0] for line in skipped} == {
        "A1 NOT_MEASURED: too-few-memory-nodes:"
    }, done.stdout
    assert sum(int(line[9]) for line in skipped) == 5


def test_provenance_of_the_project_reaches_every_arm(measured):
    """What the hook returns stands in each run's fingerprint and in the report's provenance."""
    _, folder = measured
    evidence = json.loads((folder / "run/evidence-T1.json").read_text())
    assert {run["arm"] for run in evidence["runs"]} == {"A", "A'", "B"}
    assert {run["fingerprint"]["machine.user.lab.nps"] for run in evidence["runs"]} == {"4"}
    assert evidence["provenance"]["user.lab.nps"] == {"value": "4"}
    assert "user.lab.nps" in (folder / "run/report.md").read_text()


def test_verdict_hook_is_called_once_each(measured):
    """A project hears of every verdict once."""
    _, folder = measured
    assert sorted(line.split()[0] for line in (folder / "verdicts.log").read_text().splitlines()) == ["A1", "T1"]


def test_failed_gates_keep_their_word(tmp_path, run_here):
    """Where gates are enforced, the summary labels a failed gate with the gate's status, and JUnit agrees."""
    (tmp_path / "test_one.py").write_text(
        "from types import SimpleNamespace\n"
        "from pytest_engram.model import *\n"
        "def test_one(engram_edge, request):\n"
        "    gates = tuple(GateResult(gate=n, name=name, status=Status.FAIL, reason='r', observed='o', threshold='t',\n"
        "                             next_step='n') for n, name in enumerate(GATE_NAMES))\n"
        "    verdict = Verdict(experiment='X', title='t', claim=Claim.IMPROVES, subject='s', status=Status.FAIL,\n"
        "                      gates=gates, protocol_hash='')\n"
        "    engram_edge.settle(SimpleNamespace(verdict=verdict), request.node)\n"
    )
    done = run_here("-ra", "--junitxml=junit.xml", cwd=tmp_path)
    assert "GATE FAIL test_one.py::test_one" in done.stdout, done.stdout
    assert properties(tmp_path)["test_one"]["engram_status"] == "FAIL"


def test_a_large_table_says_how_far_it_is():
    """Bring-up of a table of 4 GiB or more speaks at each tenth; a small one is over before it could."""
    said, plan = [], SimpleNamespace(schedule=(), experiment=SimpleNamespace(id="B1"))
    tell = session._progress(said.append, plan)
    for done in range(41):
        tell("pages", (done << 28, 40 << 28))
        tell("pages", (done, 40))
    assert len(said) == 10
    assert said[-1] == "B1  pages placed 10240 of 10240 MiB"

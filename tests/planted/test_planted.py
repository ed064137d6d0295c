"""Candidates whose verdict is known beforehand, judged as a user would judge a patch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def judge(tmp_path):
    """Run base ``Slow`` against a candidate; returns (exit code, output, the planted verdict).

    A machine that others disturb cannot tell (exit 11 or 13): where a verdict must come, it is asked ``again``.
    """

    def run(candidate, *options, again=0):
        report = tmp_path / candidate
        command = [
            sys.executable, "-m", "pytest", "-m", "serving", "suites/serving", "-p", "no:cacheprovider",
            f"--engram-experiments={HERE / 'patch.yaml'}", "--engram-backend=planted_backends:Slow",
            f"--engram-candidate=planted_backends:{candidate}", "--engram-engine=cpu",
            f"--engram-report={report}", f"--benchmark-json={tmp_path / 'run.json'}", *options,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if again and done.returncode in (11, 13):
            return run(candidate, *options, again=again - 1)
        section = json.loads((tmp_path / "run.json").read_text())["engram"]
        return done.returncode, done.stdout, section["verdicts"][0]

    return run


def stopped_at(verdict):
    """The number of the first judged gate that is not PASS."""
    return next((gate["gate"] for gate in verdict["gates"] if gate["judged"] and gate["status"] != "PASS"), None)


def test_faster_candidate_may_say_so(judge, tmp_path):
    """A candidate that is really faster end to end exits 0 and prints the one sentence, offline too."""
    code, output, verdict = judge("Faster", again=2)
    assert (code, verdict["status"]) == (0, "PASS"), output
    assert verdict["sentence"] in " ".join(output.split())
    assert "suite loop" in verdict["sentence"]
    offline = subprocess.run(
        [sys.executable, "-m", "pytest_engram.cli", "gate", str(tmp_path / "run.json")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert offline.returncode == 0, offline.stdout + offline.stderr
    assert verdict["sentence"] in " ".join(offline.stdout.split())


def test_one_wrong_row_stops_at_gate_0(judge):
    """The same candidate with one corrupted row fails correctness (exit 10), however fast it is."""
    code, output, verdict = judge("FasterWrongRow", again=2)
    assert (code, verdict["status"], stopped_at(verdict)) == (10, "FAIL", 0), output
    assert verdict["sentence"] is None


@pytest.mark.slow
def test_identical_code_is_no_treatment(judge):
    """The same class on both arms is named as identical code and exits non-zero."""
    code, output, verdict = judge("Slow", "--engram-pairs=6")
    assert code != 0, output
    assert (stopped_at(verdict), verdict["gates"][1]["reason"]) == (1, "identical-code")


@pytest.mark.slow
def test_renamed_code_moves_nothing(judge):
    """Identical behaviour under another name passes no gate that asks for an effect."""
    code, output, verdict = judge("SameAgain")
    assert code in (10, 11, 13), output
    assert verdict["status"] in ("FAIL", "INCONCLUSIVE", "INVALID")
    assert stopped_at(verdict) <= 2


def test_only_a_shorter_wait_stops_before_gate_4(judge):
    """A candidate that hides the wait at the main computation's cost fails gate 3."""
    code, output, verdict = judge("OnlyShorterWait", "--engram-pairs=6", again=2)
    assert code == 10, output
    assert stopped_at(verdict) == 3

"""The plugin as a user runs it: what was not measured, not selected or not finished is never green."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_engram import cli

ROOT = Path(__file__).parents[2]
PLACEMENT = ("suites/placement", "-m", "numa")


def run(*arguments, folder, cwd=ROOT):
    """One pytest run in its own process, for what only a process shows: its exit code, its workers, its path."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += [f"--engram-report={folder}/report", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """(process, folder) of `pytest -m numa --benchmark-json` on a machine with one NUMA node."""
    folder = tmp_path_factory.mktemp("numa")
    return run(*PLACEMENT, f"--benchmark-json={folder}/run.json", folder=folder), folder


@pytest.fixture
def command(capsys):
    """``command(*arguments)`` -> (exit code, stdout, stderr) of the `pytest-engram` command."""
    return lambda *arguments: (cli.main([*map(str, arguments)]), *capsys.readouterr())


@pytest.fixture
def needs_one_node():
    """These runs state what a one-node machine cannot prove."""
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) != 1:
        pytest.skip("this machine has several NUMA nodes: its verdicts are real")


def strict(text):
    """Parse JSON that contains neither NaN nor infinities."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))


@pytest.mark.usefixtures("needs_one_node")
def test_one_node_is_not_measured(measured):
    """`pytest -m numa` on one NUMA node exits 12 with strict JSON and a reason for each experiment."""
    done, folder = measured
    assert done.returncode == 12, done.stdout
    section = strict((folder / "run.json").read_text())["engram"]
    assert {v["experiment"]: (v["status"], v["gates"][0]["reason"]) for v in section["verdicts"]} == dict.fromkeys(
        ("A1", "A2", "A3"), ("NOT_MEASURED", "too-few-memory-nodes")
    )
    assert done.stdout.count("needs two memory NUMA nodes, found one") >= 3
    assert {path.name for path in (folder / "report").iterdir()} >= {"verdict.json", "report.md"}


@pytest.mark.usefixtures("needs_one_node")
def test_offline_verdict_is_the_same(measured, command):
    """`pytest-engram gate run.json` gives the run's own verdict and exit code."""
    code, out, err = command("gate", measured[1] / "run.json")
    assert code == 12, err
    assert out.count("NOT_MEASURED") >= 3


@pytest.mark.usefixtures("needs_one_node")
def test_baseline_without_a_case_is_named(measured, tmp_path, command):
    """A baseline that lacks a case gives 12 and names it."""
    _, folder = measured
    whole = json.loads((folder / "run.json").read_text())
    whole["engram"]["verdicts"] = [v for v in whole["engram"]["verdicts"] if v["experiment"] != "A2"]
    (tmp_path / "base.json").write_text(json.dumps(whole))
    code, out, _ = command("gate", folder / "run.json", "--baseline", tmp_path / "base.json")
    assert code == 12, out
    assert any("A2" in line and "baseline" in line for line in out.splitlines()), out


@pytest.mark.parametrize("keep", [0, 1, 400])
def test_truncated_file_is_a_usage_error(measured, tmp_path, command, keep):
    """A truncated or empty result file names the file and the position and exits 4."""
    _, folder = measured
    (tmp_path / "cut.json").write_text((folder / "run.json").read_text()[:keep])
    code, _, err = command("gate", tmp_path / "cut.json")
    assert code == 4
    assert "cut.json" in err


def test_measurement_under_xdist_is_refused(run_here):
    """`-n` with a `-m` that names measurement is a usage error (exit 4), whatever else it names."""
    for expression in ("numa", "correctness or numa", "overlap and not slow"):
        done = run_here("suites", "-m", expression, "-n", "2")
        assert done.returncode == 4, done.stdout
        assert "names measurement" in done.stderr + done.stdout


def test_measurement_that_reaches_a_worker_is_not_measured(tmp_path):
    """A measurement item on an xdist worker is skipped as NOT_MEASURED and the run is not green."""
    done = run("suites/placement", "-n", "1", folder=tmp_path)
    assert done.returncode == 12, done.stdout
    assert "xdist worker" in done.stdout


def test_nothing_selected_is_not_green(run_here):
    """A selection that matches nothing keeps pytest's own exit code 5."""
    assert run_here("suites/placement", "-m", "numa", "-k", "no_such_item").returncode == 5


@pytest.mark.parametrize("option", ["--benchmark-disable", "--benchmark-skip"])
def test_disabled_benchmarks_are_not_measured(run_here, option):
    """Measurement without benchmarks is NOT_MEASURED (exit 12)."""
    done = run_here("suites/overlap", "-m", "overlap", "-k", "test_gates and B1", option)
    assert done.returncode == 12, done.stdout
    assert "benchmarks-disabled" in done.stdout


def test_all_skipped_is_not_green(pytester, run_here):
    """A correctness run in which every case is skipped exits 12, not 0."""
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.correctness\n"
        "def test_one():\n    'd'\n    pytest.skip('not supported by this backend')\n"
    )
    assert run_here("-m", "correctness", cwd=pytester.path).returncode == 12


def test_one_pass_among_skips_is_green(pytester, run_here):
    """The control of the rule above: one case that passes makes the run 0."""
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.correctness\n"
        "@pytest.mark.parametrize('skip', [True, False])\n"
        "def test_one(skip):\n    'd'\n    if skip:\n        pytest.skip('not supported')\n"
    )
    assert run_here("-m", "correctness", cwd=pytester.path).returncode == 0


def test_crashed_worker_is_not_green(pytester):
    """A worker that dies leaves a failed run."""
    pytester.makepyfile(
        "import os, pytest\n@pytest.mark.correctness\ndef test_one():\n    'd'\n    os._exit(1)\n"
        "@pytest.mark.correctness\ndef test_two():\n    'd'\n"
    )
    options = ("-m", "correctness", "-n", "1", "--max-worker-restart=0", "-p", "no:hypothesispytest")
    assert pytester.runpytest_subprocess(*options).ret not in (0, 5)


def test_failing_test_of_the_user_wins(pytester, run_here):
    """A failure that is no gate keeps pytest's exit code 1."""
    pytester.makepyfile("def test_one():\n    assert False\n")
    assert run_here(cwd=pytester.path).returncode == 1


def test_plain_projects_are_untouched(pytester, run_here):
    """A project that uses nothing of ours sees its own exit code and no section."""
    pytester.makepyfile("def test_one():\n    pass\n")
    done = run_here(cwd=pytester.path)
    assert done.returncode == 0
    assert "engram gates" not in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engram-backend=nobody"], ["nobody", "reference"]),
        (["--engram-backend=json:JSONDecoder"], ["JSONDecoder", "lacks"]),
        (["--engram-engine=abacus"], ["abacus", "auto"]),
        (["--engram-require=B9:1"], ["B9", "--engram-require"]),
        (["--engram-require=B1:7"], ["B1:7"]),
        (["--engram-time-budget=soon"], ["soon"]),
        (["--engram-pairs=3"], ["at least 6"]),
        (["--engram-rows=many"], ["many", "384016682"]),
        (["--engram-rows=400000000000"], ["400000000000", "full"]),
        (["--engram-rows=²"], ["²", "full"]),
        (["--engram-seed=-1"], ["-1", "--engram-seed"]),
        (["--benchmark-json=/proc/no/x.json"], ["/proc/no"]),
        (["--engram-time-budget=0"], ["--engram-time-budget"]),
        (["--engram-experiments=/no/such/file.yaml"], ["/no/such/file.yaml"]),
    ],
)
def test_bad_options_are_usage_errors(run_here, options, words):
    """A bad option is one clear sentence and exit 4 before anything is measured."""
    done = run_here(*PLACEMENT, *options)
    text = done.stdout + done.stderr
    assert done.returncode == 4, text
    assert all(word in text for word in words), text
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text


def test_bad_yaml_is_named_with_its_line(tmp_path, run_here):
    """A fault in an experiment file names file and line and exits 4."""
    text = (ROOT / "fixtures/experiments/B1.yaml").read_text().replace("claim: improves", "claim: impoves")
    (tmp_path / "B1.yaml").write_text(text)
    done = run_here("suites/overlap", "-m", "overlap", f"--engram-experiments={tmp_path}/B1.yaml")
    assert done.returncode == 4
    assert "B1.yaml:6" in done.stdout + done.stderr


def test_time_budget_refuses_what_cannot_fit(run_here):
    """A schedule whose own floor exceeds the budget is NOT_MEASURED before anything runs."""
    done = run_here("suites/overlap", "-m", "overlap", "-k", "test_gates and B1", "--engram-time-budget=2s")
    assert done.returncode == 12, done.stdout
    assert "over-time-budget" in done.stdout


def test_collecting_judges_nothing(tmp_path, run_here):
    """`--collect-only` owes no verdict, writes no report and keeps pytest's exit code."""
    done = run_here(*PLACEMENT, "--collect-only")
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "report").exists()


def test_folder_of_the_json_is_made(tmp_path, run_here):
    """`--benchmark-json` may name a folder that does not exist yet."""
    done = run_here(*PLACEMENT, f"--benchmark-json={tmp_path}/new/run.json")
    assert done.returncode == 12, done.stdout
    assert "engram" in strict((tmp_path / "new/run.json").read_text())


def test_required_gate_decides_alone(run_here):
    """With --engram-require only the named gates set the exit code; here the named one was not reached."""
    assert run_here(*PLACEMENT, "--engram-require=A1:1").returncode == 12


def test_report_mode_exits_0(run_here):
    """In report mode a run that ran and reported exits 0, and still says NOT_MEASURED."""
    done = run_here(*PLACEMENT, "--engram-gate=report")
    assert done.returncode == 0, done.stdout
    assert "NOT_MEASURED" in done.stdout


def test_audit_of_nobody_is_a_usage_error(command):
    """`pytest-engram audit` without a process says so and exits 4."""
    code, _, err = command("audit")
    assert code == 4
    assert "no process is named" in err


@pytest.mark.parametrize(
    ("marker", "file"), [("numa", "B1"), ("serving", "B1"), ("overlap", "A1"), ("correctness", None)]
)
def test_an_experiment_that_nothing_asks_for_is_not_green(run_here, marker, file):
    """A marker that no given experiment belongs to, and a required experiment that was not selected, exit 12."""
    given = (
        [f"--engram-experiments=fixtures/experiments/{file}.yaml"] if file else ["-k", "pad", "--engram-require=B1:3"]
    )
    assert run_here("suites", "-m", marker, "-q", *given).returncode == 12
    if file is None:
        assert run_here("suites", "-m", marker, "-q", "-k", "pad").returncode == 0


def test_a_report_folder_that_cannot_be_written_is_refused_first(run_here):
    """What is measured must have a place to go: exit 4 and one sentence, before the first run."""
    where = "--engram-report=README.md/x"
    done = run_here("suites", "-m", "overlap", "--engram-experiments=fixtures/experiments/B1.yaml", where)
    assert done.returncode == 4
    assert "--engram-report" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_backend_beside_the_tests_is_found(tmp_path):
    """A module in the folder where the `pytest` script is called, which adds no folder itself, is found."""
    (tmp_path / "my_module.py").write_text(
        "from pytest_engram.backends.reference import ReferenceBackend as Base\n\n\nclass Plain(Base):\n    pass\n"
    )
    script = [sys.executable, "-P", "-c", "import sys, pytest; sys.exit(pytest.console_main())"]
    if sys.version_info < (3, 11):
        script.remove("-P")
    chosen = [
        "--engram-backend=my_module:Plain",
        "--pyargs",
        "pytest_engram.suites",
        "-m",
        "correctness",
        "-k",
        "pad",
        "-p",
        "no:hypothesispytest",
    ]
    done = subprocess.run([*script, *chosen], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

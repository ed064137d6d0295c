"""Our samples in pytest-benchmark's file, and the section that the plugin adds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import pytest_engram.codec
from pytest_engram import codec
from pytest_engram.model import CorrectnessSample, MetricRule
from pytest_engram.report import benchmark, records
from pytest_engram.report.account import Account

ROOT = str(Path(pytest_engram.codec.__file__).parents[1])
ITEMS = """
    import pytest
    from pathlib import Path
    from pytest_engram import codec
    from pytest_engram.model import Evidence
    from pytest_engram.report.benchmark import publish

    EVIDENCE = codec.decode(Path(__file__).with_name("evidence.json").read_bytes(), Evidence)

    @pytest.mark.parametrize("arm", ["A", "B"])
    def test_arm(request, arm):
        publish(request, EVIDENCE, arm)
"""


def _refuse(name):
    raise AssertionError(f"{name} is not JSON")


def _strict(path):
    return json.loads(path.read_text(), parse_constant=_refuse)


def _python(folder, *arguments):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # not xdist's worker
    environment = {**clean, "PYTHONPATH": ROOT}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip


def _pytest(folder, *arguments):
    unused = ("engram", "cacheprovider", "xdist", "hypothesispytest")
    absent = [word for name in unused for word in ("-p", f"no:{name}")]
    return _python(folder, "pytest", *absent, *arguments)


@pytest.fixture
def project(tmp_path, make_evidence):
    """A project with one item per arm that publishes recorded evidence."""
    (tmp_path / "evidence.json").write_bytes(codec.encode(make_evidence()))
    (tmp_path / "test_arms.py").write_text(textwrap.dedent(ITEMS))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_pytest_benchmark_reads_exactly_our_samples(project, make_evidence, make_verdict):
    """Every round in the JSON is one of our samples to the last bit, and pytest-benchmark's compare reads the file."""
    done = _pytest(project, "--benchmark-json=run.json")
    assert done.returncode == 0, done.stdout
    found = {bench["params"]["arm"]: bench for bench in _strict(project / "run.json")["benchmarks"]}
    evidence = make_evidence()
    for arm in ("A", "B"):
        assert tuple(found[arm]["stats"]["data"]) == benchmark.benchmark_rounds(evidence, arm)
        assert found[arm]["extra_info"]["engram"]["arm"] == arm
        assert found[arm]["options"]["timer"] == "pytest_engram.replay"
        assert found[arm]["group"] == "engram B1"
    assert found["A"]["stats"]["rounds"] == 4
    section = records.engram_section(Account([make_verdict()], [evidence]), {})
    benchmark.add_engram_section(project / "run.json", section)
    compared = _python(project, "pytest_benchmark", "compare", "run.json", "--columns=min,rounds")
    assert compared.returncode == 0, compared.stderr
    assert "test_arm[A]" in compared.stdout
    assert "test_arm[B]" in compared.stdout
    assert _strict(project / "run.json")["benchmarks"] == list(found.values())
    (result,) = records.read_results([project / "run.json"])
    assert result.evidence is not None
    assert result.stored == make_verdict()


def test_disabled_benchmarks_are_not_measured(project):
    """X1: with benchmarks disabled nothing was recorded, and the item says so instead of passing."""
    done = _pytest(project, "--benchmark-disable", "--benchmark-json=run.json")
    assert done.returncode == 1
    assert "NotMeasurable: B1 arm A: pytest-benchmark is disabled" in done.stdout


def test_a_clock_that_comes_too_late_is_an_error(project):
    """An item that made the fixture before the clock would publish times of its own: refused."""
    text = (project / "test_arms.py").read_text()
    (project / "test_arms.py").write_text(text.replace("(request, arm)", "(benchmark, request, arm)"))
    done = _pytest(project)
    assert done.returncode == 1
    assert "UsageError: B1 arm A: the benchmark fixture existed before" in done.stdout


def test_the_clock_replays_bit_for_bit():
    """Each pair of readings differs by exactly one sample, in order; a further round has nothing to replay."""
    samples = (0.1, 1e-9, 0.1 + 0.2, 1 / 3)
    clock = benchmark.ReplayClock(samples)
    replayed = []
    for _ in samples:
        start = clock()
        replayed.append(clock() - start)
    assert tuple(replayed) == samples
    assert clock.left == 0
    clock()
    with pytest.raises(StopIteration):
        clock()


def test_rounds_are_the_arms_own_in_order(make_evidence):
    """A is not A′ and not B; samples come run by run, in seconds."""
    evidence = make_evidence()
    assert benchmark.benchmark_rounds(evidence, "A") == (0.00125, 0.00131, 0.001250003, 0.00131)
    assert benchmark.benchmark_rounds(evidence, "A'") == (0.001250002, 0.00131)
    assert benchmark.benchmark_rounds(evidence, "C") == ()


def test_a_placement_experiment_publishes_lookups(make_evidence):
    """Where the lookup is the mechanism, its kernel time is the headline: waits and queueing are not in it."""
    rule = MetricRule(metric="lookup", direction="down")
    evidence = make_evidence("A1", mechanism=(rule,))
    assert benchmark.headline(evidence) == "lookup"
    assert benchmark.benchmark_rounds(evidence, "B") == (2e-6,)


def test_extra_info_carries_correctness_and_is_json(make_evidence, make_run):
    """X3, X4: a benchmark whose checks failed says so in its own record, in types that every JSON writer knows."""
    bad = CorrectnessSample(case="h6", contract="H6", passed=False)
    absent = CorrectnessSample(case="p1", contract="P1", passed=False, supported=False)
    runs = (make_run(0, "A", correctness_after=(bad, absent)), make_run(1, "A"))
    info = benchmark.extra_info(make_evidence(runs=runs), "A")
    assert (info["correctness_passed"], info["correctness_failed"], info["runs"]) == (2, 1, 2)
    assert json.loads(json.dumps(info)) == info


@pytest.mark.parametrize("content", [None, b"", b"\n"])
def test_a_file_is_written_where_pytest_benchmark_wrote_none(tmp_path, make_verdict, content):
    """X2: a missing or 0-byte file becomes a complete one that pytest-benchmark's own tools accept."""
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    benchmark.add_engram_section(path, records.engram_section(Account([make_verdict()], []), {}))
    assert _strict(path)["engram"]["verdicts"][0]["experiment"] == "B1"
    assert _strict(path)["benchmarks"] == []
    compared = _python(tmp_path, "pytest_benchmark", "compare", "run.json")
    assert "Traceback" not in compared.stderr
    assert "Failed to load" not in compared.stderr


def test_nan_of_others_becomes_null_and_is_listed(tmp_path, make_verdict):
    """X4: pytest-benchmark's bare NaN does not stay in the file, and the place is named."""
    path = tmp_path / "run.json"
    path.write_text('{"benchmarks": [{"stats": {"ops": NaN, "min": 1}}], "version": "5"}')
    benchmark.add_engram_section(path, records.engram_section(Account([make_verdict()], []), {}))
    tree = _strict(path)
    assert tree["benchmarks"] == [{"stats": {"ops": None, "min": 1}}]
    assert tree["engram"]["replaced"] == ["$.benchmarks[0].stats.ops"]


def test_a_broken_file_is_kept_aside(tmp_path, make_verdict):
    """What pytest-benchmark left half-written is not lost and not parsed: ours is whole, theirs is `.broken`."""
    path = tmp_path / "run.json"
    path.write_text('{"benchmarks": [{"st')
    benchmark.add_engram_section(path, records.engram_section(Account([make_verdict()], []), {}))
    assert _strict(path)["benchmarks"] == []
    assert (tmp_path / "run.json.broken").read_text() == '{"benchmarks": [{"st'


def test_adding_twice_changes_nothing(tmp_path, make_verdict):
    """The section replaces itself."""
    path = tmp_path / "run.json"
    section = records.engram_section(Account([make_verdict()], []), {})
    benchmark.add_engram_section(path, section)
    first = path.read_bytes()
    benchmark.add_engram_section(path, section)
    assert path.read_bytes() == first


def test_a_crash_in_the_middle_leaves_the_old_file(tmp_path, make_verdict, monkeypatch):
    """Atomic: pytest-benchmark's file stands untouched when our rename never happens."""
    path = tmp_path / "run.json"
    path.write_text('{"benchmarks": []}')

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="disk full"):
        benchmark.add_engram_section(path, records.engram_section(Account([make_verdict()], []), {}))
    assert path.read_text() == '{"benchmarks": []}'
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("option", [None, Path("run.json"), SimpleNamespace(name="run.json"), "run.json"])
def test_the_target_is_found_for_every_form_of_the_option(option):
    """Older pytest-benchmark keeps an open file where newer ones keep a path; no option is no target."""
    config = SimpleNamespace(getoption=lambda _name, _default: option)
    assert benchmark.json_path(config) == (None if option is None else Path("run.json"))


def test_no_samples_is_not_measured(make_evidence, make_run):
    """An arm that lost its samples publishes nothing, by name, and never an empty benchmark."""
    evidence = make_evidence(runs=(replace(make_run(), compute=()),))
    with pytest.raises(benchmark.NotMeasurable, match="no step samples"):
        benchmark.publish(None, evidence, "A")

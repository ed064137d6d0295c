"""Our samples through pytest-benchmark: a replay clock for its tools, and the ``engram`` section in its file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_engram import codec
from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.model import Evidence, RunRecord
from pytest_engram.report import strict


class ReplayClock:
    """A timer that replays durations: every second call is that many seconds after the call before.

    Each round starts at 0.0, so that ``end − start`` is the sample itself, to the last bit.
    """

    __name__ = "pytest_engram.replay"  # what pytest-benchmark writes as the name of its timer

    def __init__(self, samples: tuple[float, ...]) -> None:
        self._samples = iter(samples)
        self.left = len(samples)
        self._started = False

    def __call__(self) -> float:
        """Seconds: 0.0 at the start of a round, the sample at its end."""
        self._started = not self._started
        if self._started:
            return 0.0
        self.left -= 1
        return next(self._samples)


def headline(evidence: Evidence) -> str:
    """What the rounds of an arm are: ``lookup`` (kernel time) where that is the first mechanism, else ``step``."""
    rules = evidence.plan.experiment.mechanism
    return "lookup" if rules and rules[0].metric.startswith("lookup") else "step"


def benchmark_rounds(evidence: Evidence, arm: str) -> tuple[float, ...]:
    """The arm's headline samples in seconds: every lookup of its marked steps, or every unmarked step, as run."""
    read = _lookups if headline(evidence) == "lookup" else _steps
    return tuple(ns / 1e9 for run in evidence.runs if run.arm == arm for ns in read(run))


def publish(request: pytest.FixtureRequest, evidence: Evidence, arm: str) -> None:
    """Hand the arm's samples to pytest-benchmark from the item that ``request`` belongs to.

    The clock reaches the ``benchmark`` fixture through its public marker, so the item must not have asked for that
    fixture itself.  Raises ``NotMeasurable`` where there is nothing to publish or nobody listens.
    """
    rounds = benchmark_rounds(evidence, arm)
    who = f"{evidence.plan.experiment.id} arm {arm}"
    if not rounds:
        raise NotMeasurable(f"no {headline(evidence)} samples", code="no-samples", who=who)
    clock = ReplayClock(rounds)
    request.node.add_marker(
        pytest.mark.benchmark(timer=clock, group=f"engram {evidence.plan.experiment.id}"), append=False
    )
    benchmark = request.getfixturevalue("benchmark")
    benchmark.extra_info["engram"] = extra_info(evidence, arm)
    benchmark.pedantic(lambda: None, rounds=len(rounds), iterations=1, warmup_rounds=0)
    if benchmark.disabled:
        raise NotMeasurable("pytest-benchmark is disabled, so it recorded nothing", code="benchmarks-disabled", who=who)
    if clock.left:
        raise UsageError(
            "the benchmark fixture existed before its replay clock", code="late-clock", who=who,
            expected="an item that does not request `benchmark`", way_out="request `engram_publish` alone",
        )  # fmt: skip


def extra_info(evidence: Evidence, arm: str) -> dict[str, Any]:
    """What a reader of one benchmark must know, JSON-safe: what was timed, of which protocol, and whether correct."""
    runs = [run for run in evidence.runs if run.arm == arm]
    checks = [check for run in runs for check in (*run.correctness_before, *run.correctness_after) if check.supported]
    clean, _ = strict.finite(
        {
            "experiment": evidence.plan.experiment.id,
            "arm": arm,
            "metric": headline(evidence),
            "subject": evidence.plan.experiment.subject,
            "protocol_hash": evidence.plan.protocol_hash,
            "runs": len(runs),
            "correctness_passed": sum(check.passed for check in checks),
            "correctness_failed": sum(not check.passed for check in checks),
            "problems": [problem.code for run in runs for problem in run.problems],
            "fingerprint": runs[0].fingerprint if runs else {},
        }
    )
    return dict(clean)


def json_path(config: pytest.Config) -> Path | None:
    """Where ``--benchmark-json`` points; pytest-benchmark before 5.2 kept an open file there."""
    option = config.getoption("benchmark_json", None)
    return None if not option else Path(getattr(option, "name", option) if not isinstance(option, Path) else option)


def add_engram_section(path: Path, section: Mapping[str, Any]) -> None:
    """Put the section into pytest-benchmark's file, or write a whole file where it wrote none or 0 bytes.

    The result is strict JSON and replaces the old file in one rename.  A file that is there but is no JSON is kept
    as ``<name>.broken``.
    """
    tree = _existing(path)
    merge_section(tree, section)
    codec.write_atomic(path, strict.dumps(tree))


def merge_section(output_json: dict[str, Any], section: Mapping[str, Any]) -> None:
    """The same in place, for ``pytest_benchmark_update_json``; NaN elsewhere becomes null and is listed."""
    clean, lost = strict.finite({**output_json, "engram": dict(section)})
    clean["engram"]["replaced"] = [*clean["engram"].get("replaced", ()), *lost]
    output_json.clear()
    output_json.update(clean)


def _existing(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if not text.strip():
        return _empty()
    try:
        tree = json.loads(text)
    except ValueError:
        tree = None
    if isinstance(tree, dict):
        return tree
    codec.write_atomic(path.with_name(f"{path.name}.broken"), text.encode())
    return _empty()


def _empty() -> dict[str, Any]:
    """What pytest-benchmark's own readers expect of a file without benchmarks."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    return {"machine_info": {}, "commit_info": {}, "benchmarks": [], "datetime": now, "version": None}


def _lookups(run: RunRecord) -> list[int]:
    marks = (mark for sample in run.overlap for timeline in sample.timelines for mark in timeline.lookups)
    return [mark.done - mark.start for mark in marks]


def _steps(run: RunRecord) -> list[int]:
    return [ns for sample in run.compute for ns in sample.step_ns]

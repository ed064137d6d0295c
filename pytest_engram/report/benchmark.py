"""Our samples through pytest-benchmark: a replay clock for its tools, and the ``engram`` section in its file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from pytest_engram import codec
from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.gates.comparison import Case
from pytest_engram.model import Evidence


class ReplayClock:
    """A timer that replays durations: every second call is that many seconds after the call before.

    Each round starts at 0.0, so that ``end − start`` is the sample itself, to the last bit.
    """

    __name__ = "pytest_engram.replay"  # what pytest-benchmark writes as the name of its timer

    def __init__(self, samples: tuple[float, ...]) -> None:
        self._readings = chain((0.0,), chain.from_iterable((sample, 0.0) for sample in samples))
        self.left = 2 * len(samples)

    def __call__(self) -> float:
        """Seconds: 0.0 at the start of a round, the sample at its end."""
        self.left -= 1
        return next(self._readings)


def headline(evidence: Evidence) -> str:
    """What the rounds of an arm are: ``lookup`` (kernel time) where that is the first mechanism, else ``step``."""
    rules = evidence.plan.experiment.mechanism
    return "lookup" if rules and rules[0].metric.startswith("lookup") else "step"


def benchmark_rounds(evidence: Evidence, arm: str) -> tuple[float, ...]:
    """The arm's headline samples in seconds: every lookup of its marked steps, or every unmarked step, as run."""
    runs = [run for run in evidence.runs if run.arm == arm]
    if headline(evidence) == "step":
        return tuple(ns / 1e9 for run in runs for sample in run.compute for ns in sample.step_ns)
    marks = (mark for run in runs for sample in run.overlap for line in sample.timelines for mark in line.lookups)
    return tuple((mark.done - mark.start) / 1e9 for mark in marks)


def publish(request: pytest.FixtureRequest, evidence: Evidence, arm: str) -> None:
    """Hand the arm's samples to pytest-benchmark from the item that ``request`` belongs to.

    The clock reaches the ``benchmark`` fixture through its public marker, so the item must not have asked for that
    fixture itself.  Raises ``NotMeasurable`` where there is nothing to publish or nobody listens.
    """
    rounds = benchmark_rounds(evidence, arm)
    name, who = evidence.plan.experiment.id, f"{evidence.plan.experiment.id} arm {arm}"
    if not rounds:
        raise NotMeasurable(f"no {headline(evidence)} samples", code="no-samples", who=who)
    clock = ReplayClock(rounds)
    request.node.add_marker(pytest.mark.benchmark(timer=clock, group=f"engram {name}"), append=False)
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
    return {
        "experiment": evidence.plan.experiment.id, "arm": arm, "metric": headline(evidence), "runs": len(runs),
        "subject": Case(evidence).subject, "protocol_hash": evidence.plan.protocol_hash,
        "correctness_passed": sum(check.passed for check in checks),
        "correctness_failed": sum(not check.passed for check in checks),
        "problems": [problem.code for run in runs for problem in run.problems],
        "fingerprint": runs[0].fingerprint if runs else {},
    }  # fmt: skip


def json_path(config: pytest.Config) -> Path | None:
    """Where ``--benchmark-json`` points; pytest-benchmark before 5.2 kept an open file there."""
    option = config.getoption("benchmark_json", None)
    return Path(option if isinstance(option, Path) else getattr(option, "name", option)) if option else None


def add_engram_section(path: Path, section: Mapping[str, Any]) -> None:
    """Put the section into pytest-benchmark's file, or write a whole file where it wrote none or 0 bytes.

    The result is strict JSON and replaces the old file in one rename: NaN becomes null and is listed.  A file that is
    there but is no JSON is kept as ``<name>.broken``.
    """
    clean, lost = codec.finite({**_existing(path), "engram": section})
    clean["engram"]["replaced"] += lost
    codec.write_atomic(path, codec.dumps(clean))


def _existing(path: Path) -> dict[str, Any]:
    """What pytest-benchmark wrote, else what its own readers expect of a file without benchmarks."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        if text.strip():
            codec.write_atomic(path.with_name(f"{path.name}.broken"), text.encode())
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    return {"machine_info": {}, "commit_info": {}, "benchmarks": [], "datetime": now, "version": None}

"""Small complete records with sane defaults; a test names only what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_engram import model as m
from pytest_engram.report import records, results

GATE_TEXTS = (
    ("all-passed", "96/96 checks in 24 runs", "every check"),
    ("treated", "submission differs on 2/2 ranks", "every rank"),
    ("moved", "exposed wait −31.0 % [−35.2, −27.4]", "below 0 %"),
    ("not-worse", "main compute +0.4 % [−0.2, +0.9]", "below +2 %"),
    ("improved", "goodput +4.6 % [+2.2, +7.1]", "above 0 %"),
)


@pytest.fixture
def make_gate() -> Any:
    """``make_gate(2, "FAIL", reason=…)``: a gate that passes with plain texts unless told otherwise."""

    def make(number: int, status: str = "PASS", **changes: Any) -> m.GateResult:
        reason, observed, threshold = GATE_TEXTS[number]
        gate = m.GateResult(
            gate=number, name=m.GATE_NAMES[number], status=m.Status(status), reason=reason,
            observed=observed, threshold=threshold, next_step="",
        )  # fmt: skip
        if status == "BLOCKED":
            gate = replace(gate, reason="earlier-gate", observed="gate 1 did not pass", threshold="", next_step="")
        return replace(gate, **changes)

    return make


@pytest.fixture
def make_verdict(make_gate: Any) -> Any:
    """``make_verdict("FAIL", at=2, reason=…)``: gates before ``at`` pass, later ones are BLOCKED."""

    def make(status: str = "PASS", *, at: int = 5, gate: dict[str, Any] | None = None, **changes: Any) -> m.Verdict:
        words = ["PASS" if number < at else status if number == at else "BLOCKED" for number in range(5)]
        gates = tuple(make_gate(n, word, **(gate or {}) if n == at else {}) for n, word in enumerate(words))
        base = m.Verdict(
            experiment="B1", title="Submit early or at consumption", claim=m.Claim.IMPROVES, subject="suite loop",
            status=m.Status(status), gates=gates, protocol_hash="4f1a",
        )  # fmt: skip
        return replace(base, **changes)

    return make


@pytest.fixture
def lookup_effect() -> m.Effect:
    """B's lookup is 3.1 % shorter."""
    return m.Effect(
        metric="lookup", arm="B", estimate=-0.031, low=-0.04, high=-0.022, p_value=0.004, blocks=8,
        per_block=(-0.035, -0.028),
    )  # fmt: skip


@pytest.fixture
def characterised(make_verdict: Any, make_gate: Any, lookup_effect: m.Effect) -> m.Verdict:
    """A1: gates 0 and 1 pass, the others are reported and not judged."""
    open_gates = tuple(
        make_gate(n, "INCONCLUSIVE", judged=False, observed="…", threshold="", effects=(lookup_effect,) * (n == 2))
        for n in (2, 3, 4)
    )
    gates = (make_gate(0), make_gate(1), *open_gates)
    return make_verdict(experiment="A1", title="NUMA node 0 or 1", claim=m.Claim.CHARACTERISES, gates=gates)


@pytest.fixture
def make_experiment() -> Any:
    """An experiment that changes the submission point; keyword arguments replace fields."""

    def make(identifier: str = "B1", **changes: Any) -> m.Experiment:
        rule = m.MetricRule(metric="exposed_wait", direction="down")
        base = m.Experiment(
            id=identifier, title="Submit early or at consumption", why="prefetch | only", claim=m.Claim.IMPROVES,
            subject="suite loop", variable="submission",
            arms={"A": {"submission": "at_consumption"}, "B": {"submission": "early"}}, hold={}, unit="replay", ranks=1,
            blocks=8, cooldown_s=0.0, aa_level=0.01, alpha=0.025,
            mechanism=(rule,), no_offset=(replace(rule, metric="main_compute", margin=0.02),),
            end_to_end=(replace(rule, metric="step"),), guards=(), workload=m.Workload(),
        )  # fmt: skip
        return replace(base, **changes)

    return make


@pytest.fixture
def make_run() -> Any:
    """A run whose steps last 1.25 ms and more, with one lookup of 2,000 ns on rank 0 over two NUMA nodes."""

    def make(index: int = 0, arm: str = "A", **changes: Any) -> m.RunRecord:
        mark = m.LookupMark(layer=1, hash_ready=0, submit=100, start=400, done=2400, wait_before=1900,
                            wait_after=2400, rows=1536, tiles=96, grid=66)  # fmt: skip
        line = m.Timeline(rank=0, step=0, begin=0, end=9000, tokens=64, lookups=(mark,))
        pages = m.PageDistribution(
            rank=0, moment=m.Moment.LOADED, table=0, identity="0:1", address=4096, table_bytes=4 << 20,
            page_bytes=4096, pages={0: 768, 1: 256}, unplaced={}, covered_bytes=4 << 20, policy_text="bind:0",
            routes=("move_pages", "numa_maps"),
        )  # fmt: skip
        receipt = m.StepReceipt(step="pre-touch", rank=0, seconds=0.9, minor_faults=(10, 1034),
                                object_pages=(0, 1024), mapped_pages=(0, 1024))  # fmt: skip
        base = m.RunRecord(
            index=index, block=index // 2, arm=arm, started_at="2026-11-29T20:00:00Z", seconds=2.9,
            fingerprint={"machine.cpu": "x", "table.bytes": "4194304", "backend.commit": "c0ffee"},
            correctness_before=(m.CorrectnessSample(case="h6", contract="H6", passed=True),),
            placement=(m.PlacementSample(rank=0, distributions=(pages,)),),
            startup=(m.StartupSample(rank=0, receipts=(receipt,)),),
            overlap=(m.OverlapSample(rank=0, state="low-reuse", timelines=(line,), resolution_ns=1,
                                     source_bytes=811008, staging_bytes=1572864),),
            compute=(m.ComputeSample(rank=0, tokens=64, step_ns=(1_250_000 + index, 1_310_000), main_ns=(1, 2)),),
        )  # fmt: skip
        return replace(base, **changes)

    return make


@pytest.fixture
def make_evidence(make_experiment: Any, make_run: Any) -> Any:
    """Four runs of A, B, A′, A, unless ``runs`` are given; keyword arguments replace the experiment's fields."""

    def make(identifier: str = "B1", runs: tuple[m.RunRecord, ...] | None = None, **changes: Any) -> m.Evidence:
        experiment = make_experiment(identifier, **changes)
        plan = m.Plan(
            experiment=experiment, schedule=(), seed=7, protocol_hash="4f1a", engine="cpu", backends={},
            placements={}, cpus=((0,),), rows=1024,
        )  # fmt: skip
        runs = runs if runs is not None else (make_run(0, "A"), make_run(1, "B"), make_run(2, "A'"), make_run(3, "A"))
        return m.Evidence(plan=plan, runs=runs, provenance={"kernel": "6.18", "gpu": None})

    return make


@pytest.fixture
def gate_files() -> Any:
    """The gates over files, as the command has them."""
    return lambda paths, **named: results.gate_results(records.read_results(paths), **named)

"""``evaluate``: from evidence to verdict, pure.  Everything that prints or exits renders its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_engram.gates.case import Case
from pytest_engram.gates.correctness import correctness
from pytest_engram.gates.effects import end_to_end, mechanism, no_offset
from pytest_engram.gates.reasons import Finding, of_problem
from pytest_engram.gates.tested import percent
from pytest_engram.gates.treatment import treatment
from pytest_engram.model import (
    GATE_NAMES,
    Claim,
    Effect,
    Evidence,
    Experiment,
    GateResult,
    Problem,
    Status,
    Verdict,
)

_BLOCKED = Finding(reason="earlier-gate")
_TREATMENT = GATE_NAMES.index("treatment")
_FIRST_REPORTED = 2  # gates from here on are reported, not judged, for a `characterises` claim


def evaluate(evidence: Evidence, prior: Sequence[Verdict] = ()) -> Verdict:
    """Judge the five gates in order; the first judged one that is not PASS blocks the rest and is the status.

    ``prior`` are verdicts under equal fingerprints, of this run or of a file: what ``requires`` is checked against.
    """
    case = Case(evidence)
    treated = arms = case.candidates
    gates: tuple[Callable[[], Finding], ...] = (
        lambda: correctness(case),
        lambda: treatment(case),
        lambda: mechanism(case, arms),
        lambda: no_offset(case, treated, arms),
        lambda: end_to_end(case, treated, arms, prior),
    )
    results: list[GateResult] = []
    notes: list[str] = []
    for number, judge in enumerate(gates):
        blocked = any(result.judged and result.status is not Status.PASS for result in results)
        finding = _BLOCKED if blocked else judge()
        result = _result(case.experiment, number, finding)
        notes += finding.notes
        results.append(result)
        if result.judged and result.status is Status.PASS:
            arms = finding.passed
            treated = arms if number == _TREATMENT else treated
    return _verdict(case.experiment, results, evidence.plan.protocol_hash, arms, notes)


def not_measured(experiment: Experiment, problem: Problem) -> Verdict:
    """The verdict of an experiment that could not be measured: gate 0 says why, the rest is blocked."""
    findings = (of_problem(problem), *[_BLOCKED] * (len(GATE_NAMES) - 1))
    results = [_result(experiment, number, finding) for number, finding in enumerate(findings)]
    return _verdict(experiment, results, "", (), ())


def _result(experiment: Experiment, number: int, finding: Finding) -> GateResult:
    judged = experiment.claim is Claim.IMPROVES or number < _FIRST_REPORTED or finding.always_judged
    result = finding.result(number, judged=judged)
    if judged or result.status is not Status.FAIL:
        return result
    return Finding(
        reason="no-winner", observed=finding.observed, threshold=finding.threshold, effects=finding.effects
    ).result(number, judged=False)


def _verdict(
    experiment: Experiment, results: Sequence[GateResult], protocol: str, arms: Sequence[str], notes: Sequence[str]
) -> Verdict:
    status = next((r.status for r in results if r.judged and r.status is not Status.PASS), Status.PASS)
    won = status is Status.PASS and experiment.claim is Claim.IMPROVES and len(results) == len(GATE_NAMES)
    return Verdict(
        experiment=experiment.id, title=experiment.title, claim=experiment.claim, subject=experiment.subject,
        status=status, gates=tuple(results), protocol_hash=protocol, notes=tuple(notes),
        sentence=_sentence(experiment, results[-1].effects, arms) if won else None,
    )  # fmt: skip


def _sentence(experiment: Experiment, found: Sequence[Effect], arms: Sequence[str]) -> str:
    """The one sentence that a passed `improves` claim may print; one clause per candidate that passed."""
    metric = experiment.end_to_end[0].metric
    several = len(experiment.arms) > 2
    clauses = [
        f"{effect.arm + ' ' if several else ''}{metric} {_size(effect.estimate)} "
        f"[{100 * (1 - 2 * experiment.alpha):g} % CI {_end(effect.low, '−∞')} … {_end(effect.high, '+∞')}]"
        for effect in found
        if effect.metric == metric and effect.arm in arms
    ]
    blocks = found[0].blocks
    load = f"over {blocks} blocks at the same SLO and load; subject: {experiment.subject}"
    return f"{experiment.id}: {', '.join(clauses)} {load}."


def _size(estimate: float | None) -> str:
    return "without a finite size" if estimate is None else percent(estimate)


def _end(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{100 * value:+.1f}".replace("-", "−")

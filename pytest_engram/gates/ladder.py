"""``evaluate``: from evidence to verdict, pure; ``exit_code``: what verdicts mean to the shell.

Everything that prints or exits renders their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_engram.gates.comparison import Case, percent
from pytest_engram.gates.correctness import correctness
from pytest_engram.gates.effects import end_to_end, mechanism, no_offset
from pytest_engram.gates.reasons import Finding, of_problem
from pytest_engram.gates.treatment import treatment
from pytest_engram.model import Claim, Effect, Evidence, Experiment, GateResult, Problem, Status, Verdict

EXIT_NOT_MEASURED = 12
_CODES = {  # by precedence
    Status.INVALID: 13, Status.FAIL: 10, Status.NOT_MEASURED: EXIT_NOT_MEASURED, Status.BLOCKED: EXIT_NOT_MEASURED,
    Status.INCONCLUSIVE: 11, Status.PASS: 0,
}  # fmt: skip
_BLOCKED = Finding("earlier-gate")
_TREATMENT = 1


def evaluate(evidence: Evidence, prior: Sequence[Verdict] = ()) -> Verdict:
    """Judge the five gates in order; the first judged one that is not PASS blocks the rest and is the status.

    ``prior`` are verdicts under equal fingerprints, of this run or of a file: what ``requires`` is checked against.
    """
    case = Case(evidence, prior)
    notes: list[str] = []
    results: list[GateResult] = []
    for number, judge in enumerate((correctness, treatment, mechanism, no_offset, end_to_end)):
        finding = next(judge(case)) if _status(results) is Status.PASS else _BLOCKED  # the first that a gate has to say
        notes += finding.notes
        results.append(finding.result(number, case.experiment.claim))
        if results[-1].judged and results[-1].status is Status.PASS:
            case.left = finding.passed
            case.treated = finding.passed if number == _TREATMENT else case.treated
    verdict = _verdict(case.experiment, case.subject, results, case.plan.protocol_hash, notes)
    won = verdict.status is Status.PASS and verdict.claim is Claim.IMPROVES
    return replace(verdict, sentence=_sentence(case, results[-1].effects) if won else None)


def not_measured(experiment: Experiment, problem: Problem) -> Verdict:
    """The verdict of an experiment that could not be measured: gate 0 says why, the rest is blocked."""
    who = "" if problem.who == experiment.id else problem.who  # the verdict names its experiment itself
    return _verdict(experiment, experiment.subject, unmeasured(replace(problem, who=who), experiment.claim), "", ())


def unmeasured(problem: Problem, claim: Claim) -> tuple[GateResult, ...]:
    """The rungs below an absence: gate 0 has its reason, the rest is blocked."""
    return tuple(found.result(gate, claim) for gate, found in enumerate((of_problem(problem), *[_BLOCKED] * 4)))


def _status(results: Sequence[GateResult]) -> Status:
    return next((r.status for r in results if r.judged and r.status is not Status.PASS), Status.PASS)


def _verdict(
    experiment: Experiment, subject: str, results: Sequence[GateResult], protocol: str, notes: Sequence[str]
) -> Verdict:
    return Verdict(
        experiment=experiment.id, title=experiment.title, claim=experiment.claim, subject=subject,
        status=_status(results), gates=tuple(results), protocol_hash=protocol, notes=tuple(notes),
    )  # fmt: skip


def _sentence(case: Case, found: Sequence[Effect]) -> str:
    """The one sentence that a passed `improves` claim may print; one clause per candidate that passed."""
    experiment = case.experiment
    metric, several = experiment.end_to_end[0].metric, len(experiment.arms) > 2
    level = f"{100 * (1 - 2 * experiment.alpha):g} % CI"
    clauses = [
        f"{effect.arm + ' ' if several else ''}{metric} {percent(effect.estimate, 'without a finite size')} "
        f"[{level} {percent(effect.low, '−∞', '')} … {percent(effect.high, '+∞', '')}]"
        for effect in found
        if effect.metric == metric and effect.arm in case.left
    ]
    load = f"over {found[0].blocks} blocks at the same SLO and load; subject: {case.subject}"
    return f"{experiment.id}: {', '.join(clauses)} {load}."


def exit_code(verdicts: Sequence[Verdict], required: Mapping[str, int] | None = None) -> int:
    """13 > 10 > 12 > 11 > 0 over the verdicts; no verdict at all is NOT_MEASURED.

    ``required`` maps an experiment to the last gate that it must reach: those decide alone, up to that gate, and a
    required experiment without a verdict is NOT_MEASURED.
    """
    found = {one.status for one in verdicts}
    if required is not None:
        found = {_reached(one, required[one.experiment]) for one in verdicts if one.experiment in required}
        found |= {Status.NOT_MEASURED} if required.keys() - {one.experiment for one in verdicts} else set()
    return next((code for status, code in _CODES.items() if status in found), EXIT_NOT_MEASURED)


def _reached(verdict: Verdict, gate: int) -> Status:
    """The first judged status up to ``gate`` that is not PASS; a gate that is missing was not measured."""
    rungs = [result for result in verdict.gates if result.gate <= gate]
    return _status(rungs) if {result.gate for result in rungs} == set(range(gate + 1)) else Status.NOT_MEASURED

"""The gates once more over files: re-evaluate, compare, show side by side; nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_engram import codec, gates
from pytest_engram.errors import UsageError
from pytest_engram.model import GATE_NAMES, Claim, GateResult, Status, Verdict
from pytest_engram.report import markdown as page
from pytest_engram.report import numbers, terminal
from pytest_engram.report.records import Result, read_results

Evaluate = Callable[..., Verdict]  # gates.evaluate(evidence, prior=verdicts)
_SYSTEM = ("machine.", "backend.", "table.", "engine", "ranks")
_RULES = ("subject", "claim", "arms", "hold", "mechanism", "no_offset", "end_to_end", "guards", "alpha", "workload",
          "serving")  # fmt: skip


def gate_files(
    paths: Iterable[Path | str],
    baseline: Path | str | None = None,
    require: Mapping[str, int] | None = None,
    *,
    markdown: Path | None = None,
    evaluate: Evaluate = gates.evaluate,
) -> tuple[list[Verdict], int, list[str]]:
    """Evaluate the evidence in files again; returns the verdicts, the exit code and the text to print.

    A stored verdict that its own evidence does not give is a ``UsageError``; a verdict without evidence, and a case
    that only one side of a baseline has, is NOT_MEASURED.  Results of several files stand side by side, never pooled.
    ``require`` is what ``gates.exit_code`` takes; ``markdown`` renders the report again to that file.
    """
    found = read_results(paths)
    verdicts = _judge(found, evaluate)
    lines = [line for verdict in verdicts for line in ("", *terminal.ladder(verdict))] + _twice(found)
    if baseline is not None:
        gaps, text = _against(found, verdicts, read_results([baseline]), Path(baseline), evaluate)
        verdicts, lines = verdicts + gaps, lines + text
    lines += ["", *terminal.summary(verdicts)]
    if markdown is not None:
        evidences = [result.evidence for result in found if result.evidence is not None]
        codec.write_atomic(markdown, page.render(verdicts, evidences, {}).encode())
    return verdicts, gates.exit_code(verdicts, require or None), lines


def _judge(found: Sequence[Result], evaluate: Evaluate) -> list[Verdict]:
    """A verdict per result; an experiment that requires others is judged after them, of its own run or its kin."""
    done: dict[int, Verdict] = {}
    for number in sorted(range(len(found)), key=lambda number: _requires(found[number])):
        prior = [verdict for other, verdict in done.items() if _kin(found[other], found[number])]
        done[number] = _again(found[number], evaluate, prior)
    return [done[number] for number in range(len(found))]


def _requires(result: Result) -> bool:
    return bool(result.evidence and result.evidence.plan.experiment.requires)


def _kin(one: Result, other: Result) -> bool:
    """Measured in one run, or on the same machine with the same build and tables."""
    return one.run == other.run or (one.evidence is not None and _system(one) == _system(other))


def _system(result: Result) -> dict[str, str]:
    return {key: value for key, value in _fingerprint(result).items() if key.startswith(_SYSTEM)}


def _fingerprint(result: Result) -> dict[str, str]:
    runs = result.evidence.runs if result.evidence else ()
    return next((run.fingerprint for run in runs if run.arm == "A" and run.fingerprint), {})


def _again(result: Result, evaluate: Evaluate, prior: Sequence[Verdict]) -> Verdict:
    if result.evidence is None:
        stored = result.stored.status.value if result.stored else ""
        return absent(result.experiment, "no-evidence", f"a stored {stored} in {result.source} without its evidence")
    verdict = evaluate(result.evidence, prior=prior)
    if result.stored is not None:
        _same(result.stored, verdict, result.source)
    return verdict


def _same(stored: Verdict, now: Verdict, source: Path) -> None:
    """Refuse a stored verdict that differs, in anything that decides, from what the evidence gives now."""
    before, after = _decisive(stored), _decisive(now)
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if old != new and not _close(old, new):
            raise UsageError(
                f"the stored verdict of {now.experiment} says {key} = {old}, its evidence gives {new}",
                code="verdict-differs", where=str(source), expected="the verdict that follows from the evidence",
                way_out="the file was edited or another version wrote it: measure again, or keep only the evidence",
            )  # fmt: skip


def _decisive(verdict: Verdict) -> dict[str, Any]:
    flat: dict[str, Any] = {
        name: getattr(verdict, name) for name in ("status", "claim", "subject", "protocol_hash", "sentence")
    }
    for gate in verdict.gates:
        flat |= {f"gate {gate.gate} {name}": getattr(gate, name) for name in ("status", "reason", "judged")}
        for effect in gate.effects:
            at = f"gate {gate.gate} {effect.arm} {effect.metric}"
            flat |= {f"{at} {name}": getattr(effect, name) for name in ("estimate", "low", "high", "blocks")}
    return {key: value.value if isinstance(value, (Status, Claim)) else value for key, value in flat.items()}


def _close(old: Any, new: Any) -> bool:
    """Another numpy may differ in the last bits; that is not another verdict."""
    return isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12)


def _against(
    found: Sequence[Result], verdicts: Sequence[Verdict], base: Sequence[Result], path: Path, evaluate: Evaluate
) -> tuple[list[Verdict], list[str]]:
    """Baseline and now side by side; two files share no schedule, so the difference is shown and not judged."""
    before = {result.experiment: (result, then) for result, then in zip(base, _judge(base, evaluate), strict=True)}
    gaps, lines = [], ["", f"against {path} (no common schedule: shown, not judged)"]
    for result, verdict in zip(found, verdicts, strict=True):
        pair = before.get(verdict.experiment)
        if pair is None:
            gaps.append(absent(verdict.experiment, "baseline-lacks-case", f"{path} has no {verdict.experiment}"))
        elif unlike := _unlike(pair[0], result):
            gaps.append(absent(verdict.experiment, "baseline-not-comparable", f"{path} differs: {unlike}"))
        else:
            lines += _side_by_side(pair[1], verdict)
    missing = before.keys() - {verdict.experiment for verdict in verdicts}
    gaps += [absent(name, "case-left-out", f"{path} has {name}, this run has not") for name in sorted(missing)]
    return gaps, lines


def _unlike(base: Result, now: Result) -> str | None:
    """What makes two results answers to two questions: machine, engine, tables, or the rules of the experiment.

    Another build of the backend is what a baseline is for, and another seed asks the same question.
    """
    old, new = _question(base), _question(now)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return ", ".join(f"{key} ({old.get(key)} against {new.get(key)})" for key in keys[:3]) or None


def _question(result: Result) -> dict[str, Any]:
    if result.evidence is None:
        return {}
    rules = {name: getattr(result.evidence.plan.experiment, name) for name in _RULES}
    system = {key: value for key, value in _system(result).items() if not key.startswith("backend.")}
    return {**system, **rules, "engine": result.evidence.plan.engine}


def _side_by_side(base: Verdict, now: Verdict) -> list[str]:
    lines = [f"  {now.experiment}  {base.status.value} → {now.status.value}"]
    for old, new in zip(base.gates, now.gates, strict=False):
        if old.effects or new.effects:
            lines.append(f"    {new.gate}  {numbers.effects(old.effects)} → {numbers.effects(new.effects)}")
    return lines


def _twice(found: Sequence[Result]) -> list[str]:
    names = [result.experiment for result in found]
    return [
        f"{name}: {names.count(name)} results, shown side by side and not pooled"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]


def absent(experiment: str, reason: str, observed: str) -> Verdict:
    """The verdict of a case that is not there: gate 0 NOT_MEASURED, the rest BLOCKED."""
    first = GateResult(
        gate=0, name=GATE_NAMES[0], status=Status.NOT_MEASURED, reason=reason, observed=observed,
        threshold="the case and its evidence", next_step=f"measure {experiment} and pass the file that holds it",
    )  # fmt: skip
    blocked = replace(first, status=Status.BLOCKED, reason="earlier-gate", observed="", threshold="", next_step="")
    rest = tuple(replace(blocked, gate=number, name=name) for number, name in enumerate(GATE_NAMES) if number)
    return Verdict(
        experiment=experiment, title="not there", claim=Claim.CHARACTERISES, subject="nothing",
        status=Status.NOT_MEASURED, gates=(first, *rest), protocol_hash="",
    )  # fmt: skip

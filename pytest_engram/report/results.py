"""The gates once more over files: re-evaluate, compare, show side by side; nothing is measured here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_engram import codec, gates
from pytest_engram.errors import UsageError
from pytest_engram.experiment_rules import in_order
from pytest_engram.model import Evidence, Problem, Status, Verdict
from pytest_engram.report import figure, numbers, terminal
from pytest_engram.report import markdown as page
from pytest_engram.report.account import Account, numbered
from pytest_engram.report.records import Result, read_results

_SYSTEM = ("machine.", "backend.", "table.", "engine", "ranks")
_RULES = ("subject", "claim", "arms", "hold", "mechanism", "no_offset", "end_to_end", "guards", "alpha", "workload",
          "serving")  # fmt: skip


def gate_results(
    found: list[Result], baseline: Path | str | None = None, require: Mapping[str, int] | None = None,
    *, markdown: Path | None = None,
) -> tuple[list[Verdict], int, list[str]]:  # fmt: skip
    """Evaluate again what was read; returns the verdicts, the exit code and the text to print.

    A stored verdict that its own evidence does not give is a ``UsageError``; a verdict without evidence, and a case
    that only one side of a baseline has, is NOT_MEASURED.  Results of several files stand side by side, never pooled.
    ``require`` is what ``gates.exit_code`` takes; ``markdown`` renders the report again to that file.
    """
    verdicts = _judge(found)
    shown, evidences, alike = _apart(found, verdicts)
    lines = [*(line for verdict in shown for line in ("", *terminal.ladder(verdict))), *alike]
    if baseline is not None:
        base = read_results([baseline])
        gaps, text = _against(zip(found, verdicts, shown, strict=True), base, Path(baseline))
        verdicts, shown, lines = verdicts + gaps, shown + gaps, lines + text
    account = Account(shown, evidences)
    if markdown is not None:
        machine = evidences[0].provenance if evidences else {}
        codec.write_atomic(markdown, page.render(account, machine).encode())
        figure.write_figures(markdown.parent, evidences)
    nothing = [] if shown else ["NOT_MEASURED  no experiment is in there"]
    lines += ["", *terminal.explained(account), *terminal.summary(shown), *nothing]
    return verdicts, gates.exit_code(verdicts, require or None), lines


def _apart(found: Sequence[Result], verdicts: Sequence[Verdict]) -> tuple[list[Verdict], list[Evidence], list[str]]:
    """Verdicts and evidence under names that tell results of one experiment apart, and which run each name means."""
    names = numbered(result.experiment for result in found)
    times = Counter(result.experiment for result in found)
    shown = [replace(verdict, experiment=name) for name, verdict in zip(names, verdicts, strict=True)]
    both = [*zip(names, found, strict=True)]
    evidences = [_renamed(result.evidence, name) for name, result in both if result.evidence is not None]
    lines = [f"{name}: {n} results, shown side by side and not pooled" for name, n in times.items() if n > 1]
    lines += [f"  {name}  {result.run}" for name, result in both if times[result.experiment] > 1]
    return shown, evidences, lines


def _renamed(evidence: Evidence, name: str) -> Evidence:
    chosen = replace(evidence.plan.experiment, id=name)
    return replace(evidence, plan=replace(evidence.plan, experiment=chosen))


def _judge(found: Sequence[Result]) -> list[Verdict]:
    """A verdict per result; an experiment that requires others is judged after them, of its own run or else its kin."""
    alone: dict[int, Verdict] = {}  # by what its own run holds, as it was when the run wrote its verdicts
    done: dict[int, Verdict] = {}
    order = in_order(result.evidence.plan.experiment for result in found if result.evidence)
    turn = {name: place for place, name in enumerate(order)}
    for number in sorted(range(len(found)), key=lambda number: turn.get(found[number].experiment, 0)):
        result = found[number]
        inside = [other for other in done if found[other].run == result.run]
        own, then = [done[other] for other in inside], [alone[other] for other in inside]
        has = {known.experiment for known in own}
        kin = [known for other, known in done.items() if known.experiment not in has and _kin(found[other], result)]
        try:
            done[number] = alone[number] = _again(result, then)
            if own + kin != then and result.evidence:  # what other runs add, the stored verdict could not know
                done[number] = gates.evaluate(result.evidence, prior=own + kin)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            seen = f"{result.experiment} cannot be judged: {error!r}"
            raise UsageError(seen, code="bad-evidence", where=str(result.run), expected="evidence of a run") from error
    return [done[number] for number in range(len(found))]


def _kin(one: Result, other: Result) -> bool:
    """Measured on the same machine with the same build and tables."""
    return one.evidence is not None and _system(one) == _system(other)


def _system(result: Result) -> dict[str, str]:
    runs = result.evidence.runs if result.evidence else ()
    known: dict[str, str] = next((run.fingerprint for run in runs if run.arm == "A" and run.fingerprint), {})
    return {key: value for key, value in known.items() if key.startswith(_SYSTEM)}


def _again(result: Result, prior: Sequence[Verdict]) -> Verdict:
    """The verdict that the evidence gives now; a stored one that differs in anything that decides is refused."""
    if result.stored is not None and result.evidence is None:
        seen = f"a stored {result.stored.status.value} in {result.run} without its evidence"
        unproven, first = absent(result.stored, "no-evidence", seen), (*result.stored.gates, None)[0]
        if first and result.stored.status is first.status is Status.NOT_MEASURED:  # it claims nothing: the run knew why
            return replace(unproven, gates=(replace(first, effects=()), *unproven.gates[1:]))
        return unproven
    verdict = gates.evaluate(result.evidence, prior=prior)  # type: ignore[arg-type]  # one of the two is there
    before, after = _decisive(result.stored or verdict), _decisive(verdict)
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if old != new and not _close(old, new):
            raise UsageError(
                f"the stored verdict of {result.experiment} says {key} = {old}, its evidence gives {new}",
                code="verdict-differs", where=str(result.run), expected="the verdict that follows from the evidence",
                way_out="the file was edited or another version wrote it: measure again, or keep only the evidence",
            )  # fmt: skip
    return verdict


def _decisive(verdict: Verdict) -> dict[str, Any]:
    tree = codec.to_builtins(verdict)
    flat = {name: tree[name] for name in ("status", "claim", "subject", "protocol_hash", "sentence")}
    for gate in tree["gates"]:
        at = f"gate {gate['gate']}"
        flat |= {f"{at} {name}": gate[name] for name in ("status", "reason", "judged")}
        for effect in gate["effects"]:
            at = f"gate {gate['gate']} {effect['arm']} {effect['metric']}"
            flat |= {f"{at} {name}": effect[name] for name in ("estimate", "low", "high", "blocks")}
    return flat


def _close(old: Any, new: Any) -> bool:
    """Another numpy may differ in the last bits; that is not another verdict."""
    return isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12)


def _against(
    now: Iterable[tuple[Result, Verdict, Verdict]], base: Sequence[Result], path: Path
) -> tuple[list[Verdict], list[str]]:
    """Baseline and now side by side; two files share no schedule, so the difference is shown and not judged.

    ``now`` are (result, verdict, verdict under the name that is shown).
    """
    before = {result.experiment: (result, then) for result, then in zip(base, _judge(base), strict=True)}
    gaps, lines, left_out = [], ["", f"against {path} (no common schedule: shown, not judged)"], dict(before)
    for result, verdict, shown in now:
        name = verdict.experiment
        left_out.pop(name, None)
        if name not in before:
            gaps.append(absent(verdict, "baseline-lacks-case", f"{path} has no {name}"))
        elif unlike := _unlike(before[name][0], result):
            gaps.append(absent(verdict, "baseline-not-comparable", f"{path} differs: {unlike}"))
        else:
            lines += _side_by_side(before[name][1], shown)
    for name, (_, then) in left_out.items():
        gaps.append(absent(then, "case-left-out", f"{path} has {name}, this run has not"))
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
    return [f"  {now.experiment}  {base.status.value} → {now.status.value}"] + [
        f"    {new.gate}  {numbers.effects(old.effects)} → {numbers.effects(new.effects)}"
        for old, new in zip(base.gates, now.gates, strict=False)
        if old.effects or new.effects
    ]


def absent(about: Verdict, reason: str, observed: str) -> Verdict:
    """The verdict of a case that is not there: gate 0 NOT_MEASURED, the rest BLOCKED."""
    problem = Problem(code=reason, message=observed, status=Status.NOT_MEASURED)
    first, *blocked = gates.unmeasured(problem, about.claim)
    first = replace(first, next_step=f"measure {about.experiment} and pass the file that holds it")
    return replace(about, status=first.status, gates=(first, *blocked), sentence=None, notes=())

"""The gate ladder and the progress lines as a tired person reads them on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from pytest_engram.model import Claim, GateResult, RunRecord, Status, Verdict
from pytest_engram.report import numbers
from pytest_engram.report.account import Account

Markup = Callable[[str, Status], str]
_STATUS = max(len(status.value) for status in Status)
_COLOURS = {Status.PASS: "green", Status.FAIL: "red", Status.INVALID: "red", Status.BLOCKED: "light"}


def plain(text: str, status: Status) -> str:  # noqa: ARG001 - the signature of a Markup
    """The markup of a terminal without colours."""
    return text


def colours(writer: Any) -> Markup:
    """The markup of pytest's terminal writer (``config.get_terminal_writer()``)."""
    return lambda text, status: str(writer.markup(text, **{_COLOURS.get(status, "yellow"): True}))


def ladder(verdict: Verdict, width: int = 100, markup: Markup = plain) -> list[str]:
    """A header, then one rung per gate; only the rung where the experiment stopped explains itself.

    ``markup`` colours a status word that is padded already, so columns stay aligned.
    """
    decisive = stopped_at(verdict)
    lines = [_header(verdict, width, markup)]
    for gate in verdict.gates:
        lines += _rung(gate, width, markup, short=gate.status is Status.BLOCKED and gate is not decisive)
        if gate is decisive:
            lines += _wrap(gate.reason, "      why   ", width)
            lines += _wrap(gate.next_step, "      next  ", width) if gate.next_step else []
    return lines + [line for note in verdict.notes for line in _wrap(note, "  note  ", width)]


def stopped_at(verdict: Verdict) -> GateResult | None:
    """The first judged gate that is not PASS: it gave the experiment its status."""
    return next((gate for gate in verdict.gates if gate.judged and gate.status is not Status.PASS), None)


def summary(verdicts: Sequence[Verdict], markup: Markup = plain) -> list[str]:
    """One line per experiment with what it lets this run say."""
    name = max((len(verdict.experiment) for verdict in verdicts), default=0)
    words = [markup(f"{verdict.status.value:{_STATUS}}", verdict.status) for verdict in verdicts]
    return [f"{v.experiment:{name}}  {word}  {can_say(v)}" for v, word in zip(verdicts, words, strict=True)]


def can_say(verdict: Verdict) -> str:
    """The strongest statement that the verdict carries; a claim of better is the verdict's own sentence or nothing."""
    stopped = stopped_at(verdict)
    if stopped is not None:
        return f"stopped at gate {_called(stopped)}: {stopped.reason}"
    if verdict.status is not Status.PASS:
        return "stopped at no gate"
    if verdict.claim is Claim.IMPROVES:
        return verdict.sentence or "passed, and the verdict carries no sentence"
    found = [effect for gate in verdict.gates if not gate.judged for effect in gate.effects]
    if len(found) > 3:
        return f"{len(found)} effects reported, no winner declared"
    return f"reported, no winner declared: {numbers.effects(found)}" if found else "reported, without an effect"


def explained(account: Account, width: int = 100) -> list[str]:
    """What the evidence says of the hypotheses, with the first line of why, and the advice of each experiment."""
    if not account.evidences:
        return []
    lines = ["hypotheses (they explain, no gate reads them)"]
    for one in account.hypotheses:
        lines += _wrap(f"{one.statement}: {one.lines[0]}", f"  {one.number} {one.outcome:10} ", width)
    for verdict, advice in zip(account.verdicts, account.advice, strict=True):
        lines += _wrap(advice, f"  {verdict.experiment}  ", width) if advice else []
    return [*lines, ""]


def run_line(experiment: str, done: int, total: int, run: RunRecord, eta: float | None) -> str:
    """``B1  run  7/24  block 3  A'  2.9 s  eta 48 s``: the ``done``-th run just ended, ``eta`` seconds are left."""
    tail = "" if eta is None else f"  eta {numbers.seconds(eta)}"
    trouble = "".join(f"  {problem.code}" for problem in run.problems)
    place = f"run {done:{len(str(total))}}/{total}  block {run.block + 1}"
    return f"{experiment}  {place}  {run.arm:2}  {numbers.seconds(run.seconds)}{tail}{trouble}"


def _header(verdict: Verdict, width: int, markup: Markup) -> str:
    word, scope = verdict.status.value, f"[{verdict.claim.value}, {verdict.subject}]"
    room = max(width - len(verdict.experiment) - len(scope) - len(word) - 6, 12)
    left = f"{verdict.experiment}  {textwrap.shorten(verdict.title, room, placeholder=' …')}  {scope}"
    return f"{left:{max(width - len(word), len(left) + 2)}}{markup(word, verdict.status)}"


def _called(gate: GateResult) -> str:
    return f"{gate.gate} {gate.name.replace('_', ' ')}"


def _rung(gate: GateResult, width: int, markup: Markup, *, short: bool) -> list[str]:
    """An unjudged gate with effects is reported, not judged; a gate behind the decisive one is its status alone."""
    word, text = gate.status.value, "" if short else gate.observed
    if not short and not gate.judged and gate.effects:
        word, text = "reported", numbers.effects(gate.effects)
    elif text and gate.threshold:
        text += f" | needs {gate.threshold}"
    head = f"  {_called(gate):14} "
    first, *rest = _wrap(text, " " * (len(head) + _STATUS + 1), width)
    return [f"{head}{markup(f'{word:{_STATUS}}', gate.status)} {first.lstrip()}".rstrip(), *rest]


def _wrap(text: str, head: str, width: int) -> list[str]:
    room = max(width - len(head), 24)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]

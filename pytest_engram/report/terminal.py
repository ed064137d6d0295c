"""The gate ladder and the progress lines as a tired person reads them on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from pytest_engram.model import Claim, GateResult, RunRecord, Status, StepReceipt, Verdict
from pytest_engram.report import numbers

Markup = Callable[[str, Status], str]
_STATUS = max(len(status.value) for status in Status)
_NAME = 12
_INDENT = " " * 6

_COLOURS = {
    Status.PASS: "green",
    Status.FAIL: "red",
    Status.INVALID: "red",
    Status.INCONCLUSIVE: "yellow",
    Status.NOT_MEASURED: "yellow",
    Status.BLOCKED: "light",
}


def plain(text: str, status: Status) -> str:  # noqa: ARG001 - the signature of a Markup
    """The markup of a terminal without colours."""
    return text


def colours(writer: Any) -> Markup:
    """The markup of pytest's terminal writer (``config.get_terminal_writer()``)."""
    return lambda text, status: str(writer.markup(text, **{_COLOURS[status]: True}))


def ladder(verdict: Verdict, width: int = 100, markup: Markup = plain) -> list[str]:
    """A header, then one rung per gate; only the rung where the experiment stopped explains itself.

    ``markup`` colours a status word that is padded already, so columns stay aligned.
    """
    decisive = stopped_at(verdict)
    lines = [_header(verdict, width, markup)]
    for gate in verdict.gates:
        lines += _rung(gate, width, markup, short=gate.status is Status.BLOCKED and gate is not decisive)
        if gate is decisive:
            lines += _explain(gate, width)
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
    if verdict.status is not Status.PASS or stopped is not None:
        return f"stopped at {_where(stopped)}"
    if verdict.claim is Claim.IMPROVES:
        return verdict.sentence or "passed, and the verdict carries no sentence"
    shown = numbers.effects(effect for gate in verdict.gates if not gate.judged for effect in gate.effects)
    return f"reported, no winner declared: {shown}" if shown else "reported, without an effect"


def run_line(experiment: str, done: int, total: int, run: RunRecord, eta: float | None) -> str:
    """``B1  run  7/24  block 3  A'  2.9 s  eta 48 s``: the ``done``-th run just ended, ``eta`` seconds are left."""
    tail = "" if eta is None else f"  eta {numbers.seconds(eta)}"
    trouble = "".join(f"  {problem.code}" for problem in run.problems)
    place = f"run {done:{len(str(total))}}/{total}  block {run.block + 1}"
    return f"{experiment}  {place}  {run.arm:2}  {numbers.seconds(run.seconds)}{tail}{trouble}"


def bring_up_line(experiment: str, receipt: StepReceipt) -> str:
    """``B1  rank 0  pre-touch  0.9 s  +6,291,456 object pages`` for one step of making a table."""
    head = f"{experiment}  rank {receipt.rank}  {receipt.step}"
    if receipt.not_applicable:
        return f"{head}  not applicable: {receipt.not_applicable}"
    pages = receipt.object_pages
    grown = "" if pages is None else f"  +{numbers.count(pages[1] - pages[0])} object pages"
    return f"{head}  {numbers.seconds(receipt.seconds)}{grown}"


def _header(verdict: Verdict, width: int, markup: Markup) -> str:
    word = verdict.status.value
    scope = f"[{verdict.claim.value}, {verdict.subject}]"
    room = max(width - len(verdict.experiment) - len(scope) - len(word) - 6, 12)
    title = textwrap.shorten(verdict.title, room, placeholder=" …")
    left = f"{verdict.experiment}  {title}  {scope}"
    return f"{left:{max(width - len(word), len(left) + 2)}}{markup(word, verdict.status)}"


def _rung(gate: GateResult, width: int, markup: Markup, *, short: bool) -> list[str]:
    head = f"  {gate.gate} {gate.name.replace('_', ' '):{_NAME}} "
    word, text = (gate.status.value, "") if short else _cells(gate)
    body = _body(text, len(head) + _STATUS + 1, width) if text else [""]
    rest = [" " * (len(head) + _STATUS + 1) + line for line in body[1:]]
    return [f"{head}{markup(f'{word:{_STATUS}}', gate.status)} {body[0]}".rstrip(), *rest]


def _cells(gate: GateResult) -> tuple[str, str]:
    """The status word and what stands beside it; an unjudged gate with effects is reported, not judged."""
    if not gate.judged and gate.effects:
        return "reported", numbers.effects(gate.effects)
    return gate.status.value, f"{gate.observed} | needs {gate.threshold}" if gate.threshold else gate.observed


def _explain(gate: GateResult, width: int) -> list[str]:
    lines = _wrap(gate.reason, f"{_INDENT}why   ", width)
    return lines + _wrap(gate.next_step, f"{_INDENT}next  ", width) if gate.next_step else lines


def _where(gate: GateResult | None) -> str:
    return "no gate" if gate is None else f"gate {gate.gate} {gate.name.replace('_', ' ')}: {gate.reason}"


def _wrap(text: str, head: str, width: int) -> list[str]:
    lines = _body(text, len(head), width)
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]


def _body(text: str, used: int, width: int) -> list[str]:
    return textwrap.wrap(text, max(width - used, 24), break_long_words=False, break_on_hyphens=False) or [""]

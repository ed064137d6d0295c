"""The report as Markdown: a short head that survives every size limit, then tables per experiment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_engram.model import Claim, Evidence, GateResult, Status, Verdict
from pytest_engram.report import figure, measured, terminal
from pytest_engram.report.account import Account

LIMIT = 900_000  # bytes; CI services drop a job summary above 1 MiB as a whole
_VALUE = 300  # characters of one provenance value
_SUMMARY = ("experiment", "claim", "subject", "status", "what this run can say")
_GATES = ("#", "gate", "status", "reason", "observed", "threshold", "next step")


def render(account: Account, provenance: Mapping[str, Any], *, limit: int = LIMIT) -> str:
    """The whole report, at most ``limit`` bytes of UTF-8; what is cut is said in the last line."""
    lines = [*_head(account.verdicts, provenance)]
    if account.evidences:
        lines += ["## Hypotheses: they explain, no gate reads them", ""]
        for one in account.hypotheses:
            lines += [f"{one.number}. {one.statement}: **{one.outcome}**", ""]
            lines += [*(f"   - {escape(line)}" for line in one.lines), ""]
    pictures = {id(evidence): name for name, evidence, _ in figure.figures(account.evidences)}
    for (verdict, evidence), advice in zip(account.pairs, account.advice, strict=True):
        lines += _experiment(verdict, evidence, advice, pictures.get(id(evidence)))
    lines += ["## Provenance", "", *table(("what", "value"), _flat(provenance))]
    return _cut("\n".join(lines) + "\n", limit)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table with escaped cells, and the blank line that must follow it; nothing for no rows."""
    cells = [list(head), *([escape(cell) for cell in row] for row in rows)]
    if len(cells) == 1:
        return []
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return [*(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in cells), ""]


def escape(cell: object) -> str:
    """One line of text that cannot end a cell, open a tag or start a link."""
    signs = str.maketrans({sign: f"\\{sign}" for sign in "\\|<`*"})
    return " ".join(str(cell).split()).translate(signs).replace("](", "]\\(")


def _head(verdicts: Sequence[Verdict], provenance: Mapping[str, Any]) -> Iterator[str]:
    yield from ("# Engram gates", "")
    rows = [(v.experiment, v.claim.value, v.subject, v.status.value, terminal.can_say(v)) for v in verdicts]
    yield from table(_SUMMARY, rows)
    if not verdicts:
        yield from ("No experiment was judged: nothing is shown, and nothing follows.", "")
    if command := provenance.get("command"):
        yield from ("Repeat it with:", "", "```sh", str(command).replace("```", "` ` `"), "```", "")


def _experiment(verdict: Verdict, evidence: Evidence | None, advice: str | None, picture: str | None) -> Iterator[str]:
    yield from (f"## {escape(verdict.experiment)}: {escape(verdict.title)} — {verdict.status.value}", "")
    yield from table(_GATES, map(_gate, verdict.gates))
    if evidence is not None:
        asked = evidence.plan.experiment
        yield from (f"**Why.** {escape(asked.why)}", "")
        yield from (f"**Predicted**: {escape(asked.direction_note)}.", "") if asked.direction_note else ()
        yield from (f"**Advice**: {escape(advice)}.", "") if advice else ()
        yield from (f"![main compute beside lookups]({picture})", "") if picture else ()
    for title, head, rows in (measured.effects(verdict), *(measured.tables(evidence) if evidence else ())):
        lines = table(head, rows)
        yield from (f"### {title}", "", *lines) if lines else ()
    yield from ("### What this does not prove", "", *(f"- {escape(line)}" for line in _limits(verdict, evidence)))
    yield from ("", f"Protocol `{verdict.protocol_hash or 'none'}`.", "")


def _gate(gate: GateResult) -> tuple[object, ...]:
    status = gate.status.value if gate.judged else f"{gate.status.value} (reported, not judged)"
    stopped = gate.status not in (Status.PASS, Status.BLOCKED)
    return gate.gate, gate.name, status, gate.reason, gate.observed, gate.threshold, gate.next_step if stopped else ""


def _limits(verdict: Verdict, evidence: Evidence | None) -> Iterator[str]:
    """Written against ourselves: what a reader may be tempted to conclude and must not."""
    plan = evidence.plan if evidence else None
    limits = (
        (True, f"Subject '{verdict.subject}': nothing here speaks of a served engine."),
        (verdict.claim is Claim.CHARACTERISES, "It characterises: the effect stands, and no arm is declared better."),
        (verdict.status is not Status.PASS, f"{verdict.status.value}: gates after the first failure were not decided."),
        (True, "One machine, this table size, these shapes: page walks, links and clocks differ elsewhere."),
        (plan is None, "There is no evidence behind this verdict."),
        (plan and plan.engine == "cpu", "CPU engine: a thread gathers rows; no GPU and no PCIe link took part."),
        (plan and plan.experiment.workload.reuse == "repeated", "Rows are repeated: a gain may be a cache's."),
        (plan and not plan.experiment.serving, "Nothing was served: TTFT, ITL and goodput are not measured."),
    )
    return (text for holds, text in limits if holds)


def _flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        elif key != "command":
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield f"{path}{key}", text if len(text) <= _VALUE else f"{text[:_VALUE]} … ({len(text)} characters)"


def _cut(text: str, limit: int) -> str:
    """Whole lines up to the limit; the records themselves are in the evidence files."""
    data = text.encode()
    if len(data) <= limit:
        return text
    sizes = f"the report has {len(data):,} bytes, {limit:,} are allowed"
    note = f"\n**Cut here:** {sizes}; evidence-*.json holds all of it.\n"
    kept = data[: max(limit - len(note.encode()), 0)]
    return kept[: kept.rfind(b"\n") + 1].decode() + note

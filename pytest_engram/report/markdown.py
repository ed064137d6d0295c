"""The report as Markdown: a short head that survives every size limit, then tables per experiment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pytest_engram.model import Claim, Evidence, GateResult, Moment, PageDistribution, RunRecord, Status, Verdict
from pytest_engram.report import numbers, terminal
from pytest_engram.report.measured import ledger_table, metric_table, startup_table

LIMIT = 900_000  # bytes; CI services drop a job summary above 1 MiB as a whole
_VALUE = 300  # characters of one provenance value


def render(
    verdicts: Sequence[Verdict], evidences: Sequence[Evidence], provenance: Mapping[str, Any], *, limit: int = LIMIT
) -> str:
    """The whole report, at most ``limit`` bytes of UTF-8; what is cut is said in the last line."""
    by_experiment: dict[str, list[Evidence]] = {}
    for evidence in evidences:
        by_experiment.setdefault(evidence.plan.experiment.id, []).append(evidence)
    lines = [*_head(verdicts, provenance)]
    for verdict in verdicts:
        mine = by_experiment.get(verdict.experiment)
        lines += _experiment(verdict, mine.pop(0) if mine else None)
    lines += ["## Provenance", "", *table(("what", "value"), _flat(provenance))]
    return _cut("\n".join(lines) + "\n", limit)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table with escaped cells, and the blank line that must follow it; nothing for no rows."""
    body = [[escape(cell) for cell in row] for row in rows]
    if not body:
        return []
    widths = [max(3, *(len(row[column]) for row in [list(head), *body])) for column in range(len(head))]
    lines = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in [list(head), *body]]
    lines.insert(1, ["-" * width for width in widths])
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def escape(cell: object) -> str:
    """One line of text that cannot end a cell, open a tag or start a link."""
    text = " ".join(str(cell).split()).replace("\\", "\\\\")
    for sign in "|<`*":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("](", "]\\(")


def _head(verdicts: Sequence[Verdict], provenance: Mapping[str, Any]) -> Iterator[str]:
    yield from ("# Engram gates", "")
    yield from table(
        ("experiment", "claim", "subject", "status", "what this run can say"),
        [(v.experiment, v.claim.value, v.subject, v.status.value, terminal.can_say(v)) for v in verdicts],
    )
    if not verdicts:
        yield from ("No experiment was judged: nothing is shown, and nothing follows.", "")
    if command := provenance.get("command"):
        yield from ("Repeat it with:", "", "```sh", str(command).replace("```", "` ` `"), "```", "")


def _experiment(verdict: Verdict, evidence: Evidence | None) -> Iterator[str]:
    yield from (f"## {escape(verdict.experiment)}: {escape(verdict.title)} — {verdict.status.value}", "")
    yield from table(("#", "gate", "status", "reason", "observed", "threshold", "next step"), map(_gate, verdict.gates))
    yield from _effects(verdict)
    if evidence is not None:
        yield from (f"**Why.** {escape(evidence.plan.experiment.why)}", "")
        yield from _section("Medians over runs", metric_table(evidence))
        yield from _section("Where the pages lay", _placement(evidence))
        yield from _section("Start-up, never part of steady times", startup_table(evidence))
        yield from _section("Bytes per step, separate ledgers", ledger_table(evidence))
        yield from _section("Problems", _problems(evidence))
    yield from ("### What this does not prove", "")
    yield from (f"- {escape(line)}" for line in _limits(verdict, evidence))
    yield from ("", f"Protocol `{verdict.protocol_hash or 'none'}`.", "")


def _section(title: str, found: tuple[Sequence[str], Iterable[Sequence[object]]]) -> list[str]:
    lines = table(*found)
    return [f"### {title}", "", *lines] if lines else []


def _gate(gate: GateResult) -> tuple[object, ...]:
    status = gate.status.value if gate.judged else f"{gate.status.value} (reported, not judged)"
    stopped = gate.status not in (Status.PASS, Status.BLOCKED)
    return gate.gate, gate.name, status, gate.reason, gate.observed, gate.threshold, gate.next_step if stopped else ""


def _effects(verdict: Verdict) -> list[str]:
    rows = [
        (gate.gate, effect.arm, effect.metric, f"{numbers.signed(effect.estimate)} {numbers.points(effect.metric)}",
         numbers.interval(effect) if effect.estimate is not None else effect.note or numbers.ABSENT,
         numbers.ABSENT if effect.p_value is None else f"{effect.p_value:.4f}", effect.blocks,
         " ".join(numbers.signed(block) for block in effect.per_block))
        for gate in verdict.gates
        for effect in gate.effects
    ]  # fmt: skip
    head = ("gate", "arm", "metric", "effect", "interval", "p", "blocks", "per block, %")
    return _section("Effects against arm A", (head, rows))


def _placement(evidence: Evidence) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    """One row per distinct answer of the kernel: runs of an arm that answered the same share a row."""
    nodes = sorted({node for _, pages in _audits(evidence) for node in pages.pages})
    rows: dict[tuple[object, ...], int] = {}
    for run, pages in _audits(evidence):
        shares = tuple(numbers.size(pages.pages.get(node, 0) * pages.page_bytes) for node in nodes)
        unplaced = ", ".join(f"{name} {number}" for name, number in sorted(pages.unplaced.items())) or "0"
        coverage = f"{numbers.size(pages.covered_bytes)} of {numbers.size(pages.table_bytes)}"
        row = (
            run.arm,
            pages.rank,
            pages.table,
            pages.moment.value,
            *shares,
            unplaced,
            coverage,
            "+".join(pages.routes),
        )
        rows[row] = rows.get(row, 0) + 1
    order = {moment.value: number for number, moment in enumerate(Moment)}
    listed = sorted(rows.items(), key=lambda item: (str(item[0][0]), item[0][1], item[0][2], order[str(item[0][3])]))
    head = ("arm", "rank", "table", "moment", *(f"NUMA node {node}" for node in nodes), "pages not placed", "coverage",
            "asked by", "audits")  # fmt: skip
    return head, [(*row, times) for row, times in listed]


def _audits(evidence: Evidence) -> Iterator[tuple[RunRecord, PageDistribution]]:
    return ((run, pages) for run in evidence.runs for sample in run.placement for pages in sample.distributions)


def _problems(evidence: Evidence) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    """Equal problems of one arm share a row."""
    found = [("", problem) for problem in evidence.problems]
    found += [(run.arm, problem) for run in evidence.runs for problem in run.problems]
    rows = sorted((arm, p.status.value, p.code, p.who, p.where, p.message) for arm, p in found)
    head = ("arm", "status", "code", "who", "where", "message", "times")
    return head, [(*row, len(list(same))) for row, same in groupby(rows)]


def _limits(verdict: Verdict, evidence: Evidence | None) -> Iterator[str]:
    """Written against ourselves: what a reader may be tempted to conclude and must not."""
    if verdict.subject != "served engine":
        yield f"The subject is '{verdict.subject}': nothing here speaks of a served engine."
    if verdict.claim is Claim.CHARACTERISES:
        yield "The claim is 'characterises': the effect is reported with its interval, and no arm is declared better."
    if verdict.status is not Status.PASS:
        yield f"The status is {verdict.status.value}: gates after the first that did not pass were not decided."
    yield "One machine, this table size, these shapes: page walks, links and clocks differ elsewhere."
    if evidence is None:
        yield "There is no evidence behind this verdict."
        return
    experiment = evidence.plan.experiment
    if evidence.plan.engine == "cpu":
        yield "The engine is 'cpu': a worker thread gathers rows; no GPU, no UVA read and no PCIe link took part."
    if experiment.workload.reuse == "repeated":
        yield "Rows are repeated: a gain may be a cache's."
    if experiment.serving is None:
        yield "No open-loop load was served: TTFT, ITL and goodput are not measured."


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
    note = (
        f"\n**Cut here:** the report has {len(data):,} bytes, {limit:,} are allowed; evidence-*.json holds all of it.\n"
    )
    kept = data[: max(limit - len(note.encode()), 0)]
    return kept[: kept.rfind(b"\n") + 1].decode() + note

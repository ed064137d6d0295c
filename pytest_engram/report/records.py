"""Results on disk: the run folder and ``engram`` section that this package writes, and the files that it reads back."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pytest_engram import codec, experiment_rules
from pytest_engram import provenance as machine
from pytest_engram.errors import UsageError
from pytest_engram.model import SCHEMA_VERSION, Evidence, Verdict
from pytest_engram.report import figure, markdown
from pytest_engram.report.account import Account, numbered

SECTION_SCHEMA = 1  # 1: verdicts, evidence or the names of its files, provenance, command, hypotheses, advice
VERDICT_FILE = "verdict.json"
EVIDENCE_FILES = "evidence-*.json*"  # also compressed


@dataclass(frozen=True, slots=True)
class Result:
    """One experiment as one run left it: its evidence, the verdict that was stored with it, or both."""

    run: Path  # the folder or file whose experiments were one run
    experiment: str
    evidence: Evidence | None
    stored: Verdict | None


@dataclass(frozen=True, slots=True)
class _Records:
    verdicts: list[Verdict]
    evidence: list[Evidence]


def write_run(folder: Path, account: Account, *, command: Sequence[str] = ()) -> dict[str, Any]:
    """Write ``evidence-<id>.json`` per experiment, ``report.md``, its figures and, last, ``verdict.json``, atomically.

    Returns the section with the evidence embedded.
    """
    evidences = account.evidences
    names = [f"evidence-{stem}.json" for stem in numbered(one.plan.experiment.id for one in evidences)]
    for name, evidence in zip(names, evidences, strict=True):
        codec.write_atomic(folder / name, codec.encode(evidence))
    figure.write_figures(folder, evidences)
    known = evidences[0].provenance if evidences else machine.collect()
    text = markdown.render(account, {**known, "command": shlex.join(command)})
    codec.write_atomic(folder / "report.md", text.encode())
    section = engram_section(account, known, command)
    stored = {**section, "evidence": [], "evidence_files": names}
    codec.write_atomic(folder / VERDICT_FILE, codec.dumps({"engram": stored}))
    return section


def engram_section(account: Account, provenance: dict[str, Any], command: Sequence[str] = ()) -> dict[str, Any]:
    """The schema-versioned section as strict JSON builtins; ``replaced`` lists where NaN or an infinity became null."""
    section = {
        "schema": SECTION_SCHEMA, "tool": "pytest-engram", "command": command, "verdicts": account.verdicts,
        "evidence": account.evidences, "provenance": provenance, "hypotheses": account.hypotheses,
        "advice": account.advice,
    }  # fmt: skip
    clean, lost = codec.finite(codec.to_builtins(section), "$.engram")
    return {**clean, "replaced": lost}


def read_results(paths: Iterable[Path | str]) -> list[Result]:
    """Every experiment in run folders, our own files and benchmark JSON; each file counts once.

    Raises ``UsageError`` with file and position for what is truncated, not JSON, of an unknown schema, or not ours.
    """
    runs: dict[Path, dict[Path, None]] = {}
    for file in (Path(os.path.realpath(file)) for path in paths for file in _files(Path(path))):
        ours = file.name == VERDICT_FILE or file.match(EVIDENCE_FILES)
        runs.setdefault(file.parent if ours else file, {})[file] = None
    return [result for run, files in runs.items() for result in _pair(run, [_read(file) for file in files])]


def _files(path: Path) -> list[Path]:
    """A folder and its verdict file stand for the whole run."""
    folder = path.parent if path.name == VERDICT_FILE else path
    found = [file for file in (folder / VERDICT_FILE, *sorted(folder.glob(EVIDENCE_FILES))) if file.exists()]
    if not found and path.is_dir():
        raise _usage(path, "the folder holds no verdict.json and no evidence-*.json", "no-results")
    return found or [path]


def _pair(run: Path, files: Sequence[_Records]) -> Iterator[Result]:
    """Evidence and stored verdicts of one run, in order, by experiment; what lacks a partner stays."""
    verdicts = [verdict for records in files for verdict in records.verdicts]
    for evidence in (evidence for records in files for evidence in records.evidence):
        name = evidence.plan.experiment.id
        stored = next((verdict for verdict in verdicts if verdict.experiment == name), None)
        verdicts = [verdict for verdict in verdicts if verdict is not stored]
        yield Result(run, name, evidence, stored)
    yield from (Result(run, verdict.experiment, None, verdict) for verdict in verdicts)


def _read(file: Path) -> _Records:
    tree = codec.load(file)
    if isinstance(tree, dict) and {"plan", "runs"} <= tree.keys():
        tree = {"engram": {"schema": SECTION_SCHEMA, "verdicts": [], "evidence": [tree]}}
    section = tree.get("engram") if isinstance(tree, dict) else None
    if not isinstance(section, dict):
        raise _usage(file, "line 1 column 1: there is no 'engram' section in this file", "no-engram-section")
    _check_schema(section, SECTION_SCHEMA, file, "engram")
    for name in ("verdicts", "evidence"):
        for number, record in enumerate(section.get(name) or ()):
            _check_schema(record, SCHEMA_VERSION, file, f"{name}[{number}]")
            plan = record.get("plan") if isinstance(record, dict) else None
            _check_schema(plan, SCHEMA_VERSION, file, f"{name}[{number}].plan")
    records: _Records = codec.from_builtins(section, _Records, source=str(file))
    for chosen in (evidence.plan.experiment for evidence in records.evidence):
        for place, seen, expected in islice(experiment_rules.faults(chosen), 1):
            where = f"{chosen.id}.{'.'.join(map(str, place))}"
            raise UsageError(seen, code="bad-experiment", where=f"{file}: {where}", expected=expected)
    return records


def _check_schema(record: Any, known: int, file: Path, at: str) -> None:
    seen = record.get("schema") if isinstance(record, dict) else known  # what is no record is refused as such
    if type(seen) is not int or seen != known:
        raise _usage(file, f"{at}.schema is {seen!r} and this version reads {known}", "unknown-schema")


def _usage(path: Path, seen: str, code: str) -> UsageError:
    return UsageError(
        seen, code=code, where=str(path), expected="a run folder, its files, or benchmark JSON of pytest-engram",
        way_out="pass what --engram-report or --benchmark-json of this version wrote",
    )  # fmt: skip

"""Results on disk: the ``engram`` section that this package writes, and the files that it reads back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from pytest_engram import codec
from pytest_engram.errors import UsageError
from pytest_engram.model import SCHEMA_VERSION, Evidence, Problem, Verdict
from pytest_engram.report import strict

SECTION_SCHEMA = 1  # 1: verdicts, evidence or the names of its files, provenance, problems, command
VERDICT_FILE = "verdict.json"
EVIDENCE_FILES = "evidence-*.json"
Record = TypeVar("Record", Evidence, Verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One experiment as one run left it: its evidence, the verdict that was stored with it, or both."""

    source: Path
    run: Path  # the folder or file whose experiments were one run
    evidence: Evidence | None
    stored: Verdict | None

    @property
    def experiment(self) -> str:
        """The experiment's id."""
        if self.evidence is not None:
            return self.evidence.plan.experiment.id
        return self.stored.experiment if self.stored is not None else ""


def engram_section(
    verdicts: Sequence[Verdict],
    evidences: Sequence[Evidence],
    *,
    provenance: Mapping[str, Any] | None = None,
    problems: Sequence[Problem] = (),
    command: Sequence[str] = (),
    evidence_files: Sequence[str] = (),
) -> dict[str, Any]:
    """The schema-versioned section as strict JSON builtins.

    With ``evidence_files`` the evidence stays in those files beside the section; without, it is embedded.
    ``replaced`` lists the JSON paths where a NaN or an infinity became null.
    """
    section = {
        "schema": SECTION_SCHEMA,
        "tool": "pytest-engram",
        "version": tool_version(),
        "command": list(command),
        "verdicts": [codec.to_builtins(verdict) for verdict in verdicts],
        "evidence": [] if evidence_files else [codec.to_builtins(evidence) for evidence in evidences],
        "evidence_files": list(evidence_files),
        "provenance": codec.to_builtins(dict(provenance or {})),
        "problems": [codec.to_builtins(problem) for problem in problems],
    }
    clean, lost = strict.finite(section, "$.engram")
    return {**clean, "replaced": lost}


def tool_version() -> str | None:
    """The installed version; None in a checkout that nobody installed."""
    try:
        return metadata.version("pytest-engram")
    except metadata.PackageNotFoundError:
        return None


def read_results(paths: Iterable[Path | str]) -> list[Result]:
    """Every experiment in run folders, our own files and benchmark JSON; each file counts once.

    Raises ``UsageError`` with file and position for what is truncated, not JSON, of an unknown schema, or not ours.
    """
    groups: dict[Path, dict[Path, None]] = {}
    for path in (Path(each) for each in paths):
        for file in _files(path):
            ours = file.name == VERDICT_FILE or file.match(EVIDENCE_FILES)
            groups.setdefault(file.parent.resolve() if ours else file.resolve(), {})[file.resolve()] = None
    return [result for run, files in groups.items() for result in _group(run, files)]


def _files(path: Path) -> list[Path]:
    """A folder and its verdict file stand for the whole run."""
    if path.is_dir() or path.name == VERDICT_FILE:
        folder = path if path.is_dir() else path.parent
        found = [file for file in (folder / VERDICT_FILE, *sorted(folder.glob(EVIDENCE_FILES))) if file.exists()]
        if found:
            return found
    if path.is_dir():
        raise _usage(path, "the folder holds no verdict.json and no evidence-*.json", "no-results")
    return [path]


def _group(run: Path, files: Iterable[Path]) -> list[Result]:
    """Pair the evidence and the stored verdicts of one run, in order, by experiment; what lacks a partner stays."""
    evidences: list[tuple[Path, Evidence]] = []
    verdicts: list[tuple[Path, Verdict]] = []
    for file in files:
        _read(file, evidences, verdicts)
    results = []
    for source, evidence in evidences:
        mine = (pair for pair in verdicts if pair[1].experiment == evidence.plan.experiment.id)
        partner = next(mine, None)
        if partner is not None:
            verdicts.remove(partner)
        results.append(Result(source=source, run=run, evidence=evidence, stored=partner[1] if partner else None))
    return results + [Result(source=source, run=run, evidence=None, stored=verdict) for source, verdict in verdicts]


def _read(file: Path, evidences: list[tuple[Path, Evidence]], verdicts: list[tuple[Path, Verdict]]) -> None:
    tree = strict.load(file)
    if isinstance(tree, dict) and {"plan", "runs"} <= tree.keys():
        evidences.append((file, _record(tree, Evidence, file, "$")))
        return
    if not isinstance(tree, dict) or not isinstance(tree.get("engram"), dict):
        raise _usage(file, "line 1 column 1: there is no 'engram' section in this file", "no-engram-section")
    section = tree["engram"]
    _check_schema(section, SECTION_SCHEMA, file, "$.engram")
    evidences += [(file, record) for record in _records(section, "evidence", Evidence, file)]
    verdicts += [(file, record) for record in _records(section, "verdicts", Verdict, file)]


def _records(section: Mapping[str, Any], name: str, kind: type[Record], file: Path) -> list[Record]:
    entries = section.get(name)
    if not isinstance(entries, list):
        raise _usage(file, f"$.engram.{name} is not a list", "bad-json")
    return [_record(entry, kind, file, f"$.engram.{name}[{number}]") for number, entry in enumerate(entries)]


def _record(tree: Any, kind: type[Record], file: Path, at: str) -> Record:
    if not isinstance(tree, dict):
        raise _usage(file, f"{at} is not an object", "bad-json")
    _check_schema(tree, SCHEMA_VERSION, file, at)
    return codec.from_builtins(tree, kind, source=f"{file} at {at}")


def _check_schema(tree: Mapping[str, Any], known: int, file: Path, at: str) -> None:
    seen = tree.get("schema")
    if type(seen) is not int or seen != known:
        raise UsageError(
            f"{at}.schema is {seen!r}", code="unknown-schema", where=str(file), expected=str(known),
            way_out="read the file with the version of pytest-engram that wrote it",
        )  # fmt: skip


def _usage(path: Path, seen: str, code: str) -> UsageError:
    return UsageError(
        seen, code=code, where=str(path), expected="a run folder, its files, or benchmark JSON of pytest-engram",
        way_out="pass what --engram-report or --benchmark-json wrote",
    )  # fmt: skip

"""The kill table, each fault × the cases that catch it: ``python tests/faults/kill_table.py [--seeds N] [--markdown]``.

A fault is killed by a case of a contract line that the fault names, through a difference that the case saw: a crash of
the backend is no kill.  A fault that survives on any seed ends the command with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import faults_engine  # noqa: E402
import faults_hash  # noqa: E402
import faults_rows  # noqa: E402
import faults_storage  # noqa: E402

from pytest_engram.cases import bench, storage  # noqa: E402
from pytest_engram.cases.case import Case  # noqa: E402
from pytest_engram.checks import CASES, check  # noqa: E402

FAULTS = {**faults_hash.FAULTS, **faults_rows.FAULTS, **faults_engine.FAULTS, **faults_storage.FAULTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What became of one fault on one seed: the cases that saw a difference, and those that merely crashed."""

    fault: str
    expected: tuple[str, ...]
    seen: tuple[Case, ...]
    crashed: tuple[Case, ...]

    @property
    def killed(self) -> bool:
        """Whether a case of an expected contract line saw it."""
        return any(case.contract in self.expected for case in self.seen)


def run(name: str, seed: int, *, whole: bool) -> Kill:
    """One fault on one seed.  A survivor is tried once more with pauses that outlast what a busy machine delays.

    A consumer that waits for too much is expected here, so nobody waits long for it.
    """
    with patch.object(bench, "_DEADLOCK_S", 0.5):
        if (kill := _run(name, seed, whole=whole)).killed:
            return kill
        with patch.object(bench, "_DELAY_S", 2.0), patch.object(storage, "_DELAY_S", 2.0):
            return _run(name, seed, whole=whole)


def _run(name: str, seed: int, *, whole: bool) -> Kill:
    """Run the cases of the lines that a fault breaks against it; the ``whole`` family's show who else sees it."""
    lines, backend = FAULTS[name]
    expected = tuple(lines.split())
    failed = failing(backend, family(lines) if whole else (case for case in CASES if case.contract in expected), seed)
    return Kill(
        fault=name, expected=expected,
        seen=tuple(case for case, sample in failed if not _crash(sample)),
        crashed=tuple(case for case, sample in failed if _crash(sample)),
    )  # fmt: skip


def family(lines: str) -> list[Case]:
    """The cases of all lines with the same first letters."""
    return [case for case in CASES if case.contract[0] in lines]


def failing(backend: Any, cases: Iterable[Case], seed: int = 0) -> list[tuple[Case, Any]]:
    """Those of ``cases`` that fail, with their samples."""
    samples = [(case, check(backend, case, seed=seed)) for case in cases]
    return [(case, sample) for case, sample in samples if sample.supported and not sample.passed]


def _crash(sample: Any) -> bool:
    """An exception's text, without the place or value of a difference."""
    return sample.expected is None and sample.seen is None and "Error: " in sample.detail


def kills(seeds: int, families: str = "HLPS", *, whole: bool = False) -> Iterator[Kill]:
    """Per fault what happened on the first seed that it survives, else on seed 0; ``families`` are first letters."""
    for name in (name for name, (lines, _) in FAULTS.items() if lines[0] in families):
        found = [run(name, seed, whole=whole) for seed in range(seeds)]
        yield next((kill for kill in found if not kill.killed), found[0])


def rows(found: Iterable[Kill]) -> Iterator[tuple[str, str, str]]:
    """(fault, expected lines, catching cases: those of an expected line first, crashes in parentheses)."""
    for kill in found:
        cases = sorted(kill.seen, key=lambda case: case.contract not in kill.expected)
        names = [f"{case.contract} {case.name}" for case in cases] + [f"({case.name})" for case in kill.crashed]
        yield kill.fault, " ".join(kill.expected), ", ".join(names) if kill.killed else f"SURVIVES: {', '.join(names)}"


def report(found: list[Kill], *, markdown: bool = False) -> int:
    """Print the table and ``killed: N/N``; 1 if a fault survives."""
    table = [("fault", "must be caught by", "caught by"), *rows(found)]
    if markdown:
        table.insert(1, ("---",) * 3)
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    for row in table:
        text = [cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)]
        print(f"| {' | '.join(text)} |" if markdown else "  ".join(text))
    dead = sum(kill.killed for kill in found)
    print(f"\nkilled: {dead}/{len(found)}")
    return int(dead < len(found))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    return report(list(kills(options.seeds, whole=True)), markdown=options.markdown)


if __name__ == "__main__":
    sys.exit(main())

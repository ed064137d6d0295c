"""The README's conformance table, counted from the committed reports; as a command it writes the README."""

from __future__ import annotations

import collections
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- conformance: tests/docs/readme_block.py writes this -->", "<!-- /conformance -->"
REPORTS = {"compiled-h200": "H200", "interpreter": "no GPU"}
FAMILIES = {"H": "hash ids", "L": "rows and gate", "P": "prefetch", "S": "shared storage, launch"}
WORDS = {"pass": "pass", "declared difference": "declared", "not supported": "not offered", "fail": "FAIL"}


def outcomes(report: str) -> dict[str, dict[str, str]]:
    """Engine -> contract line -> outcome, of a report's first table."""
    rows = [line.strip("| \n").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    end = next(i for i, row in enumerate(rows) if i > 1 and not re.match(r"[HLPS]\d+ *$", row[0]))
    head = [cell.strip() for cell in rows[0]]
    lines = [[cell.strip() for cell in row] for row in rows[2 if "---" in rows[1][0] else 1 : end]]
    return {name: {row[0]: row[column] for row in lines} for column, name in enumerate(head) if column > 1}


def block(folder: Path) -> str:
    """The table between the markers: contract lines by outcome, per family, engine and machine."""
    columns = {}
    for stem, machine in REPORTS.items():
        for engine, found in outcomes((folder / f"{stem}.md").read_text(encoding="utf-8")).items():
            if engine != "reference":
                columns[f"[{engine}, {machine}](reports/conformance/{stem}.md)"] = found
    rows = [["contract lines", *columns], ["---"] * (len(columns) + 1)]
    for letter, name in FAMILIES.items():
        rows.append([f"{letter}: {name}", *(count(found, letter) for found in columns.values())])
    return "\n".join([BEGIN, *(f"| {' | '.join(row)} |" for row in rows), END])


def count(found: dict[str, str], letter: str) -> str:
    """Lines of one family by outcome, a mixed line by its worst one."""
    counts = collections.Counter(outcome.split(" (")[0] for line, outcome in found.items() if line[0] == letter)
    return ", ".join(f"{counts[outcome]} {word}" for outcome, word in WORDS.items() if counts[outcome])


def replaced(readme: str, folder: Path) -> str:
    """``readme`` with the text between its markers made anew."""
    before, _, rest = readme.partition(BEGIN)
    return before + block(folder) + rest.partition(END)[2]


def main() -> int:
    """Write the README, if it has the markers."""
    path = ROOT / "README.md"
    path.write_text(replaced(path.read_text(encoding="utf-8"), ROOT / "reports/conformance"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

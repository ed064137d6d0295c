"""Every line of the contract is a case, a suite's or a test's word, or listed here with the reason why it is not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pytest_engram.checks import CASES

ROOT = Path(__file__).resolve().parents[2]
LINES = {
    *(f"H{number}" for number in range(1, 21) if number != 15),
    *(f"L{number}" for number in range(1, 13) if number != 6),
    *(f"S{number}" for number in range(1, 15) if number != 11),
    *(f"P{number}" for number in range(1, 10)),
}
NOT_HERE = {
    "H20": "a model runner without a window is the engine's refusal; our batches always have one, unknown is −1",
    "L12": "names of checkpoint tensors belong to the engine's weight loader; our tables have no names",
    "S8": "checks of engine configuration: sharing without offload, groups, elastic EP",
    "S9": "sharing groups over several nodes come from the engine's launcher; ours are given by the plan",
    "S10": "an engine's fallback; our storage refuses instead, with the way out, and never measures something else",
    "S12": "what an engine logs about cgroups; our capacity check refuses",
    "P8": "the same branch in every DP rank of a CUDA engine; our engines have no inline branch",
}
_NUMBER = re.compile(r"\b[HLSP]\d{1,2}\b")
_RANGE = re.compile(r"\b([HLSP])(\d{1,2})[–-]\1(\d{1,2})\b")


def numbers(text: str) -> set[str]:
    """Contract numbers in a text; ``H2–H4`` is three of them."""
    ranges = {f"{m[1]}{n}" for m in _RANGE.finditer(text) for n in range(int(m[2]), int(m[3]) + 1)}
    return ranges | set(_NUMBER.findall(text))


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a file's tests, and of the check functions that are named after nothing else."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield ast.get_docstring(node) or ""


def occurring() -> set[str]:
    """Every number in a case's contract field or in the docstring of a test or suite."""
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "suites").rglob("test_*.py")]
    return {case.contract for case in CASES}.union(*(numbers(text) for file in files for text in docstrings(file)))


def test_every_contract_line_occurs() -> None:
    """Each number has a case or a named test, or a reason in ``NOT_HERE``."""
    assert sorted(LINES - occurring() - set(NOT_HERE)) == []


def test_every_number_is_of_the_contract() -> None:
    """No case claims a line that does not exist, and nothing is excused that does not exist."""
    assert {case.contract for case in CASES} | set(NOT_HERE) <= LINES
    assert all(NOT_HERE.values())


def test_numbers_are_read_from_text() -> None:
    """Single numbers and ranges count; other words do not."""
    assert numbers("H6: a, L1–L3 and S2, S3; not B1, P99x or K44") == {"H6", "L1", "L2", "L3", "S2", "S3"}

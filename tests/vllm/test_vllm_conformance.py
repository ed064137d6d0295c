"""The conformance table: how outcomes are told apart, and both vLLM releases in it."""

import os
from types import SimpleNamespace

import pytest

from pytest_engram import cli
from pytest_engram.cases.case import Case, Finding
from pytest_engram.checks import check, compact_cases, explain
from pytest_engram.report import conformance as module
from pytest_engram.report.conformance import conformance, failed, render


def good(probe):
    """Nothing differs."""


def wrong(probe):
    """Something differs."""
    return Finding(detail="one bit differs", token=7)


def backend(name="engine", differences=(), capabilities=("hash",)):
    """A backend that is only asked for its words."""
    return SimpleNamespace(
        name=name, engines=frozenset({"cpu"}), capabilities=frozenset(capabilities),
        differences=dict(differences), receipt=lambda: {"version": "1|2"},
    )  # fmt: skip


@pytest.fixture
def cases(monkeypatch):
    """Four lines: good, bad, half bad, and one that needs a capability."""
    words = (("fine", "H1", good), ("broken", "H2", wrong), ("one", "H3", good), ("two", "H3", wrong))
    made = [Case(name, contract, "hash", check=run, compact=False) for name, contract, run in words]
    made.append(Case("gated", "L11", "gate", check=good, compact=False))
    monkeypatch.setattr(module, "CASES", made)
    return made


def line(text, contract):
    """The table's cells of one contract line."""
    return next(row.split(" | ") for row in text.splitlines() if row.startswith(f"| {contract} "))


@pytest.mark.usefixtures("cases")
def test_failure_is_shown_before_everything_else():
    """A line fails if one of its cases fails; the count says how many."""
    result = conformance([backend()])
    text = render(result)
    assert failed(result)
    assert line(text, "H1")[2].startswith("pass")
    assert line(text, "H3")[2].startswith("fail (1 of 2)")
    assert "H2 broken: token 7; one bit differs" in text


@pytest.mark.usefixtures("cases")
def test_absent_capability_is_never_a_pass():
    """A line whose capability the backend lacks is not supported."""
    assert line(render(conformance([backend()])), "L11")[2].startswith("not supported")


@pytest.mark.usefixtures("cases")
def test_declared_difference_is_neither_pass_nor_fail():
    """What a backend declares is shown as declared, with its reason, and does not break the table."""
    result = conformance([backend(differences={"H2": "documented", "two": "also"})])
    assert not failed(result)
    assert line(render(result), "H2")[2].startswith("declared difference")
    assert "documented" in render(result)


@pytest.mark.usefixtures("cases")
def test_declaration_does_not_hide_a_missing_capability():
    """A declared line that the backend cannot run at all stays not supported."""
    result = conformance([backend(differences={"L11": "rounds"})])
    assert line(render(result), "L11")[2].startswith("not supported")


@pytest.mark.usefixtures("cases")
def test_every_engine_has_its_column_and_receipt():
    """Two versions stand side by side, each with its escaped receipt."""
    text = render(conformance([backend("a@1"), backend("a@2", capabilities=())]))
    assert line(text, "H1")[2:] == ["pass         ", "not supported |"]
    assert text.count(r"1\|2") == 2


@pytest.mark.parametrize(("bad", "code"), [(wrong, 1), (good, 0)])
def test_command_writes_the_table_and_tells_failure(monkeypatch, capsys, bad, code):
    """The command loads the named backends, writes their table, and returns 1 only if a line is broken."""
    monkeypatch.setattr(module, "CASES", [Case("one", "H1", "hash", check=bad, compact=False)])
    monkeypatch.setattr("pytest_engram.backends.load_backend", backend)
    assert cli.main(["conformance", "a@1", "a@2"]) == code
    printed = capsys.readouterr().out
    assert line(printed, "H1")[2].startswith("fail" if code else "pass")
    assert "## a@2" in printed


@pytest.mark.parametrize("case", compact_cases(), ids=lambda case: f"{case.contract}-{case.name}")
def test_vllm_conforms_in_the_compact_cases(vllm_backend, case):
    """Gate 0's cases hold for vLLM's own modules."""
    sample = check(vllm_backend, case)
    assert sample.passed, explain(sample)


@pytest.mark.skipif(os.environ.get("PYTEST_ENGRAM_CONFORMANCE") != "1", reason="`make conformance` runs all cases")
def test_vllm_conforms_in_all_cases(vllm_backend):
    """No line of the contract is broken by this release; what is declared is only the interpreter's."""
    result = conformance([vllm_backend])
    assert not failed(result), render(result)
    declared = {sample.case for outcome, sample in result[0][1] if outcome == "declared difference"}
    assert declared == set(vllm_backend.differences)

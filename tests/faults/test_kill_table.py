"""Every planted fault is caught by the contract line that it breaks, and the correct backend breaks none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.checks import CASES, check, explain

SEEDS = 20


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """``kill_table.py``, which imports its neighbours as a script does."""
    sys.path.insert(0, str(Path(__file__).parent))
    return importlib.import_module("kill_table")


@pytest.mark.parametrize("family", ["H", "L", "P", "S"])
def test_every_fault_is_killed(table: ModuleType, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """P4 and every other line: removing any one dependency or rule is seen, and every case sees such a removal."""
    found = list(table.kills(1, family))
    code = table.report(found, markdown=True)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.endswith(f"killed: {len(found)}/{len(found)}\n")
    caught = {case.name for kill in found for case in kill.seen if case.contract in kill.expected}
    assert caught == {case.name for case in CASES if case.contract[0] == family}


def test_there_are_enough_faults(table: ModuleType) -> None:
    """At least forty backends are planted, and each names existing contract lines only."""
    assert len(table.FAULTS) >= 40
    assert {line for lines, _ in table.FAULTS.values() for line in lines.split()} <= {case.contract for case in CASES}


def test_planting_alone_changes_nothing(table: ModuleType) -> None:
    """The planting machinery itself is harmless: without a fault no case fails."""
    hashes, rows, engines, storages = (vars(table)[f"faults_{name}"] for name in ("hash", "rows", "engine", "storage"))
    harmless = {
        "H": [hashes._batch(), hashes._layout(), hashes._ids(lambda ids: ids), hashes._arithmetic(),
              hashes._values(hashes._at(lambda sources, shift: sources.at(shift)))],
        "L": [rows._ids(lambda ids, _: ids), rows._decoded(lambda out, *_: out), rows._gate_by()],
        "P": [engines._prepare_after(lambda _: None), engines._consumer_waits_for(lambda own, _: [own])],
        "S": [storages._storage(storages._subclass())],
    }  # fmt: skip
    tried = [(backend, table.family(line)) for line, backends in harmless.items() for backend in backends]
    assert [table.failing(*each) for each in tried] == [[]] * 11


def test_a_survivor_is_told(
    table: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A correct backend in a fault's place survives, so does one that only crashes: the command ends with 1."""
    crashing = ReferenceBackend()
    crashing.lookup = lambda *_, **__: 1 / 0  # type: ignore[assignment, method-assign]
    monkeypatch.setattr(table, "FAULTS", {"nothing": ("L3", ReferenceBackend()), "a crash": ("L3", crashing)})
    assert table.report(list(table.kills(1))) == 1
    printed = capsys.readouterr().out
    assert printed.count("SURVIVES") == 2
    assert printed.endswith("killed: 0/2\n")


@pytest.mark.slow
def test_every_fault_is_killed_on_every_seed(table: ModuleType) -> None:
    """No fault survives any of 20 seeds."""
    assert [kill.fault for kill in table.kills(SEEDS) if not kill.killed] == []


@pytest.mark.slow
def test_no_false_alarm() -> None:
    """The correct backend passes every case on 20 seeds."""
    samples = [check(ReferenceBackend(), case, seed=seed) for seed in range(SEEDS) for case in CASES]
    assert [explain(sample) for sample in samples if sample.supported and not sample.passed] == []
    assert {sample.case for sample in samples if not sample.supported} <= {"one-variant", "short-cgroup"}

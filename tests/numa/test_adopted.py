"""Tables that a backend allocates itself: the suite maps nothing of its own, and only audits where the pages lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_engram import experiment, planning, runner
from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.engines.cpu import EmulatedCudart
from pytest_engram.errors import PlacementError
from pytest_engram.model import Plan, Status, TablePlan
from pytest_engram.numa.group import SoloGroup
from pytest_engram.numa.table import adopt_table, build_table, plan_for
from pytest_engram.session import this_machine

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "experiments"
NODE = this_machine().memory_nodes[0].id
NBYTES = 40_000


class NoStorage(ReferenceBackend):
    """Looks up, but allocates nothing."""

    name = "no-storage"
    storage = None  # type: ignore[assignment]


def plan_of(backend: str, by: str = "engine") -> Plan:
    """One short run of two ranks whose tables the backend allocates."""
    chosen = experiment.load(FOLDER / "B1.yaml")
    work = replace(chosen.workload, hidden=64, layers=8, steps=2, warmup=1)
    hold = {**chosen.hold, "policy": f"bind:{NODE}", "placement_by": by}
    chosen = replace(chosen, serving=None, cooldown_s=0.0, workload=work, ranks=2, hold=hold)
    plan = planning.make_plan(chosen, this_machine(), planning.Choices(engine="cpu", rows=5000, backend=backend))
    return replace(plan, schedule=plan.schedule[:1])


def adopted(make: Any) -> Any:
    return adopt_table(SoloGroup(), plan_for(SoloGroup(), f"bind:{NODE}", "tmpfs"), NBYTES, make)


def test_an_engines_memory_is_adopted_audited_and_given_back() -> None:
    """The table is the engine's own bytes, its receipt says who allocated it, and closing closes it once."""
    closed: list[bool] = []
    own = build_table(SoloGroup(), plan_for(SoloGroup(), f"bind:{NODE}", "tmpfs"), NBYTES)
    table = adopted(lambda: SimpleNamespace(buffer=own.buffer, close=lambda: closed.append(True)))
    table.buffer[-1] = 7
    assert own.buffer[-1] == 7
    assert (table.identity, table.address) == (own.identity, own.address)
    assert table.distributions[0].pages == own.distributions[0].pages == {NODE: 10}
    assert [(one.step, one.detail) for one in table.receipts] == [("allocate", f"by the engine, asked bind:{NODE}")]
    table.close()
    table.close()
    assert closed == [True]
    own.close()


def test_a_table_that_is_too_small_is_refused() -> None:
    """Fewer bytes than the layout needs are an error before a row is written, and the engine's table is closed."""
    closed: list[bool] = []
    small = SimpleNamespace(buffer=np.zeros(4096, np.uint8), close=lambda: closed.append(True))
    with pytest.raises(PlacementError) as caught:
        adopted(lambda: small)
    assert (caught.value.code, caught.value.seen) == ("short-table", "4096 bytes")
    assert closed == [True]


def test_the_emulated_registration_faults_in_its_caller() -> None:
    """Untouched pages are allocated by registering, as ``cudaHostRegister`` does, and counted before and after."""
    plan = plan_for(SoloGroup(), "default", "tmpfs")
    seen: list[int | None] = []

    class Counting(EmulatedCudart):
        def register(self, address: int, nbytes: int) -> int:
            seen.append(table.backing.allocated_bytes)
            code = super().register(address, nbytes)
            seen.append(table.backing.allocated_bytes)
            return code

    def register(built: Any) -> Any:
        nonlocal table
        table = built
        Counting().register(built.address, NBYTES)
        return SimpleNamespace(close=lambda: None)

    table: Any = None
    build_table(SoloGroup(), plan, NBYTES, register=register, order="stock").close()
    assert seen == [0, 40_960]


def test_the_emulated_registration_takes_any_address() -> None:
    """A range that begins and ends inside pages is registered whole, as CUDA does it: its pages and no other."""
    plan = plan_for(SoloGroup(), "default", "tmpfs")
    seen: list[int | None] = []

    def register(built: Any) -> Any:
        EmulatedCudart().register(built.address + 4096 + 64, 4096)  # the end of page 1 and the begin of page 2
        seen.append(built.backing.allocated_bytes)
        return SimpleNamespace(close=lambda: None)

    build_table(SoloGroup(), plan, NBYTES, register=register, order="stock").close()
    assert seen == [2 * 4096]


def test_the_runner_takes_a_backends_own_table() -> None:
    """``placement_by: engine``: the backend hears the policy; the audits of both ranks name one object, as asked."""
    evidence = runner.run(plan_of("reference"))
    assert evidence.problems == ()
    (run,) = evidence.runs
    assert run.correct
    assert [[receipt.step for receipt in one.receipts] for one in run.startup] == [["allocate", "load"]] * 2
    audits = [audit for one in run.placement for audit in one.distributions]
    assert {tuple(audit.pages) for audit in audits} == {(NODE,)}
    assert len({audit.identity for audit in audits}) == 1
    assert {audit.policy_text for audit in audits} == {f"bind:{NODE}"}
    assert run.fingerprint["placement_by"] == "engine"


def test_the_positive_control_is_placed_by_the_suite() -> None:
    """Near and far are asked of the machine: a stock build that ignores where it should allocate is not in between."""
    plan, asked = plan_of("reference"), list[tuple[str, str, str]]()
    tables = tuple(TablePlan(ranks=(node,), mode="bind", nodes=(node,)) for node in (0, 1))
    placements = {arm: replace(placement, tables=tables) for arm, placement in plan.placements.items()}
    chosen = replace(plan.experiment, positive_control=True, unit="allocation")
    plan = replace(plan, placements=placements, experiment=chosen)

    def launch(_entry: str, payload: Any, *_: Any, **__: Any) -> None:
        hold = payload["plan"]["experiment"]["hold"]
        asked.append((payload["runs"][0]["arm"], hold["placement_by"], hold["backing"]))

    runner.run(plan, launch=launch)
    assert asked[0] == (plan.schedule[0].arm, "engine", "tmpfs")
    assert {*asked[1:]} == {("control-0", "order", "tmpfs"), ("control-1", "order", "tmpfs")}


@pytest.mark.parametrize("by", ["engine", "mount"])
def test_a_backend_without_tables_is_not_measured(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that allocates nothing cannot be placed by its own code: an absence with the way out."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    (problem,) = runner.run(plan_of("test_adopted:NoStorage", by)).problems
    assert (problem.code, problem.status) == ("no-storage", Status.NOT_MEASURED)
    assert "placement_by: order" in problem.message


class DeafStorage(ReferenceBackend):
    """Allocates as it always did: nobody told it of policies."""

    name = "deaf-storage"

    def storage(self, group: Any, nbytes: int, cudart: Any, *, backing: str = "tmpfs") -> Any:  # type: ignore[override]
        """The reference's own, by default policy."""
        return super().storage(group, nbytes, cudart, backing=backing)


def test_a_storage_that_takes_no_policy_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """``engine`` asks for a policy; a ``storage`` that cannot hear it is an absence, and a mount passes none."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    (problem,) = runner.run(plan_of("test_adopted:DeafStorage")).problems
    assert (problem.code, problem.status) == ("no-policy", Status.NOT_MEASURED)
    assert "'policy'" in problem.message
    problems = runner.run(plan_of("test_adopted:DeafStorage", "mount")).problems
    assert [one.code for one in problems] in ([], ["no-private-mount"])

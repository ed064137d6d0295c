"""What the guest's suites share: tables, the gate's own words about them, and what peer ranks run.

``run.py`` puts this folder on the path, so ranks load their entries as ``guestkit:function``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pytest_engram import codec, experiment, gates, policies
from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.errors import EngramError
from pytest_engram.model import (
    ComputeSample,
    CorrectnessSample,
    Evidence,
    Experiment,
    Moment,
    OverlapSample,
    PageDistribution,
    PlacementPlan,
    PlacementSample,
    Plan,
    RunRecord,
    TablePlan,
)
from pytest_engram.numa import _syscalls, mounts
from pytest_engram.numa.backing import BACKINGS
from pytest_engram.numa.group import SoloGroup
from pytest_engram.numa.populate import populate
from pytest_engram.numa.table import SharedTable, build_table
from pytest_engram.numa.topology import read_topology
from pytest_engram.numa.world import RankSpec, run_world

MIB = 1 << 20
BYTES = 16 * MIB
SLOW = 10  # one emulating thread runs all virtual CPUs
OUT = Path(os.environ.get("OUT", "."))
HERE = Path(__file__).parent
RANKS = (RankSpec(cpus=(0,)), RankSpec(cpus=(1,)))
MPOL_MF_MOVE = 1 << 1
CPUSET = Path("/sys/fs/cgroup/node0")


class StockOrder(ReferenceBackend):
    """Allocates as the measured engines do: registered before anybody placed it, whatever it is asked for."""

    name = "stock-order"

    def storage(self, group: Any, nbytes: int, cudart: Any, *, backing: str = "tmpfs", policy: str = "") -> Any:
        """One object for all ranks; each registration faults what is not there yet."""
        shared = asked("default", backing=backing, ranks=tuple(range(group.size)))

        def register(table: SharedTable) -> Any:
            cudart.register(table.address, nbytes)
            return Registered()

        return build_table(group, shared, nbytes, register=register, order="stock")


def say(table: str, *words: str) -> None:
    """One line of a table that ``run.py`` shows on the host."""
    with (OUT / f"{table}.txt").open("a") as stream:
        stream.write(" | ".join(words) + "\n")


def asked(mode: str, *nodes: int, backing: str = "tmpfs", ranks: tuple[int, ...] = (0,)) -> PlacementPlan:
    """A placement that no policy name has checked."""
    return PlacementPlan(policy=mode, backing=backing, tables=(TablePlan(ranks=ranks, mode=mode, nodes=nodes),))


def resolved(policy: str, backing: str = "tmpfs", *, ranks: int = 1) -> PlacementPlan:
    """What a policy name means here; rank r runs on node r."""
    return policies.resolve(policy, read_topology(), ranks, backing=backing, rank_nodes=range(ranks))


@contextmanager
def built(plan: PlacementPlan, nbytes: int = BYTES, **how: Any) -> Iterator[SharedTable]:
    """A table of this process with its three audits; gone at the end."""
    table = build_table(SoloGroup(), plan, nbytes, **how)
    try:
        table.audit(Moment.LOADED)
        table.audit(Moment.REPLAYED)
        yield table
    finally:
        table.close()


def nodes_of(table: SharedTable) -> list[int]:
    """The nodes that hold pages of a table at its last audit."""
    return sorted(table.distributions[-1].pages)


def gate_one(asked_for: PlacementPlan, audits: Sequence[PageDistribution]) -> str:
    """Gate 1's reason for these audits in every arm; "as-asked" where it only misses a difference between arms.

    Correctness is given: the ladder's first rung is not what is tested here.
    """
    plan = _plan(asked_for)
    names = (("engine", "L1"), ("engine-edges", "L1"), ("given", "H1"))
    ranks = range(plan.experiment.ranks)
    sound = tuple(CorrectnessSample(case=name, contract=line, passed=True) for name, line in names for _ in ranks)
    steps = (1,) * plan.experiment.workload.steps
    samples = tuple(
        PlacementSample(rank=rank, distributions=tuple(a for a in audits if a.rank == rank))
        for rank in sorted({audit.rank for audit in audits})
    )
    run = RunRecord(
        index=0, block=0, arm="A", started_at="2026-01-01T00:00:00Z", seconds=0.0, fingerprint={"kernel": "one"},
        correctness_before=sound, correctness_after=sound, placement=samples,
        overlap=tuple(OverlapSample(rank=rank, state="low-reuse", timelines=(), resolution_ns=1, source_bytes=1,
                                    staging_bytes=1) for rank in ranks),
        compute=tuple(ComputeSample(rank=r, tokens=plan.experiment.workload.tokens, step_ns=steps, main_ns=steps)
                      for r in ranks),
    )  # fmt: skip
    runs = tuple(replace(run, index=index, arm=arm) for index, arm in enumerate(("A", "A'", "B")))
    reason = gates.evaluate(Evidence(plan=plan, runs=runs, provenance={})).gates[1].reason
    return "as-asked" if reason == "no-treatment" else reason


def _plan(asked_for: PlacementPlan) -> Plan:
    chosen = replace(_a1(), ranks=len({rank for table in asked_for.tables for rank in table.ranks}))
    plan = Plan(
        experiment=chosen, schedule=(), seed=0, protocol_hash="", engine="cpu", backends={},
        placements=dict.fromkeys(chosen.arms, asked_for), cpus=((0,), (1,)), rows=1,
    )  # fmt: skip
    return replace(plan, protocol_hash=gates.plan_hash(plan))


@cache
def _a1() -> Experiment:
    return experiment.load(HERE / "A1.yaml")


def pages_text(audit: PageDistribution) -> str:
    """``N0 100 %`` for a person."""
    total = sum(audit.pages.values()) + sum(audit.unplaced.values())
    found = [f"N{node} {count / total:.1%}" for node, count in sorted(audit.pages.items())]
    return " ".join(found + [f"{name} {count / total:.1%}" for name, count in audit.unplaced.items()])


def code_of(build: Callable[[], Any]) -> str:
    """The code of the error that a build ends in; "not caught" where it ends well."""
    try:
        build()
    except EngramError as error:
        return error.code
    return "not caught"


def world(entry: str, payload: Any = None, *, ranks: Sequence[RankSpec] = RANKS, on_event: Any = None) -> list[Any]:
    """Real peers, one per NUMA node, with deadlines for an emulator."""
    return run_world(f"guestkit:{entry}", payload, ranks, deadline_s=20.0 * SLOW, on_event=on_event)


def distributions(told: Any) -> tuple[PageDistribution, ...]:
    """What ranks sent, as records."""
    return tuple(codec.from_builtins(one, PageDistribution) for one in told)


# ------------------------------------------------------------------------------------------------ entries of ranks


def matrix(group: Any, payload: dict[str, Any]) -> None:
    """Build, load, replay and audit one table per cell, in lock-step; every rank reports every cell."""
    for number, cell in enumerate(payload["cells"]):
        table = build_table(group, codec.from_builtins(cell, PlacementPlan), payload["bytes"])
        table.load(lambda buffer: buffer.fill(7), group)
        table.audit(Moment.LOADED)
        group.barrier(step="replay")
        same = bool((table.buffer == 7).all()) if table.backing.shared else True
        table.audit(Moment.REPLAYED)
        report = {"cell": number, "rank": group.rank, "same": same, "audits": codec.to_builtins(table.distributions)}
        table.close()
        group.emit(report)
        group.barrier(step=f"cell {number}")


def move_with_a_second_mapper(group: Any, _payload: Any) -> list[Any]:
    """The leader asks for a move to node 1 while the peer maps the same pages."""
    table = build_table(group, asked("bind", 0, ranks=(0, 1)), BYTES)
    if group.rank == 0:
        _syscalls.mbind(table.address, table.backing.nbytes, _syscalls.MPOL_BIND, (1,), MPOL_MF_MOVE)
    return _audited(table, group)


def untouched_follower(group: Any, _payload: Any) -> list[Any]:
    """The follower's mapping is never touched: its pages are no evidence yet, wherever the leader's lie."""
    import pytest_engram.numa.table as protocol

    if group.rank == 1:
        setattr(protocol, "populate", lambda *_args, **_kwargs: "skipped")  # noqa: B010 - a re-exported name
    return _audited(build_table(group, asked("bind", 1, ranks=(0, 1)), BYTES), group)


def first_to_register(group: Any, payload: dict[str, Any]) -> list[Any]:
    """Stock order; the emulated registration of rank ``first`` faults the pages before the other rank's does."""

    def register(table: SharedTable) -> Any:
        for rank in (payload["first"], 1 - payload["first"]):
            if rank == group.rank:
                populate(table.backing, lambda *_: None, write=True)
            group.barrier(step=f"rank {rank} registers")
        return Registered()

    return _audited(build_table(group, asked("bind", 0, ranks=(0, 1)), BYTES, register=register, order="stock"), group)


def mounted(group: Any, payload: Any) -> dict[str, Any]:
    """Code that sets no policy, over a private /dev/shm whose mount has the asked one."""
    plan = codec.from_builtins(payload, PlacementPlan)
    receipt = mounts.enter(group, plan)
    stock = asked("default", ranks=(0, 1))
    return {"told": receipt.detail, "audits": _audited(build_table(group, stock, BYTES, order="stock"), group)}


def peer_in_a_cpuset(group: Any, _payload: Any) -> list[Any]:
    """Rank 0 binds the object to node 1 and touches nothing; rank 1 faults it from inside a cpuset of node 0."""
    if group.rank == 1:
        (CPUSET / "cgroup.procs").write_text(str(os.getpid()))
    backing = BACKINGS["memfd"](BYTES)
    handle = group.all_gather(backing.create() if group.rank == 0 else None, step="create")[0]
    if group.rank == 1:
        backing.attach(handle)
    backing.map()
    if group.rank == 0:
        _syscalls.mbind(backing.address, backing.nbytes, _syscalls.MPOL_BIND, (1,))
    group.barrier(step="policy")
    for rank in (1, 0):
        if rank == group.rank:
            populate(backing, lambda *_: None, write=True)
        group.barrier(step=f"rank {rank} touches")
    table = SharedTable(plan=asked("bind", 1).tables[0], index=0, nbytes=BYTES, rank=group.rank, backing=backing)
    table.audit(Moment.REGISTERED)
    return _audited(table, group)


def own_table_in_a_cpuset(_group: Any, _payload: Any) -> str:
    """A rank that the cpuset keeps on node 0 asks for node 1, past the policy's own check."""
    (CPUSET / "cgroup.procs").write_text(str(os.getpid()))
    attempts = (lambda: resolved("bind:1"), lambda: build_table(SoloGroup(), asked("bind", 1), BYTES))
    return ", ".join(map(code_of, attempts))


def _audited(table: SharedTable, group: Any) -> list[Any]:
    group.barrier(step="built")
    for moment in (Moment.LOADED, Moment.REPLAYED):
        table.audit(moment)
    group.barrier(step="audited")
    told: list[Any] = codec.to_builtins(table.distributions)
    table.close()
    return told


class Registered:
    """An emulated registration: nothing to undo."""

    def close(self) -> None:
        """Nothing was pinned."""

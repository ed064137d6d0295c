"""Shared tables built in lock-step by all ranks: create, broadcast, map, policy, populate, register, audit, load.

The leader of a table (the first rank of its ``TablePlan``; every rank where the backing is private) decides where its
pages lie before any peer touches or registers them.  Each step leaves a receipt in each rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_engram import policies
from pytest_engram.errors import NotMeasurable, PlacementError, UsageError
from pytest_engram.model import Moment, PlacementPlan, TablePlan
from pytest_engram.numa import _syscalls, capacity
from pytest_engram.numa.backing import BACKINGS, Adopted
from pytest_engram.numa.group import Group
from pytest_engram.numa.populate import populate
from pytest_engram.numa.shared import Note, Registration, SharedTable
from pytest_engram.numa.topology import read_topology

__all__ = ["Progress", "Registration", "SharedTable", "adopt_table", "build_table", "plan_for"]

Progress = Callable[[int, int], None]
_NEWS_S = 1.0
_WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")


def build_table(
    group: Group, placement: PlacementPlan, num_bytes: int, *,
    register: Callable[[SharedTable], Registration] | None = None, progress: Progress | None = None,
    order: str = "placed",
) -> SharedTable:  # fmt: skip
    """This rank's table of ``placement``, ``num_bytes`` long, with its pages placed, pre-touched and registered.

    ``register`` pins the mapping in this rank; without it the pages are only mapped (read) so that this rank's audit
    sees them.  ``order="stock"`` registers before policy and pre-touch, as engines do today.  On any error every rank
    raises, unregisters, unmaps.
    Raises ``UsageError`` (does not fit, ``too-large``), ``NotMeasurable``, ``PlacementError`` or ``PeerError``.
    """
    table = _table_of(group.rank, placement, num_bytes)
    build = _Build(table, group, placement, register, progress, order)
    try:
        build.run()
    except BaseException:
        table.close()
        raise
    return table


def adopt_table(
    group: Group, placement: PlacementPlan, num_bytes: int, make: Callable[[], Any], *,
    register: Callable[[SharedTable], Registration] | None = None,
) -> SharedTable:  # fmt: skip
    """This rank's part of a table that an engine allocates in ``make()`` (see ``Adopted``), audited where it lies.

    ``register`` verifies the engine's own registration.  Raises what ``make`` raises, and ``PlacementError``.
    """
    table = _table_of(group.rank, placement, num_bytes)
    table.backing = Adopted(num_bytes, make, like=type(table.backing))
    try:
        with table.step("allocate", group) as note:
            table.backing.map()
            note.detail = f"by the engine, asked {placement.policy}"
        group.barrier(step="allocate")
        table.registration = register(table) if register else None
        table.audit(Moment.REGISTERED)
        group.barrier(step="audit")
    except BaseException:
        table.close()
        raise
    return table


def plan_for(group: Group, policy: str, backing: str) -> PlacementPlan:
    """What ``policy`` means for the ranks of ``group``, each at home on the node of its CPUs (None: on several)."""
    topology = read_topology()
    nodes = {topology.node_of_cpu(cpu) for cpu in os.sched_getaffinity(0)}
    homes = group.all_gather(nodes.pop() if len(nodes) == 1 else None, step="homes")
    return policies.resolve(policy, topology, group.size, backing=backing, rank_nodes=homes)


def _table_of(rank: int, placement: PlacementPlan, num_bytes: int) -> SharedTable:
    mine = [(index, plan) for index, plan in enumerate(placement.tables) if rank in plan.ranks]
    if len(mine) != 1 or num_bytes <= 0:
        raise UsageError(
            f"{len(mine)} tables of {num_bytes} bytes list this rank", code="bad-placement", who=f"rank {rank}",
            where=f"policy {placement.policy}", expected="exactly one table with at least one byte",
        )  # fmt: skip
    if placement.backing not in BACKINGS:
        seen, known = f"unknown backing {placement.backing!r}", f"one of {', '.join(BACKINGS)}"
        raise UsageError(seen, code="unknown-backing", where="placement", expected=known)
    ((index, plan),) = mine
    backing = BACKINGS[placement.backing](num_bytes)
    backing.ask(plan)
    return SharedTable(plan=plan, index=index, nbytes=num_bytes, rank=rank, backing=backing)


@dataclass
class _Build:
    """The protocol, one method per step."""

    table: SharedTable
    group: Group
    placement: PlacementPlan
    register_with: Callable[[SharedTable], Registration] | None
    progress: Progress | None
    order: str

    def run(self) -> None:
        orders = {"placed": (self.policy, self.populate, self.register), "stock": (self.register, self.policy)}
        if self.order not in orders:
            raise UsageError(f"unknown order {self.order!r}", code="bad-order", expected=", ".join(orders))
        self.create()
        for step in (self.map, *orders[self.order], self.audit):
            with self.table.step(step.__name__, self.group) as note:
                if self.table.backing.resident and step.__name__ in ("policy", "populate"):
                    note.not_applicable = "the driver placed the pages when it made them"
                else:
                    step(note)
            self.group.barrier(step="barrier" if step.__name__ == "populate" else step.__name__)

    def create(self) -> None:
        table, handle = self.table, None
        with table.step("create", self.group) as note:
            if table.leads:
                free = capacity.live_memory(), capacity.shm_free(), capacity.cgroup_free()
                capacity.check_capacity(self.placement, table.backing.nbytes, *free)
                handle = table.backing.create()
            else:
                note.not_applicable = "the leader creates"
        self.group.check(step="broadcast")
        handles = self.group.all_gather(handle, step="broadcast")
        if not table.leads:
            self._attach(handles[table.plan.ranks[0]])

    def _attach(self, handle: dict[str, str]) -> None:
        try:
            self.table.backing.attach(handle)
        except PlacementError:  # a leader that died takes /proc/<pid> with it: then its death is the news, not this
            end = time.monotonic() + _NEWS_S
            while time.monotonic() < end:
                self.group.check()
                time.sleep(0.01)
            raise

    def map(self, note: Note) -> None:
        self.table.backing.map()
        note.detail = self.table.backing.detail

    def policy(self, note: Note) -> None:
        plan, backing = self.table.plan, self.table.backing
        if self.order == "placed" and self.table.leads:
            _require_untouched(self.table)
        if plan.mode == "default":
            note.not_applicable = "the default policy is no policy"
        elif self.table.leads or backing.policy_per_mapper:
            if plan.mode == "weighted-interleave":
                _require_weights(plan)
            note.detail = f"mbind {plan.mode} {plan.nodes}"
            try:
                _syscalls.mbind(backing.address, backing.nbytes, _syscalls.MODES[plan.mode], plan.nodes)
            except OSError as error:
                raise _syscalls.refused(error, f"policy {plan.mode} {plan.nodes}") from error
        else:
            note.not_applicable = "the policy belongs to the object; the leader sets it"

    def populate(self, note: Note) -> None:
        if self.table.leads:
            note.detail = populate(self.table.backing, self._tick, write=True)
        else:
            note.not_applicable = "the leader touches every page"

    def register(self, note: Note) -> None:
        if self.register_with:
            self.table.registration = self.register_with(self.table)
        else:  # in the engines' order this stands for registration, which faults untouched pages with write intent
            note.not_applicable = "nothing to register with: the pages are only mapped"
            write, alive = self.order != "placed", lambda *_: self.group.check()
            note.detail = populate(self.table.backing, alive, write=write)

    def audit(self, _note: Note) -> None:
        self.table.audit(Moment.REGISTERED)

    def _tick(self, done: int, total: int) -> None:
        self.group.check()
        if self.progress:
            self.progress(done, total)


def _require_untouched(table: SharedTable) -> None:
    allocated, mapped = table.residency()
    if mapped or allocated:
        seen = f"{allocated or 0} bytes are allocated and {mapped or 0} mapped before the policy is set"
        raise PlacementError(
            seen, code="already-touched", where="policy", expected="no resident page",
            way_out="find who touched the table: mbind moves no page",
        )  # fmt: skip


def _require_weights(plan: TablePlan) -> None:
    """The weights are the machine's, in sysfs: they are verified, never changed."""
    for node, weight in zip(plan.nodes, plan.weights, strict=True):
        file, expected = _WEIGHTS / f"node{node}", "Linux 6.9 or later"
        try:
            seen = int(file.read_text())
        except OSError as error:
            why = f"{file}: {error.strerror}"
            raise NotMeasurable(why, code="no-weighted-interleave", where="policy", expected=expected) from error
        if seen != weight:
            raise NotMeasurable(
                f"node {node} has weight {seen}", code="other-weights", where="policy", expected=f"{weight}",
                way_out=f"ask the administrator for: echo {weight} > {file}",
            )  # fmt: skip

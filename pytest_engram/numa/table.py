"""Shared tables built in lock-step by all ranks: create, broadcast, map, policy, populate, register, audit, load.

The leader of a table (the first rank of its ``TablePlan``; every rank where the backing is private) decides where its
pages lie before any peer touches or registers them.  Each step leaves a receipt in each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest_engram.errors import NotMeasurable, PlacementError, UsageError
from pytest_engram.model import Moment, PlacementPlan, TablePlan
from pytest_engram.numa import _syscalls, capacity, pages
from pytest_engram.numa.backing import BACKINGS
from pytest_engram.numa.group import Group
from pytest_engram.numa.populate import populate
from pytest_engram.numa.shared import Registration, SharedTable

__all__ = ["Progress", "Registration", "SharedTable", "build_table"]

Progress = Callable[[int, int], None]
_NEWS_S = 1.0
_WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")


def build_table(
    group: Group,
    placement: PlacementPlan,
    num_bytes: int,
    *,
    register: Callable[[SharedTable], Registration] | None = None,
    progress: Progress | None = None,
    reserve_bytes: int | None = None,
    threads: int | None = None,
    order: str = "placed",
) -> SharedTable:
    """This rank's table of ``placement``, ``num_bytes`` long, with its pages placed, pre-touched and registered.

    ``register`` pins the mapping in this rank; without it the pages are only mapped (read) so that this rank's audit
    sees them.  ``order="stock"`` registers before policy and pre-touch, as engines do today.  On any error in any
    rank every rank raises, unregisters and unmaps.  Raises ``UsageError`` (does not fit, ``too-large``),
    ``NotMeasurable``, ``PlacementError`` or ``PeerError``.
    """
    table = _table_of(group.rank, placement, num_bytes)
    build = _Build(table, group, placement, register, progress, reserve_bytes, threads, order)
    try:
        build.run()
    except BaseException:
        table.close()
        raise
    return table


def _table_of(rank: int, placement: PlacementPlan, num_bytes: int) -> SharedTable:
    mine = [(index, plan) for index, plan in enumerate(placement.tables) if rank in plan.ranks]
    if len(mine) != 1 or num_bytes <= 0:
        raise UsageError(
            f"{len(mine)} tables of {num_bytes} bytes list this rank", code="bad-placement", who=f"rank {rank}",
            where=f"policy {placement.policy}", expected="exactly one table with at least one byte",
        )  # fmt: skip
    kind = BACKINGS.get(placement.backing)
    if kind is None:
        raise UsageError(
            f"unknown backing {placement.backing!r}", code="unknown-backing", where="placement",
            expected=f"one of {', '.join(BACKINGS)}",
        )  # fmt: skip
    index, plan = mine[0]
    return SharedTable(plan=plan, index=index, nbytes=num_bytes, rank=rank, backing=kind(num_bytes))


@dataclass
class _Build:
    """The protocol, one method per step."""

    table: SharedTable
    group: Group
    placement: PlacementPlan
    register: Callable[[SharedTable], Registration] | None
    progress: Progress | None
    reserve_bytes: int | None
    threads: int | None
    order: str

    def run(self) -> None:
        orders = {"placed": (self.policy, self.populate, self.registered), "stock": (self.registered, self.policy)}
        if self.order not in orders:
            raise UsageError(f"unknown order {self.order!r}", code="bad-order", expected="placed or stock")
        for step in (self.create, self.map, *orders[self.order], self.audit):
            step()

    def create(self) -> None:
        handle = None
        with self.table.step("create", self.group) as note:
            if self.table.leads:
                self._check_capacity()
                handle = self.table.backing.create()
            else:
                note.not_applicable = "the leader creates"
        self.group.check(step="broadcast")
        handles = self.group.all_gather(handle, step="broadcast")
        if not self.table.leads:
            self._attach(handles[self.table.plan.ranks[0]])

    def _attach(self, handle: dict[str, str]) -> None:
        try:
            self.table.backing.attach(handle)
        except PlacementError:  # a leader that died takes /proc/<pid> with it: then its death is the news, not this
            end = time.monotonic() + _NEWS_S
            while time.monotonic() < end:
                self.group.check()
                time.sleep(0.01)
            raise

    def map(self) -> None:
        with self.table.step("map", self.group):
            self.table.backing.map()
        self.group.barrier(step="map")

    def policy(self) -> None:
        plan, backing = self.table.plan, self.table.backing
        with self.table.step("policy", self.group) as note:
            if self.order == "placed" and self.table.leads:
                self._require_untouched()
            if plan.mode == "default":
                note.not_applicable = "the default policy is no policy"
            elif self.table.leads or backing.policy_per_mapper:
                self._set_policy()
                note.detail = f"mbind {plan.mode} {plan.nodes}"
            else:
                note.not_applicable = "the policy belongs to the object; the leader sets it"
        self.group.barrier(step="policy")

    def populate(self) -> None:
        with self.table.step("populate", self.group) as note:
            if self.table.leads:
                note.detail = populate(self.table.backing, self._progress, write=True, threads=self.threads)
            else:
                note.not_applicable = "the leader touches every page"
        self.group.barrier(step="barrier")

    def registered(self) -> None:
        with self.table.step("register", self.group) as note:
            if self.register:
                self.table.registration = self.register(self.table)
            else:  # in stock order this stands for registration, which faults untouched pages with write intent
                write = self.order == "stock"
                note.not_applicable = "nothing to register with: the pages are only mapped"
                note.detail = populate(self.table.backing, self._alive, write=write, threads=self.threads)
        self.group.barrier(step="register")

    def audit(self) -> None:
        with self.table.step("audit", self.group):
            self.table.audit(Moment.REGISTERED)
        self.group.barrier(step="audit")

    def _check_capacity(self) -> None:
        capacity.check_capacity(
            self.placement, self.table.backing.nbytes, capacity.live_memory(), capacity.shm_free(),
            capacity.cgroup_free(), reserve=self.reserve_bytes,
        )  # fmt: skip

    def _require_untouched(self) -> None:
        mapped = pages.mapped_bytes(self.table.address, self.table.backing.nbytes)
        allocated = self.table.backing.allocated_bytes or 0
        if mapped or allocated:
            raise PlacementError(
                f"{allocated} bytes are allocated and {mapped} mapped before the policy is set", code="already-touched",
                where="policy", expected="no resident page", way_out="find who touched the table: mbind moves no page",
            )  # fmt: skip

    def _set_policy(self) -> None:
        plan, backing = self.table.plan, self.table.backing
        if plan.mode == "weighted-interleave":
            _require_weights(plan)
        try:
            _syscalls.mbind(backing.address, backing.nbytes, _syscalls.MODES[plan.mode], plan.nodes)
        except OSError as error:
            raise _syscalls.refused(error, f"policy {plan.mode} {plan.nodes}") from error

    def _progress(self, done: int, total: int) -> None:
        self._alive(done, total)
        if self.progress:
            self.progress(done, total)

    def _alive(self, _done: int, _total: int) -> None:
        self.group.check()


def _require_weights(plan: TablePlan) -> None:
    """The weights are the machine's, in sysfs: they are verified, never changed."""
    for node, weight in zip(plan.nodes, plan.weights, strict=True):
        file = _WEIGHTS / f"node{node}"
        try:
            seen = int(file.read_text())
        except OSError as error:
            raise NotMeasurable(
                f"{file}: {error.strerror}",
                code="no-weighted-interleave",
                where="policy",
                expected="Linux 6.9 or later",
            ) from error
        if seen != weight:
            raise NotMeasurable(
                f"node {node} has weight {seen}", code="other-weights", where="policy", expected=f"{weight}",
                way_out=f"ask the administrator for: echo {weight} > {file}",
            )  # fmt: skip

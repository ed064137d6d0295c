"""One rank of a world: builds its table and engine once, then performs the runs that the launcher scheduled.

Every rank executes the same sequence; each run ends in an ``all_gather`` of the ranks' parts, so a record is
complete or a problem, never half.
"""

from __future__ import annotations

import inspect
import time
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from pytest_engram import checks, codec, experiment_rules
from pytest_engram.backends import load_backend, receipt_of
from pytest_engram.backends.protocol import Backend
from pytest_engram.engines import backings, engine_class
from pytest_engram.engines.collective import Collective
from pytest_engram.engines.protocol import Engine, EngineSetup, StepSettings
from pytest_engram.engines.tables import WHOLE, fill_table, full_shards, table_bytes, table_views
from pytest_engram.errors import NotMeasurable
from pytest_engram.model import (
    CorrectnessSample,
    Moment,
    PageDistribution,
    PlacementPlan,
    PlacementSample,
    Plan,
    RunRecord,
    ScheduledRun,
    StartupSample,
)
from pytest_engram.numa import mounts
from pytest_engram.numa.group import Group
from pytest_engram.numa.pages import worker_policy
from pytest_engram.numa.table import SharedTable, adopt_table, build_table
from pytest_engram.numa.uncore import SocketLink
from pytest_engram.planning import layout_for
from pytest_engram.provenance import collect, machine_fingerprint
from pytest_engram.replay import VOCABULARY, Replay
from pytest_engram.schedule import base_arm
from pytest_engram.serving.replay import fixed_batches
from pytest_engram.tokens import synthetic_token_map


def main(group: Group, payload: Mapping[str, Any]) -> None:
    """Entry of a rank: ``payload`` holds the plan and the runs of this world."""
    plan = codec.from_builtins(payload["plan"], Plan, source="plan")
    runs = [codec.from_builtins(run, ScheduledRun, source="schedule") for run in payload["runs"]]
    peer = Peer(group, plan, base_arm(runs[0].arm))
    try:
        for run in runs:
            if not peer.perform(run):  # wrong rows: nothing after them is worth measuring
                break
    finally:
        peer.close()


class Peer:
    """A rank's table, engines and standing evidence."""

    def __init__(self, group: Group, plan: Plan, arm: str) -> None:
        self.group, self.plan, self.work = group, plan, plan.experiment.workload
        self.layout = layout_for(plan)
        self.shard = (group.rank, group.size) if self.work.tensor_parallel and group.size > 1 else WHOLE
        self.part = self.shard if plan.placements[arm].notes else WHOLE  # a split gives each rank a table of its heads
        self.token_map = synthetic_token_map(self.layout.compressed_vocab, VOCABULARY)
        backings.install(plan.placements[arm].backing, group.rank)
        self.machine = machine_fingerprint(collect(standing=True))  # of the machine's /dev/shm, before it is hidden
        self.backends: dict[str, Backend] = {}
        self.table = self._table(arm, plan.placements[arm])
        fill = partial(fill_table, layout=self.layout, seed=plan.seed, shard=self.part, check=group.check)
        self.table.load(fill, group)
        self.table.audit(Moment.LOADED)
        self.views = table_views(self.table.buffer, self.layout, self.part)
        self.collective = Collective(group, plan.engine, deadline_s=plan.deadline_s) if self.shard[1] > 1 else None
        self.engines: dict[str, Engine] = {}
        self.link = SocketLink(plan.cpus[group.rank])
        self.replay = Replay(group, plan, self.layout, self.token_map, self.shard)

    def _table(self, arm: str, placement: PlacementPlan) -> SharedTable:
        """Built by the suite in its own order, or allocated by the backend: as its patch is asked, or under a mount."""
        by, group = experiment_rules.settings(self.plan.experiment, arm)["placement_by"], self.group
        engine, nbytes = engine_class(self.plan.engine), table_bytes(self.layout, self.part)
        register = engine.registrar(group.rank)
        if by == "order":
            progress = lambda done, total: group.emit({"kind": "pages", "value": [done, total]})  # noqa: E731
            return build_table(group, placement, nbytes, register=register, progress=progress)
        allocate = getattr(self._backend(arm), "storage", None)
        if allocate is None:
            raise NotMeasurable(
                "it allocates no table", code="no-storage", who=f"backend {self.plan.backends[arm]}",
                where=f"placement_by: {by}", expected="its method `storage`", way_out="placement_by: order",
            )  # fmt: skip
        mounted = [mounts.enter(group, placement)] if by == "mount" else []
        asked = {} if mounted else {"policy": placement.policy}
        told, named = (group, nbytes, engine.cudart(group.rank)), {"backing": placement.backing, **asked}
        try:
            inspect.signature(allocate).bind(*told, **named)
        except TypeError as error:
            raise NotMeasurable(
                str(error), code="no-policy", who=f"backend {self.plan.backends[arm]}", where=f"placement_by: {by}",
                expected="storage(group, nbytes, cudart, *, backing, policy)", way_out="let its `storage` take them",
            ) from None  # fmt: skip
        table = adopt_table(group, placement, nbytes, partial(allocate, *told, **named), register=register)
        table.receipts[:0] = mounted
        return table

    def _backend(self, arm: str) -> Backend:
        spec = self.plan.backends[arm]
        if spec not in self.backends:
            self.backends[spec] = load_backend(spec)
        return self.backends[spec]

    def close(self) -> None:
        """Stop the engines, release the table, then leave the collective, which may wait for a lost peer."""
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()
        self.views = ()
        self.link.close()
        self.table.close()
        if self.collective is not None:
            self.collective.close()

    def engine(self, arm: str) -> Engine:
        """The engine of an arm; arms with the same backend share one, so that only the arm's variable differs."""
        spec = self.plan.backends[arm]
        if spec not in self.engines:
            serving, work, rank = self.plan.experiment.serving, self.work, self.group.rank
            setup = EngineSetup(
                rank=rank, layout=self.layout, workload=work, tables=self.views, token_map=self.token_map,
                backend=self._backend(arm), cpus=self.plan.cpus[rank], seed=self.plan.seed, shard=self.shard,
                max_tokens=max(work.tokens, *work.sizes, serving.max_batch_tokens if serving else 0),
                gather=None if self.collective is None else self.collective.gather,
            )  # fmt: skip
            self.engines[spec] = engine_class(self.plan.engine)(setup)
        return self.engines[spec]

    def perform(self, run: ScheduledRun) -> bool:
        """One run: check, measure marked, measure unmarked, serve, audit, check again; then emit the record.

        Returns whether every supported correctness case passed on every rank.
        """
        arm = base_arm(run.arm)
        engine, chosen = self.engine(arm), experiment_rules.settings(self.plan.experiment, arm)
        settings = StepSettings(**{field.name: chosen[field.name] for field in fields(StepSettings)})
        time.sleep(self.plan.experiment.cooldown_s)
        self.group.barrier(step=f"run {run.index}")
        started, clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.perf_counter()
        engine.drift()  # what it counts between two calls starts here
        before = self._check(arm, engine, settings, run.index)
        self.link.take()  # what arrives at this rank's socket counts from here
        overlap, compute = self.replay.steps(engine, settings)
        serving, sweep = self.replay.serve(engine, settings), tuple(self.replay.sweep(engine, settings))
        state = engine.drift() | self.link.take()
        self.table.audit(Moment.REPLAYED)
        part = RunRecord(
            index=run.index, block=run.block, arm=run.arm, started_at=started,
            fingerprint=self._fingerprint(arm), correctness_before=before,
            correctness_after=self._check(arm, engine, settings, run.index + 1),
            placement=(PlacementSample(rank=self.group.rank, distributions=self._audits(),
                                       worker=worker_policy(self.group.rank, engine.staging)),),
            startup=self._startup(), overlap=overlap, compute=compute, sweep=sweep, serving=serving,
            drift={name: value for name, value in state.items() if not isinstance(value, str)},
            drift_absent={name: why for name, why in state.items() if isinstance(why, str)},
            seconds=time.perf_counter() - clock,
        )  # fmt: skip
        parts = self.group.all_gather(codec.to_builtins(part), step=f"record {run.index}")
        merged = _merge([codec.from_builtins(p, RunRecord, source="a peer's record") for p in parts])
        if self.group.rank == 0:
            self.group.emit({"kind": "run", "value": codec.to_builtins(merged)})
        return merged.correct

    def _check(self, arm: str, engine: Engine, settings: StepSettings, seed: int) -> tuple[CorrectnessSample, ...]:
        backend = self._backend(arm)
        cases = checks.compact_cases(storage=self.plan.storage_in_question)
        contract = tuple(checks.check(backend, case, seed=seed, engine=self.plan.engine) for case in cases)
        batch = next(fixed_batches(self.work, seed, VOCABULARY, "low-reuse"))
        return (*contract, *checks.check_engine(engine, batch, settings, self.layout, self.token_map, self.plan.seed))

    def _audits(self) -> tuple[PageDistribution, ...]:
        """The audits since the last run; those of registration and load stand in the first run of their world."""
        audits, self.table.distributions = tuple(self.table.distributions), []
        return audits

    def _startup(self) -> tuple[StartupSample, ...]:
        receipts, self.table.receipts = tuple(self.table.receipts), []
        return (StartupSample(rank=self.group.rank, receipts=receipts),) if receipts else ()

    def _fingerprint(self, arm: str) -> dict[str, str]:
        """What this arm really ran: keys named after the variable may differ between arms, all others may not."""
        chosen, placement = experiment_rules.settings(self.plan.experiment, arm), self.plan.placements[arm]
        receipt = receipt_of(self._backend(arm))
        return {
            **{f"machine.{key}": value for key, value in self.machine.items()},
            **{f"machine.user.{key}": value for key, value in self.plan.user.items()},
            **{f"backend.{key}": value for key, value in receipt.items()},
            "table.digest": self._digest(),
            "table.bytes": str(table_bytes(self.layout)),
            "policy": placement.policy,
            "placement_by": chosen["placement_by"],
            "backing": placement.backing,
            "groups": str([list(table.ranks) for table in placement.tables]),
            **{field.name: str(chosen[field.name]) for field in fields(StepSettings)},
            "shards": str(self.shard[1]),
            "engine": self.plan.engine,
            "ranks": str(self.group.size),
            "protocol": self.plan.protocol_hash,
        }

    def _digest(self) -> str:
        """CRC of 1,024 of this rank's rows per layer; the full content is checked against the oracle."""
        crc = 0
        for own in full_shards(self.views, self.layout, self.shard):
            rows = np.linspace(0, len(own.weight) - 1, 1024).astype(np.int64)
            crc = zlib.crc32(own.scales[rows].tobytes(), zlib.crc32(own.weight[rows].tobytes(), crc))
        return f"{crc:08x}"


def _merge(parts: list[RunRecord]) -> RunRecord:
    """One record of all ranks' samples; a key on which ranks differ is kept per rank, and so are their counters."""
    first = parts[0]
    fingerprint, drift, absent = dict(first.fingerprint), dict(first.drift), dict(first.drift_absent)
    for rank, part in enumerate(parts[1:], 1):
        fingerprint |= {f"{k}@{rank}": v for k, v in part.fingerprint.items() if first.fingerprint.get(k) != v}
        drift |= {f"rank{rank}.{name}": value for name, value in part.drift.items()}
        absent |= {f"rank{rank}.{name}": why for name, why in part.drift_absent.items()}
    joined: dict[str, Any] = {
        field.name: tuple(sample for part in parts for sample in getattr(part, field.name))
        for field in fields(first)
        if isinstance(getattr(first, field.name), tuple)
    }
    longest = max(part.seconds for part in parts)
    return replace(first, fingerprint=fingerprint, seconds=longest, drift=drift, drift_absent=absent, **joined)

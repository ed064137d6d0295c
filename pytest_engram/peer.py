"""One rank of a world: builds its table and engine once, then performs the runs that the launcher scheduled.

Every rank executes the same sequence; each run ends in an ``all_gather`` of the ranks' parts, so a record is
complete or a problem, never half.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import numpy as np

from pytest_engram import checks, codec, ledger
from pytest_engram.backends import load_backend, receipt_of
from pytest_engram.backends.protocol import Backend
from pytest_engram.engines import backings, engine_class
from pytest_engram.engines.protocol import Engine, EngineSetup, StepSettings
from pytest_engram.engines.tables import fill_table, table_bytes, table_views
from pytest_engram.model import (
    ComputeSample,
    CorrectnessSample,
    Moment,
    OverlapSample,
    PageDistribution,
    PlacementSample,
    Plan,
    RunRecord,
    ScheduledRun,
    ServingSample,
    StartupSample,
)
from pytest_engram.numa.group import Group
from pytest_engram.numa.pages import worker_policy
from pytest_engram.numa.table import build_table
from pytest_engram.planning import layout_for
from pytest_engram.provenance import collect, machine_fingerprint
from pytest_engram.schedule import base_arm
from pytest_engram.serving.loop import serve
from pytest_engram.serving.replay import fixed_batches, make_load
from pytest_engram.tokens import synthetic_token_map

VOCABULARY = 129_280  # token ids of the model's tokenizer


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
        self.group, self.plan = group, plan
        self.layout = layout_for(plan)
        self.token_map = synthetic_token_map(self.layout.compressed_vocab, VOCABULARY)
        engine = engine_class(plan.engine)
        backings.install(plan.placements[arm].backing, group.rank)
        self.table = build_table(
            group, plan.placements[arm], table_bytes(self.layout), register=engine.registrar(group.rank),
            progress=lambda done, total: group.emit({"kind": "pages", "value": [done, total]}),
        )  # fmt: skip
        self.table.load(self._fill, group)
        self.table.audit(Moment.LOADED)
        self.views = table_views(self.table.buffer, self.layout)
        self.machine = machine_fingerprint(collect())
        self.engines: dict[str, Engine] = {}
        self.backends: dict[str, Backend] = {}

    def _fill(self, buffer: Any) -> None:
        fill_table(buffer, self.layout, self.plan.seed, check=self.group.check)

    def close(self) -> None:
        """Stop the engines, then release the table."""
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()
        self.views = ()
        self.table.close()

    def engine(self, arm: str) -> Engine:
        """The engine of an arm; arms with the same backend share one, so that only the arm's variable differs."""
        spec = self.plan.backends[arm]
        if spec not in self.engines:
            self.backends[spec] = load_backend(spec)
            serving = self.plan.experiment.serving
            workload = self.plan.experiment.workload
            setup = EngineSetup(
                rank=self.group.rank, layout=self.layout, workload=workload, tables=self.views,
                token_map=self.token_map, backend=self.backends[spec], cpus=self.plan.cpus[self.group.rank],
                max_tokens=max(workload.tokens, serving.max_batch_tokens if serving else 0), seed=self.plan.seed,
            )  # fmt: skip
            self.engines[spec] = engine_class(self.plan.engine)(setup)
        return self.engines[spec]

    def perform(self, run: ScheduledRun) -> bool:
        """One run: check, measure marked, measure unmarked, serve, audit, check again; then emit the record.

        Returns whether every supported correctness case passed on every rank.
        """
        arm = base_arm(run.arm)
        engine, settings = self.engine(arm), self._settings(arm)
        time.sleep(self.plan.experiment.cooldown_s)
        self.group.barrier(step=f"run {run.index}")
        started, clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.perf_counter()
        before = self._check(arm, engine, settings, run.index)
        overlap, compute = self._steps(engine, settings)
        serving = self._serve(engine, settings)
        self.table.audit(Moment.REPLAYED)
        part = RunRecord(
            index=run.index, block=run.block, arm=run.arm, started_at=started,
            fingerprint=self._fingerprint(arm), correctness_before=before,
            correctness_after=self._check(arm, engine, settings, run.index + 1),
            placement=(PlacementSample(rank=self.group.rank, distributions=self._audits(),
                                       worker=worker_policy(self.group.rank)),),
            startup=self._startup(), overlap=overlap, compute=compute, serving=serving, drift=engine.drift(),
            seconds=time.perf_counter() - clock,
        )  # fmt: skip
        parts = self.group.all_gather(codec.to_builtins(part), step=f"record {run.index}")
        merged = _merge([codec.from_builtins(p, RunRecord, source="a peer's record") for p in parts])
        if self.group.rank == 0:
            self.group.emit({"kind": "run", "value": codec.to_builtins(merged)})
        return merged.correct

    def _settings(self, arm: str) -> StepSettings:
        changed = {**self.plan.experiment.hold, **self.plan.experiment.arms[arm]}
        cap = changed.get("cap")
        return StepSettings(submission=str(changed.get("submission", "early")), cap=None if cap is None else int(cap))

    def _check(self, arm: str, engine: Engine, settings: StepSettings, seed: int) -> tuple[CorrectnessSample, ...]:
        backend = self.backends[self.plan.backends[arm]]
        cases = checks.compact_cases(regrouped=self.plan.regrouped)
        contract = tuple(checks.check(backend, case, seed=seed, engine=self.plan.engine) for case in cases)
        batch = next(fixed_batches(self.plan.experiment.workload, seed, VOCABULARY, "low-reuse"))
        return (*contract, *checks.check_engine(engine, batch, settings, self.layout, self.token_map, self.plan.seed))

    def _steps(
        self, engine: Engine, settings: StepSettings
    ) -> tuple[tuple[OverlapSample, ...], tuple[ComputeSample, ...]]:
        work, rank = self.plan.experiment.workload, self.group.rank
        batches = fixed_batches(work, self.plan.seed, VOCABULARY, work.reuse)
        for batch in islice(batches, work.warmup):
            engine.step(batch, settings, marks=True)
        marked = [engine.step(b, settings, marks=True, index=i) for i, b in enumerate(islice(batches, work.steps))]
        self.group.barrier(step="unmarked steps")
        plain = [engine.step(b, settings, marks=False, index=i) for i, b in enumerate(islice(batches, work.steps))]
        lines = ledger.step_bytes(work.tokens, self.layout)
        overlap = OverlapSample(
            rank=rank, state=work.reuse, resolution_ns=engine.resolution_ns,
            timelines=tuple(step.timeline for step in marked if step.timeline is not None),
            source_bytes=lines.source, staging_bytes=lines.staging,
        )  # fmt: skip
        step, main = zip(*((result.step_ns, result.main_ns) for result in plain), strict=True)
        compute = ComputeSample(rank=rank, tokens=work.tokens, step_ns=step, main_ns=main)
        return (overlap,), (compute,)

    def _serve(self, engine: Engine, settings: StepSettings) -> tuple[ServingSample, ...]:
        plan = self.plan.experiment.serving
        if plan is None:
            return ()
        self.group.barrier(step="serving")
        load = make_load(plan, self.plan.seed + self.group.rank, VOCABULARY)
        engine.hold = False  # a served step starts at once; a measured one when it is fully enqueued
        try:
            return (serve(engine, load, plan, settings, rank=self.group.rank),)
        finally:
            engine.hold = True

    def _audits(self) -> tuple[PageDistribution, ...]:
        """The audits since the last run; those of registration and load stand in the first run of their world."""
        audits, self.table.distributions = tuple(self.table.distributions), []
        return audits

    def _startup(self) -> tuple[StartupSample, ...]:
        receipts, self.table.receipts = tuple(self.table.receipts), []
        return (StartupSample(rank=self.group.rank, receipts=receipts),) if receipts else ()

    def _fingerprint(self, arm: str) -> dict[str, str]:
        """What this arm really ran: keys named after the variable may differ between arms, all others may not."""
        experiment, placement = self.plan.experiment, self.plan.placements[arm]
        settings = {**experiment.hold, **experiment.arms[arm]}
        receipt = receipt_of(self.backends[self.plan.backends[arm]])
        return {
            **{f"machine.{key}": value for key, value in self.machine.items()},
            **{f"machine.user.{key}": value for key, value in self.plan.user.items()},
            **{f"backend.{key}": value for key, value in receipt.items()},
            "table.digest": self._digest(),
            "table.bytes": str(self.table.nbytes),
            "policy": placement.policy,
            "backing": placement.backing,
            "groups": str([list(table.ranks) for table in placement.tables]),
            "submission": str(settings.get("submission", "early")),
            "cap": str(settings.get("cap")),
            "engine": self.plan.engine,
            "ranks": str(self.group.size),
            "protocol": self.plan.protocol_hash,
        }

    def _digest(self) -> str:
        """CRC of 1,024 rows spread over each layer's table; the full content is checked against the oracle."""
        crc = 0
        for weight, scales in self.views:
            rows = np.linspace(0, len(weight) - 1, 1024).astype(np.int64)
            crc = zlib.crc32(scales[rows].tobytes(), zlib.crc32(weight[rows].tobytes(), crc))
        return f"{crc:08x}"


def _merge(parts: list[RunRecord]) -> RunRecord:
    """One record of all ranks' samples; a key on which ranks differ is kept per rank."""
    first = parts[0]
    fingerprint = dict(first.fingerprint)
    for rank, part in enumerate(parts[1:], 1):
        fingerprint |= {f"{k}@{rank}": v for k, v in part.fingerprint.items() if first.fingerprint.get(k) != v}
    joined: dict[str, Any] = {
        field.name: tuple(sample for part in parts for sample in getattr(part, field.name))
        for field in fields(first)
        if isinstance(getattr(first, field.name), tuple)
    }
    return replace(first, fingerprint=fingerprint, seconds=max(p.seconds for p in parts), **joined)

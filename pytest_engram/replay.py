"""What one rank measures in a run: fixed batches marked and unmarked, an open-loop load, a sweep that explains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

from pytest_engram import ledger, metrics
from pytest_engram.engines.protocol import Engine, StepResult, StepSettings
from pytest_engram.hashing import EngramLayout, HashBatch, hash_ids
from pytest_engram.model import ComputeSample, OverlapSample, Plan, ServingSample, SweepSample
from pytest_engram.numa.group import Group
from pytest_engram.planning import step_ledger
from pytest_engram.serving.loop import serve
from pytest_engram.serving.replay import fixed_batches, make_load

VOCABULARY = 129_280  # token ids of the model's tokenizer
_SWEEP_STEPS, _SWEEP_WARMUP, _ALONE = 5, 1, 4  # steps of each kind in a sweep's point, batches without main compute


class Replay:
    """The same batches in every run of a plan; ``shard``: this rank's index and the number of head shards."""

    def __init__(self, group: Group, plan: Plan, layout: EngramLayout, token_map: Any, shard: tuple[int, int]) -> None:
        self.group, self.plan, self.work = group, plan, plan.experiment.workload
        self.layout, self.token_map, self.shard = layout, token_map, shard

    def steps(
        self, engine: Engine, settings: StepSettings
    ) -> tuple[tuple[OverlapSample, ...], tuple[ComputeSample, ...]]:
        """Marked steps with their lookups alone, then unmarked ones, all of the workload's own size."""
        work, rank, distinct = self.work, self.group.rank, self._distinct
        batches = self._batches(work.tokens)
        for batch in islice(batches, work.warmup):
            engine.step(batch, settings, marks=True, output=False)
        marked = _run(engine, islice(batches, work.steps), settings, marks=True)
        alone = tuple(engine.alone_ns(batch, settings) for batch in islice(batches, _ALONE))
        self.group.barrier(step="unmarked steps")
        plain = _run(engine, islice(batches, work.steps), settings, marks=False)
        lines = step_ledger(self.plan, self.shard[0])
        overlap = OverlapSample(
            rank=rank, state=work.reuse, resolution_ns=engine.resolution_ns,
            timelines=tuple(step.timeline for step in marked if step.timeline is not None),
            source_bytes=lines.source, staging_bytes=lines.staging, alone_ns=alone,
            distinct_bytes=round(lines.source * distinct),
        )  # fmt: skip
        return (overlap,), (self._compute(plain),)

    def _batches(self, tokens: int) -> Iterator[HashBatch]:
        """The run's fixed batches: the ranks' own, unless they share the heads and so take every step together."""
        seed = self.plan.seed + (0 if self.shard[1] > 1 else self.group.rank)
        return fixed_batches(replace(self.work, tokens=tokens), seed, VOCABULARY, self.work.reuse)

    @cached_property
    def _distinct(self) -> float:
        """Distinct rows as a share of all that the marked steps read; every run takes the same batches."""
        batches = islice(self._batches(self.work.tokens), self.work.warmup, self.work.warmup + self.work.steps)
        local = -(-self.layout.columns // self.shard[1])
        own = slice(self.shard[0] * local, (self.shard[0] + 1) * local)
        return ledger.distinct_share([hash_ids(self.layout, b, self.token_map)[:, :, own] for b in batches])

    def _compute(self, plain: Sequence[StepResult]) -> ComputeSample:
        gathered = [step.communication_ns for step in plain if step.communication_ns is not None]
        alone = "one rank has no collectives" if self.group.size == 1 else "the ranks share no heads"
        whole = bool(plain) and len(gathered) == len(plain)
        return ComputeSample(
            rank=self.group.rank, tokens=self.work.tokens, step_ns=tuple(step.step_ns for step in plain),
            main_ns=tuple(step.main_ns for step in plain), communication_ns=tuple(gathered) if whole else None,
            communication_absent=None if whole else "a step without its gather's time" if gathered else alone,
        )  # fmt: skip

    def sweep(self, engine: Engine, settings: StepSettings) -> Iterator[SweepSample]:
        """1, 2, 4 … and all ranks at work, at every batch size; ranks that share the heads only work together.

        What would repeat the run's own steps, all that can be at its own size, is left out.
        """
        size, free = self.group.size, self.shard[1] == 1
        counts = [count for count in range(1, size + 1) if count == size or (free and count & (count - 1) == 0)]
        sizes = self.work.sizes if len(counts) == 1 else (*self.work.sizes, self.work.tokens)
        points = [(tokens, count) for tokens in sizes for count in counts]
        for tokens, peers in points:
            self.group.barrier(step=f"sweep of {tokens} tokens, {peers} at work")
            if self.group.rank < peers:
                yield self._point(engine, settings, tokens, peers)
        if points:
            self.group.barrier(step="sweep")

    def _point(self, engine: Engine, settings: StepSettings, tokens: int, peers: int) -> SweepSample:
        batches, quiet = self._batches(tokens), replace(settings, submission="at_consumption")  # no row twice: caches
        marked = _run(engine, islice(batches, _SWEEP_WARMUP + _SWEEP_STEPS), settings, marks=True)[_SWEEP_WARMUP:]
        plain = _run(engine, islice(batches, _SWEEP_STEPS), settings, marks=False)
        calm = plain if quiet == settings else _run(engine, islice(batches, _SWEEP_STEPS), quiet, marks=False)
        lines = [step.timeline for step in marked if step.timeline is not None]
        lookup, exposed = zip(*map(metrics.totals, lines), strict=True) if lines else ((), ())
        return SweepSample(
            rank=self.group.rank, tokens=tokens, peers=peers, lookup_ns=lookup, exposed_ns=exposed,
            main_ns=tuple(step.main_ns for step in plain), quiet_main_ns=tuple(step.main_ns for step in calm),
            source_bytes=step_ledger(self.plan, self.shard[0], tokens).source, timeline=lines[-1] if lines else None,
        )  # fmt: skip

    def serve(self, engine: Engine, settings: StepSettings) -> tuple[ServingSample, ...]:
        """The open-loop load, where the experiment has one."""
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


def _run(engine: Engine, batches: Iterable[HashBatch], settings: StepSettings, *, marks: bool) -> list[StepResult]:
    return [engine.step(one, settings, marks=marks, index=index, output=False) for index, one in enumerate(batches)]

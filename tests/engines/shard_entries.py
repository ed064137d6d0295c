"""Ranks for test_collective.py: the same step over a head shard, and over all heads."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.engines.collective import Collective
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.engines.protocol import EngineSetup, StepSettings
from pytest_engram.engines.tables import fill_table, table_bytes, table_views
from pytest_engram.hashing import HashBatch
from pytest_engram.layout import EngramLayout
from pytest_engram.model import Workload


def sharded(group: Any, variants: Any) -> list[dict[str, Any]]:
    """:func:`_compare` for each of the (heads a 2-gram, whether the gather joins a world that is there already)."""
    return [_compare(group, heads, joins=joins) for heads, joins in variants]


def _compare(group: Any, heads: int, *, joins: bool) -> dict[str, Any]:
    """What a rank's shard gives against all heads: rows, outputs, times."""
    layout = EngramLayout.for_rows(9000, layers=(1, 3), n_heads=heads, head_dim=64, compressed_vocab=700)
    buffer = np.zeros(table_bytes(layout), np.uint8)
    fill_table(buffer, layout, 5)
    whole = EngineSetup(
        rank=group.rank, layout=layout, workload=Workload(hidden=64, layers=5, engram_layers=(1, 3), tokens=16),
        tables=table_views(buffer, layout), token_map=np.arange(1000, dtype=np.int32) % 700, seed=5, max_tokens=32,
        backend=ReferenceBackend(), cpus=tuple(sorted(os.sched_getaffinity(0))),
    )  # fmt: skip
    world, second = Collective(group, "cpu", deadline_s=20), Collective(group, "cpu", deadline_s=20)
    part = replace(whole, shard=(group.rank, group.size), gather=(second if joins else world).gather)
    seen = [_seen(setup) for setup in (whole, part)]
    second.close()
    world.close()
    (rows, outputs, _, full), (shard_rows, shard_outputs, gathers, local) = seen
    return {
        "rows": bool((rows == shard_rows).all()), "outputs": bool(np.array_equal(outputs, shard_outputs)),
        "gathers": gathers, "main": local.main_ns, "communication": [full.communication_ns, local.communication_ns],
        "step": local.step_ns, "launched": [local.timeline.lookups[0].rows, full.timeline.lookups[0].rows],
    }  # fmt: skip


def forsaken(group: Any, _payload: Any) -> None:
    """Rank 1 never comes to the gather.  Only that has a short deadline: until they have met, ranks may be late."""
    collective = Collective(group, "cpu", deadline_s=60)
    if group.rank == 0:
        collective._dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), collective._ranks)
        collective.gather(np.zeros((2, 4), np.uint16), np.zeros(4, np.uint16))
    group.barrier(step="never")


def _seen(setup: EngineSetup) -> tuple[Any, Any, list[int], Any]:
    engine, settings = CpuEngine(setup), StepSettings()
    try:
        tokens = [np.random.default_rng(n).integers(0, 1000, 1 + 7 * n) for n in range(4)]
        batches = [HashBatch.sequence(each, history=[1, 2, 3]) for each in tokens]
        rows = np.concatenate([engine.rows(batch, settings)[1] for batch in batches])
        outputs = np.concatenate([engine.step(batch, settings, marks=False).output for batch in batches])
        step = engine.step(batches[-1], settings, marks=True)
        spans = [span.layer for span in step.timeline.spans if span.name == "gather"]
        return rows, outputs, spans, step
    finally:
        engine.close()

"""Placed tables for a test: real peer processes hold them, the test maps the same pages."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_engram import codec, planning, policies
from pytest_engram.engines import engine_class
from pytest_engram.engines.protocol import Engine, EngineSetup
from pytest_engram.engines.tables import fill_table, table_bytes, table_views
from pytest_engram.errors import UsageError
from pytest_engram.layout import EngramLayout
from pytest_engram.model import Moment, PageDistribution, PlacementPlan, StepReceipt, Topology, Workload
from pytest_engram.numa.backing import BACKINGS, Backing
from pytest_engram.numa.group import Group
from pytest_engram.numa.table import build_table
from pytest_engram.numa.world import RankSpec, run_world

HOLD = "pytest_engram.tables:hold"
DEADLINE_S = 60.0


@dataclass(eq=False)
class PlacedTable:
    """One table (of the first sharing group) as this process sees it, and what every rank reported about its own."""

    layout: EngramLayout
    backing: Backing
    receipts: Sequence[StepReceipt]
    distributions: Sequence[PageDistribution]
    seed: int
    _release: int
    _thread: threading.Thread
    _news: queue.SimpleQueue[Any]

    def __post_init__(self) -> None:
        self.views = table_views(self.buffer, self.layout)

    @property
    def buffer(self) -> Any:
        """uint8 [bytes], writable, shared with the peers."""
        return np.frombuffer(self.backing.mapped, dtype=np.uint8)[: table_bytes(self.layout)]

    def close(self) -> None:
        """Let the peers go, wait for them, unmap; raises the error of a peer that failed or died meanwhile."""
        if self._release >= 0:
            os.write(self._release, b"x")
            self._thread.join(DEADLINE_S)
            os.close(self._release)
            self._release, self.views = -1, ()
            self.backing.close()
            if not self._news.empty():
                raise self._news.get()[1]


def place(
    topology: Topology, *, policy: str, backing: str, ranks: int, rows: int, seed: int, deadline_s: float = DEADLINE_S
) -> PlacedTable:
    """Build, load and audit a table of about ``rows`` rows per layer in ``ranks`` peers; raises their error."""
    if backing not in BACKINGS or not BACKINGS[backing].shared:
        shared = ", ".join(name for name, kind in BACKINGS.items() if kind.shared)
        raise UsageError(f"backing {backing!r}", code="unknown-backing", where="engram_table", expected=shared)
    layout, cpus = EngramLayout.for_rows(rows), planning.rank_cpus(topology, ranks)
    homes = [topology.node_of_cpu(own[0]) for own in cpus]
    plan = policies.resolve(policy, topology, ranks, backing=backing, rank_nodes=homes)
    flag = os.memfd_create("pytest-engram-release", os.MFD_CLOEXEC)
    payload = {"rows": rows, "seed": seed, "flag": f"/proc/{os.getpid()}/fd/{flag}"}
    payload["placement"] = codec.to_builtins(plan)
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def launch() -> None:
        try:
            specs = [RankSpec(cpus=own) for own in cpus]
            run_world(HOLD, payload, specs, deadline_s=deadline_s, on_event=lambda *event: news.put(event))
        except Exception as error:  # noqa: BLE001 - the waiting test raises it
            news.put((-1, error))

    thread = threading.Thread(target=launch, name="engram-table", daemon=True)
    thread.start()
    told: dict[int, Any] = {}
    while len(told) < ranks:
        rank, value = news.get()
        if rank < 0:
            os.close(flag)
            raise value
        told[rank] = value
    reports = [told[rank] for rank in range(ranks)]
    mine = BACKINGS[backing](table_bytes(layout))
    mine.attach(told[0]["handle"])
    mine.map()
    return PlacedTable(
        layout=layout, backing=mine, seed=seed, _release=flag, _thread=thread, _news=news,
        receipts=[codec.from_builtins(one, StepReceipt) for told in reports for one in told["receipts"]],
        distributions=[codec.from_builtins(one, PageDistribution) for told in reports for one in told["distributions"]],
    )  # fmt: skip


def hold(group: Group, payload: Mapping[str, Any]) -> None:
    """Entry of a peer: build, load, audit, report, then keep the table until the test lets go."""
    layout = EngramLayout.for_rows(payload["rows"])
    table = build_table(group, codec.from_builtins(payload["placement"], PlacementPlan), table_bytes(layout))
    try:
        table.load(lambda buffer: fill_table(buffer, layout, payload["seed"], check=group.check), group)
        table.audit(Moment.LOADED)
        handle = {"path": table.backing.path, "identity": table.identity}
        report = {"receipts": table.receipts, "distributions": table.distributions}
        group.emit({"handle": handle, **codec.to_builtins(report)})
        while os.path.exists(payload["flag"]) and os.stat(payload["flag"]).st_size == 0:
            group.check()
            time.sleep(0.02)
    finally:
        table.close()


def engine_over(table: PlacedTable, backend: Any, *, engine: str = "cpu", **workload: Any) -> Engine:
    """An engine whose one serial prefetch stream reads ``table``; ``workload`` are fields of ``model.Workload``."""
    work = Workload(**{"hidden": 256, "layers": 16, "tokens": 64, **workload})
    vocabulary = np.arange(129_280, dtype=np.int32) % table.layout.compressed_vocab
    setup = EngineSetup(
        rank=0, layout=table.layout, workload=work, tables=table.views, token_map=vocabulary, backend=backend,
        cpus=tuple(sorted(os.sched_getaffinity(0))), max_tokens=work.tokens, seed=table.seed,
    )  # fmt: skip
    built: Engine = engine_class(engine)(setup)
    return built

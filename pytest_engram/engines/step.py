"""The suite loop's step, the same for every engine: hash, submit, compute, wait at each consumer, project, gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from pytest_engram.engines.prefetch import Ticket
from pytest_engram.engines.protocol import EngineSetup, StepResult, StepSettings
from pytest_engram.engines.tables import consumers, full_shards
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.gpu.timeline import HostMarks
from pytest_engram.hashing import HashBatch
from pytest_engram.model import Timeline

_IMPOSSIBLE = 0x7FFF  # a NaN that no lookup writes: a row that was not staged cannot pass for one that was
Ran = tuple[Any, dict[int, Ticket], Any]  # hash ids int32 [T, L, H], lookups by layer, hidden states [T, D] or None


class SuiteEngine:
    """What engines share.  One of them says how a batch is staged, hashed and submitted, and how a lookup is awaited.

    ``staging`` is bf16 [layers, max_tokens, local heads, dim], allocated once; the rows of all heads lie in ``_whole``
    [layers, max_tokens, H, dim], which is the same buffer unless the heads are sharded.
    """

    name = ""
    _chain: Any
    staging: Any
    _trace: HostMarks
    _stage: Callable[[HashBatch], tuple[Any, Any]]  # (token ids [T], keep bool [T]) where the engine computes
    _enqueue: Callable[[], AbstractContextManager[None]]  # around what the step clock sees
    _submit: Callable[[Ticket], None]
    _await: Callable[[int, Ticket], None]
    _drain: Callable[[], None]  # wait for everything that was submitted so far
    _finish: Callable[[Any], Any]  # wait for a result and bring it to numpy

    def __init__(self, setup: EngineSetup, tables: tuple[tuple[Any, Any], ...]) -> None:
        self._setup, self._tables, self.max_tokens = setup, consumers(setup), setup.max_tokens
        if setup.shard[1] > 1 and setup.gather is None:
            raise UsageError(f"shard {setup.shard} without a gather", code="no-gather", who=f"{self.name} engine")
        self._hasher = setup.backend.hasher(setup.layout, setup.token_map, slot_cache=False)
        self._shards: tuple[Any, ...] = full_shards(tables, setup.layout, setup.shard)
        bounds = {0, *self._tables, *(layer + 1 for layer in self._tables), setup.workload.layers}
        self._stretches = sorted(bounds)  # layers between two consumers share one mark: marks cost time in a graph

    def step(
        self, batch: HashBatch, settings: StepSettings, *, marks: bool, index: int = 0, output: bool = True
    ) -> StepResult:
        """See :class:`~pytest_engram.engines.protocol.Engine`.

        Raises:
            EngramError: ``lookup-failed`` when a lookup raised or did not end by the deadline; ``cuda-failed`` when
                the device reports an error of this step; ``closed``.
            NotMeasurable: ``no-cuda-graphs``, ``no-external-events``.
            UsageError: the batch is larger than ``max_tokens``.
        """
        run = self._begin(batch, settings, full=marks)
        with self._enqueue():
            _, tickets, hidden = run()
        tokens, trace = len(batch.token_ids), self._trace
        states = self._finish(hidden[: tokens if output else 0])
        begin, end, line = trace.ns("begin"), trace.ns("end"), None
        if marks:
            line = Timeline(
                rank=self._setup.rank, step=index, begin=begin, end=end, tokens=tokens, spans=trace.spans(),
                lookups=trace.lookups({layer: ticket.launch for layer, ticket in tickets.items()}),
            )  # fmt: skip
        gathers = trace.spent_ns("gather:begin", "gather:end")
        main = end - begin - trace.spent_ns("wait_before", "wait_after") - gathers
        return StepResult(end - begin, main, states, line, gathers if self._setup.shard[1] > 1 else None)

    def oracle(self, batch: HashBatch, rows: Iterable[Any]) -> Any:
        """See :class:`~pytest_engram.engines.protocol.Engine`."""
        return self._chain.oracle(batch.token_ids, ~batch.dead, dict(zip(self._tables, rows, strict=True)))

    def rows(self, batch: HashBatch, settings: StepSettings) -> tuple[Any, Any]:
        """See :class:`~pytest_engram.engines.protocol.Engine`; the same queue and the same staging as a step."""
        run, count = self._begin(batch, settings, full=False, main=False), len(batch.token_ids)
        self._bits(self.staging)[...] = _IMPOSSIBLE
        with self._enqueue():
            ids, *_ = run()
        for table in self._tables.values():
            self._gather(table, count)
        staged = self._bits(self._whole)[:, :count].swapaxes(0, 1)
        return self._finish(ids[:count]), self._finish(staged).view("uint16")

    def alone_ns(self, batch: HashBatch, settings: StepSettings) -> int:
        """See :class:`~pytest_engram.engines.protocol.Engine`."""
        run = self._begin(batch, replace(settings, graph=False), full=True, main=False)
        with self._enqueue():
            ids, *_ = run()
        self._finish(ids)
        return self._trace.spent_ns("start", "done")

    def _begin(self, batch: HashBatch, settings: StepSettings, *, full: bool, main: bool = True) -> Callable[[], Ran]:
        """Refuse what cannot run; what is returned runs the step, or without ``main`` its lookups only."""
        most, tokens = self.max_tokens, len(batch.token_ids)
        if tokens > most:
            expected, who = f"at most {most}, the size of the staging buffer", f"{self.name} engine"
            raise UsageError(f"{tokens} tokens in a batch", code="too-many-tokens", who=who, expected=expected)
        if not self._shards:
            raise self._failed("the engine is closed", code="closed")
        return self._ready(batch, settings, full=full, main=main)

    def _ready(self, batch: HashBatch, settings: StepSettings, *, full: bool, main: bool) -> Callable[[], Ran]:
        """Stage the batch and begin its marks."""
        if settings.graph:
            seen, way_out = f"the {self.name} engine captures no steps", "leave graph out, or use the cuda engine"
            raise NotMeasurable(seen, code="no-cuda-graphs", way_out=way_out)
        staged = self._stage(batch)
        self._trace = self._marks(full=full)
        return partial(self._run, batch, staged, settings, main=main)

    def _run(self, batch: HashBatch, staged: tuple[Any, Any], settings: StepSettings, *, main: bool = True) -> Ran:
        """What the step clock sees."""
        (tokens, keep), hidden = staged, None
        self._trace.mark("begin")
        ids, tickets = self._prepare(batch, settings)
        self._trace.mark("hash_ready")
        self._submit_early(tickets, settings)
        if main:
            hidden = self._forward(self._chain.embed(tokens), keep, tickets, settings)
        else:
            for layer, ticket in tickets.items():
                self._consume(layer, ticket, settings)
        self._trace.mark("end")
        return ids, tickets, hidden

    def _prepare(self, batch: HashBatch, settings: StepSettings) -> tuple[Any, dict[int, Ticket]]:
        """Hash the batch, int32 [T, L, H], and make one ticket per Engram layer, in the order of the layers."""
        ids = self._hash(batch)
        return ids, {layer: self._ticket(layer, i, ids, settings) for layer, i in self._tables.items()}

    def _hash(self, batch: HashBatch) -> Any:
        return self._hasher(batch)

    def _ticket(self, layer: int, table: int, ids: Any, settings: StepSettings) -> Ticket:
        lookup = partial(self._setup.backend.lookup, self._shards[table])
        return Ticket(
            partial(lookup, ids[:, table], self.staging[table, : len(ids)], cap=settings.cap),
            partial(self._trace.mark, layer=layer), settings.lane(table, len(ids)),
        )  # fmt: skip

    def _submit_early(self, tickets: dict[int, Ticket], settings: StepSettings) -> None:
        if settings.submission == "early":
            for ticket in tickets.values():
                if ticket.lane is not None:
                    self._submit(ticket)

    def _forward(self, hidden: Any, keep: Any, tickets: dict[int, Ticket], settings: StepSettings) -> Any:
        chain, span = self._chain, self._trace.span
        for layer, following in pairwise(self._stretches):
            if layer in tickets:
                self._consume(layer, tickets[layer], settings)
                rows = self._collect(layer, len(hidden))
                with span("projection", layer):
                    key, value = chain.project(rows)
                with span("gate", layer):
                    norms = chain.query_norm, chain.key_norm
                    hidden = self._setup.backend.gate(hidden, key, value, *norms, keep)
            with span("compute", layer):
                for number in range(layer, following):
                    hidden = chain.layer(hidden, number)
        return hidden

    def _consume(self, layer: int, ticket: Ticket, settings: StepSettings) -> None:
        """Wait for this layer's own lookup, or for all so far; unless it was submitted early, it is submitted only now.

        An inline lookup is the consumer's own work: all of it lies in the wait.
        """
        if ticket.lane is not None and settings.submission != "early":
            self._submit(ticket)
        self._trace.mark("wait_before", layer)
        if ticket.lane is None:
            self._submit(ticket)
        self._await(layer, ticket)
        if settings.wait == "stream":
            self._drain()
        self._trace.mark("wait_after", layer)

    def _collect(self, layer: int, tokens: int) -> Any:
        """The rows of all heads bf16 [T, H, dim], of whichever shard."""
        table = self._tables[layer]
        if self._setup.shard[1] > 1:
            with self._trace.span("gather", layer):
                self._gather(table, tokens)
        return self._whole[table, :tokens]

    def _gather(self, table: int, tokens: int) -> None:
        """Every shard's staged rows into ``_whole``, without the padded heads (L4, L8)."""
        shards, gather = self._setup.shard[1], self._setup.gather
        if gather is None or shards == 1 or not tokens:
            return
        local = self.staging[table, :tokens]
        parts = self._parts[: shards * tokens].reshape(shards, *local.shape)
        gather(parts, local)
        rows = parts.swapaxes(0, 1).reshape(tokens, -1, local.shape[-1])
        self._whole[table, :tokens] = rows[:, : self._setup.layout.columns]

    def _allocate(self, staging: Any, empty: Callable[[tuple[int, ...]], Any]) -> None:
        """Take ``staging``, and make what a gather needs beside it by ``empty(shape)``."""
        self.staging = self._whole = staging
        if (shards := self._setup.shard[1]) > 1:
            layers, most, local, dim = staging.shape
            self._parts = empty((shards * most, local, dim))
            self._whole = empty((layers, most, self._setup.layout.columns, dim))

    def _bits(self, buffer: Any) -> Any:
        """A buffer of rows as 16-bit integers."""
        return buffer

    def _marks(self, *, full: bool) -> HostMarks:
        return HostMarks(full=full)

    def _failed(self, seen: str, code: str, where: str | None = None) -> EngramError:
        return EngramError(seen, code=code, who=f"rank {self._setup.rank}", where=where)

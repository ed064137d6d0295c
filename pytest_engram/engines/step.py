"""The suite loop's step, the same for every engine: hash, submit, compute, wait at each consumer, project, gate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from pytest_engram.engines.prefetch import Ticket
from pytest_engram.engines.protocol import EngineSetup, StepResult, StepSettings
from pytest_engram.engines.tables import consumers, full_shards
from pytest_engram.errors import EngramError, UsageError
from pytest_engram.gpu.timeline import HostMarks
from pytest_engram.hashing import HashBatch
from pytest_engram.model import Timeline

_IMPOSSIBLE = 0x7FFF  # a NaN that no lookup writes: a row that was not staged cannot pass for one that was


class SuiteEngine:
    """What engines share.  One of them says how a batch is staged, hashed and submitted, and how a lookup is awaited.

    ``_staging`` is bf16 [layers, max_tokens, H, dim], allocated once.
    """

    name = ""
    _chain: Any
    _staging: Any
    _trace: HostMarks
    _stage: Callable[[HashBatch], tuple[Any, Any]]  # (token ids [T], keep bool [T]) where the engine computes
    _enqueue: Callable[[], AbstractContextManager[None]]  # around what the step clock sees
    _submit: Callable[[Ticket], None]
    _await: Callable[[int, Ticket], None]
    _finish: Callable[[Any], Any]  # wait for a result and bring it to numpy

    def __init__(self, setup: EngineSetup, tables: tuple[tuple[Any, Any], ...]) -> None:
        self._setup, self._tables = setup, consumers(setup)
        self._hasher = setup.backend.hasher(setup.layout, setup.token_map, slot_cache=False)
        self._shards: tuple[Any, ...] = full_shards(tables, setup.layout)

    def step(self, batch: HashBatch, settings: StepSettings, *, marks: bool, index: int = 0) -> StepResult:
        """See :class:`~pytest_engram.engines.protocol.Engine`.

        Raises:
            EngramError: ``lookup-failed`` when a lookup raised or did not end by the deadline; ``cuda-failed`` when
                the device reports an error of this step; ``closed``.
            UsageError: the batch is larger than ``max_tokens`` or the submission is unknown.
        """
        tokens, keep = self._begin(batch, settings, full=marks)
        trace = self._trace
        with self._enqueue():
            trace.mark("begin")
            _, tickets = self._prepare(batch, settings)
            trace.mark("hash_ready")
            self._submit_early(tickets, settings)
            hidden = self._forward(self._chain.embed(tokens), keep, tickets, settings)
            trace.mark("end")
        output, begin, end = self._finish(hidden), trace.ns("begin"), trace.ns("end")
        line = None
        if marks:
            line = Timeline(
                rank=self._setup.rank, step=index, begin=begin, end=end, tokens=len(output), spans=trace.spans(),
                lookups=trace.lookups({layer: ticket.launch for layer, ticket in tickets.items()}),
            )  # fmt: skip
        return StepResult(end - begin, end - begin - trace.waited_ns(), output, line)

    def rows(self, batch: HashBatch, settings: StepSettings) -> tuple[Any, Any]:
        """See :class:`~pytest_engram.engines.protocol.Engine`; the same queue and the same staging as a step."""
        self._begin(batch, settings, full=False)
        ids, tickets = self._prepare(batch, settings)
        self._bits[...] = _IMPOSSIBLE
        self._submit_early(tickets, settings)
        for layer, ticket in tickets.items():
            self._consume(layer, ticket, settings)
        staged = self._bits[:, : len(ids)].swapaxes(0, 1)
        return self._finish(ids), self._finish(staged).view("uint16")

    def _begin(self, batch: HashBatch, settings: StepSettings, *, full: bool) -> tuple[Any, Any]:
        """Refuse what cannot run, stage the batch, begin its marks."""
        most, tokens, who = self._setup.max_tokens, len(batch.token_ids), f"{self.name} engine"
        if tokens > most:
            expected = f"at most {most}, the size of the staging buffer"
            raise UsageError(f"{tokens} tokens in a batch", code="too-many-tokens", who=who, expected=expected)
        if settings.submission not in {"early", "at_consumption"}:
            expected, seen = "'early' or 'at_consumption'", f"submission {settings.submission!r}"
            raise UsageError(seen, code="bad-submission", who=who, expected=expected)
        if not self._shards:
            raise self._failed("the engine is closed", code="closed")
        staged = self._stage(batch)
        self._trace = self._marks(full=full)
        return staged

    def _prepare(self, batch: HashBatch, settings: StepSettings) -> tuple[Any, dict[int, Ticket]]:
        """Hash the batch, int32 [T, L, H], and make one ticket per Engram layer, in the order of the layers."""
        ids = self._hash(batch)
        return ids, {layer: self._ticket(layer, i, ids, settings.cap) for layer, i in self._tables.items()}

    def _hash(self, batch: HashBatch) -> Any:
        return self._hasher(batch)

    def _ticket(self, layer: int, table: int, ids: Any, cap: int | None) -> Ticket:
        lookup = partial(self._setup.backend.lookup, self._shards[table])
        return Ticket(
            partial(lookup, ids[:, table], self._staging[table, : len(ids)], cap=cap),
            partial(self._trace.mark, layer=layer),
        )

    def _submit_early(self, tickets: dict[int, Ticket], settings: StepSettings) -> None:
        if settings.submission == "early":
            for ticket in tickets.values():
                self._submit(ticket)

    def _forward(self, hidden: Any, keep: Any, tickets: dict[int, Ticket], settings: StepSettings) -> Any:
        chain, span = self._chain, self._trace.span
        for layer in range(self._setup.workload.layers):
            if layer in tickets:
                self._consume(layer, tickets[layer], settings)
                with span("projection", layer):
                    key, value = chain.project(self._staging[self._tables[layer], : len(hidden)])
                with span("gate", layer):
                    norms = chain.query_norm, chain.key_norm
                    hidden = self._setup.backend.gate(hidden, key, value, *norms, keep)
            with span("compute", layer):
                hidden = chain.layer(hidden, layer)
        return hidden

    def _consume(self, layer: int, ticket: Ticket, settings: StepSettings) -> None:
        """Wait for this layer's own lookup, which is submitted only now unless that was done early."""
        if settings.submission != "early":
            self._submit(ticket)
        self._trace.mark("wait_before", layer)
        self._await(layer, ticket)
        self._trace.mark("wait_after", layer)

    @property
    def _bits(self) -> Any:
        """The staging buffer as 16-bit integers."""
        return self._staging

    def _marks(self, *, full: bool) -> HostMarks:
        return HostMarks(full=full)

    def _failed(self, seen: str, code: str, where: str | None = None) -> EngramError:
        return EngramError(seen, code=code, who=f"rank {self._setup.rank}", where=where)

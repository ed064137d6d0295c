"""The one check set: correctness suites, gate 0, kill table and conformance table all call :func:`check`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import Backend, TableShard
from pytest_engram.cases.case import (
    Case,
    Finding,
    Probe,
    RowSource,
    Unsupported,
    engine_differs,
    ids_differ,
    rows_differ,
    source_rows,
)
from pytest_engram.cases.gate import GATE_CASES
from pytest_engram.cases.hash import HASH_CASES
from pytest_engram.cases.launch import LAUNCH_CASES
from pytest_engram.cases.lookup import LOOKUP_CASES
from pytest_engram.cases.prefetch import PREFETCH_CASES
from pytest_engram.cases.slots import SLOT_CASES
from pytest_engram.cases.storage import STORAGE_CASES
from pytest_engram.errors import NotMeasurable
from pytest_engram.hashing import DEAD_ID, EngramLayout, HashBatch, hash_ids
from pytest_engram.model import CorrectnessSample
from pytest_engram.rows import synthetic_at

CASES: tuple[Case, ...] = (
    *HASH_CASES, *SLOT_CASES, *LOOKUP_CASES, *GATE_CASES, *PREFETCH_CASES, *STORAGE_CASES, *LAUNCH_CASES
)  # fmt: skip


_STORAGE_IN_QUESTION = ("one-mapping", "loaded", "fresh-rows")


def compact_cases(*, regrouped: bool = False) -> tuple[Case, ...]:
    """The cases that gate 0 runs in every arm, before and after timing; quick enough to stand beside a measurement.

    ``regrouped``: the arms share or back their tables differently, so storage and replay stand in question too.
    """
    return tuple(case for case in CASES if case.compact or (regrouped and case.name in _STORAGE_IN_QUESTION))


def check(backend: Backend, case: Case, *, seed: int = 0, engine: str | None = None) -> CorrectnessSample:
    """Run one case on ``engine`` (by default the backend's CPU engine, else CUDA); never raises for a backend's error.

    A failing case whose name or contract number is among ``backend.differences`` is reported as not supported, with
    the declaration and what was seen: a declared difference is shown, it is no pass.
    """
    if case.capability not in backend.capabilities:
        return _sample(case.name, case.contract, Finding(detail=f"no capability {case.capability!r}"), supported=False)
    where = engine or ("cpu" if "cpu" in backend.engines else "cuda")
    declared = backend.differences.get(case.name) or backend.differences.get(case.contract)
    try:
        found = _guarded(partial(case.run, Probe(backend, where, seed, case.name)))
    except Unsupported as absence:
        return _sample(case.name, case.contract, Finding(detail=str(absence)), supported=False)
    return _sample(case.name, case.contract, found, declared=declared)


def check_table(
    backend: Backend, shards: Sequence[TableShard], layout: EngramLayout, token_map: Any, *, seed: int,
    source: RowSource | None = None,
) -> tuple[CorrectnessSample, ...]:  # fmt: skip
    """Ids and rows through ``backend`` on the actual tables, one sample each per layer (H5, L1 and L3).

    ``shards`` are one per layer, placed as the backend's lookup takes them; ``source`` knows every row's content, by
    default :func:`synthetic_source` of ``seed``.  Sampled are hashed tokens, dead ones and chunk boundaries, the first
    and last rows, ids one past them and ``DEAD_ID``.
    """
    rows = source or synthetic_source(layout, seed)
    batch = _edge_batch(np.random.default_rng(seed).integers(0, len(token_map), 24, dtype=np.int32))
    expected = hash_ids(layout, batch, token_map)

    def ids_found() -> Finding | None:
        return ids_differ(backend.hasher(layout, token_map, slot_cache=False)(batch), expected, layout)

    def rows_found(layer: int, shard: TableShard) -> Finding | None:
        probe = Probe(backend, "cpu" if isinstance(shard.weight, np.ndarray) else "cuda", seed, "table")
        wanted = np.concatenate([expected[:, layer], _edge_ids(layout, layer)])
        seen, _ = probe.lookup(shard, probe.place(wanted))
        want = _shard_rows(wanted, shard, layout, partial(rows, layer))
        return rows_differ(seen, want, wanted, head_start=shard.head_start, layer=layout.layer_ids[layer])

    found = [_guarded(partial(rows_found, layer, shard)) for layer, shard in enumerate(shards)]
    return (_sample("table-ids", "H5", _guarded(ids_found)), *(_sample("table-rows", "L1", each) for each in found))


def check_engine(
    engine: Any, batch: HashBatch, settings: Any, layout: EngramLayout, token_map: Any, seed: int,
    *, source: RowSource | None = None,
) -> tuple[CorrectnessSample, ...]:  # fmt: skip
    """Ids and staged rows of an engine's own path: for ``batch``, and for its tokens with dead ones and boundaries.

    ``engine.rows(batch, settings)`` gives (ids int32 [T, L, H], rows u16 [T, L, H, dim]); ``seed`` is the table's.
    """
    rows = source or synthetic_source(layout, seed)
    batches = {"engine": batch, "engine-edges": _edge_batch(batch.token_ids[:24])}
    found = {
        name: _guarded(partial(engine_differs, partial(engine.rows, each, settings), each, layout, token_map, rows))
        for name, each in batches.items()
    }
    return tuple(_sample(name, "L1", each) for name, each in found.items())


def synthetic_source(layout: EngramLayout, seed: int) -> RowSource:
    """The content of tables that were filled with :func:`~pytest_engram.rows.synthetic_rows` of ``seed``."""
    return lambda layer, rows: synthetic_at(rows, layout.head_dim, layer=layer, seed=seed, block=layout.block)


def explain(sample: CorrectnessSample) -> str:
    """One line for a person: contract line, case, token, head, layer, expected, seen, detail."""
    where = ", ".join(
        f"{name} {value}"
        for name, value in (("token", sample.token), ("head", sample.head), ("layer", sample.layer))
        if value is not None
    )
    values = f"expected {sample.expected}, seen {sample.seen}" if sample.expected is not None else ""
    return f"{sample.contract} {sample.case}: " + "; ".join(part for part in (where, values, sample.detail) if part)


def _guarded(run: Callable[[], Finding | None]) -> Finding | None:
    """A backend's exception is a finding with its text, never a crash of the checks."""
    try:
        return run()
    except Unsupported:
        raise
    except NotMeasurable as absence:  # the backend's own word for "not here"
        raise Unsupported(str(absence)) from absence
    except Exception as error:  # noqa: BLE001 - whatever the system under test raises
        return Finding(detail=f"{type(error).__name__}: {error}")


def _sample(
    name: str, contract: str, found: Finding | None, *, supported: bool = True, declared: str | None = None
) -> CorrectnessSample:
    if found is None:
        detail = f"declared difference did not show: {declared}" if declared else ""
        return CorrectnessSample(case=name, contract=contract, passed=True, detail=detail)
    return CorrectnessSample(
        case=name, contract=contract, passed=False, supported=supported and not declared,
        detail=f"declared difference: {declared}; {found.detail}" if declared else found.detail,
        token=found.token, head=found.head, layer=found.layer, expected=found.expected, seen=found.seen,
    )  # fmt: skip


def _shard_rows(ids: Any, shard: TableShard, layout: EngramLayout, source: Callable[[Any], Any]) -> Any:
    """What a shard must give: its own rows, zeros for ids of others and for padded heads."""
    mine = np.full((len(ids), shard.local_heads), DEAD_ID, dtype=np.int32)
    real = ids[:, shard.head_start : shard.head_start + shard.local_heads]
    mine[:, : real.shape[1]] = np.where((real >= shard.start) & (real < shard.end), real, DEAD_ID)
    return source_rows(source, mine, shard.end, layout.head_dim)


def _edge_batch(tokens: Any) -> HashBatch:
    """The same tokens as three requests: a first chunk with a dead token, a later chunk, one token alone."""
    third = max(1, len(tokens) // 3)
    dead = np.arange(third) == third // 2
    parts = [
        HashBatch.sequence(tokens[:third], dead=dead),
        HashBatch.sequence(tokens[third:-1], history=tokens[:third], history_dead=dead),
        HashBatch.sequence(tokens[-1:]),
    ]
    return HashBatch.concat(parts[: min(3, len(tokens))])


def _edge_ids(layout: EngramLayout, layer: int) -> Any:
    """int32 [4, H]: each column's first and last row, ids past the table, dead ids."""
    first = layout.offsets[layer]
    last = first + layout.primes[layer] - 1
    past = np.full(layout.columns, layout.rows(layer))
    return np.stack([first, last, past, np.full(layout.columns, DEAD_ID)]).astype(np.int32)

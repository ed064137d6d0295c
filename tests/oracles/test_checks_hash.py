"""Planted faults of hashers: every hash and slot-cache case is shown to catch one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_engram import hashing
from pytest_engram.backends.reference import ReferenceBackend, ReferenceHasher
from pytest_engram.checks import CASES, check
from pytest_engram.hashing import DEAD_ID, EngramLayout, HashBatch, SlotCache, hash_ids

MINE = [case for case in CASES if case.capability in ("hash", "slot-cache")]


class FaultyHasher(ReferenceHasher):
    """The reference's hasher with one fault in how a batch becomes ids."""

    def __init__(self, fault: Callable[..., Any], layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> None:
        super().__init__(layout, token_map, slot_cache=slot_cache)
        self._fault = fault

    def __call__(self, batch: HashBatch) -> Any:
        return self._fault(self._layout, batch, self._token_map, self._cache)


def _with_hash(fault: Callable[..., Any]) -> ReferenceBackend:
    backend = ReferenceBackend()
    backend.hasher = lambda layout, token_map, *, slot_cache: FaultyHasher(  # type: ignore[method-assign]
        fault, layout, token_map, slot_cache=slot_cache
    )
    return backend


def _with_hasher(**methods: Any) -> ReferenceBackend:
    kind = type("Planted", (ReferenceHasher,), methods)
    backend = ReferenceBackend()
    backend.hasher = kind  # type: ignore[method-assign]
    return backend


def _on_batch(**changes: Callable[[HashBatch], Any]) -> ReferenceBackend:
    """Hash a batch in which fields were replaced; the batch is not validated again."""

    def fault(layout: EngramLayout, batch: HashBatch, token_map: Any, cache: Any) -> Any:
        names = HashBatch.__dataclass_fields__
        fields = {name: getattr(batch, name) for name in names} | {n: make(batch) for n, make in changes.items()}
        return hash_ids(layout, SimpleNamespace(**fields), token_map, cache)  # type: ignore[arg-type]

    return _with_hash(fault)


def _from_values(change: Callable[[EngramLayout, Any], Any]) -> ReferenceBackend:
    """Hash the shifted values that ``change`` makes of the batch's sources."""

    def fault(layout: EngramLayout, batch: HashBatch, token_map: Any, cache: Any) -> Any:
        out = np.empty((len(batch.token_ids), len(layout.layer_ids), layout.columns), np.int32)
        if len(out):
            hashing._hash_chunk(layout, change(layout, hashing._sources(layout, batch, token_map, cache)), out)
        return out

    return _with_hash(fault)


def _on_layout(change: Callable[[EngramLayout], Any]) -> ReferenceBackend:
    return _with_hash(lambda layout, batch, token_map, cache: hash_ids(change(layout), batch, token_map, cache))


def _on_ids(change: Callable[[Any], Any]) -> ReferenceBackend:
    return _with_hash(lambda *args: change(hash_ids(*args)))


def _shallow_block(layout: EngramLayout, sources: Any) -> Any:
    positions = sources.batch.positions
    values = np.empty((layout.max_ngram, len(positions)), np.int64)
    for shift in range(layout.max_ngram):
        source = sources.at(shift)
        values[shift] = np.where((positions < shift) | (source == DEAD_ID), sources.pad, source)
    return values


def _no_start(layout: EngramLayout, sources: Any) -> Any:
    moved = SimpleNamespace(**{n: getattr(sources.batch, n) for n in HashBatch.__dataclass_fields__})
    moved.positions = sources.batch.positions + layout.max_ngram
    return hashing._shifted_values(layout, replace(sources, batch=moved, start=sources.start + layout.max_ngram))


def _lower_bound(layout: EngramLayout, sources: Any) -> Any:
    batch = sources.batch
    found = np.searchsorted(batch.query_start_loc[1:], np.arange(len(batch.token_ids)), side="left")
    request = np.minimum(found, len(batch.query_start_loc) - 2)
    start = batch.positions[np.minimum(batch.query_start_loc[request], len(request) - 1)]
    return hashing._shifted_values(layout, replace(sources, request=request, start=start))


def _write_last(layout: EngramLayout, batch: HashBatch, token_map: Any, cache: SlotCache | None) -> Any:
    if cache is None:
        return hash_ids(layout, batch, token_map)
    before = SlotCache(len(cache.values))
    before.values[:] = cache.values
    hash_ids(layout, batch, token_map, cache)
    return hash_ids(layout, replace(batch, slots=np.full(len(batch.token_ids), -1)), token_map, before)


def _never_overwrite(layout: EngramLayout, batch: HashBatch, token_map: Any, cache: SlotCache | None) -> Any:
    if cache is not None:
        assert batch.slots is not None
        batch = replace(batch, slots=np.where(cache.values[batch.slots] != 0, -1, batch.slots))
    return hash_ids(layout, batch, token_map, cache)


def _slots_over_window(layout: EngramLayout, batch: HashBatch, token_map: Any, cache: SlotCache | None) -> Any:
    window = np.full_like(batch.window, -1) if cache is not None else batch.window
    return hash_ids(layout, replace(batch, window=window), token_map, cache)


def _bind_once(self: Any, num_slots: int) -> None:
    self._cache = self._cache or SlotCache(num_slots)


def _bind_dead(self: Any, num_slots: int) -> None:
    self._cache = SlotCache(num_slots)
    self._cache.values[:] = DEAD_ID


class _Everlasting(SlotCache):
    """A slot cache whose values are shared by every instance."""

    shared = np.zeros(64, np.int32)

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.values = self.shared


FAULTS: dict[str, tuple[ReferenceBackend, set[str]]] = {
    "raw pad token as pad id": (
        _with_hash(lambda layout, batch, token_map, cache: hash_ids(
            layout, batch, np.where(np.arange(len(token_map)) == 2, 2, token_map).astype(np.int32), cache)),
        {"pad-id"},
    ),
    "one layer's multipliers for both": (
        _on_layout(lambda layout: SimpleNamespace(**{
            name: getattr(layout, name) for name in ("layer_ids", "columns", "max_ngram", "n_heads", "pad_token_id",
                                                     "primes", "offsets")
        }, multipliers=layout.multipliers[[0, 0]])),
        {"multipliers", "ngrams"},
    ),
    "primes from the model's start always": (
        _on_layout(lambda layout: replace(EngramLayout.deepseek_v41(), layer_ids=layout.layer_ids)), {"prime-ranges"},
    ),
    "int64 ids": (_on_ids(lambda ids: ids.astype(np.int64)), {"ngrams", "empty-batch"}),
    "4-gram heads first": (_on_ids(lambda ids: np.roll(ids, 8, axis=2)), {"ngrams"}),
    "one id off": (_on_ids(lambda ids: ids + (np.arange(len(ids)) == 1)[:, None, None].astype(np.int32)),
                   {"ngrams", "strided-inputs"}),
    "strides ignored": (
        _on_batch(token_ids=lambda b: b.token_ids if b.token_ids.base is None else np.ascontiguousarray(
            b.token_ids.base[: len(b.token_ids)])),
        {"strided-inputs"},
    ),
    "nothing before position 0 is blocked": (_from_values(_no_start), {"before-start"}),
    "a block ends with its shift": (_from_values(_shallow_block), {"dead-blocks-deeper", "image-sentinel"}),
    "pad value instead of dead": (
        _on_batch(token_ids=lambda b: np.where(b.dead, np.int32(2), b.token_ids), dead=lambda b: np.zeros_like(b.dead)),
        {"dead-blocks-deeper", "image-sentinel"},
    ),
    "dead windows ignored": (
        _on_batch(window_dead=lambda b: np.zeros_like(b.window_dead)), {"dead-blocks-deeper", "image-sentinel"},
    ),
    "an unknown window blocks": (
        _on_batch(window_dead=lambda b: b.window_dead | (b.window < 0), window=lambda b: np.abs(b.window)),
        {"unknown-window"},
    ),
    "slots win over the window": (_with_hash(_slots_over_window), {"window-before-slots", "fresh-instance"}),
    "window in text order": (_on_batch(window=lambda b: b.window[:, ::-1]), {"window-order", "history-window"}),
    "window forgotten": (
        _on_batch(window=lambda b: np.full_like(b.window, -1)),
        {"chunk-invariance", "window-order", "history-window", "fresh-instance"},
    ),
    "lower bound in the boundaries": (_from_values(_lower_bound), {"repeated-boundaries", "batch-invariance"}),
    "the batch is one request": (
        _on_batch(query_start_loc=lambda b: np.array([0, len(b.token_ids)], np.int32)),
        {"batch-invariance", "slot-tables"},
    ),
    "the first block table for all": (
        _on_batch(block_table=lambda b: None if b.block_table is None else b.block_table[[0] * len(b.block_table)]),
        {"slot-tables"},
    ),
    "block number as slot": (
        _on_batch(block_table=lambda b: None if b.block_table is None else np.zeros_like(b.block_table)),
        {"slot-chunks", "prefix-hit", "slot-strides", "prompt-window"},
    ),
    "slots are read before they are written": (_with_hash(_write_last), {"slot-write-first"}),
    "slot −1 is the last slot": (
        _on_batch(slots=lambda b: None if b.slots is None else np.where(b.slots < 0, 63, b.slots)), {"slot-padding"},
    ),
    "slot −1 is slot 0": (
        _on_batch(slots=lambda b: None if b.slots is None else np.maximum(b.slots, 0)), {"slot-padding"},
    ),
    "a written slot is kept": (_with_hash(_never_overwrite), {"rollback"}),
    "history survives a new binding": (_with_hasher(bind=_bind_once), {"rebind"}),
    "new slots are dead": (_with_hasher(bind=_bind_dead), {"new-slots"}),
    "history from nowhere": (
        _with_hasher(bind=lambda self, _: setattr(self, "_cache", _Everlasting(64))), {"fresh-instance", "rebind"},
    ),
    "dummies are row 0": (
        _with_hasher(dummy=lambda _, n: (np.zeros((n, 2, 24), np.int32), np.zeros(n, bool))), {"dummy-batch"},
    ),
    "dummies are kept": (
        _with_hasher(dummy=lambda _, n: (np.full((n, 2, 24), -1, np.int32), np.ones(n, bool))), {"dummy-batch"},
    ),
    "an empty batch is one token": (
        _with_hash(lambda layout, batch, *rest: hash_ids(layout, batch, *rest) if len(batch.token_ids) else
                  np.zeros((0, layout.columns), np.int32)),
        {"empty-batch"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_hash_fault_is_caught(name: str, seed: int) -> None:
    """Negative control: a backend with one fault fails the cases that exist for it, with the place and the values."""
    backend, caught_by = FAULTS[name]
    for case in (case for case in MINE if case.name in caught_by):
        sample = check(backend, case, seed=seed)
        assert not sample.passed
        assert sample.supported
        assert "Error" not in sample.detail
        assert sample.expected != sample.seen


def test_every_hash_case_has_a_negative_control() -> None:
    """Each case of these capabilities is named by a planted fault that it must catch."""
    assert {case.name for case in MINE} == set().union(*(by for _, by in FAULTS.values()))


def test_planting_alone_changes_no_hash() -> None:
    """The planting machinery itself is harmless: without a fault every case passes."""
    for backend in (_on_batch(), _on_ids(lambda ids: ids), _from_values(hashing._shifted_values)):
        assert [case.name for case in MINE if not check(backend, case).passed] == []

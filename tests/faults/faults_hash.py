"""Hashers with one fault each: name -> (contract lines that must catch it, backend)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from pytest_engram import hashing
from pytest_engram.backends.reference import ReferenceBackend, ReferenceHasher
from pytest_engram.hashing import DEAD_ID, IMAGE_SENTINEL_ID, HashBatch, SlotCache, build_token_map, hash_ids

_LAYOUT = ("layer_ids", "columns", "max_ngram", "n_heads", "pad_token_id", "primes", "offsets", "multipliers")


def _hasher(**methods: Any) -> ReferenceBackend:
    """The reference with some methods of its hasher replaced."""
    backend = ReferenceBackend()
    backend.hasher = type("Faulty", (ReferenceHasher,), methods)  # type: ignore[method-assign]
    return backend


def _hash(fault: Callable[..., Any]) -> ReferenceBackend:
    """``fault(layout, batch, token_map, cache)`` in the place of the oracle."""
    return _hasher(__call__=lambda self, batch: fault(self._layout, batch, self._token_map, self._cache))


def _fields(batch: HashBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in HashBatch.__dataclass_fields__}


def _batch(**changes: Callable[[HashBatch], Any]) -> ReferenceBackend:
    """Fields of the batch are replaced before the oracle hashes it; it is not validated again."""

    def fault(layout: Any, batch: HashBatch, *rest: Any) -> Any:
        changed = {name: make(batch) for name, make in changes.items()}
        return hash_ids(layout, SimpleNamespace(**(_fields(batch) | changed)), *rest)  # type: ignore[arg-type]

    return _hash(fault)


def _layout(**changes: Callable[[Any], Any]) -> ReferenceBackend:
    """Arrays of the layout are replaced."""

    def fault(layout: Any, *rest: Any) -> Any:
        changed = {name: make(layout) for name, make in changes.items()}
        return hash_ids(SimpleNamespace(**({n: getattr(layout, n) for n in _LAYOUT} | changed)), *rest)  # type: ignore[arg-type]

    return _hash(fault)


def _ids(change: Callable[[Any], Any]) -> ReferenceBackend:
    return _hash(lambda *inputs: change(hash_ids(*inputs)))


def _values(change: Callable[[Any, Any], Any]) -> ReferenceBackend:
    """``change(layout, sources)`` gives the value of each shift."""

    def fault(layout: Any, batch: HashBatch, token_map: Any, cache: Any) -> Any:
        out = np.empty((len(batch.token_ids), len(layout.layer_ids), layout.columns), np.int32)
        if len(out):
            hashing._hash_chunk(layout, change(layout, hashing._sources(layout, batch, token_map, cache)), out)
        return out

    return _hash(fault)


def _arithmetic(multiply: Any = np.multiply, mix: Any = np.bitwise_xor, *, modulo_first: bool = False) -> Any:
    """The hash written out, with another product, another mixing, or the remainder taken before mixing."""

    def fault(layout: Any, batch: HashBatch, token_map: Any, cache: Any) -> Any:
        out = np.empty((len(batch.token_ids), len(layout.layer_ids), layout.columns), np.int32)
        if not len(out):
            return out
        values = hashing._shifted_values(layout, hashing._sources(layout, batch, token_map, cache))
        for layer, column in np.ndindex(*layout.primes.shape):
            prime, order = layout.primes[layer, column], 2 + column // layout.n_heads
            terms = [multiply(values[s], layout.multipliers[layer, s]) for s in range(order)]
            rolling = terms[0] % prime if modulo_first else terms[0]
            for term in terms[1:]:
                rolling = mix(rolling, term % prime if modulo_first else term)
            out[:, layer, column] = rolling % prime + layout.offsets[layer, column]
        return out

    return _hash(fault)


def _multiply_32(values: Any, multiplier: Any) -> Any:
    return (values.astype(np.int32) * multiplier.astype(np.int32)).astype(np.int64)


def _at(at: Callable[[Any, int], Any]) -> Callable[[Any, Any], Any]:
    """The oracle's values, with the source of each shift from ``at(sources, shift)``."""

    def change(layout: Any, sources: Any) -> Any:
        faulty = SimpleNamespace(batch=sources.batch, pad=sources.pad, at=partial(at, sources))
        return hashing._shifted_values(layout, faulty)  # type: ignore[arg-type]

    return change


def _window_over_chunk(sources: Any, shift: int) -> Any:
    if not shift or shift > sources.window.shape[1]:
        return sources.at(shift)
    known = sources.batch.window[sources.request, shift - 1] >= 0
    return np.where(known, sources.window[sources.request, shift - 1], sources.at(shift))


def _leak(sources: Any, shift: int) -> Any:
    """Where the window knows nothing, the token that lies before in the flattened batch."""
    before = np.concatenate([sources.own[:shift], sources.own[: len(sources.own) - shift]])[: len(sources.own)]
    unknown = (sources.batch.positions - shift < sources.start) & (sources.at(shift) == sources.pad)
    return np.where(unknown, before, sources.at(shift))


def _shallow(layout: Any, sources: Any) -> Any:
    read = [sources.at(shift) for shift in range(layout.max_ngram)]
    early = [sources.batch.positions < shift for shift in range(layout.max_ngram)]
    return np.array([np.where(e | (r == DEAD_ID), sources.pad, r) for e, r in zip(early, read, strict=True)], np.int64)


def _no_start(layout: Any, sources: Any) -> Any:
    moved = SimpleNamespace(**_fields(sources.batch))
    moved.positions = sources.batch.positions + layout.max_ngram
    return hashing._shifted_values(layout, replace(sources, batch=moved, start=sources.start + layout.max_ngram))


def _lower_bound(layout: Any, sources: Any) -> Any:
    starts = sources.batch.query_start_loc
    found = np.searchsorted(starts[1:], np.arange(len(sources.own)), side="left")
    request = np.minimum(found, len(starts) - 2)
    start = sources.batch.positions[np.minimum(starts[request], len(request) - 1)]
    return hashing._shifted_values(layout, replace(sources, request=request, start=start))


def _read_first(layout: Any, batch: HashBatch, token_map: Any, cache: SlotCache | None) -> Any:
    if cache is None:
        return hash_ids(layout, batch, token_map)
    before = SlotCache(len(cache.values))
    before.values[:] = cache.values
    hash_ids(layout, batch, token_map, cache)
    return hash_ids(layout, replace(batch, slots=np.full(len(batch.token_ids), -1)), token_map, before)


def _never_overwrite(layout: Any, batch: HashBatch, token_map: Any, cache: SlotCache | None) -> Any:
    if cache is not None and batch.slots is not None:
        batch = replace(batch, slots=np.where(cache.values[batch.slots] != 0, -1, batch.slots))
    return hash_ids(layout, batch, token_map, cache)


def _cache_over_window(layout: Any, batch: HashBatch, token_map: Any, cache: SlotCache | None) -> Any:
    window = batch.window if cache is None else np.full_like(batch.window, -1)
    return hash_ids(layout, replace(batch, window=window), token_map, cache)


def _zero_is_dead(sources: Any, shift: int) -> Any:
    read = sources.at(shift)
    return np.where(read == 0, DEAD_ID, read)


def _dead_is_zero(sources: Any, shift: int) -> Any:
    return np.maximum(sources.at(shift), 0)


def _bind_dead(self: Any, slots: int) -> None:
    self._cache = SlotCache(slots)
    self._cache.values[:] = DEAD_ID


def _tokens(change: Callable[[Any], Any], narrow: Callable[[Any], Any] = lambda ids: ids) -> ReferenceBackend:
    """``change(pairs)`` before the token map is built, ``narrow(ids)`` after."""
    backend = ReferenceBackend()

    def token_map(tokens: Any) -> tuple[Any, int]:
        ids, count = build_token_map(change(tokens))
        return narrow(ids), count

    backend.token_map = token_map  # type: ignore[assignment]
    return backend


def _variants() -> ReferenceBackend:
    backend = ReferenceBackend()
    backend.hash_variants = lambda *inputs: len({len(b.token_ids) for b in inputs[2]})  # type: ignore[method-assign]
    return backend


def _alive(batch: HashBatch) -> Any:
    return np.zeros_like(batch.dead)


def _with_slots(change: Callable[[Any], Any]) -> Callable[[HashBatch], Any]:
    return lambda batch: None if batch.slots is None else change(batch)


_ORACLE = hashing.EngramLayout.deepseek_v41

FAULTS: dict[str, tuple[str, ReferenceBackend]] = {
    "pad token's own id as pad value": ("H2", _hash(lambda layout, batch, token_map, *rest: hash_ids(
        layout, batch, np.where(np.arange(len(token_map)) == layout.pad_token_id, np.int32(2), token_map), *rest))),
    "the model's pad token always": ("H2", _layout(pad_token_id=lambda _: 2)),
    "one layer's multipliers for both": ("H3", _layout(multipliers=lambda o: o.multipliers[[0, 0]])),
    "multipliers in reverse": ("H3 H5", _layout(multipliers=lambda o: np.ascontiguousarray(o.multipliers[:, ::-1]))),
    "an even multiplier": ("H3 H5", _layout(multipliers=lambda o: o.multipliers - (np.arange(4) == 2))),
    "product in 32 bits": ("H3 H5", _arithmetic(multiply=_multiply_32)),
    "the model's primes always": ("H4", _layout(
        primes=lambda o: _ORACLE().primes, offsets=lambda o: _ORACLE().offsets)),
    "primes used again by each order": ("H4", _layout(primes=lambda o: np.tile(o.primes[:, :8], 3))),
    "primes of the other layer": ("H4", _layout(primes=lambda o: o.primes[::-1])),
    "offsets of the other layer": ("H4", _layout(offsets=lambda o: o.offsets[::-1])),
    "offsets run on over layers": ("H4", _layout(offsets=lambda o: o.offsets + np.array([[0], [o.primes[0].sum()]]))),
    "no offsets": ("H4", _layout(offsets=lambda o: o.offsets * 0)),
    "inclusive sums as offsets": ("H4", _layout(offsets=lambda o: o.offsets + o.primes)),
    "heads in reverse": ("H5", _ids(lambda ids: np.ascontiguousarray(ids[:, :, ::-1]))),
    "3-grams before 2-grams": ("H5", _ids(lambda ids: ids[:, :, [*range(8, 16), *range(8), *range(16, 24)]])),
    "layers swapped": ("H5", _ids(lambda ids: np.ascontiguousarray(ids[:, ::-1]))),
    "addition for XOR": ("H5", _arithmetic(mix=np.add)),
    "modulo before XOR": ("H5", _arithmetic(modulo_first=True)),
    "int64 ids": ("H5 H18", _ids(lambda ids: ids.astype(np.int64))),
    "strides of the token ids ignored": ("H5", _batch(token_ids=lambda b: b.token_ids if b.token_ids.base is None else
                                         np.ascontiguousarray(b.token_ids.base[: len(b.token_ids)]))),
    "nothing before position 0 is blocked": ("H6", _values(_no_start)),
    "a block does not deepen": ("H6", _values(_shallow)),
    "a dead token is a pad token": ("H6", _batch(
        token_ids=lambda b: np.where(b.dead, np.int32(2), b.token_ids), dead=_alive)),
    "a dead token is compressed id 0": ("H6", _values(_at(_dead_is_zero))),
    "dead tokens live": ("H6", _batch(dead=_alive)),
    "dead windows live": ("H6", _batch(window_dead=lambda b: np.zeros_like(b.window_dead))),
    "image sentinel lives in the chunk": ("H6", _batch(dead=lambda b: b.dead & (b.token_ids != IMAGE_SENTINEL_ID))),
    "image sentinel lives in the window": ("H6", _batch(
        window_dead=lambda b: b.window_dead & (b.window != IMAGE_SENTINEL_ID))),
    "an unknown window blocks": ("H7", _batch(
        window_dead=lambda b: b.window_dead | (b.window < 0), window=lambda b: np.abs(b.window))),
    "the window beats the chunk": ("H7 H8", _values(_at(_window_over_chunk))),
    "the cache beats the window": ("H7", _hash(_cache_over_window)),
    "token id 0 in the window is unknown": ("H7 H8", _batch(window=lambda b: np.where(b.window == 0, -1, b.window))),
    "window oldest first": ("H8", _batch(window=lambda b: b.window[:, ::-1])),
    "window one token late": ("H8", _batch(window=lambda b: np.roll(b.window, 1, axis=1))),
    "window two deep": ("H8", _batch(window=lambda b: np.where(np.arange(b.window.shape[1]) < 2, b.window, -1))),
    "lower bound in the boundaries": ("H9", _values(_lower_bound)),
    "the window is forgotten": ("H10", _batch(window=lambda b: np.full_like(b.window, -1))),
    "tokens past 8,192 are not hashed": ("H10", _ids(lambda ids: ids * (np.arange(len(ids)) < 8192)[:, None, None])),
    "the batch is one request": ("H11", _batch(query_start_loc=lambda b: np.array([0, len(b.token_ids)], np.int32))),
    "lookback into the request before": ("H11", _values(_at(_leak))),
    "the first block table for all": ("H11", _batch(
        block_table=_with_slots(lambda b: b.block_table[[0] * len(b.block_table)]))),
    "slots without a block table": ("H12", _batch(block_table=_with_slots(lambda b: np.zeros_like(b.block_table)))),
    "slots are read before they are written": ("H12", _hash(_read_first)),
    "slot −1 is the last": ("H12", _batch(slots=_with_slots(lambda b: np.where(b.slots < 0, 63, b.slots)))),
    "slot −1 is the first": ("H12", _batch(slots=_with_slots(lambda b: np.maximum(b.slots, 0)))),
    "strides of the slots ignored": ("H12", _batch(slots=_with_slots(
        lambda b: b.slots if b.slots.base is None else np.ascontiguousarray(b.slots.base[: len(b.slots)])))),
    "a written slot is kept": ("H12", _hash(_never_overwrite)),
    "history survives a new binding": ("H12", _hasher(
        bind=lambda self, slots: setattr(self, "_cache", self._cache or SlotCache(slots)))),
    "new slots are dead": ("H12", _hasher(bind=_bind_dead)),
    "compressed id 0 is dead": ("H12", _values(_at(_zero_is_dead))),
    "generated tokens are not written": ("H13", _batch(
        slots=_with_slots(lambda b: np.where(b.positions >= 4, -1, b.slots)))),
    "the window knows the prompt only": ("H14", _batch(window=lambda b: np.where(
        (b.positions[np.minimum(b.query_start_loc[:-1], len(b.positions) - 1)] >= 8)[:, None], -1, b.window)
        if len(b.positions) else b.window)),
    "dummies are row 0": ("H17", _hasher(dummy=lambda _, n: (np.zeros((n, 2, 24), np.int32), np.zeros(n, bool)))),
    "dummies are kept": ("H17", _hasher(dummy=lambda _, n: (np.full((n, 2, 24), -1, np.int32), np.ones(n, bool)))),
    "case counts": ("H1", _tokens(lambda tokens: [(text.replace("T", "x"), raw) for text, raw in tokens])),
    "a lone space is empty": ("H1", _tokens(lambda tokens: [(text.strip() or "", raw) for text, raw in tokens])),
    "compressed ids in 15 bits": ("H1", _tokens(list, lambda ids: ids & 0x7FFF)),
    "every length is compiled": ("H19", _variants()),
    "no window is an unknown one": ("H20", _batch(
        window=lambda b: b.window if b.window.shape[1] else np.full((len(b.window), 3), -1, np.int32),
        window_dead=lambda b: b.window_dead if b.window.shape[1] else np.zeros((len(b.window), 3), dtype=bool))),
    "an empty batch has no layers": ("H18", _hash(lambda layout, batch, *rest: hash_ids(layout, batch, *rest)
                                     if len(batch.token_ids) else np.zeros((0, layout.columns), np.int32))),
}  # fmt: skip


class _Everlasting(SlotCache):
    """A slot cache that all instances of an engine share."""

    values_of_all = np.zeros(64, np.int32)

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.values = self.values_of_all


FAULTS["slots of another instance"] = (
    "H16",
    _hasher(bind=lambda self, _: setattr(self, "_cache", _Everlasting(64))),
)

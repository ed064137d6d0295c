"""What a contract case is made of: the case, the probe that drives one backend, the finding where they differ."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pytest_engram.backends.arrays import place, place_bf16, to_numpy
from pytest_engram.backends.protocol import Backend, Hasher, Launch, TableShard
from pytest_engram.errors import NotMeasurable
from pytest_engram.hashing import EngramLayout, HashBatch, SlotCache, hash_ids, synthetic_token_map
from pytest_engram.rows import decode_rows, lookup_rows, same_bits

RowSource = Callable[[int, Any], tuple[Any, Any]]  # (layer index, rows int64 [n]) -> (weight u8, scales u8)

_UNWRITTEN = 0x4BCD  # no FP8 value times a power of two has so long a mantissa
_TOKENS = 129_000  # drawn token ids stay below the image sentinel


class Unsupported(Exception):  # noqa: N818 - an absence, not an error
    """The backend has the capability in general but not what this case needs; its ``NotMeasurable`` says the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Where a backend differs from the oracle; ``token``, ``head`` and ``layer`` where they exist."""

    detail: str
    token: int | None = None
    head: int | None = None
    layer: int | None = None
    expected: str | None = None
    seen: str | None = None


class Probe:
    """Drives one backend on one engine; ``rng`` depends on the seed and the case."""

    def __init__(self, backend: Backend, engine: str, seed: int, case: str) -> None:
        self.backend, self.engine = backend, engine
        self.rng = np.random.default_rng([seed, zlib.crc32(case.encode())])
        self.layout = EngramLayout.deepseek_v41()
        self.token_map = synthetic_token_map()

    def optional(self, name: str) -> Any:
        """A method that a backend may have; its absence makes the case unsupported, with the name as the reason."""
        found = getattr(self.backend, name, None)
        if found is None:
            raise Unsupported(f"the backend has no {name}()")
        return found

    def tokens(self, count: int) -> Any:
        """Random token ids int32 [count], none of them the image sentinel."""
        return self.rng.integers(0, _TOKENS, count, dtype=np.int32)

    def hasher(self, slots: int | None = None, layout: EngramLayout | None = None) -> Hasher:
        """A fresh hasher, with a bound slot cache of ``slots`` slots if given."""
        made = self.backend.hasher(layout or self.layout, self.token_map, slot_cache=slots is not None)
        if slots is not None:
            made.bind(slots)
        return made

    def ids(self, batch: HashBatch, cache: SlotCache | None = None, layout: EngramLayout | None = None) -> Any:
        """The oracle's ids of a batch."""
        return hash_ids(layout or self.layout, batch, self.token_map, cache)

    def differs(self, batch: HashBatch, expected: Any = None, *, hasher: Hasher | None = None) -> Finding | None:
        """Hash ``batch`` with the backend; ``expected`` ids int32 [≤ T, L, H], the oracle's own by default."""
        seen = (hasher or self.hasher())(batch)
        return ids_differ(seen, self.ids(batch) if expected is None else expected, self.layout)

    def place(self, array: Any) -> Any:
        """A numpy array, of any stride, as this engine's backends take it."""
        return place(array, self.engine)

    def shard(self, weight: Any, scales: Any, *, heads: int, start: int = 0, end: int | None = None) -> TableShard:
        """A shard of all ``heads`` columns whose rows start at hash id ``start``."""
        last = start + len(weight) if end is None else end
        return TableShard(weight, scales, start, last, 0, heads, heads)

    def lookup(self, shard: TableShard, ids: Any, cap: int | None = None) -> tuple[Any, Launch]:
        """(rows u16 [T, local_heads, dim], launch) of a numpy shard and ids, of any stride, through the backend."""
        shape = ids.shape[0], shard.local_heads, shard.weight.shape[1]
        out = place_bf16(np.full(shape, _UNWRITTEN, np.uint16), self.engine)
        placed = replace(shard, weight=self.place(shard.weight), scales=self.place(shard.scales))
        launch = self.backend.lookup(placed, self.place(ids), out, cap=cap)
        return to_numpy(out), launch

    def rows_differ(self, shard: TableShard, ids: Any, cap: int | None = None) -> Finding | None:
        """Look up ``ids`` (numpy, any stride) in a numpy shard with the backend and with the oracle."""
        expected = np.empty((len(ids), shard.local_heads, shard.weight.shape[1]), dtype=np.uint16)
        lookup_rows(shard, ids, expected)
        seen, _ = self.lookup(shard, ids, cap)
        return rows_differ(seen, expected, ids, head_start=shard.head_start)


Parts = Iterator[tuple[str, Finding | None]]
Check = Callable[[Probe], "Finding | Parts | None"]


@dataclass(frozen=True, slots=True)
class Case:
    """One behaviour: ``check`` returns the first difference, or yields its parts by name, each a difference or None.

    Its docstring is the behaviour in a sentence.
    """

    name: str
    contract: str
    capability: str
    check: Check
    compact: bool = False  # part of gate 0's evidence in every run

    @property
    def behaviour(self) -> str:
        """What the case asserts, for reports."""
        return " ".join((self.check.__doc__ or self.name).split())

    def run(self, probe: Probe) -> Finding | None:
        """The first difference; the parts behind it do not run."""
        found = self.check(probe)
        return first(found) if isinstance(found, Iterator) else found


def cases(capability: str, *, compact: Sequence[Check] = (), **lines: Sequence[Check]) -> tuple[Case, ...]:
    """The cases of contract lines, each named after its function: ``H5=[ngrams]``."""
    return tuple(
        Case(run.__name__.replace("_", "-"), line, capability, run, compact=run in compact)
        for line, runs in lines.items()
        for run in runs
    )


def refused(run: Callable[[], Any], what: str) -> Finding | None:
    """A finding unless ``run`` raises, whichever error the backend chose; "not measurable here" is no refusal."""
    try:
        run()
    except (NotMeasurable, Unsupported):
        raise
    except Exception:  # noqa: BLE001 - any refusal will do
        return None
    return Finding(detail=what, expected="an error", seen="accepted")


def first(parts: Iterable[tuple[str, Finding | None]]) -> Finding | None:
    """The first finding of named parts, with the part's name."""
    for name, found in parts:
        if found:
            return replace(found, detail=f"{name}: {found.detail}")
    return None


def compare(
    seen: Any, expected: Any, place: Callable[..., dict[str, Any]], *,
    same: Callable[[Any, Any], Any] = np.equal, show: Callable[[Any], str] = str,
) -> Finding | None:  # fmt: skip
    """The first index where two arrays are not ``same``; ``place(*index)`` gives the finding's fields."""
    if (seen.dtype, seen.shape) != (expected.dtype, expected.shape):
        kinds = [f"{array.dtype} {array.shape}" for array in (expected, seen)]
        return Finding(detail="wrong dtype or shape", expected=kinds[0], seen=kinds[1])
    wrong = np.argwhere(~same(seen, expected))
    if not len(wrong):
        return None
    at = tuple(map(int, wrong[0]))
    fields = place(*at)
    detail = f"{len(wrong)} of {expected.size} values differ{fields.pop('first', '')}"
    return Finding(detail=detail, expected=show(expected[at]), seen=show(seen[at]), **fields)


def ids_differ(seen: Any, expected: Any, layout: EngramLayout) -> Finding | None:
    """The first token, layer and head whose id differs; tokens of ``seen`` past ``expected`` are not judged."""
    return compare(
        to_numpy(seen)[: len(expected)], expected,
        lambda token, layer, head: {"token": token, "layer": layout.layer_ids[layer], "head": head},
    )  # fmt: skip


def rows_differ(
    seen: Any, expected: Any, ids: Any = None, *, head_start: int = 0, layer: int | None = None
) -> Finding | None:
    """The first token and head whose bf16 bits differ, with the hash id and the column; NaN equals NaN."""

    def place(token: int, head: int, column: int) -> dict[str, Any]:
        head += head_start
        known = f" of hash id {ids[token, head]}" if ids is not None and head < ids.shape[1] else ""
        return {"token": token, "head": head, "layer": layer, "first": f", first in column {column}{known}"}

    return compare(seen, expected, place, same=same_bits, show=_bits)


def floats_differ(seen: Any, expected: Any, tolerance: float) -> Finding | None:
    """The first token whose float32 [T, D] differ by more than ``tolerance`` × (1 + the expected magnitude)."""
    return compare(
        to_numpy(seen), expected.astype(np.float32),
        lambda token, column: {"token": token, "first": f", first in column {column}"},
        same=lambda one, other: abs(one - other) <= tolerance * (1 + abs(other)), show=lambda value: f"{value:.7g}",
    )  # fmt: skip


def oracle_rows(layout: EngramLayout, ids: Any, rows: RowSource) -> Iterator[Any]:
    """Layer by layer the bits u16 [T, H, dim] that ``ids`` int32 [T, L, H] must give; zeros outside the table."""
    for layer in range(len(layout.layer_ids)):
        mine = ids[:, layer]
        owned = (mine >= 0) & (mine < layout.rows(layer))
        expected = np.zeros((*mine.shape, layout.head_dim), dtype=np.uint16)
        if owned.any():
            expected[owned] = decode_rows(*rows(layer, mine[owned].astype(np.int64)))
        yield expected


def staged_differ(staged: Iterable[Any], ids: Any, layout: EngramLayout, rows: RowSource) -> Finding | None:
    """Each layer's ``staged`` rows u16 [T, H, dim] against the oracle's for ``ids`` int32 [T, L, H]."""
    for layer, (seen, want) in enumerate(zip(staged, oracle_rows(layout, ids, rows), strict=True)):
        if found := rows_differ(seen, want, ids[:, layer], layer=layout.layer_ids[layer]):
            return found
    return None


def engine_differs(
    path: Callable[[], Any], batch: HashBatch, layout: EngramLayout, token_map: Any, rows: RowSource
) -> Finding | None:
    """Ids and staged rows that ``path()`` gives for ``batch`` against the oracle's, layer by layer."""
    expected = hash_ids(layout, batch, token_map)
    ids, staged = path()
    return ids_differ(ids, expected, layout) or staged_differ(np.swapaxes(staged, 0, 1), expected, layout, rows)


def _bits(value: Any) -> str:
    number = np.array([int(value) << 16], dtype=np.uint32).view(np.float32)[0]
    return "not written" if value == _UNWRITTEN else f"0x{int(value):04x} ({number:g})"

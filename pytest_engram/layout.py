"""Where hash ids live: primes, offsets, multipliers and head shards of the n-gram tables."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_engram.errors import UsageError

Int64 = NDArray[np.int64]

# numpy does not promise its generator's stream across versions, so the model's own multipliers are pinned.
_PINNED_MULTIPLIERS = {
    (99_092, 1): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (99_092, 14): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramLayout:
    """Bucket layout of the Engram tables; equal and hashable by its fields.

    ``num_embeddings`` are the rows of each layer's table, at least the sum of its primes (L7).  ``vocab_size`` is
    where the prime search starts, ``compressed_vocab`` the size of the token map's image, ``pad_token_id`` the raw id
    (hashes use ``token_map[pad_token_id]``, H2).  Derived arrays are read-only int64.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    vocab_size: int
    compressed_vocab: int = 99_092
    pad_token_id: int = 2
    max_ngram: int = 4
    n_heads: int = 8
    head_dim: int = 256
    block: int = 32

    def __post_init__(self) -> None:
        if self.max_ngram < 2 or self.n_heads < 1 or self.vocab_size < 2 or self.compressed_vocab < 1:
            raise _bad(f"{self}", "max_ngram ≥ 2, n_heads ≥ 1, vocab_size ≥ 2, compressed_vocab ≥ 1")
        if self.block < 1 or self.head_dim < self.block or self.head_dim % self.block:
            raise _bad(f"head_dim {self.head_dim}, block {self.block}", "head_dim a multiple of block")
        if not self.layer_ids or len(self.layer_ids) != len(self.num_embeddings):
            raise _bad(f"layers {self.layer_ids}, rows {self.num_embeddings}", "one row count per Engram layer")
        for index, count in enumerate(self.num_embeddings):
            if count < self.rows(index):
                raise _bad(f"layer {self.layer_ids[index]} has {count} rows", f"at least {self.rows(index)}")
            _require_int32(self.rows(index))

    @classmethod
    def deepseek_v41(cls) -> EngramLayout:
        """The published model: layers 1 and 14 with 384,006,168 and 384,016,682 rows."""
        return cls(layer_ids=(1, 14), num_embeddings=(384_006_168, 384_016_682), vocab_size=16_000_000)

    @classmethod
    def for_rows(cls, rows: int, layers: tuple[int, ...] = (1, 14), **fields: Any) -> EngramLayout:
        """The largest layout of the model's structure in which no layer has more than ``rows`` rows.

        ``fields`` are other fields of the layout, such as ``head_dim`` or ``n_heads``.  Raises ``UsageError`` below
        the smallest structure (one distinct prime per layer and column) and, before any search, above int32.
        """
        _require_int32(rows)
        columns = (fields.get("max_ngram", 4) - 1) * fields.get("n_heads", 8)

        def sums(start: int) -> tuple[int, ...]:
            return tuple(int(part) for part in _primes(start, len(layers), columns).sum(axis=1))

        if (least := max(sums(2))) > rows:
            raise _bad(f"{rows} rows", f"at least {least} for {len(layers)} layers of {columns} columns")
        start = bisect_right(range(rows // columns + 1), rows, lo=3, key=lambda start: max(sums(start))) - 1
        return cls(layer_ids=layers, num_embeddings=sums(start), vocab_size=start, **fields)

    @property
    def columns(self) -> int:
        """Hash columns per layer, H = (max_ngram − 1) × n_heads; 2-gram heads come first."""
        return (self.max_ngram - 1) * self.n_heads

    @property
    def depth(self) -> int:
        """How many tokens a hash looks back."""
        return self.max_ngram - 1

    @property
    def primes(self) -> Int64:
        """[L, H] the smallest unused primes from ``vocab_size`` in (layer, order, head) order (H4)."""
        return _primes(self.vocab_size, len(self.layer_ids), self.columns)

    @property
    def offsets(self) -> Int64:
        """[L, H] exclusive running sums of the primes, per layer (H4)."""
        return _frozen(np.cumsum(self.primes, axis=1) - self.primes)

    @property
    def multipliers(self) -> Int64:
        """[L, max_ngram] odd; times any compressed id they stay below 2**63 (H3)."""
        rows = [_layer_multipliers(layer, self.max_ngram, self.compressed_vocab) for layer in self.layer_ids]
        return _frozen(np.array(rows, dtype=np.int64))

    def rows(self, layer_index: int) -> int:
        """Rows that hash ids can reach: the sum of the layer's primes."""
        return int(self.primes[layer_index].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShard:
    """One rank's complete head buckets: columns from ``head_start``, hash ids [``start``, ``end``) (L4)."""

    head_start: int
    local_heads: int
    start: int
    end: int


def head_shard(primes: Int64, shards: int, rank: int) -> HeadShard:
    """Rank ``rank`` of ``shards`` over one layer's ``primes`` [H]; the last shard may own fewer true heads.

    Raises ``UsageError`` if a shard would own no head at all, before anything is allocated.
    """
    heads = len(primes)
    if shards < 1 or not 0 <= rank < shards:
        raise UsageError(f"shard {rank} of {shards}", code="bad-shard", expected="0 ≤ rank < shards")
    local = -(-heads // shards)
    if (shards - 1) * local >= heads:
        raise UsageError(
            f"{heads} heads over {shards} shards leave a shard without heads", code="shard-without-heads",
            expected=f"({shards} − 1) × {local} < {heads}", way_out="use fewer shards",
        )  # fmt: skip
    first = rank * local
    start, end = int(primes[:first].sum()), int(primes[: first + local].sum())
    return HeadShard(head_start=first, local_heads=local, start=start, end=end)


def shard_rank(tp_rank: int, dp_rank: int, dp_size: int) -> int:
    """Head order is TP-major, then DP inside (L8)."""
    return tp_rank * dp_size + dp_rank


def parameter_name(tensor: str) -> str:
    """The parameter that a checkpoint's tensor is loaded into: both names of an Engram scale mean one (L12)."""
    module, _, kind = tensor.rpartition(".")
    is_scale = module.endswith("engram.embed") and kind in {"scale", "weight_scale"}
    return f"{module}.weight_scale_inv" if is_scale else tensor


def sharing_group(nodes: Sequence[int], replica: int) -> int:
    """How many DP replicas of ``replica`` ranks can share one table; ``nodes`` are the hosts of all ranks (S9).

    A replica lies on one host, each host's replicas are neighbours, and every host has as many; else 1: no sharing.
    """
    replicas = [set(nodes[first : first + replica]) for first in range(0, len(nodes), replica)]
    runs = [len(list(run)) for _, run in groupby(replicas)]
    whole = len(nodes) % replica == 0 and all(len(hosts) == 1 for hosts in replicas)
    return runs[0] if whole and len(set(runs)) == 1 and len(runs) == len(set(nodes)) else 1


def _bad(seen: str, expected: str) -> UsageError:
    return UsageError(seen, code="bad-layout", who="EngramLayout", expected=expected)


def _require_int32(rows: int) -> None:
    if rows > np.iinfo(np.int32).max:
        raise _bad(f"{rows} rows", "row numbers that fit int32 (H5)")


def _frozen(array: Int64) -> Int64:
    array.flags.writeable = False
    return array


def _primes_in(start: int, stop: int) -> Int64:
    """What no smaller prime divides in [start, stop)."""
    numbers = np.arange(max(start, 2), stop, dtype=np.int64)
    composite = np.zeros(len(numbers), dtype=bool)
    for factor in _primes_in(2, math.isqrt(stop) + 1) if stop > 4 else ():
        composite |= (numbers > factor) & (numbers % factor == 0)
    return numbers[~composite]


@lru_cache(maxsize=64)
def _primes(start: int, layers: int, columns: int) -> Int64:
    """The search restarts for every order but reuses nothing, so the result is a run of consecutive primes."""
    wanted, width = layers * columns, 64
    while len(found := _primes_in(start, start + width)) < wanted:
        width *= 2
    return _frozen(found[:wanted].reshape(layers, columns))


def _layer_multipliers(layer: int, max_ngram: int, vocabulary: int) -> Any:
    pinned = _PINNED_MULTIPLIERS.get((vocabulary, layer), ())
    return pinned if len(pinned) == max_ngram else drawn_multipliers(layer, max_ngram, vocabulary)


def drawn_multipliers(layer: int, max_ngram: int, vocabulary: int) -> Int64:
    """Contract H3's draw: seed 10007 × layer id, bound (int64 max // vocabulary) // 2, then doubled plus one."""
    bound = max(1, (np.iinfo(np.int64).max // vocabulary) // 2)
    return np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64) * 2 + 1

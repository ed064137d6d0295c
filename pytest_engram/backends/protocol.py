"""What a system under test provides, on one screen.

A backend is any Engram implementation.  Arrays are numpy on the CPU engine and torch tensors on the CUDA engine;
shapes use T tokens, L Engram layers, H = (max_ngram − 1) × heads hash columns, R requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pytest_engram.hashing import EngramLayout, HashBatch
from pytest_engram.ledger import Launch

__all__ = ["CAPABILITIES", "Backend", "Hasher", "Launch", "TableShard"]

CAPABILITIES = ("hash", "slot-cache", "lookup", "shards", "gate", "storage", "prefetch", "launch")


@dataclass(frozen=True, slots=True)
class TableShard:
    """One rank's part of one Engram layer's table.

    ``weight`` u8 [rows, dim] (FP8 e4m3 bit patterns), ``scales`` u8 [rows, dim // 32] (ue8m0 bytes); row r holds
    hash id ``start + r``; ids outside [start, end) are not owned and give zeros.  The shard owns hash columns
    [head_start, head_start + local_heads) of ``total_heads``; columns ≥ total_heads are padding and give zeros.
    """

    weight: Any
    scales: Any
    start: int
    end: int
    head_start: int
    local_heads: int
    total_heads: int


class Hasher(Protocol):
    """Stateful only through its slot cache."""

    def __call__(self, batch: HashBatch) -> Any:
        """Hash ids, int32 [T, L, H], row numbers into each layer's table; [0, L, H] for an empty batch."""

    def bind(self, num_slots: int) -> None:
        """(Re)bind a slot cache of that many slots; history is dropped, new slots are 0."""


@runtime_checkable
class Backend(Protocol):
    """One Engram implementation."""

    name: str
    engines: frozenset[str]  # "cpu", "cuda"
    capabilities: frozenset[str]  # subset of CAPABILITIES: the rest is reported as not supported
    differences: dict[str, str]  # contract number -> declared, documented difference

    def receipt(self) -> dict[str, str]:
        """Proof of what runs: version, commit, dirty state, file hashes.

        ``subject`` "engine modules" says that they are a serving engine's own; ``mode`` "interpreter" that kernels are
        interpreted, so that no time of theirs may be judged.
        """

    def hasher(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> Hasher:
        """``token_map`` int32 [vocabulary]: token id -> compressed id."""

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        """Rows of ``ids`` int32 [T, total_heads] (any stride) decoded into ``out`` bf16 [T, local_heads, dim]
        (u16 bit patterns on numpy).  ``cap`` bounds the programs of a background launch; None is the full grid."""

    def gate(self, hidden: Any, key: Any, value: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        """The gated residual of one layer (contract L11): float32 [T, D] in, float32 [T, D] out."""

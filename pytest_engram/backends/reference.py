"""The suite's own system under test: the numpy oracles behind the backend protocol."""

from __future__ import annotations

import hashlib
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from pytest_engram import ledger
from pytest_engram.backends.protocol import Launch, TableShard
from pytest_engram.engines.protocol import Engine, EngineSetup
from pytest_engram.errors import UsageError
from pytest_engram.gpu.registration import Cudart, register
from pytest_engram.hashing import EngramLayout, HashBatch, SlotCache, dummy_ids, hash_ids
from pytest_engram.model import PlacementPlan, TablePlan
from pytest_engram.numa.group import Group
from pytest_engram.numa.table import SharedTable, build_table
from pytest_engram.rows import gated_residual, lookup_rows

_PACKAGE = Path(__file__).parents[1]
_COMPUTING = ("layout", "hashing", "rows", "backends/reference", "gpu/gather", "gpu/hash", "gpu/_kernels")
_SOURCES = tuple(f"{name}.py" for name in _COMPUTING)


class ReferenceBackend:
    """numpy on the CPU engine; on the CUDA engine its lookup is this package's own kernel."""

    name = "reference"
    engines = frozenset({"cpu", "cuda"})
    capabilities = frozenset({"hash", "slot-cache", "lookup", "shards", "gate", "prefetch", "storage"})

    def __init__(self) -> None:
        self.differences: dict[str, str] = {}

    def receipt(self) -> dict[str, str]:
        """The package's version and the sha256 of each file that computes."""
        present = [name for name in _SOURCES if (_PACKAGE / name).exists()]
        hashes = {name: hashlib.sha256((_PACKAGE / name).read_bytes()).hexdigest() for name in present}
        return {"backend": self.name, "version": _version(), **hashes}

    def hasher(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> ReferenceHasher:
        """See the protocol; the hasher also offers ``on_device``, which the CUDA engine takes."""
        return ReferenceHasher(layout, token_map, slot_cache=slot_cache)

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        """On numpy arrays ``cap`` only bounds the reported grid: one thread serves all rows."""
        if not isinstance(out, np.ndarray):
            from pytest_engram.gpu.gather import lookup

            return Launch(*lookup(shard, ids, out, cap=cap))
        lookup_rows(shard, ids, out)
        return Launch(*ledger.launch(len(ids), shard.local_heads, cap))

    def gate(self, hidden: Any, key: Any, value: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        """See the protocol; numpy and torch arrays alike."""
        xp = np if isinstance(hidden, np.ndarray) else import_module("torch")
        return gated_residual(hidden, key, value, query_norm, key_norm, keep=keep, xp=xp)

    def prefetch(self, setup: EngineSetup) -> Engine:
        """The suite's own CPU engine, whose lookups and gates are those of ``setup.backend``."""
        from pytest_engram.engines.cpu import CpuEngine

        return CpuEngine(setup)

    def storage(self, group: Group, nbytes: int, cudart: Cudart, *, backing: str = "tmpfs") -> SharedTable:
        """One rank's part of a table that all ranks of ``group`` share, registered through ``cudart``."""
        tables = (TablePlan(ranks=tuple(range(group.size)), mode="default", nodes=()),)
        plan = PlacementPlan(policy="shared", backing=backing, tables=tables)
        return build_table(group, plan, nbytes, register=lambda table: register(table.buffer, cudart=cudart), threads=1)


class ReferenceHasher:
    """Hash ids by the oracle; stateful only through its slot cache."""

    def __init__(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> None:
        self._layout, self._token_map, self._slot_cache = layout, np.asarray(token_map), slot_cache
        self._cache: SlotCache | None = None
        self._device: Any = None

    def __call__(self, batch: HashBatch) -> Any:
        """Hash ids int32 [T, L, H]."""
        if self._slot_cache and self._cache is None:
            raise UsageError("the slot cache is not bound", code="unbound-slots", way_out="call bind(num_slots) first")
        return hash_ids(self._layout, batch, self._token_map, self._cache)

    def on_device(self, batch: HashBatch, device: Any) -> tuple[Any, Any, Any]:
        """(launch of the hash, token ids, keep) on a torch device; see :meth:`gpu.hash.DeviceHasher.stage`."""
        if self._device is None:
            from pytest_engram.gpu.hash import DeviceHasher

            self._device = DeviceHasher(self._layout, self._token_map, device)
            if self._cache is not None:
                self._device.bind(len(self._cache.values))
        return self._device.stage(batch)  # type: ignore[no-any-return]

    def bind(self, num_slots: int) -> None:
        """(Re)bind a slot cache; history is dropped."""
        self._cache, self._device = SlotCache(num_slots) if self._slot_cache else None, None

    def dummy(self, tokens: int) -> tuple[Any, Any]:
        """(ids int32 [tokens, L, H] all dead, keep bool [tokens] all False) of a replica without requests (H17)."""
        return dummy_ids(self._layout, tokens), np.zeros(tokens, dtype=bool)


def _version() -> str:
    try:
        return version("pytest-engram")
    except PackageNotFoundError:
        return "source tree"

"""The suite's own system under test: the numpy oracles behind the backend protocol."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from pytest_engram import ledger
from pytest_engram.backends.arrays import to_numpy
from pytest_engram.backends.protocol import CAPABILITIES, Launch, TableShard
from pytest_engram.backends.streams import Around, Prefetch, StreamPrefetch, new_variants
from pytest_engram.engines.protocol import Engine, EngineSetup
from pytest_engram.errors import UsageError
from pytest_engram.gpu.registration import Cudart, register, require
from pytest_engram.hashing import EngramLayout, HashBatch, SlotCache, dummy_ids, hash_ids, padded_ids
from pytest_engram.layout import parameter_name, sharing_group
from pytest_engram.numa.capacity import check_capacity, live_memory
from pytest_engram.numa.group import Group, SoloGroup
from pytest_engram.numa.table import SharedTable, build_table, plan_for
from pytest_engram.rows import gated_residual, lookup_rows
from pytest_engram.tokens import build_token_map

_PACKAGE = Path(__file__).parents[1]
_COMPUTING = ("layout", "hashing", "rows", "backends/reference", "gpu/gather", "gpu/hash", "gpu/_kernels")


class ReferenceBackend:
    """numpy on the CPU engine; on the CUDA engine its lookup is this package's own kernel."""

    name = "reference"
    engines = frozenset({"cpu", "cuda"})
    capabilities = frozenset(CAPABILITIES)
    parameter_name, sharing_group = staticmethod(parameter_name), staticmethod(sharing_group)
    token_map = staticmethod(build_token_map)
    padded_ids = staticmethod(lambda ids, *rest: padded_ids(to_numpy(ids), *rest))

    def __init__(self) -> None:
        self.differences = {"S12": "refuses a table beyond the memory cgroup's room, so that nothing is killed for it"}

    def receipt(self) -> dict[str, str]:
        """The package's version and the sha256 of each file that computes."""
        files = [f"{name}.py" for name in _COMPUTING]
        hashes = {name: hashlib.sha256((_PACKAGE / name).read_bytes()).hexdigest() for name in files}
        return {"backend": self.name, "version": _version(), **hashes}

    def hasher(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> ReferenceHasher:
        """See the protocol; the hasher also offers ``on_device``, which the CUDA engine takes."""
        return ReferenceHasher(layout, token_map, slot_cache=slot_cache)

    def hash_variants(self, layout: EngramLayout, token_map: Any, batches: Sequence[HashBatch]) -> int:
        """Variants of the hash kernel that these batches needed compiled."""
        require()
        from pytest_engram.gpu._kernels import hash_kernel
        from pytest_engram.gpu.hash import DeviceHasher

        hasher = DeviceHasher(layout, token_map, "cuda")
        return new_variants(hash_kernel, [partial(hasher, batch) for batch in batches])

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        """On numpy arrays ``cap`` only bounds the reported grid: one thread serves all rows."""
        if not isinstance(out, np.ndarray):
            from pytest_engram.gpu.gather import lookup

            return lookup(shard, ids, out, cap=cap)
        lookup_rows(shard, ids, out)
        return ledger.launch(len(ids), shard.local_heads, cap)

    def gate(self, hidden: Any, key: Any, value: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        """See the protocol; numpy and torch arrays alike."""
        xp = np if isinstance(hidden, np.ndarray) else import_module("torch")
        return gated_residual(hidden, key, value, query_norm, key_norm, keep=keep, xp=xp)

    def prefetch(self, setup: EngineSetup) -> Engine:
        """The suite's own CPU engine, whose lookups and gates are those of ``setup.backend``."""
        from pytest_engram.engines.cpu import CpuEngine

        return CpuEngine(setup)

    def streams(self, layout: EngramLayout, tables: Any, most: int, around: Around, *, engine: str) -> Prefetch:
        """The suite's own prefetch stream on the GPU, or on a virtual GPU for the CPU engine."""
        return StreamPrefetch(self.lookup, layout, tables, most, around, engine)

    def storage(
        self, group: Group, nbytes: int, cudart: Cudart | None, *, backing: str = "tmpfs", policy: str = "default"
    ) -> SharedTable:
        """One rank's part of a table that all ranks of ``group`` share, placed, then registered through ``cudart``."""
        plan = plan_for(group, policy, backing)
        return build_table(group, plan, nbytes, register=lambda table: register(table.buffer, cudart=cudart))

    def sharing(self, *, offload: bool, replicas: int, elastic: bool = False) -> None:
        """Raise ``UsageError`` where tables cannot be shared although that is asked for (S8)."""
        for wrong, seen in ((not offload, "no offload"), (replicas < 2, f"{replicas} replicas"), (elastic, "elastic")):
            if wrong:
                raise UsageError(seen, code="no-sharing", expected="offloaded tables of a fixed group of 2 or more")

    def may_share(self, nbytes: int, *, shm: str, replicas: int) -> bool:
        """Whether replicas can share ``nbytes`` in ``shm``; a warning says why not (S10)."""
        absent = not os.path.isdir(shm)
        full = absent or shutil.disk_usage(shm).free < nbytes
        why = f"no {shm}" if absent else f"{shm} is too small" if full else "" if replicas > 1 else "no second replica"
        if why:
            logging.getLogger(__name__).warning("every rank gets a table of its own: %s", why)
        return not why

    def fits(self, nbytes: int, *, cgroup_free: int) -> None:
        """Raise ``UsageError`` for a table that does not fit this machine, or a memory cgroup with that much room."""
        plan = plan_for(SoloGroup(), "default", "tmpfs")
        check_capacity(plan, nbytes, live_memory(), None, cgroup_free, reserve=0)


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

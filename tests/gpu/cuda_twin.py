"""The CUDA engine's twin on CPUs, loaded by its tests: the same step over stand-in streams and a numpy lookup."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pytest_engram.backends.protocol import Launch, TableShard
from pytest_engram.backends.reference import ReferenceBackend, ReferenceHasher
from pytest_engram.engines.cuda import CudaEngine, Platform
from pytest_engram.engines.protocol import EngineSetup
from pytest_engram.engines.tables import fill_table, table_bytes, table_views
from pytest_engram.hashing import EngramLayout, HashBatch
from pytest_engram.model import Workload
from pytest_engram.rows import lookup_rows

LAYOUT = EngramLayout.for_rows(5000, (1, 3), head_dim=64, compressed_vocab=500)
WORK = Workload(hidden=64, layers=5, engram_layers=(1, 3), tokens=6)
TOKEN_MAP = np.arange(1000, dtype=np.int32) % 500
HASH_NS, STEP_NS = 30_000, 130_000  # on the virtual GPU: one hash and two lookups of 50 µs


class TwinHasher(ReferenceHasher):
    """The reference hasher whose device is the CPU: staged, then launched."""

    cuda: Any = None

    def on_device(self, batch: HashBatch, device: Any) -> tuple[Any, Any, Any]:
        ids = torch.tensor(self(batch)).as_subclass(Ids)
        self.cuda.log.append(("staged",))
        tokens, keep = (torch.tensor(each, device=device) for each in (batch.token_ids, ~batch.dead))
        return partial(self._run, ids), tokens, keep

    def _run(self, ids: Any) -> Any:
        self.cuda.log.append(("hash", self.cuda.current_stream().name))
        self.cuda.launch(partial(self.cuda.advance, HASH_NS))
        return ids.clone()


class HostHasher:
    """A hasher that knows no device."""

    def __init__(self, honest: ReferenceHasher) -> None:
        self.honest = honest

    def __call__(self, batch: HashBatch) -> Any:
        return self.honest(batch)


class TwinBackend(ReferenceBackend):
    """The reference backend on torch tensors of the CPU; ``lazy`` looks nothing up."""

    on_host = False

    def __init__(self, cuda: Any, *, lazy: bool = False) -> None:
        super().__init__()
        self.cuda, self.lazy, self.caps = cuda, lazy, []  # type: ignore[var-annotated]

    def hasher(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> Any:
        made = TwinHasher(layout, token_map, slot_cache=slot_cache)
        made.cuda = self.cuda
        return HostHasher(made) if self.on_host else made

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        self.cuda.log.append(("lookup", self.cuda.current_stream().name))
        self.caps.append(cap)
        table = replace(shard, weight=shard.weight.numpy(), scales=shard.scales.numpy())
        rows, held = out.view(torch.int16).numpy().view(np.uint16), ids.numpy()

        def kernel() -> None:
            self.cuda.advance(50_000)
            if not self.lazy:
                lookup_rows(table, held, rows)

        self.cuda.launch(kernel)
        return Launch(out.shape[0] * out.shape[1], 9, cap or 0)


class Ids(torch.Tensor):  # type: ignore[misc,name-defined]
    """A tensor of the CPU that can be recorded on a stand-in stream."""

    def record_stream(self, stream: Any) -> None:
        stream.cuda.log.append(("record_stream", stream.name))


def setup(cuda: Any, *, table_seed: int = 1, **changes: Any) -> EngineSetup:
    """A small engine's parts; ``changes`` replace fields."""
    buffer = np.zeros(table_bytes(LAYOUT), np.uint8)
    fill_table(buffer, LAYOUT, table_seed)
    fields: dict[str, Any] = {
        "rank": 0, "layout": LAYOUT, "workload": WORK, "tables": table_views(buffer, LAYOUT), "token_map": TOKEN_MAP,
        "backend": TwinBackend(cuda), "cpus": (0,), "max_tokens": 8, "seed": 7,
    }  # fmt: skip
    return EngineSetup(**{**fields, **changes})


def build(cuda: Any, **changes: Any) -> Any:
    """The engine over stand-ins."""

    class Twin(CudaEngine):
        def _upload(self, array: Any) -> Any:
            return super()._upload(array).as_subclass(Ids)

    engine = Twin(setup(cuda, **changes), Platform(cuda, torch.device("cpu"), torch.from_numpy, cuda.spin))
    cuda.log.clear()
    return engine


def batch(tokens: int = 6) -> HashBatch:
    """One request; the third token is dead."""
    dead = np.arange(tokens) == 2
    return HashBatch.sequence(np.arange(tokens) * 37 % 1000, history=[5, 6, 7, 8], dead=dead)

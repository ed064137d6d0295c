"""vLLM's own Engram layer with its own table: allocation, registration, loading and prefetch as the engine does them.

Shared and pinned tables need CUDA; ``device`` tables also run interpreted.  The table belongs to the engine: the
suite only adopts what :meth:`EngineLayer.tables` names and audits where its pages really are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from pytest_engram.backends.vllm import VllmBackend, host_tensor, model_config
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.hashing import EngramLayout
from pytest_engram.numa.group import Group

STORAGES = ("shared", "pinned", "thp", "device")


class EngineGroup:
    """Our rendezvous as the group coordinator that ``DPSharedEngramStorage`` expects.

    The engine's two ``torch.distributed`` calls are routed to it as well, so torch needs no process group.
    """

    def __init__(self, group: Group) -> None:
        self.rank_in_group, self.world_size, self.cpu_group = group.rank, group.size, group

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value in every rank."""
        return self.cpu_group.broadcast(value, step="engine broadcast")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """One tensor that the engine allocated, named so that the kernel can be asked about it."""

    name: str  # "weight" or "scales"
    pid: int
    address: int
    table_bytes: int
    backing: str  # what the engine really chose: "tmpfs", "pinned", "anon-thp" or "device"


class EngineLayer:
    """One vLLM ``Engram`` module, built by its real constructor.

    ``storage``: ``shared`` (one copy in /dev/shm for ``group``), ``pinned`` or ``thp`` (per rank), ``device``.  Layers
    that share a ``stream`` serialise their lookups, as in the engine; None gives this layer its own.
    """

    def __init__(
        self,
        backend: VllmBackend,
        layout: EngramLayout,
        layer_index: int,
        *,
        hidden: int,
        max_tokens: int,
        storage: str = "shared",
        group: Group | None = None,
        stream: Any = None,
    ) -> None:
        _check(backend, storage, group)
        self.backend, self.storage = backend, storage
        kind = backend.engine.get("Engram")
        model = SimpleNamespace(**vars(model_config(layout)), hidden_size=hidden, hc_mult=1, rms_norm_eps=1e-20)
        peers = EngineGroup(group) if group and storage == "shared" else None
        with _configured(backend, storage, peers, max_tokens):
            self.module = kind(
                model, None, backend.layout(layout), layer_index, use_sequence_parallel=False, prefix="engram",
                prefetch_stream=stream,
            )  # fmt: skip

    def load(self, weight: Any, scales: Any) -> None:
        """Load a checkpoint's u8 [rows, dim] and u8 [rows, dim // 32] through the engine's own weight loaders.

        A shared table is written by its leader only, and each part ends in a barrier; followers may pass None.
        """
        torch = import_module("torch")
        table = self.module.embed_tokens
        parts = ((table.weight, weight, torch.float8_e4m3fn), (table.weight_scale_inv, scales, torch.float8_e8m0fnu))
        for parameter, part, kind in parts:
            parameter.weight_loader(parameter, None if part is None else host_tensor(part).view(kind))

    def prepare(self, ids: Any) -> None:
        """Submit the lookup of ``ids`` int32 [T, H]: on the prefetch stream, or inline for a device table."""
        with self.backend.kernels():
            self.module.prepare_embeddings(self.backend.tensor(ids))

    def embed(self, ids: Any) -> Any:
        """Wait for this layer's own lookup; bf16 [T, H, dim], a view of the staging buffer."""
        return self.module.embed(self.backend.tensor(ids))

    def tables(self) -> tuple[EngineTable, EngineTable]:
        """Address and bytes of the weights and the scales in this process, and the backing that was really chosen."""
        table = self.module.embed_tokens
        packed = getattr(table, "_packed", None) is not None
        backing = {"shared": "tmpfs", "thp": "anon-thp" if packed else "pinned"}.get(self.storage, self.storage)

        def named(name: str, tensor: Any) -> EngineTable:
            return EngineTable(
                name=name, pid=os.getpid(), address=tensor.data_ptr(), table_bytes=tensor.nbytes, backing=backing
            )

        return named("weight", table.weight), named("scales", table.weight_scale_inv)


def _check(backend: VllmBackend, storage: str, group: Group | None) -> None:
    if storage not in STORAGES:
        raise UsageError(f"storage {storage!r}", code="bad-storage", who=backend.name, expected=", ".join(STORAGES))
    if backend.interpreted and storage != "device":
        raise NotMeasurable(
            f"a {storage} table is registered with CUDA, and there is no CUDA device", code="no-cuda",
            who=backend.name, way_out="run on a GPU machine, or use storage='device'",
        )  # fmt: skip
    if storage == "shared" and (group is None or group.size < 2):
        raise UsageError(
            "a shared table without a group", code="no-sharing-group", who=backend.name,
            expected="a group of at least two ranks", way_out="use storage='pinned' for one rank",
        )  # fmt: skip


@contextmanager
def _configured(backend: VllmBackend, storage: str, group: EngineGroup | None, max_tokens: int) -> Iterator[None]:
    """The engine's configuration and group while its constructor runs; its errors become ours with the same text."""
    torch, around = import_module("torch"), backend.around
    around.group = group
    around.config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens),
        engram_config=SimpleNamespace(
            cpu_offload=storage != "device", dp_shared_memory=storage == "shared", use_thp=storage == "thp"
        ),
        lora_config=None,
    )
    try:
        with torch.device("cpu" if backend.interpreted else "cuda"):
            yield
    except (RuntimeError, ValueError) as error:
        raise EngramError(
            str(error), code="engine-refused", who=backend.name, where=f"constructing a {storage} table"
        ) from error
    finally:
        around.group = around.config = None

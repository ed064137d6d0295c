"""vLLM's own Engram layer with its own table: allocation, registration, loading and prefetch as the engine does them.

Shared and huge-page tables need CUDA; where kernels are interpreted ``pinned`` ones are ordinary memory, and lookups
run on a virtual GPU.  The table belongs to the engine: the suite only audits where its pages really are.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from pytest_engram.backends.arrays import host_tensor
from pytest_engram.backends.streams import Around
from pytest_engram.backends.vllm_tables import EngineGroup, model_config
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.hashing import EngramLayout
from pytest_engram.numa.group import Group

STORAGES = ("shared", "pinned", "thp", "device")


class EngineLayer:
    """One ``Engram`` module of a ``VllmBackend``, built by its real constructor; its refusals become ours, same text.

    ``storage``: ``shared`` (one copy in /dev/shm for ``group``), ``pinned`` or ``thp`` (per rank), ``device``.  Layers
    that share a ``stream`` serialise their lookups, as in the engine; None gives this layer its own.  One thread at a
    time may construct from a backend.
    """

    def __init__(
        self, backend: Any, layout: EngramLayout, layer_index: int, *, hidden: int, max_tokens: int,
        storage: str = "shared", group: Group | None = None, stream: Any = None,
    ) -> None:  # fmt: skip
        _check(backend, storage)
        self.backend, self.storage, around = backend, storage, backend.around
        own = backend.layout(layout)
        model = SimpleNamespace(**vars(model_config(layout)), hidden_size=hidden, hc_mult=1, rms_norm_eps=1e-20)
        around.group = EngineGroup(group) if group and storage == "shared" else None
        around.config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens), lora_config=None,
            engram_config=SimpleNamespace(
                cpu_offload=storage != "device", dp_shared_memory=storage == "shared", use_thp=storage == "thp"
            ),
        )  # fmt: skip
        try:
            with import_module("torch").device("cpu" if backend.interpreted else "cuda"):
                self.module = backend.engine.get("Engram")(
                    model, None, own, layer_index, use_sequence_parallel=False, prefix="engram",
                    prefetch_stream=stream,
                )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            where = f"constructing a {storage} table"
            raise EngramError(str(error), code="engine-refused", who=backend.name, where=where) from error
        finally:
            around.group = around.config = None

    def load(self, weight: Any, scales: Any) -> None:
        """Load a checkpoint's u8 [rows, dim] and u8 [rows, dim // 32] through the engine's own weight loaders.

        A shared table is written by its leader only, and each part ends in a barrier; followers may pass None.
        """
        torch, table = import_module("torch"), self.module.embed_tokens
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

    @property
    def backing(self) -> str:
        """What the engine really chose: ``tmpfs``, ``pinned``, ``anon-thp`` or ``device``."""
        packed = getattr(self.module.embed_tokens, "_packed", None) is not None
        return {"shared": "tmpfs", "thp": "anon-thp" if packed else "pinned"}.get(self.storage, self.storage)


class EnginePrefetch:
    """The engine's layers of one rank with pinned tables and one prefetch stream, as ``streams.Prefetch``."""

    def __init__(self, backend: Any, layout: EngramLayout, tables: Any, most: int, around: Around) -> None:
        self._backend, self.cuda, backend.around.forward = backend, backend.around.cuda, None
        self.device = import_module("torch").device("cpu" if backend.interpreted else "cuda")
        stream = self.cuda.Stream()
        self._layers = [
            EngineLayer(backend, layout, layer, hidden=32, max_tokens=most, storage="pinned", stream=stream)
            for layer in range(len(tables))
        ]
        for number, (layer, table) in enumerate(zip(self._layers, tables, strict=True)):
            layer.load(*table)
            embedding = layer.module.embed_tokens
            embedding.lookup = partial(self._lookup, number, around, embedding, embedding.lookup)

    def submit(self, layer: int, ids: Any) -> None:
        """See ``streams.Prefetch``."""
        self._layers[layer].module.prepare_embeddings(ids)

    def take(self, layer: int, tokens: int) -> Any:
        """See ``streams.Prefetch``."""
        return self._layers[layer].embed(import_module("torch").empty(tokens, 0))

    def together(self, tokens_across_dp: tuple[int, ...]) -> None:
        """All ranks' token counts, with the engine's limit of an inline lookup, if it has one, between them."""
        around, counts = self._backend.around, import_module("torch").tensor(tokens_across_dp)
        around.forward = mine = SimpleNamespace(dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=counts))
        limits = None, max(tokens_across_dp)
        for entry in self._backend.engine.entries:
            scope: dict[str, Any] = vars(entry)
            if own := scope.get("_engram_lookup_thresholds"):
                scope["_engram_lookup_thresholds"] = lambda at, own=own: limits if around.forward is mine else own(at)

    def _lookup(self, layer: int, around: Around, table: Any, own: Any, ids: Any, out: Any, **how: Any) -> None:
        def run() -> None:
            with self._backend.kernels():
                own(ids, out, **how)

        around(layer, table._storage()[0], out, run)


def _check(backend: Any, storage: str) -> None:
    if storage not in STORAGES:
        raise UsageError(f"storage {storage!r}", code="bad-storage", who=backend.name, expected=", ".join(STORAGES))
    if backend.interpreted and storage in {"shared", "thp"}:
        raise NotMeasurable(
            f"a {storage} table is registered with CUDA, and there is no CUDA device", code="no-cuda",
            who=backend.name, way_out="run on a GPU machine, or use storage='device'",
        )  # fmt: skip

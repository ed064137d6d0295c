"""vLLM's own shared storage behind the few calls of the contract's storage cases; CUDA's registration may be played."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from pytest_engram.backends.vllm_light import LightEngine, Overlay
from pytest_engram.errors import NotMeasurable
from pytest_engram.gpu.registration import Cudart
from pytest_engram.layout import EngramLayout
from pytest_engram.numa.group import Group
from pytest_engram.numa.pages import mapped_vmas

_DIM = 32  # values of a row; its one scale makes it 33 bytes


class EngineGroup:
    """Our rendezvous as the group coordinator that ``DPSharedEngramStorage`` expects.

    The engine's two ``torch.distributed`` calls are routed to it as well, so torch needs no process group.
    """

    def __init__(self, group: Group) -> None:
        self.rank_in_group, self.world_size, self.cpu_group = group.rank, group.size, group

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value in every rank."""
        return self.cpu_group.broadcast(value, step="engine broadcast")


class Registrations:
    """The engine's ``torch.cuda.cudart()``: a thread that plays registers with its own calls, others with CUDA's."""

    def __init__(self, engine: LightEngine) -> None:
        self._mine, self._owners = threading.local(), dict[int, Cudart]()
        names, torch = engine.around.torch, import_module("torch")
        self._real, wrap = torch.cuda.cudart, torch.from_numpy
        pinned = {"is_pinned": lambda tensor: self._mine.cudart.pinned(tensor.numpy()[:1])}
        played = type("Played", (torch.Tensor,), pinned)
        names["cuda"] = Overlay("cuda", {"cudart": lambda: self}, partial(getattr, names.get("cuda", torch.cuda)))
        names["from_numpy"] = lambda array: (
            wrap(array).as_subclass(played) if getattr(self._mine, "cudart", None) else wrap(array)
        )

    @contextmanager
    def played(self, cudart: Cudart | None) -> Iterator[list[Any]]:
        """Inside, this thread registers with ``cudart``; what is yielded gets (pages before, pages after) of each.

        None is CUDA's own, of which nothing is written down.
        """
        self._mine.cudart, self._mine.pages = cudart, []
        try:
            yield self._mine.pages
        finally:
            del self._mine.cudart

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> Any:  # noqa: N802 - CUDA's name
        """As torch binds it: an object with ``value``."""
        cudart = getattr(self._mine, "cudart", None)
        if cudart is None:
            return self._real().cudaHostRegister(pointer, nbytes, flags)
        before, self._owners[pointer] = _object_pages(pointer), cudart
        code = cudart.register(pointer, nbytes)
        self._mine.pages.append((before, _object_pages(pointer)))
        return SimpleNamespace(value=code)

    def cudaHostUnregister(self, pointer: int) -> Any:  # noqa: N802
        """The calls that registered the range unregister it, on whichever thread its last view dies."""
        cudart = self._owners.pop(pointer, None)
        return SimpleNamespace(value=cudart.unregister(pointer)) if cudart else self._real().cudaHostUnregister(pointer)


class EngineTable:
    """One rank's ``DPSharedEngramStorage`` of ``nbytes``, or the engine's huge-page memory."""

    def __init__(self, engine: LightEngine, calls: Registrations, group: Group, nbytes: int, cudart: Cudart | None,
                 backing: str) -> None:  # fmt: skip
        self._engine, self._torch = engine, import_module("torch")
        self._storage: Any = None
        with calls.played(cudart) as pages:
            if backing == "tmpfs":
                rows, kind = -(-nbytes // (_DIM + 1)), engine.get("DPSharedEngramStorage")
                if hasattr(kind, "cudart"):  # a patch that registers by itself
                    kind = type(kind.__name__, (kind,), {"cudart": cudart})
                self._storage = kind(rows, _DIM, _DIM, EngineGroup(group))
                self._memory = self._storage.weight.untyped_storage()
            else:
                memory = engine.get("_allocate_huge_page_storage")(nbytes)
                if memory is None:
                    raise NotMeasurable("the engine fell back to pinned memory", code="no-thp", where=backing)
                self._memory = memory.untyped_storage()
        self.receipts = [SimpleNamespace(step="register", object_pages=pair) for pair in pages]

    @property
    def buffer(self) -> Any:
        """All bytes, u8 numpy; setting it asks the engine whether its parameters may be replaced."""
        return self._torch.empty(0, dtype=self._torch.uint8).set_(self._memory).numpy()

    @buffer.setter
    def buffer(self, other: Any) -> None:
        flat = self._torch.from_numpy(other)
        self._storage.get_views(flat[: self._storage.weight.numel()], flat[self._storage.weight.numel() :])

    def device_view(self) -> Any:
        """The engine's own view of the weights."""
        return self._storage.get_views(self._storage.weight, self._storage.weight_scale_inv)[0]

    def load(self, fill: Any, group: Group) -> None:  # noqa: ARG002 - the engine has its group
        """``fill`` a copy, and give it to the engine's weight loader as a checkpoint's tensor."""
        torch, loaded = self._torch, None
        if fill is not None:
            loaded = torch.from_numpy(self.buffer.copy())[:, None]
            fill(loaded[:, 0].numpy())
        parameter = torch.nn.Parameter(torch.from_numpy(self.buffer)[:, None], requires_grad=False)
        parameter.engram_vocab_start = 0
        plain = self._storage is None
        own = self._engine.get("_engram_head_shard_weight_loader") if plain else self._storage.load_weight
        own(parameter, loaded)

    def close(self) -> None:
        """Let go of the storage; whoever still has a view keeps its memory registered."""
        self._storage = self._memory = None


def model_config(layout: EngramLayout) -> SimpleNamespace:
    """The ``engram_*`` fields of a model configuration as vLLM reads them."""
    same = ("layer_ids", "num_embeddings", "n_heads", "head_dim", "pad_token_id", "vocab_size")
    return SimpleNamespace(
        engram_max_ngram_size=layout.max_ngram, engram_compressed_vocab_size=layout.compressed_vocab,
        **{f"engram_{name}": getattr(layout, name) for name in same},
    )  # fmt: skip


def _object_pages(pointer: int) -> int:
    """Allocated pages of the file that is mapped at an address; 0 for anonymous memory."""
    with suppress(OSError):
        return os.stat(mapped_vmas(pointer, 1, name="maps")[0].path).st_blocks * 512 // 4096
    return 0

"""The reference allocation order as a vLLM plugin: the pages of a shared table are placed before anyone registers it.

All peers map; the leader sets the object's policy and writes every page; CPU barrier; peers register; every rank's
page distribution is collected and logged; weights are loaded as before.  ``PYTEST_ENGRAM_PLACEMENT`` is a placement
policy in this suite's words (``bind:0``, ``interleave``, ``per-numa-node`` …), the same in every worker; unset is
stock.  Any failure in any rank is a warning with its reason in all of them, and then the stock allocation.  To switch
it on, a distribution of your own declares::

    [project.entry-points."vllm.general_plugins"]
    engram_placement = "pytest_engram.backends.vllm_patch:register"
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pytest_engram.backends.vllm import ENVIRONMENT, VllmBackend
from pytest_engram.errors import PeerError, UsageError
from pytest_engram.gpu.registration import Cudart
from pytest_engram.gpu.registration import register as register_with_cuda
from pytest_engram.numa.group import Group
from pytest_engram.numa.table import build_table, plan_for

STORAGE = "DPSharedEngramStorage"
MODULES = ("vllm.models.deepseek_v41.nvidia.engram", "vllm.models.deepseek_v41.common.engram")  # 0.31, 0.32 and later


def register() -> None:
    """The plugin's entry point: patch the installed vLLM, or warn that there is nothing to patch."""
    for name in MODULES:
        with suppress(ImportError):
            module = import_module(name)
            if hasattr(module, STORAGE):
                return install(module)
    seen = f"no {STORAGE} in {' or '.join(MODULES)}"
    return logging.getLogger(__name__).warning("stock Engram placement: %s", seen)


def install(module: Any) -> None:
    """Put a subclass of the engine's storage in its place in ``module``; a second call does nothing."""
    stock = getattr(module, STORAGE)
    if not issubclass(stock, PlacedStorage):
        placed = type("PlacedEngramStorage", (PlacedStorage, stock), {"engine": module, "stock": stock})
        setattr(module, STORAGE, placed)


class PatchedVllmBackend(VllmBackend):
    """The light vLLM with the patch, for ``candidate=pytest_engram.backends.vllm_patch:PatchedVllmBackend``."""

    def __init__(self, spec: str = "vllm", *, cache: Path | None = None) -> None:
        super().__init__(spec, cache=cache)
        self.name += "+placed"
        install(next(module for module in self.engine.entries if STORAGE in vars(module)))


class PlacedStorage:
    """What :func:`install` lays over ``DPSharedEngramStorage``."""

    engine: Any
    stock: Any
    group: Any
    cudart: Cudart | None = None  # a test's own
    _writes = False

    def _allocate(self, num_bytes: int) -> Any:
        """u8 [num_bytes] in every rank, registered: one object per table of the policy."""
        try:
            ranks = _Ranks(self.group, self.engine.torch.distributed)
            with ranks.together():
                asked = ranks.all_gather(os.environ.get(ENVIRONMENT, ""), step="policy")
                if len(set(asked)) > 1:
                    raise UsageError(f"{ENVIRONMENT} differs between ranks: {asked}", code="ranks-differ")
                if asked[0]:
                    return self._placed(ranks, asked[0], num_bytes)
        except Exception as error:  # noqa: BLE001 - whatever it was, the engine starts as it does without the patch
            self.engine.logger.warning("stock Engram placement, the reference order failed: %s", error)
        return self.stock._allocate(self, num_bytes)

    def _placed(self, ranks: _Ranks, policy: str, num_bytes: int) -> Any:
        plan = plan_for(ranks, policy, "tmpfs")
        if plan.notes:
            raise UsageError(f"policy {policy!r}: a DP group shares whole slices", code="no-head-shards")
        pin = partial(register_with_cuda, cudart=self.cudart)
        table = build_table(ranks, plan, num_bytes, register=lambda table: pin(table.buffer))
        told = ranks.all_gather({"pages": table.distributions[-1].pages}, step="pages")
        if ranks.rank == 0:
            self.engine.logger.info("Engram pages by NUMA node, per rank, asked %s: %s", policy, told)
        self._writes = table.leads and ranks.rank > 0
        tensor, table.registration = self.engine.torch.from_numpy(table.buffer), None
        table.close()  # closes the descriptor; mapping and registration live as long as the tensor's memory
        return tensor

    def load_weight(self, param: Any, loaded_weight: Any) -> None:
        """As stock, where rank 0 writes; the leaders of further copies write theirs before the same barrier."""
        if self._writes:
            self.engine._engram_head_shard_weight_loader(param, loaded_weight)
        self.stock.load_weight(self, param, loaded_weight)


class _Ranks(Group):
    """The engine's group.  A rank that fails says so in the collective that the others are waiting in."""

    def __init__(self, coordinator: Any, distributed: Any) -> None:
        self.rank, self.size = coordinator.rank_in_group, coordinator.world_size
        self._gather = partial(distributed.all_gather_object, group=coordinator.cpu_group)

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:  # noqa: ARG002 - the ranks run the same code
        """Every rank's ``obj``."""
        return self._exchange(obj)

    def check(self, step: str = "") -> None:
        """There is no news between collectives."""

    def emit(self, obj: Any) -> None:
        """Nobody listens."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error of one rank becomes every rank's ``PeerError``, with the same text."""
        try:
            yield
        except PeerError:
            raise
        except Exception as error:  # noqa: BLE001 - told to the others, who wait in a collective
            self._exchange(None, str(error) or repr(error))

    def _exchange(self, value: Any, error: str | None = None) -> list[Any]:
        frames: list[Any] = [None] * self.size
        self._gather(frames, (value, error))
        if errors := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(frames) if error]:
            raise PeerError("; ".join(errors), code="peer-failed")
        return [value for value, _ in frames]

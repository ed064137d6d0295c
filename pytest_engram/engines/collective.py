"""The gather of staged rows over ``torch.distributed``: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pytest_engram.errors import NotMeasurable, PeerError
from pytest_engram.numa.group import Group

TRANSPORTS = {"cpu": "gloo", "cuda": "nccl"}


class Collective:
    """Made in every rank of ``group`` at the same time, for as many engines as there are; ``close`` it after them.

    Under torchrun the initialised world is used; elsewhere rank 0 opens a store on the loopback and broadcasts its
    port.  A gather that fails, or waits longer than ``deadline_s``, is a ``PeerError``.
    """

    def __init__(self, group: Group, engine: str, *, deadline_s: float = 60.0) -> None:
        try:
            import torch.distributed as dist
        except ImportError as error:
            seen, way_out = f"sharded heads need torch ({error})", "pip install 'pytest-engram[gpu]'"
            raise NotMeasurable(seen, code="no-torch", who=f"{engine} engine", way_out=way_out) from None
        self._dist: Any = dist
        self.transport, self._wait = TRANSPORTS[engine], timedelta(seconds=deadline_s)
        self._own = not dist.is_initialized()
        self._ranks: Any = (
            self._world(group) if self._own else dist.new_group(backend=self.transport, timeout=self._wait)
        )

    def gather(self, out: Any, local: Any) -> None:
        """Fill ``out`` [ranks, …] with every rank's ``local`` […], contiguous numpy arrays or torch tensors, as bytes.

        NCCL makes the current stream wait; gloo the caller.
        """
        try:
            self._dist.all_gather_into_tensor(_bytes(out).flatten(), _bytes(local).flatten(), group=self._ranks)
        except RuntimeError as lost:
            seen = str(lost).splitlines()[0]
            raise PeerError(seen, code="gather-failed", who=self.transport, where="gather of staged rows") from lost

    def close(self) -> None:
        """Leave the collective; a second call does nothing."""
        if self._ranks is not None:
            self._dist.destroy_process_group(None if self._own else self._ranks)
        self._ranks = None

    def _world(self, group: Group) -> Any:
        dist = self._dist
        store = None
        if group.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, group.size, is_master=True, wait_for_workers=False)
        port = group.broadcast(store.port if store else None, step="collective")
        store = store or dist.TCPStore("127.0.0.1", port, group.size, is_master=False, timeout=self._wait)
        dist.init_process_group(self.transport, store=store, rank=group.rank, world_size=group.size, timeout=self._wait)
        return dist.group.WORLD


def _bytes(rows: Any) -> Any:
    """A flat u8 tensor over the same memory: gloo knows no 16-bit integers."""
    import torch

    if isinstance(rows, torch.Tensor):
        return rows.view(torch.uint8)
    return torch.from_numpy(rows.view("uint8"))

"""Host memory that CUDA makes itself, as backings: no first touch and no later policy decides where its pages lie.

:func:`install` adds one to ``numa.backing.BACKINGS`` in a rank that is asked for it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from pytest_engram.errors import NotMeasurable, PlacementError
from pytest_engram.gpu import registration
from pytest_engram.gpu.cumem import Driver, DriverCudart, offer, receive
from pytest_engram.model import TablePlan
from pytest_engram.numa import _syscalls, pages
from pytest_engram.numa.backing import BACKINGS, Adopted, Backing


def _pinned(nbytes: int) -> Any:
    import torch

    if empty := getattr(torch._C, "_host_emptyCache", None):
        empty()
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class DriverMade(Backing):
    """Its pages are resident and pinned once it is mapped; ``cudart`` stands in for their registration."""

    resident = True
    identity = Adopted.identity  # the device that the driver mapped: every such mapping may have the same
    open_driver: Callable[[], Driver] = Driver
    cudart: registration.Cudart
    _asked: TablePlan

    def ask(self, plan: TablePlan) -> None:
        """Keep what ``create`` or ``map`` needs."""
        self._asked = plan

    @property
    def allocated_bytes(self) -> int | None:
        """No object says."""
        return None


class Pinned(DriverMade):
    """``torch.empty(pin_memory=True)``, one per rank, under the task policy that the plan asks for."""

    name = "pinned"
    shared = False
    allocate: Callable[[int], Any] = staticmethod(_pinned)

    def create(self) -> dict[str, str]:
        """Nothing to create before mapping."""
        return {}

    def map(self) -> None:
        """Allocate; torch rounds up to a power of two, and its cache must not hand out an older, placed block."""
        try:
            mode, nodes = _syscalls.get_mempolicy()
            _syscalls.set_mempolicy(_syscalls.MODES[self._asked.mode], self._asked.nodes)
            try:
                self._view = memoryview(self.allocate(self.nbytes).numpy())
            finally:
                _syscalls.set_mempolicy(_syscalls.MODES[mode], nodes)
        except OSError as error:
            raise _syscalls.refused(error, f"policy {self._asked.mode} {self._asked.nodes}") from error
        self.cudart = DriverCudart(self.open_driver())
        vmas = pages.mapped_vmas(self.address, self.nbytes, name="maps")
        self.detail = f"{vmas[-1].end - vmas[0].start} bytes mapped for {self.nbytes}"


class CuMem(DriverMade):
    """``cuMemCreate`` on one NUMA node; peers import the leader's descriptor."""

    name = "cumem"
    _driver: Driver
    _handle: tuple[int, int, int]  # the driver's own, node, length
    _offer: socket.socket | None = None

    def create(self) -> dict[str, str]:
        """Make the memory on the node of ``bind:N``."""
        if self._asked.mode != "bind" or len(self._asked.nodes) > 1:
            seen = f"policy {self._asked.mode} {self._asked.nodes}"
            raise NotMeasurable(seen, code="one-node-only", where="cumem", expected="bind:N: the driver wants one node")
        self._driver, (node,) = self.open_driver(), self._asked.nodes
        handle, length = self._driver.create(node, self.nbytes)
        self._handle, self._descriptor = (handle, node, length), self._driver.export(handle)
        self._offer = offer(self._descriptor)
        name = self._offer.getsockname().decode()
        self.label = name[1:]
        return {"path": name, "node": str(node), "length": str(length)}

    def attach(self, handle: dict[str, str]) -> None:
        """Import the leader's memory."""
        self._driver, self._descriptor, self.label = self.open_driver(), receive(handle["path"]), handle["path"][1:]
        self._handle = self._driver.adopt(self._descriptor), int(handle["node"]), int(handle["length"])

    def map(self) -> None:
        """Map all of it for GPU and host; an imported mapping that the driver refuses is a named absence."""
        handle, node, length = self._handle
        try:
            self._view = self._driver.map(handle, node, length)[: self.nbytes]
        except PlacementError as error:
            if self._offer is not None:  # its own memory: an error like any other
                raise
            raise NotMeasurable(
                f"{error}, of memory that another rank made", code="cumem-not-shared", where="map",
                expected="a driver that maps an imported HOST_NUMA allocation for GPU and host",
                way_out="one rank per table (per-gpu-node), or the tmpfs or memfd backing",
            ) from error  # fmt: skip
        self.cudart = DriverCudart(self._driver)
        self.detail = f"{length} bytes on node {node} for {self.nbytes}"

    def close(self) -> None:
        """Drop the descriptor; the memory goes with its last view, here and in every peer."""
        if self._offer is not None:
            self._offer.shutdown(socket.SHUT_RDWR)  # ends its thread
            self._offer.close()
            self._offer = None
        super().close()


CUDA_BACKINGS: dict[str, type[Backing]] = {kind.name: kind for kind in (Pinned, CuMem)}


def install(name: str, rank: int) -> None:
    """Make ``name`` a known backing if it is CUDA's, and the rank's GPU current; ``NotMeasurable`` without a GPU."""
    if name in CUDA_BACKINGS:
        registration.require()
        import torch

        torch.cuda.set_device(rank % torch.cuda.device_count())
        BACKINGS[name] = CUDA_BACKINGS[name]

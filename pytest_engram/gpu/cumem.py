"""Host memory of one NUMA node, made and mapped by the CUDA driver and shared between processes by file descriptor.

Driver API, "Virtual Memory Management": the pages exist from ``cuMemCreate`` on, and no policy moves them.  Every
process opens its mapping as NCCL does: to its GPU, then to the host (HOST_NUMA, whose id is ignored there), and only
then gives its handle back.  Opening ``/proc/PID/fd/N`` of the exported descriptor would open the device anew, without
the object, so it is sent over a socket, in the abstract namespace: the name goes with the process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import weakref
from contextlib import suppress
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p
from typing import Any

from pytest_engram.errors import NotMeasurable, PlacementError
from pytest_engram.gpu.registration import HeldCudart

_PINNED = _FILE_DESCRIPTOR = _DEVICE = 1  # CUmemAllocationType, CUmemAllocationHandleType, CUmemLocationType
_HOST_NUMA, _READ_WRITE = 3, 3  # CUmemLocationType, CUmemAccess_flags
_DEVICE_POINTER = 3  # CUpointer_attribute
_CODES = {1: "invalid-value", 2: "out-of-memory"}
_ABSENT = {3: "no-driver", 100: "no-gpu", 801: "no-host-numa"}


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    _fields_ = (("type", c_int), ("handles", c_int), ("where", _Location), ("win32", c_void_p), ("flags", c_uint64))


class _Access(ctypes.Structure):
    _fields_ = (("where", _Location), ("flags", c_int))


class Driver:
    """libcuda with every code checked; torch's context of the current device is made current for this thread."""

    def __init__(self, library: Any = None, device: int | None = None) -> None:
        if library is None:
            import torch

            cuda: Any = torch.cuda
            cuda.synchronize()
            library, device = ctypes.CDLL("libcuda.so.1"), cuda.current_device()
        self._library, self.device = library, device or 0

    def call(self, name: str, *arguments: Any) -> None:
        """Raise ``NotMeasurable``, or ``PlacementError`` named after the CUresult, unless it is CUDA_SUCCESS."""
        number = getattr(self._library, name)(*arguments)
        if number:
            kind, codes = (NotMeasurable, _ABSENT) if number in _ABSENT else (PlacementError, _CODES)
            code = codes.get(number, "cuda-refused")
            raise kind(f"CUresult {number}", code=code, who=name, where="cumem", expected="CUDA_SUCCESS")

    def create(self, node: int, nbytes: int) -> tuple[int, int]:
        """(Handle, length) of whole pages on ``node``, at least ``nbytes``."""
        asked = _Properties(_PINNED, _FILE_DESCRIPTOR, _Location(_HOST_NUMA, node))
        unit, handle = c_size_t(), c_ulonglong()
        self.call("cuMemGetAllocationGranularity", byref(unit), byref(asked), 0)
        length = -(-nbytes // unit.value) * unit.value
        self.call("cuMemCreate", byref(handle), c_size_t(length), byref(asked), c_ulonglong(0))
        return handle.value, length

    def export(self, handle: int) -> int:
        """A descriptor that stands for the memory in other processes."""
        descriptor = c_int(-1)
        flags = c_ulonglong(0)
        self.call("cuMemExportToShareableHandle", byref(descriptor), c_ulonglong(handle), _FILE_DESCRIPTOR, flags)
        return descriptor.value

    def adopt(self, descriptor: int) -> int:
        """This process's handle of an exported one."""
        handle = c_ulonglong()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _FILE_DESCRIPTOR)
        return handle.value

    def map(self, handle: int, node: int, nbytes: int) -> memoryview:
        """All bytes, readable and writable by GPU and host; unmapped when the last view of them is gone."""
        address = c_uint64()
        self.call("cuMemAddressReserve", byref(address), c_size_t(nbytes), c_size_t(0), c_uint64(0), c_ulonglong(0))
        span = c_uint64(address.value), c_size_t(nbytes)
        self.call("cuMemMap", *span, c_size_t(0), c_ulonglong(handle), c_ulonglong(0))
        owner = (ctypes.c_ubyte * nbytes).from_address(address.value)
        weakref.finalize(owner, self._unmap, span).atexit = False
        try:
            for place in (_Location(_DEVICE, self.device), _Location(_HOST_NUMA, node)):
                self.call("cuMemSetAccess", *span, byref(_Access(place, _READ_WRITE)), c_size_t(1))
        finally:
            self.call("cuMemRelease", c_ulonglong(handle))  # the mapping, and exported descriptors, keep the memory
        return memoryview(owner).cast("B")

    def _unmap(self, span: Any) -> None:
        self.call("cuMemUnmap", *span)
        self.call("cuMemAddressFree", *span)


class DriverCudart(HeldCudart):
    """For memory that the driver made, pinned and mapped."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver  # codes are errors already: there is nothing to clear

    def pinned(self, byte: Any) -> bool:
        """Whether the GPU can address this byte."""
        found = c_uint64()
        self._driver.call("cuPointerGetAttribute", byref(found), _DEVICE_POINTER, c_uint64(byte.ctypes.data))
        return bool(found.value)

    def pointer(self, address: int) -> int:
        """The address itself, by unified addressing; cuMemHostGetDevicePointer answers for registered memory only."""
        return address

    def synchronize(self) -> None:
        """Wait until no kernel reads the range any more."""
        self._driver.call("cuCtxSynchronize")


def offer(descriptor: int) -> socket.socket:
    """A listener that hands the descriptor to every process of this user that asks, until it is shut down."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0pytest-engram-{os.getpid()}-{os.urandom(8).hex()}")
    listener.listen()

    def answer() -> None:
        with suppress(OSError):  # shut down
            while True:
                with listener.accept()[0] as peer, suppress(OSError):  # it went away
                    user = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                    if user == os.getuid():
                        socket.send_fds(peer, [b"0"], [descriptor])

    threading.Thread(target=answer, name="engram-cumem", daemon=True).start()
    return listener


def receive(name: str) -> int:
    """The descriptor that a peer offers at ``name``."""
    try:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(name)
            return socket.recv_fds(stream, 1, 1)[1][0]
    except (OSError, IndexError) as error:
        seen, way_out = f"no descriptor from {name[1:]}: {error}", "run all ranks as one user in one network namespace"
        raise PlacementError(seen, code="peer-object-unreachable", where="map", way_out=way_out) from error

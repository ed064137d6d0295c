"""Host memory of one NUMA node, made and mapped by the CUDA driver and shared between processes by file descriptor.

Driver API, "Virtual Memory Management": the pages exist from ``cuMemCreate`` on, and no policy moves them.  Opening
``/proc/PID/fd/N`` of the exported descriptor would open the device anew, without the object, so it is sent over a
socket, in the abstract namespace: the name goes with the process.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
import threading
import weakref
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p
from typing import Any

from pytest_engram.errors import EngramError, NotMeasurable, PlacementError
from pytest_engram.gpu.registration import Cudart

_PINNED = _FILE_DESCRIPTOR = _DEVICE = 1  # CUmemAllocationType, CUmemAllocationHandleType, CUmemLocationType
_HOST_NUMA, _READ_WRITE = 3, 3  # CUmemLocationType, CUmemAccess_flags
_DEVICE_POINTER, _HOST_NUMA_ID = 3, 134  # CUpointer_attribute, CUdevice_attribute
_CODES = {1: "no-such-node", 2: "out-of-memory", 3: "no-driver", 100: "no-gpu", 801: "no-host-numa"}
_ABSENT = {"no-driver", "no-gpu", "no-host-numa"}


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
            code = _CODES.get(number, "cuda-refused")
            kind = NotMeasurable if code in _ABSENT else PlacementError
            raise kind(f"CUresult {number}", code=code, who=name, where="cumem", expected="CUDA_SUCCESS")

    @property
    def near(self) -> int:
        """The NUMA node that the current GPU is near, in the driver's own word."""
        node = c_int(-1)
        self.call("cuDeviceGetAttribute", byref(node), _HOST_NUMA_ID, self.device)
        return node.value

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
        self.call("cuMemExportToShareableHandle", byref(descriptor), c_ulonglong(handle), _FILE_DESCRIPTOR,
                  c_ulonglong(0))  # fmt: skip
        return descriptor.value

    def adopt(self, descriptor: int) -> int:
        """This process's handle of an exported one."""
        handle = c_ulonglong()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _FILE_DESCRIPTOR)
        return handle.value

    def map(self, handle: int, node: int, nbytes: int) -> memoryview:
        """All bytes, writable by the host; unmapped and released when the last view of them is gone."""
        address = c_uint64()
        self.call("cuMemAddressReserve", byref(address), c_size_t(nbytes), c_size_t(0), c_uint64(0), c_ulonglong(0))
        span = c_uint64(address.value), c_size_t(nbytes)
        self.call("cuMemMap", *span, c_size_t(0), c_ulonglong(handle), c_ulonglong(0))
        self.allow(address.value, nbytes, _HOST_NUMA, node)
        owner = (ctypes.c_ubyte * nbytes).from_address(address.value)
        weakref.finalize(owner, self._release, span, handle).atexit = False
        return memoryview(owner).cast("B")

    def allow(self, address: int, nbytes: int, kind: int, number: int) -> None:
        """Let a place read and write a mapped range."""
        access = _Access(_Location(kind, number), _READ_WRITE)
        self.call("cuMemSetAccess", c_uint64(address), c_size_t(nbytes), byref(access), c_size_t(1))

    def _release(self, span: Any, handle: int) -> None:
        self.call("cuMemUnmap", *span)
        self.call("cuMemAddressFree", *span)
        self.call("cuMemRelease", c_ulonglong(handle))


class MappedCudart(Cudart):
    """Stands in for registration: the memory is pinned already, and the GPU is given access instead."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver  # codes are errors already: there is no text to ask for, nothing to clear

    def register(self, address: int, nbytes: int) -> int:
        """Give the current GPU access."""
        self._driver.allow(address, nbytes, _DEVICE, self._driver.device)
        return 0

    def unregister(self, address: int) -> int:  # noqa: ARG002 - the mapping's end takes the access along
        """There is nothing to undo."""
        return 0

    def pinned(self, byte: Any) -> bool:
        """Whether the GPU can address this byte."""
        found = c_uint64()
        self._driver.call("cuPointerGetAttribute", byref(found), _DEVICE_POINTER, c_uint64(byte.ctypes.data))
        return found.value == byte.ctypes.data

    def synchronize(self) -> None:
        """Wait until no kernel reads the range any more."""
        self._driver.call("cuCtxSynchronize")


class Sender:
    """Hands a descriptor to every process of this user that asks at ``name``."""

    def __init__(self, descriptor: int) -> None:
        self.name = f"\0pytest-engram-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.name)
        self._socket.listen()
        threading.Thread(target=self._serve, args=(descriptor,), name="engram-cumem", daemon=True).start()

    def _serve(self, descriptor: int) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed
                return
            with peer:
                if _user(peer) == os.getuid():
                    socket.send_fds(peer, [b"0"], [descriptor])

    def close(self) -> None:
        """Stop; wakes the thread."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def receive(name: str) -> int:
    """The descriptor that a :class:`Sender` of this user hands out."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.connect(name)
            _, (descriptor,), *_ = socket.recv_fds(stream, 1, 1)
            return descriptor
    except (OSError, ValueError) as error:
        raise PlacementError(
            f"no descriptor from {name[1:]}: {error}", code="peer-object-unreachable", where="map",
            way_out="run all ranks as one user in one network namespace",
        ) from error  # fmt: skip


def _user(peer: socket.socket) -> int:
    return int(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])

"""Which calls open HOST_NUMA memory that another process made: the driver's own codes, variant by variant.

Rank 0 makes and exports, every other rank imports, then rank 0 imports its own as the control.  No conclusion is drawn
here: ``tried`` holds per variant the CUresult of each step (0: success) and whether the host saw the maker's bytes.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any

from pytest_engram.errors import EngramError
from pytest_engram.gpu.cumem import Driver, _Access, _Location, _Properties, offer, receive
from pytest_engram.numa.pages import mapped_vmas

DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT = 1, 2, 3, 4  # CUmemLocationType
MARK = 0x5A
VARIANTS: dict[str, tuple[tuple[tuple[int, ...], ...], bool]] = {  # the places of each call; handle released before
    "device, then host-numa": (((DEVICE,), (HOST_NUMA,)), False),
    "host-numa, then device": (((HOST_NUMA,), (DEVICE,)), False),
    "device and host-numa at once": (((DEVICE, HOST_NUMA),), False),
    "device only": (((DEVICE,),), False),
    "host-numa only": (((HOST_NUMA,),), False),
    "device, then host": (((DEVICE,), (HOST,)), False),
    "device, then host-numa-current": (((DEVICE,), (HOST_NUMA_CURRENT,)), False),
    "released, host-numa, then device": (((HOST_NUMA,), (DEVICE,)), True),  # the order that was refused
    "released, device, then host-numa": (((DEVICE,), (HOST_NUMA,)), True),
}
ATTRIBUTES = {  # CUdevice_attribute
    "posix_fd": 103, "host_numa_id": 134, "host_numa_vmm": 141, "host_numa_pools": 142, "host_numa_multinode_ipc": 143,
}  # fmt: skip


def sharing(group: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """A rank's entry; ``payload``: node, bytes."""
    driver, node = Driver(), int(payload["node"])
    listener, told = None, None
    if group.rank == 0:
        handle, length = driver.create(node, payload["bytes"])
        descriptor = driver.export(handle)
        made = driver.map(handle, node, length)
        made[0] = made[length - 1] = MARK
        listener = offer(descriptor)
        told = {"name": listener.getsockname().decode(), "length": length}
    told = group.broadcast(told, step="offer")
    found = {"attributes": attributes(driver), "tried": {}}
    for turn in range(group.size):  # the others first, the maker itself last
        if (group.rank - 1) % group.size == turn:
            for name, (calls, early) in VARIANTS.items():
                found["tried"][name] = attempt(driver, receive(told["name"]), told["length"], node, calls, early=early)
                group.check(step=name)
        group.barrier(step=f"tried by rank {(turn + 1) % group.size}")
    if listener is not None:
        listener.close()
    return found


def attributes(driver: Driver) -> dict[str, int]:
    """What the device says it can do, the error's number negated where it does not answer."""
    found, value = {}, c_int()
    for name, number in ATTRIBUTES.items():
        code = driver._library.cuDeviceGetAttribute(byref(value), number, driver.device)
        found[name] = value.value if code == 0 else -code
    return found


def pointers(cuda: Any, address: int, nbytes: int) -> dict[str, list[int]]:
    """What two calls make of the first and the last byte: the offset that they answer with, or the CUresult negated.

    ``device_view`` asks neither about cuMem memory, whose address is the GPU's; Triton's launcher asks the second.
    """
    found: dict[str, list[int]] = {"host_get": [], "attribute": []}
    for at in (address, address + nbytes - 1):
        answer = c_uint64()
        code = cuda.cuMemHostGetDevicePointer_v2(byref(answer), c_void_p(at), c_uint(0))
        found["host_get"].append(-code if code else answer.value - address)
        code = cuda.cuPointerGetAttribute(byref(answer), 3, c_uint64(at))  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        found["attribute"].append(-code if code else answer.value - address)
    return found


def attempt(
    driver: Driver, descriptor: int, nbytes: int, node: int, calls: tuple[tuple[int, ...], ...], *, early: bool
) -> dict[str, Any]:
    """CUresults of one variant, in order; everything that succeeded is undone."""
    cuda, handle, address, asked = driver._library, c_ulonglong(), c_uint64(), _Properties()
    codes: dict[str, Any] = {"import": cuda.cuMemImportFromShareableHandle(byref(handle), c_void_p(descriptor), 1)}
    os.close(descriptor)  # the handle holds the object
    if codes["import"]:
        return codes
    if cuda.cuMemGetAllocationPropertiesFromHandle(byref(asked), handle) == 0:
        codes["imported"] = [asked.type, asked.where.type, asked.where.id]
    codes["reserve"] = cuda.cuMemAddressReserve(
        byref(address), c_size_t(nbytes), c_size_t(0), c_uint64(0), c_ulonglong(0)
    )
    span = c_uint64(address.value), c_size_t(nbytes)
    codes["map"] = cuda.cuMemMap(*span, c_size_t(0), handle, c_ulonglong(0))
    if early:
        codes["release"] = cuda.cuMemRelease(handle)
    codes["access"] = []
    for places in calls:
        wanted = [_Access(_Location(kind, driver.device if kind == DEVICE else node), 3) for kind in places]
        array = (_Access * len(wanted))(*wanted)
        codes["access"].append(cuda.cuMemSetAccess(*span, array, c_size_t(len(wanted))))
    with suppress(EngramError):
        codes["host_maps"] = mapped_vmas(address.value, nbytes, name="maps")[-1].permissions
    if codes.get("host_maps", "").startswith("r"):  # else a look would be a SIGSEGV
        codes["host_sees"] = ctypes.c_ubyte.from_address(address.value + nbytes - 1).value == MARK
    codes["pointers"] = pointers(cuda, address.value, nbytes)
    if not codes["map"]:
        codes["unmap"] = cuda.cuMemUnmap(*span)
    cuda.cuMemAddressFree(*span)
    if not early:
        cuda.cuMemRelease(handle)
    return codes

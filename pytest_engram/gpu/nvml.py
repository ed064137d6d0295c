"""What the NVIDIA driver says about its GPUs, keyed by PCI address; loaded lazily, every failure is a reason.

``nvmlDeviceGetNumaNodeId`` is the GPU's *own* memory node on coherent platforms and never its nearest host node;
memory and CPU affinity are asked for that.  Signatures and constants: nvml.h and cuda.h of CUDA 13.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from pytest_engram.errors import NotMeasurable
from pytest_engram.model.machine import GpuAnswer

_SCOPE_NODE = 0  # NVML_AFFINITY_SCOPE_NODE
_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_CLOCK_SM = 1  # NVML_CLOCK_SM
_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_HOST_NUMA_ID = 134  # CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1 where the system has no NUMA
_WORD = ctypes.sizeof(ctypes.c_ulong) * 8
_WORDS = 64  # room for 4,096 CPUs or nodes

Load = Callable[[str], Any]


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class Refused(Exception):  # noqa: N818 - a refusal is an answer here, turned into a reason by its caller
    """One driver call said no."""


def gpu_sources(load: Load = ctypes.CDLL) -> dict[str, Callable[[], dict[str, GpuAnswer]]]:
    """The three answers the driver gives, for ``read_topology``; ``load`` opens a library by name."""
    return {
        "nvml memory affinity": lambda: Nvml(load).memory_affinity(),
        "nvml cpu affinity": lambda: Nvml(load).cpu_affinity(),
        "cuda host_numa_id": lambda: cuda_host_nodes(load),
    }


class Nvml:
    """The management library, initialised; raises ``NotMeasurable`` where it is missing or refuses."""

    def __init__(self, load: Load = ctypes.CDLL) -> None:
        self._lib = _open(load, "libnvidia-ml.so.1")
        try:
            self._call("nvmlInit_v2")
            count = ctypes.c_uint()
            self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
            self._devices = {self._pci(device): device for device in map(self._handle, range(count.value))}
        except Refused as refusal:
            raise _absent("libnvidia-ml.so.1", str(refusal)) from None

    def memory_affinity(self) -> dict[str, GpuAnswer]:
        """Nearest host nodes, with name, UUID, the GPU's own memory node and its NVLink peers."""
        return {pci: self._describe(pci, device) for pci, device in self._devices.items()}

    def cpu_affinity(self) -> dict[str, GpuAnswer]:
        """Nearest CPUs."""
        near = {pci: self._near("nvmlDeviceGetCpuAffinityWithinScope", device) for pci, device in self._devices.items()}
        return {pci: GpuAnswer(cpus=cpus, reason=reason) for pci, (cpus, reason) in near.items()}

    def cuda_version(self) -> str:
        """The newest CUDA that this driver runs, such as ``13.0``."""
        number = self._number("nvmlSystemGetCudaDriverVersion_v2", kind=ctypes.c_int)
        if number is None:
            raise _absent("libnvidia-ml.so.1", "does not tell its CUDA version")
        return f"{number // 1000}.{number % 1000 // 10}"

    def sm_clocks(self) -> dict[str, int | None]:
        """PCI address → SM clock in MHz, None where the driver does not say."""
        return {pci: self._number("nvmlDeviceGetClockInfo", device, ctypes.c_uint(_CLOCK_SM))
                for pci, device in self._devices.items()}  # fmt: skip

    def throttle_reasons(self) -> dict[str, int | None]:
        """PCI address → nvmlClocksThrottleReasons bit mask (0: none active), None where the driver does not say."""
        return {pci: self._number("nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong)
                for pci, device in self._devices.items()}  # fmt: skip

    def _describe(self, pci: str, device: Any) -> GpuAnswer:
        nodes, reason = self._near("nvmlDeviceGetMemoryAffinity", device)
        return GpuAnswer(
            nodes=nodes,
            own_node=self._number("nvmlDeviceGetNumaNodeId", device),
            name=self._text("nvmlDeviceGetName", device),
            uuid=self._text("nvmlDeviceGetUUID", device),
            peers=self._peers(pci, device),
            reason=reason,
        )

    def _near(self, name: str, device: Any) -> tuple[tuple[int, ...] | None, str | None]:
        mask = (ctypes.c_ulong * _WORDS)()
        try:
            self._call(name, device, ctypes.c_uint(_WORDS), mask, ctypes.c_uint(_SCOPE_NODE))
        except Refused as refusal:
            return None, str(refusal)
        members = _bits(list(mask))
        return (members, None) if members else (None, "names none")

    def _peers(self, pci: str, device: Any) -> dict[str, str]:
        links = sum(self._number("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(n)) == 1 for n in range(_LINKS))
        if not links:
            return {}
        return {other: f"NVLink x{links}" for other, peer in self._devices.items() if other != pci
                and self._number("nvmlDeviceGetP2PStatus", device, peer, ctypes.c_uint(_P2P_NVLINK)) == 0}  # fmt: skip

    def _handle(self, index: int) -> Any:
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        return device

    def _pci(self, device: Any) -> str:
        """The address as sysfs spells it: NVML's has an eight-digit domain and capitals."""
        info = _PciInfo()
        self._call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(info))
        domain, rest = info.busId.decode().lower().split(":", 1)
        return f"{int(domain, 16):04x}:{rest}"

    def _text(self, name: str, device: Any) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        try:
            self._call(name, device, buffer, ctypes.c_uint(len(buffer)))
        except Refused:
            return None
        return buffer.value.decode(errors="replace")

    def _number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        value = kind()
        try:
            self._call(name, *arguments, ctypes.byref(value))
        except Refused:
            return None
        return int(value.value)

    def _call(self, name: str, *arguments: Any) -> None:
        code = _function(self._lib, name)(*arguments)
        if code != 0:
            describe = _function(self._lib, "nvmlErrorString")
            describe.restype = ctypes.c_char_p
            raise Refused(f"{name}: {(describe(code) or b'error').decode()} ({code})")


def cuda_host_nodes(load: Load = ctypes.CDLL) -> dict[str, GpuAnswer]:
    """CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID of the GPUs that CUDA_VISIBLE_DEVICES leaves; no context is created."""
    cuda = _open(load, "libcuda.so.1")
    count = ctypes.c_int()
    try:
        _cuda(cuda, "cuInit", ctypes.c_uint(0))
        _cuda(cuda, "cuDeviceGetCount", ctypes.byref(count))
        return dict(_host_node(cuda, index) for index in range(count.value))
    except Refused as refusal:
        raise _absent("libcuda.so.1", str(refusal)) from None


def _host_node(cuda: Any, index: int) -> tuple[str, GpuAnswer]:
    device, node, pci = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
    _cuda(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _cuda(cuda, "cuDeviceGetPCIBusId", pci, ctypes.c_int(len(pci)), device)
    try:
        _cuda(cuda, "cuDeviceGetAttribute", ctypes.byref(node), ctypes.c_int(_HOST_NUMA_ID), device)
    except Refused as refusal:
        return pci.value.decode(), GpuAnswer(reason=str(refusal))
    known = node.value >= 0
    return pci.value.decode(), GpuAnswer(nodes=(node.value,)) if known else GpuAnswer(reason=f"says {node.value}")


def _cuda(library: Any, name: str, *arguments: Any) -> None:
    code = _function(library, name)(*arguments)
    if code != 0:
        raise Refused(f"{name}: CUresult {code}")


def _function(library: Any, name: str) -> Any:
    try:
        return getattr(library, name)
    except AttributeError:
        raise Refused(f"{name}: not in this driver") from None


def _open(load: Load, name: str) -> Any:
    try:
        return load(name)
    except OSError as error:
        raise _absent(name, str(error)) from None


def _absent(name: str, seen: str) -> NotMeasurable:
    seen = seen if name in seen else f"{name}: {seen}"
    return NotMeasurable(seen, code="no-gpu-driver", way_out="install the NVIDIA driver to hear it")


def _bits(words: list[int]) -> tuple[int, ...]:
    return tuple(index * _WORD + bit for index, word in enumerate(words) for bit in range(_WORD) if word >> bit & 1)

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
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_HOST_NUMA_ID = 134  # CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1 where the system has no NUMA
_WORDS = 64  # room for 4,096 CPUs or nodes
COUNTERS = ("sm_mhz", "throttle_reasons", "pcie_to_host_kb_per_s", "pcie_from_host_kb_per_s")

Load = Callable[[str], Any]


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t: a short address and five numbers, then the address that is used."""

    _fields_ = (("unused", ctypes.c_char * 36), ("busId", ctypes.c_char * 32))


def gpu_sources(load: Load = ctypes.CDLL) -> dict[str, Callable[[], dict[str, GpuAnswer]]]:
    """The three answers the driver gives, for ``read_topology``; ``load`` opens a library by name."""
    return {
        "nvml memory affinity": lambda: Nvml(load).memory_affinity(),
        "nvml cpu affinity": lambda: Nvml(load).cpu_affinity(),
        "cuda host_numa_id": lambda: cuda_host_nodes(load),
    }


class _Library:
    """One of the driver's libraries; what it refuses or lacks is a ``NotMeasurable`` in its own words."""

    def __init__(self, load: Load, name: str) -> None:
        self._name = name
        try:
            self._functions = load(name)
        except OSError as error:
            raise self._refusal(str(error)) from None

    def ask(self, name: str, *arguments: Any) -> str | None:
        """Call a function that returns 0 for success: why it refuses, or None when it is done."""
        function = getattr(self._functions, name, None)
        if function is None:
            return f"{name}: not in this driver"
        code = function(*arguments)
        return f"{name}: {self.describe(code)}" if code else None

    def need(self, name: str, *arguments: Any) -> None:
        """Call a function that nothing can be said without."""
        if why := self.ask(name, *arguments):
            raise self._refusal(why)

    def read(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | str:
        """The number that a function stores through its last argument, or why it refuses."""
        value = kind()
        return self.ask(name, *arguments, ctypes.byref(value)) or int(value.value)

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        """The same, None where it refuses."""
        found = self.read(name, *arguments, kind=kind)
        return None if isinstance(found, str) else found

    def describe(self, code: int) -> str:
        """The library's word for an error code."""
        return f"CUresult {code}"

    def _refusal(self, seen: str) -> NotMeasurable:
        where = None if self._name in seen else self._name
        return NotMeasurable(seen, code="no-gpu-driver", where=where, way_out="install the NVIDIA driver to hear it")


class Nvml(_Library):
    """The management library, initialised; raises ``NotMeasurable`` where it is missing or refuses."""

    def __init__(self, load: Load = ctypes.CDLL) -> None:
        super().__init__(load, "libnvidia-ml.so.1")
        self.need("nvmlInit_v2")
        count = ctypes.c_uint()
        self.need("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices = dict(map(self._device, range(count.value)))

    def describe(self, code: int) -> str:
        """NVML's own text."""
        describe = self._functions.nvmlErrorString
        describe.restype = ctypes.c_char_p
        return f"{(describe(code) or b'error').decode()} ({code})"

    def memory_affinity(self) -> dict[str, GpuAnswer]:
        """Nearest host nodes, with name, UUID, the GPU's own memory node and its NVLink peers."""
        return {pci: self._describe(pci, device) for pci, device in self._devices.items()}

    def cpu_affinity(self) -> dict[str, GpuAnswer]:
        """Nearest CPUs."""
        near = {pci: self._near("nvmlDeviceGetCpuAffinityWithinScope", device) for pci, device in self._devices.items()}
        return {pci: GpuAnswer(cpus=cpus, reason=reason) for pci, (cpus, reason) in near.items()}

    def cuda_version(self) -> str:
        """The newest CUDA that this driver runs, such as ``13.0``."""
        number = self.number("nvmlSystemGetCudaDriverVersion_v2", kind=ctypes.c_int)
        if number is None:
            raise self._refusal("does not tell its CUDA version")
        return f"{number // 1000}.{number % 1000 // 10}"

    def sm_clocks(self) -> dict[str, int | str]:
        """PCI address → SM clock in MHz, or why the driver does not say."""
        return {pci: self._sm_clock(device) for pci, device in self._devices.items()}

    def throttle_reasons(self) -> dict[str, int | str]:
        """PCI address → nvmlClocksThrottleReasons bit mask (0: none active), or why the driver does not say."""
        return {pci: self._throttled(device) for pci, device in self._devices.items()}

    def pcie_kb_per_s(self) -> dict[str, dict[str, int | str]]:
        """PCI address → direction → KB/s over NVML's own window of 20 ms, or why the driver does not say."""
        return {pci: self._pcie(device) for pci, device in self._devices.items()}

    def counters(self, uuid: str) -> dict[str, int | str]:
        """The same by name, as :data:`COUNTERS`, of the GPU with that UUID and of no other: each window takes time."""
        for device in self._devices.values():
            if self._text("nvmlDeviceGetUUID", device) == uuid:
                found = self._sm_clock(device), self._throttled(device), *self._pcie(device).values()
                return dict(zip(COUNTERS, found, strict=True))
        raise self._refusal(f"knows no GPU {uuid}")

    def _sm_clock(self, device: Any) -> int | str:
        return self.read("nvmlDeviceGetClockInfo", device, ctypes.c_uint(_CLOCK_SM))

    def _throttled(self, device: Any) -> int | str:
        return self.read("nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong)

    def _pcie(self, device: Any) -> dict[str, int | str]:
        ways = {"to_host": 0, "from_host": 1}
        return {way: self.read("nvmlDeviceGetPcieThroughput", device, ctypes.c_uint(n)) for way, n in ways.items()}

    def _describe(self, pci: str, device: Any) -> GpuAnswer:
        nodes, reason = self._near("nvmlDeviceGetMemoryAffinity", device)
        name, uuid = (self._text(f"nvmlDeviceGet{what}", device) for what in ("Name", "UUID"))
        own, peers = self.number("nvmlDeviceGetNumaNodeId", device), self._peers(pci, device)
        return GpuAnswer(nodes=nodes, own_node=own, name=name, uuid=uuid, peers=peers, reason=reason)

    def _near(self, name: str, device: Any) -> tuple[tuple[int, ...] | None, str | None]:
        mask = (ctypes.c_ulong * _WORDS)()
        if why := self.ask(name, device, ctypes.c_uint(_WORDS), mask, ctypes.c_uint(_SCOPE_NODE)):
            return None, why
        bits = int.from_bytes(bytes(mask), "little")
        members = tuple(bit for bit in range(bits.bit_length()) if bits >> bit & 1)
        return (members, None) if members else (None, "names none")

    def _peers(self, pci: str, device: Any) -> dict[str, str]:
        links = sum(self.number("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(n)) == 1 for n in range(_LINKS))
        return {other: f"NVLink x{links}" for other, peer in self._devices.items() if links and other != pci
                and self.number("nvmlDeviceGetP2PStatus", device, peer, ctypes.c_uint(_P2P_NVLINK)) == 0}  # fmt: skip

    def _device(self, index: int) -> tuple[str, Any]:
        """The address as sysfs spells it (NVML's has an eight-digit domain and capitals), and the handle."""
        device, info = ctypes.c_void_p(), _PciInfo()
        self.need("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        self.need("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(info))
        domain, rest = info.busId.decode().lower().split(":", 1)
        return f"{int(domain, 16):04x}:{rest}", device

    def _text(self, name: str, device: Any) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        refused = self.ask(name, device, buffer, ctypes.c_uint(len(buffer)))
        return None if refused else buffer.value.decode(errors="replace")


def cuda_host_nodes(load: Load = ctypes.CDLL) -> dict[str, GpuAnswer]:
    """CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID of the GPUs that CUDA_VISIBLE_DEVICES leaves, in CUDA's order: entry r is
    ``cuda:r``, and there may be none.  No context is created."""
    cuda, count = _Library(load, "libcuda.so.1"), ctypes.c_int()
    if cuda.ask("cuInit", ctypes.c_uint(0)) == f"cuInit: {cuda.describe(_NO_DEVICE)}":
        return {}
    cuda.need("cuInit", ctypes.c_uint(0))
    cuda.need("cuDeviceGetCount", ctypes.byref(count))
    return dict(_host_node(cuda, index) for index in range(count.value))


def _host_node(cuda: _Library, index: int) -> tuple[str, GpuAnswer]:
    device, node, pci = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
    cuda.need("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    cuda.need("cuDeviceGetPCIBusId", pci, ctypes.c_int(len(pci)), device)
    why = cuda.ask("cuDeviceGetAttribute", ctypes.byref(node), ctypes.c_int(_HOST_NUMA_ID), device)
    if why is None and node.value < 0:
        why = f"says {node.value}"
    return pci.value.decode(), GpuAnswer(reason=why) if why else GpuAnswer(nodes=(node.value,))

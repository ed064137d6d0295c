"""The driver's answers, through fake libraries with the C signatures of libnvidia-ml and libcuda."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from pytest_engram.errors import NotMeasurable
from pytest_engram.gpu.nvml import Nvml, cuda_host_nodes, gpu_sources
from pytest_engram.model.machine import GpuAnswer
from pytest_engram.numa.devices import ENUMERATES

PCI = ("0000:3b:00.0", "0000:af:00.0")
NOT_SUPPORTED = 3


class FakeFunction:
    """One C function; ``restype`` may be set as on a real one."""

    restype: Any = ctypes.c_int

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body = body

    def __call__(self, *arguments: Any) -> Any:
        return self.body(*arguments)


class FakeLibrary:
    """Only the functions it is given, as a driver of another age would have."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, body in functions.items():
            setattr(self, name, FakeFunction(body))


def store(pointer: Any, value: Any) -> int:
    """Write through a ``byref`` pointer and succeed."""
    pointer._obj.value = value
    return 0


def pci_info(device: Any, pointer: Any) -> int:
    """GPU n is handle n + 100."""
    pointer._obj.busId = f"0000{PCI[device.value - 100]}".upper().encode()
    return 0


def fill(buffer: Any, text: str) -> int:
    """Write a C string and succeed."""
    buffer.value = text.encode()
    return 0


def set_word(mask: Any, index: int, word: int) -> int:
    """Write one word of a bit mask and succeed."""
    mask[index] = word
    return 0


def nvml(**changes: Callable[..., Any] | None) -> Callable[[str], Any]:
    """A loader of a fake libnvidia-ml with two linked GPUs; a change of None removes the function."""
    functions: dict[str, Callable[..., Any] | None] = {
        "nvmlInit_v2": lambda: 0,
        "nvmlErrorString": lambda code: {3: b"Not Supported", 9: b"Driver Not Loaded"}[code],
        "nvmlDeviceGetCount_v2": lambda out: store(out, 2),
        "nvmlDeviceGetHandleByIndex_v2": lambda index, out: store(out, index.value + 100),
        "nvmlDeviceGetPciInfo_v3": pci_info,
        "nvmlDeviceGetName": lambda device, buffer, _size: fill(buffer, f"NVIDIA H200 no {device.value}"),
        "nvmlDeviceGetUUID": lambda device, buffer, _size: fill(buffer, f"GPU-{device.value}"),
        "nvmlDeviceGetMemoryAffinity": lambda device, _n, mask, _scope: set_word(mask, 0, 1 << (device.value - 100)),
        "nvmlDeviceGetCpuAffinityWithinScope": lambda _device, _n, mask, _scope: set_word(mask, 1, 0b101),
        "nvmlDeviceGetNumaNodeId": lambda _device, _out: NOT_SUPPORTED,
        "nvmlDeviceGetNvLinkState": lambda _device, link, out: store(out, int(link.value < 4)),
        "nvmlDeviceGetP2PStatus": lambda _device, _peer, index, out: store(out, 0 if index.value == 2 else 4),
        "nvmlDeviceGetClockInfo": lambda device, kind, out: store(out, 1980 - device.value if kind.value == 1 else 7),
        "nvmlDeviceGetPcieThroughput": lambda device, way, out: store(out, 5000 + 10 * way.value + device.value),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _device, out: store(out, 1 << 40),
        "nvmlSystemGetCudaDriverVersion_v2": lambda out: store(out, 12090),
    }
    kept = {name: body for name, body in {**functions, **changes}.items() if body is not None}
    return lambda _name: FakeLibrary(**kept)


def missing(name: str) -> Any:
    """A machine without the driver."""
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


def test_memory_affinity_names_the_host_node_and_the_gpu() -> None:
    """Nearest nodes, name, UUID and NVLink peers, keyed by PCI address."""
    answers = Nvml(nvml()).memory_affinity()
    assert answers[PCI[1]] == GpuAnswer(nodes=(1,), name="NVIDIA H200 no 101", uuid="GPU-101",
                                        peers={PCI[0]: "NVLink x4"})  # fmt: skip


def test_cpu_affinity_counts_bits_over_words() -> None:
    """Bit 0 and 2 of the second word are CPUs 64 and 66."""
    assert Nvml(nvml()).cpu_affinity()[PCI[0]] == GpuAnswer(cpus=(64, 66))


def test_the_numa_node_id_is_the_gpus_own_memory() -> None:
    """K8: nvmlDeviceGetNumaNodeId never becomes a host node; where it is refused it is absent."""
    coherent = Nvml(nvml(nvmlDeviceGetNumaNodeId=lambda device, out: store(out, device.value - 90))).memory_affinity()
    assert [(answer.own_node, answer.nodes) for answer in coherent.values()] == [(10, (0,)), (11, (1,))]
    assert Nvml(nvml()).memory_affinity()[PCI[0]].own_node is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda *_: NOT_SUPPORTED, "nvmlDeviceGetMemoryAffinity: Not Supported (3)"),
        (None, "nvmlDeviceGetMemoryAffinity: not in this driver"),
        (lambda *_: 0, "names none"),
    ],
)
def test_a_refused_question_is_a_reason(change: Callable[..., Any] | None, reason: str) -> None:
    """Not supported, not in this driver, or an empty mask: no node, and the reason in the driver's words."""
    answer = Nvml(nvml(nvmlDeviceGetMemoryAffinity=change)).memory_affinity()[PCI[0]]
    assert (answer.nodes, answer.reason) == (None, reason)
    assert answer.name == "NVIDIA H200 no 100", "the other questions are still answered"


def test_no_links_no_peers() -> None:
    """Without an active NVLink the peer-to-peer status is not asked."""
    assert Nvml(nvml(nvmlDeviceGetNvLinkState=None)).memory_affinity()[PCI[0]].peers == {}
    assert Nvml(nvml(nvmlDeviceGetP2PStatus=lambda *a: store(a[-1], 3))).memory_affinity()[PCI[0]].peers == {}


def test_clocks_and_throttling_are_absent_where_the_driver_is_silent() -> None:
    """X11: SM clock in MHz and the throttle bit mask; a silent driver gives its reason, never 0."""
    library = Nvml(nvml())
    assert library.sm_clocks() == {PCI[0]: 1880, PCI[1]: 1879}
    assert library.throttle_reasons() == {PCI[0]: 1 << 40, PCI[1]: 1 << 40}
    silent = Nvml(nvml(nvmlDeviceGetClockInfo=None)).sm_clocks()
    assert silent == dict.fromkeys(PCI, "nvmlDeviceGetClockInfo: not in this driver")


def test_pcie_counters_have_a_direction() -> None:
    """PCIe traffic in KB/s per direction; a counter that the driver lacks is its reason, never 0, for each of them."""
    base = int(Nvml(nvml()).pcie_kb_per_s()[PCI[0]]["to_host"])
    assert Nvml(nvml()).pcie_kb_per_s()[PCI[0]] == {"to_host": base, "from_host": base + 10}

    def receives_only(_device: Any, way: Any, out: Any) -> int:
        return store(out, 7) if way.value else NOT_SUPPORTED

    half = Nvml(nvml(nvmlDeviceGetPcieThroughput=receives_only)).pcie_kb_per_s()
    assert half[PCI[1]] == {"to_host": "nvmlDeviceGetPcieThroughput: Not Supported (3)", "from_host": 7}


def test_counters_are_those_of_one_gpu() -> None:
    """Clock, throttle mask and both PCIe directions of the GPU with that UUID; an unknown one is a reason."""
    found = Nvml(nvml()).counters("GPU-101")
    assert found == {"sm_mhz": 1879, "throttle_reasons": 1 << 40, "pcie_to_host_kb_per_s": 5101,
                     "pcie_from_host_kb_per_s": 5111}  # fmt: skip
    with pytest.raises(NotMeasurable, match="knows no GPU GPU-7"):
        Nvml(nvml()).counters("GPU-7")


def test_the_cuda_version_is_the_drivers() -> None:
    """12090 is CUDA 12.9; a driver that does not tell is an error, not a version."""
    assert Nvml(nvml()).cuda_version() == "12.9"
    with pytest.raises(NotMeasurable, match="does not tell its CUDA version"):
        Nvml(nvml(nvmlSystemGetCudaDriverVersion_v2=None)).cuda_version()


def test_a_missing_driver_is_a_reason() -> None:
    """Every source raises NotMeasurable that names its library."""
    for name, source in gpu_sources(missing).items():
        with pytest.raises(NotMeasurable, match=r"libcuda.so.1" if "cuda" in name else r"libnvidia-ml.so.1"):
            source()


def test_a_driver_that_does_not_start_is_a_reason() -> None:
    """The library is there, the kernel module is not."""
    with pytest.raises(NotMeasurable, match=r"nvmlInit_v2: Driver Not Loaded \(9\)"):
        Nvml(nvml(nvmlInit_v2=lambda: 9))


def cuda(node: Callable[[int], int | None], **changes: Callable[..., int]) -> Callable[[str], Any]:
    """A loader of a fake libcuda with two devices; ``node`` answers the attribute, None refuses it."""

    def attribute(out: Any, which: Any, device: Any) -> int:
        answer = node(device.value)
        return 1 if answer is None or which.value != 134 else store(out, answer)

    functions: dict[str, Callable[..., int]] = {
        "cuInit": lambda _flags: 0,
        "cuDeviceGetCount": lambda out: store(out, 2),
        "cuDeviceGet": lambda out, index: store(out, index.value),
        "cuDeviceGetPCIBusId": lambda buffer, _size, device: fill(buffer, f"0000:{'AB'[device.value]}F:00.0"),
        "cuDeviceGetAttribute": attribute,
    }
    return lambda _name: FakeLibrary(**{**functions, **changes})


def test_cuda_tells_the_nearest_host_node() -> None:
    """HOST_NUMA_ID per visible device; −1 and a refusal are reasons, not nodes."""
    assert cuda_host_nodes(cuda(lambda device: 1 - device)) == {
        "0000:AF:00.0": GpuAnswer(nodes=(1,)), "0000:BF:00.0": GpuAnswer(nodes=(0,)),
    }  # fmt: skip
    unknown = cuda_host_nodes(cuda(lambda device: -1 if device else None))
    assert unknown["0000:BF:00.0"] == GpuAnswer(reason="says -1")
    assert unknown["0000:AF:00.0"] == GpuAnswer(reason="cuDeviceGetAttribute: CUresult 1")


def test_no_visible_device_is_an_answer() -> None:
    """An empty CUDA_VISIBLE_DEVICES makes cuInit fail with CUDA_ERROR_NO_DEVICE; any other failure is a reason."""
    assert cuda_host_nodes(cuda(lambda _device: 0, cuInit=lambda _flags: 100)) == {}
    with pytest.raises(NotMeasurable, match=r"libcuda.so.1: cuInit: CUresult 999"):
        cuda_host_nodes(cuda(lambda _device: 0, cuInit=lambda _flags: 999))


def test_the_order_is_cuda_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source that orders the GPUs is the one that asks libcuda, in the order of its devices."""
    monkeypatch.setattr("pytest_engram.gpu.nvml.Nvml", lambda _load: pytest.fail("only CUDA is asked"))
    backwards = cuda(lambda _device: 0, cuDeviceGet=lambda out, index: store(out, 1 - index.value))
    assert list(gpu_sources(backwards)[ENUMERATES]()) == ["0000:BF:00.0", "0000:AF:00.0"]

"""Which NUMA node a GPU is near: every source's own answer, their agreement, and what stays unknown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_engram.errors import NotMeasurable
from pytest_engram.model.machine import GpuAnswer
from pytest_engram.numa.devices import normal_pci
from pytest_engram.numa.topology import read_topology
from pytest_engram.planning import rank_cpus

Grow = Callable[..., Path]
MACHINES = Path(__file__).parents[2] / "fixtures" / "topologies"
ONE, TWO = "0000:3b:00.0", "0000:af:00.0"


def replay(known: Mapping[str, Mapping[str, Any]]) -> dict[str, GpuAnswer]:
    """Recorded answers as a source gives them."""
    return {pci: GpuAnswer(**answer) for pci, answer in known.items()}


def says(**answers: GpuAnswer) -> Callable[[], Mapping[str, GpuAnswer]]:
    """A source that answers for the GPUs of the two-socket machine."""
    known = {"one": ONE, "two": TWO}
    return lambda: {known[name]: answer for name, answer in answers.items()}


def test_agreeing_sources_give_the_node(grow: Grow) -> None:
    """Two sysfs answers and a driver's answer agree; each is kept under its own name."""
    sources = {"nvml": says(one=GpuAnswer(nodes=(0,)), two=GpuAnswer(cpus=(1, 3)))}
    one, two = read_topology(grow("two-sockets"), gpu_sources=sources).gpus
    assert (one.numa_node, two.numa_node, one.node_absent) == (0, 1, None)
    assert two.node_by_source == {"sysfs numa_node": 1, "sysfs local_cpulist": 1, "nvml": 1}


def test_a_contradiction_is_named_and_decides_nothing(grow: Grow) -> None:
    """K8: sysfs says 0, the driver says 1: no node, both answers kept, the text names both."""
    one, two = read_topology(grow("two-sockets"), gpu_sources={"nvml": says(one=GpuAnswer(nodes=(1,)))}).gpus
    assert one.numa_node is None
    assert one.node_absent == "sources contradict: sysfs numa_node says 0, sysfs local_cpulist says 0, nvml says 1"
    assert one.node_by_source == {"sysfs numa_node": 0, "sysfs local_cpulist": 0, "nvml": 1}
    assert two.numa_node == 1, "the other GPU is not drawn into it"


def test_minus_one_stays_unknown(grow: Grow) -> None:
    """K7: numa_node −1 is never node 0, and the full local_cpulist beside it is no second witness."""
    for gpu in read_topology(grow("vm-unknown")).gpus:
        assert (gpu.numa_node, set(gpu.node_by_source.values())) == (None, {None})
        assert gpu.node_absent == "unknown: sysfs numa_node: says -1; sysfs local_cpulist: lists every CPU"


def test_the_driver_may_know_what_acpi_does_not(grow: Grow) -> None:
    """K7: with −1 in sysfs the driver's affinity is the answer, and sysfs still reads unknown."""
    source = {"nvml": lambda: {"00000000:00:05.0": GpuAnswer(cpus=(2, 3))}}
    first, second = read_topology(grow("vm-unknown"), gpu_sources=source).gpus
    assert (first.numa_node, first.node_by_source["sysfs numa_node"]) == (1, None)
    assert second.numa_node is None


def test_a_part_of_the_cpus_is_a_witness_even_beside_minus_one(grow: Grow) -> None:
    """Only the full list is the kernel's way to say unknown; some CPUs of node 1 mean node 1."""
    path = "sys/devices/pci0000:00/0000:00:05.0/local_cpulist"
    assert read_topology(grow("vm-unknown", {path: "2\n"})).gpus[0].numa_node == 1


def test_a_wide_affinity_narrows_but_does_not_contradict(grow: Grow) -> None:
    """K11: a socket-wide answer leaves sysfs's node standing; alone it stays ambiguous."""
    wide = {"nvml": lambda: {"0000:18:00.0": GpuAnswer(nodes=(0, 1))}}
    near, _ = read_topology(grow("two-sockets-snc2"), gpu_sources=wide).gpus
    assert (near.numa_node, near.node_by_source["nvml"]) == (0, None)
    base = "sys/devices/pci0000:17/0000:17:01.0/0000:18:00.0"
    silent = grow("two-sockets-snc2", {f"{base}/numa_node": "-1\n", f"{base}/local_cpulist": "0-15\n"})
    alone, _ = read_topology(silent, gpu_sources=wide).gpus
    assert (alone.numa_node, alone.node_absent) == (None, "ambiguous: nvml says 0 or 1")


def test_the_gpus_own_node_is_never_its_nearest_host_node(grow: Grow) -> None:
    """K8: the driver's own-memory node marks GPU memory and leaves numa_node to the host's answers."""
    sources = {"nvml": lambda: {"0008:01:00.0": GpuAnswer(nodes=(0,), own_node=2)}}
    no_status = {f"proc/driver/nvidia/gpus/{pci}/numa_status": None for pci in ("0008:01:00.0", "0018:01:00.0")}
    no_status["sys/devices/system/node/has_generic_initiator"] = None
    topology = read_topology(grow("grace", no_status), gpu_sources=sources)
    assert [node.id for node in topology.nodes if node.gpu_memory] == [2]
    assert [gpu.numa_node for gpu in topology.gpus] == [0, 1]


def test_a_node_that_is_not_online_is_no_answer(grow: Grow) -> None:
    """All sources agree on node 7, which this kernel does not have: unknown, and the text says so."""
    base = "sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    root = grow("two-sockets", {f"{base}/numa_node": "7\n", f"{base}/local_cpulist": "\n"})
    gpu = read_topology(root).gpus[0]
    assert (gpu.numa_node, gpu.node_absent) == (None, "the sources say node 7, which is not online here")


def test_a_source_that_fails_is_a_note_with_its_reason(grow: Grow) -> None:
    """NVML absent: the GPUs stay, the answer is None and the reason is kept."""

    def absent() -> Mapping[str, GpuAnswer]:
        raise NotMeasurable("libnvidia-ml.so.1: not found", way_out="install it")

    topology = read_topology(grow("two-sockets"), gpu_sources={"nvml": absent})
    assert topology.notes == ("nvml: libnvidia-ml.so.1: not found",)
    assert [gpu.node_by_source["nvml"] for gpu in topology.gpus] == [None, None]
    assert topology.gpus[0].numa_node == 0


def test_gpus_are_keyed_by_pci_address_not_by_index(grow: Grow) -> None:
    """K14: a source that enumerates in another order, or sees fewer GPUs, answers for the right ones."""
    sources = {"cuda": lambda: {"0000:AF:00.0": GpuAnswer(nodes=(1,), name="seen first")}}
    one, two = read_topology(grow("two-sockets"), gpu_sources=sources).gpus
    assert (one.pci, one.name, one.node_by_source["cuda"]) == (ONE, "NVIDIA H200 PCIe-like 1", None)
    assert (two.pci, two.name, two.node_by_source["cuda"]) == (TWO, "seen first", 1)


def test_a_gpu_that_only_the_driver_sees_is_kept(grow: Grow) -> None:
    """K5: a sandbox may hide PCI devices from sysfs; the driver's GPU stands, its sysfs answers are absent."""
    sources = {"nvml": lambda: {"00000000:65:00.0": GpuAnswer(nodes=(0,), uuid="GPU-65")}}
    (gpu,) = read_topology(grow("one-node-recorded"), gpu_sources=sources).gpus
    assert (gpu.pci, gpu.numa_node, gpu.uuid, gpu.pci_path, gpu.link) == ("0000:65:00.0", 0, "GPU-65", (), None)


def test_a_management_vga_is_no_gpu_unless_stand_ins_are_asked_for(grow: Grow) -> None:
    """A server's own VGA does not count; a guest without GPUs may ask for display-class stand-ins."""
    root = grow("two-sockets")
    assert [gpu.pci for gpu in read_topology(root).gpus] == [ONE, TWO]
    assert [gpu.pci for gpu in read_topology(root, stand_ins=True).gpus] == ["0000:03:00.0", ONE, TWO]
    assert len(read_topology(grow("eight-gpus"), stand_ins=True).gpus) == 8, "NVMe drives and NVSwitches never count"


def test_gpus_behind_one_switch_name_it(grow: Grow) -> None:
    """The path runs from the root port to the device, and peers below one switch share its upstream port."""
    gpus = read_topology(grow("eight-gpus")).gpus
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert gpus[0].pci_path == ("0000:10:01.0", "0000:11:00.0", "0000:12:00.0", "0000:13:00.0")
    assert gpus[0].peers == {gpus[1].pci: "shared switch 0000:11:00.0"}
    assert gpus[7].peers == {gpus[6].pci: "shared switch 0000:81:00.0"}


def test_a_peer_can_be_reached_two_ways(grow: Grow) -> None:
    """NVLink from the driver and a shared switch from sysfs stand side by side."""
    sources = {"nvml": lambda: {"0000:13:00.0": GpuAnswer(peers={"00000000:14:00.0": "NVLink x18"})}}
    assert read_topology(grow("eight-gpus"), gpu_sources=sources).gpus[0].peers == {
        "0000:14:00.0": "NVLink x18, shared switch 0000:11:00.0"
    }


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("two-sockets", ["2.5 GT/s x16 (max 32.0 GT/s x16)", "32.0 GT/s x16"]),
        ("two-sockets-snc2", ["16.0 GT/s x16", "16.0 GT/s x8 (max 16.0 GT/s x16)"]),
        ("memoryless-and-cxl", [None]),
        ("vm-unknown", [None, None]),
    ],
)
def test_the_link_is_what_runs_now_beside_what_could(grow: Grow, name: str, links: list[str | None]) -> None:
    """An idle or narrow link shows its maximum too; an unknown speed is absent."""
    assert [gpu.link for gpu in read_topology(grow(name)).gpus] == links


def test_the_driver_names_its_gpus_without_nvml(grow: Grow) -> None:
    """Model and UUID come from procfs where no other source gives them."""
    gpu = read_topology(grow("grace")).gpus[1]
    assert (gpu.name, gpu.uuid) == ("NVIDIA GB200", "GPU-00000000-0000-0000-0000-000000001801")


def test_a_memory_less_node_can_be_the_nearest(grow: Grow) -> None:
    """The GPU is near node 1 although no table can lie there."""
    topology = read_topology(grow("memoryless-and-cxl"))
    assert (topology.gpus[0].numa_node, [node.id for node in topology.memory_nodes]) == (1, [0, 2])


def test_a_recorded_guest_with_two_gpus(grow: Grow) -> None:
    """The driver's real answers beside sysfs's −1: node 0, NVLink between the two, a full-width link."""
    answers = json.loads((MACHINES / "two-h200-vm-recorded.json").read_text())["answers"]
    sources = {name: partial(replay, known) for name, known in answers.items()}
    one, two = read_topology(grow("two-h200-vm-recorded"), gpu_sources=sources).gpus
    assert one.node_by_source == {
        "sysfs numa_node": None, "sysfs local_cpulist": None,
        "nvml memory affinity": 0, "nvml cpu affinity": 0, "cuda host_numa_id": 0,
    }  # fmt: skip
    assert (one.numa_node, one.peers, one.link) == (0, {two.pci: "NVLink x18"}, "32.0 GT/s x16")
    assert all(gpu.numa_node is None for gpu in read_topology(grow("two-h200-vm-recorded")).gpus)


@pytest.mark.parametrize(
    ("shown", "nodes", "note"),
    [
        ((ONE, TWO), [0, 1], ()),  # nothing is hidden
        ((TWO,), [1], ("CUDA shows 1 of 2 GPUs, in its own order; hidden: 0000:3b:00.0",)),  # "1", or the second's UUID
        ((TWO, ONE), [1, 0], ("CUDA shows 2 of 2 GPUs, in its own order; hidden: none",)),  # "1,0"
        ((), [], ("CUDA shows 0 of 2 GPUs, in its own order; hidden: 0000:3b:00.0, 0000:af:00.0",)),  # ""
    ],
)
def test_gpu_r_is_the_one_that_rank_r_drives(
    grow: Grow, shown: tuple[str, ...], nodes: list[int], note: tuple[str, ...]
) -> None:
    """CUDA resolves CUDA_VISIBLE_DEVICES, so GPUs and the ranks' CPUs follow its order; hidden ones are only noted."""
    sources = {
        "nvml memory affinity": says(one=GpuAnswer(nodes=(0,)), two=GpuAnswer(nodes=(1,))),
        "cuda host_numa_id": lambda: {pci.upper(): GpuAnswer(reason="says -1") for pci in shown},
    }
    topology = read_topology(grow("two-sockets"), gpu_sources=sources)
    assert ([gpu.numa_node for gpu in topology.gpus], topology.notes) == (nodes, note)
    if nodes:
        cpus = rank_cpus(topology, len(nodes), "cuda")
        assert [topology.node_of_cpu(own[0]) for own in cpus] == nodes


def test_cuda_that_refuses_hides_no_gpu(grow: Grow) -> None:
    """Without CUDA no rank can run; the machine's GPUs stay for the doctor, in PCI order, beside the reason."""

    def refuse() -> Mapping[str, GpuAnswer]:
        raise NotMeasurable("cuInit: CUresult 999")

    topology = read_topology(grow("two-sockets"), gpu_sources={"cuda host_numa_id": refuse})
    assert [gpu.pci for gpu in topology.gpus] == [ONE, TWO]
    assert topology.notes == ("cuda host_numa_id: cuInit: CUresult 999",)


def test_pci_addresses_have_one_spelling() -> None:
    """The driver's eight-digit upper-case domain and CUDA's upper case become sysfs's spelling."""
    assert normal_pci("00000000:3B:00.0") == normal_pci("0000:3b:00.0") == ONE
    assert normal_pci("00010000:01:00.0") == "10000:01:00.0"

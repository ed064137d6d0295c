"""Nodes, sockets and limits as sysfs and procfs tell them, over every machine of fixtures/topologies."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.numa.topology import read_topology
from pytest_engram.numa.tree import Tree, format_list, parse_list

Grow = Callable[..., Path]
NODE1 = "sys/devices/system/node/node1"


def test_each_node_keeps_its_own_numbers(grow: Grow) -> None:
    """Sizes are bytes, reclaimable is inactive file cache plus reclaimable slab, distances go by node id."""
    first, second = read_topology(grow("two-sockets")).nodes
    assert (first.memory_bytes, first.free_bytes) == (263884212 << 10, 201330944 << 10)
    assert (first.reclaimable_bytes, second.reclaimable_bytes) == (
        (9211452 + 1311708) << 10,
        (12582916 + 2097156) << 10,
    )
    assert (first.distances, second.distances) == ({0: 10, 1: 21}, {0: 21, 1: 10})
    assert first.available_bytes == (201330944 + 9211452 + 1311708) << 10


def test_huge_page_pools_belong_to_their_node(grow: Grow) -> None:
    """A pool is (total, free) per page size in bytes; a size the node does not offer is absent, not zero."""
    first, second = read_topology(grow("two-sockets")).nodes
    assert first.hugepages == {2 << 20: (512, 500), 1 << 30: (3, 2)}
    assert second.hugepages == {2 << 20: (640, 639)}


def test_cpu_numbers_may_alternate_between_nodes(grow: Grow) -> None:
    """K12: the CPUs of a node come from its cpulist, so alternating numbers stay apart."""
    topology = read_topology(grow("two-sockets"))
    assert [node.cpus for node in topology.nodes] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert topology.sockets == {0: (0, 2, 4, 6), 1: (1, 3, 5, 7)}
    assert (topology.node_of_cpu(5), topology.node_of_cpu(4)) == (1, 0)


def test_sub_numa_clustering_is_several_nodes_per_socket(grow: Grow) -> None:
    """K11: four nodes on two sockets; a copy per socket is not a copy per node."""
    topology = read_topology(grow("two-sockets-snc2"))
    assert topology.socket_nodes() == {0: (0, 1), 1: (2, 3)}
    assert topology.nodes[3].distances == {0: 23, 1: 21, 2: 12, 3: 10}
    assert len({node.free_bytes for node in topology.nodes}) == 4


def test_a_gpus_own_memory_is_no_place_for_a_host_table(grow: Grow) -> None:
    """K8, K9: nodes 2 and 10 are the GPUs' memory; the memory-less reserve node 3 is neither."""
    topology = read_topology(grow("grace"))
    assert {node.id: node.gpu_memory for node in topology.nodes} == {0: False, 1: False, 2: True, 3: False, 10: True}
    assert [node.id for node in topology.memory_nodes] == [0, 1]
    assert topology.coherent
    assert topology.node(10) is not None
    assert topology.nodes[4].distances[1] == 80, "the fifth column is node 10's, not node 4's"


@pytest.mark.parametrize("missing", ["numa_status", "has_generic_initiator"])
def test_either_witness_names_the_gpu_memory(grow: Grow, missing: str) -> None:
    """The driver's numa_status and the firmware's generic initiators are each enough alone."""
    gone = {
        "numa_status": {f"proc/driver/nvidia/gpus/{pci}/numa_status": None for pci in ("0008:01:00.0", "0018:01:00.0")},
        "has_generic_initiator": {"sys/devices/system/node/has_generic_initiator": None},
    }[missing]
    assert [node.id for node in read_topology(grow("grace", gone)).nodes if node.gpu_memory] == [2, 10]


def test_cxl_memory_is_memory_and_a_memory_less_node_is_not(grow: Grow) -> None:
    """K9: a CPU-less CXL node stays host memory, a node with CPUs only can hold nothing."""
    topology = read_topology(grow("memoryless-and-cxl"))
    assert [node.id for node in topology.memory_nodes] == [0, 2]
    assert (topology.nodes[1].has_memory, topology.nodes[2].cpus, topology.coherent) == (False, (), False)
    assert topology.socket_nodes() == {0: (0,), 1: ()}


def test_the_cpuset_limits_what_may_hold_a_table(grow: Grow) -> None:
    """K4: allowed CPUs and nodes are read from this process's status, and memory_nodes respects them."""
    topology = read_topology(grow("eight-gpus"))
    assert (topology.cpus_allowed, topology.mems_allowed) == ((0, 1, 2, 3, 4, 5), (0,))
    assert [node.id for node in topology.memory_nodes] == [0]


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("two-sockets", None),
        ("grace", None),
        ("vm-unknown", "QEMU Standard PC (Q35 + ICH9, 2009)"),
        ("one-node-recorded", "unnamed (cpuinfo flag)"),
    ],
)
def test_a_hypervisor_is_named_where_something_betrays_it(grow: Grow, name: str, seen: str | None) -> None:
    """K13: DMI names it, a CPU flag betrays it, a bare server has none."""
    assert read_topology(grow(name)).hypervisor == seen


def test_xen_and_arm_guests_are_recognised_without_the_x86_flag(grow: Grow) -> None:
    """sys/hypervisor/type wins; a DMI product of a known hypervisor is enough where cpuinfo has no flags."""
    assert read_topology(grow("grace", {"sys/hypervisor/type": "xen\n"})).hypervisor == "xen"
    kvm = grow("grace", {"sys/class/dmi/id/product_name": "KVM Virtual Machine\n"})
    assert read_topology(kvm).hypervisor == "NVIDIA KVM Virtual Machine"


def test_memory_that_comes_up_lazily_is_counted_whole(grow: Grow) -> None:
    """A recorded guest whose only node counts 7.3 of 23.5 GiB: the whole is that node's, and a note says so."""
    topology = read_topology(grow("one-node-recorded"))
    assert (len(topology.nodes), topology.sockets, topology.gpus) == (1, {0: (0, 1)}, ())
    assert topology.nodes[0].memory_bytes == 24684092 << 10
    assert topology.nodes[0].free_bytes > 7694548 << 10
    (note,) = topology.notes
    assert note == (
        "/proc/meminfo has 24105 MiB, the NUMA nodes' own files only 7514 MiB; "
        "node 0 alone has memory, so the rest is counted as its own"
    )


def test_missing_memory_is_nobodys_on_several_nodes(grow: Grow) -> None:
    """With two memory nodes the rest is noted and given to neither."""
    topology = read_topology(grow("two-sockets", {"proc/meminfo": "MemTotal: 999999999 kB\nMemFree: 7 kB\n"}))
    (note,) = topology.notes
    assert note.endswith("own files only 515724 MiB; on which node the rest lies is unknown")
    assert topology.nodes[0].memory_bytes == 263884212 << 10


def test_this_machine_reads_like_the_kernel_says() -> None:
    """The live machine: the allowed CPUs equal the scheduler's own answer."""
    topology = read_topology()
    assert set(topology.cpus_allowed) == os.sched_getaffinity(0)
    assert all(node.distances[node.id] == 10 for node in topology.nodes)


@pytest.mark.parametrize("path", ["sys/devices/system/node/online", "proc/self/status", f"{NODE1}/meminfo"])
def test_an_unreadable_tree_is_named_not_a_traceback(grow: Grow, path: str) -> None:
    """A missing file says which one, what was expected and the way out."""
    root = grow("two-sockets", {path: None})
    with pytest.raises(NotMeasurable, match=f"/{path}: cannot read it.*expected Linux with /proc and /sys") as caught:
        read_topology(root)
    assert caught.value.code == "topology-unreadable"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (f"{NODE1}/distance", "21\n", "'21'; expected 2 numbers, one per online node"),
        (f"{NODE1}/cpulist", "1,x\n", "'1,x'; expected a list such as 0-3,8"),
        (f"{NODE1}/meminfo", "Node 1 MemTotal: many kB\n", "many kB'; expected MemTotal and MemFree"),
    ],
)
def test_text_the_kernel_never_writes_is_quoted(grow: Grow, path: str, text: str, message: str) -> None:
    """An unknown line is an error that quotes it and names the file."""
    with pytest.raises(EngramError, match=f"/{path}") as caught:
        read_topology(grow("two-sockets", {path: text}))
    assert message in str(caught.value)
    assert caught.value.code == "bad-kernel-text"


def test_an_unknown_socket_is_noted_not_numbered(grow: Grow) -> None:
    """Firmware that gives package −1 leaves those CPUs without a socket."""
    topology = read_topology(grow("grace", {"sys/devices/system/cpu/cpu7/topology/physical_package_id": "-1\n"}))
    assert topology.sockets == {0: (0, 1, 2, 3), 1: (4, 5, 6)}
    assert topology.notes == ("the socket of 1 CPUs is unknown",)


def test_a_kernel_without_cpusets_allows_everything_and_says_so(grow: Grow) -> None:
    """No Mems_allowed_list: nothing is excluded, and a note names the missing line."""
    topology = read_topology(grow("two-sockets", {"proc/self/status": "Name:\tx\nCpus_allowed_list:\t3\n"}))
    assert (topology.cpus_allowed, topology.mems_allowed, len(topology.memory_nodes)) == ((3,), (), 2)
    assert topology.notes == ("/proc/self/status has no Mems_allowed_list",)


def test_lists_survive_a_round_trip() -> None:
    """The kernel's list format, both ways; the empty list is the empty text."""
    for text in ("", "0", "0-3,8", "1,3,5-7"):
        assert format_list(parse_list(text, where="test")) == text


def test_names_come_in_numeric_order(tmp_path: Path) -> None:
    """cpu10 follows cpu9, and what does not match is left out."""
    for name in ("cpu10", "cpu9", "cpufreq"):
        (tmp_path / name).touch()
    assert Tree(tmp_path).names("", r"cpu\d+") == ["cpu9", "cpu10"]

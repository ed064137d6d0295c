"""The machine as sysfs and procfs describe it: NUMA nodes, sockets, GPUs, and what this process may use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_engram.model import NumaNode, Topology
from pytest_engram.numa import procfs
from pytest_engram.numa.devices import GpuSource, read_gpus
from pytest_engram.numa.tree import Tree, parse_list, parsed

_NODE = "sys/devices/system/node"
_CPU = "sys/devices/system/cpu"
_HYPERVISORS = re.compile(r"QEMU|KVM|VMware|Xen|Virtual Machine|Google Compute Engine|Amazon EC2|Firecracker", re.I)


def read_topology(
    root: Path = Path("/"), *, gpu_sources: Mapping[str, GpuSource] | None = None, stand_ins: bool = False
) -> Topology:
    """The machine below ``root`` (a recorded tree reads like the live one).

    ``gpu_sources`` adds answers that sysfs cannot give, each under its own name; a source that raises an
    ``EngramError`` becomes a note.  With CUDA's answer GPU r is this process's ``cuda:r``, else they are in PCI order.
    ``stand_ins`` counts every display-class PCI device as a GPU (for guests).
    Raises ``NotMeasurable`` where /proc or /sys cannot be read, ``EngramError`` on text the kernel never writes.
    """
    tree = Tree(root)
    nodes, memory_notes = read_memory(tree)
    gpus, claimed, gpu_notes = read_gpus(tree, nodes, gpu_sources or {}, stand_ins=stand_ins)
    # Coherent GPU memory is CPU-less and claimed; without any GPU, CPU-less memory is just CXL or HBM.
    own = {node.id for node in nodes if node.id in claimed and not node.cpus and node.has_memory}
    sockets, socket_notes = read_sockets(tree)
    cpus_allowed, mems_allowed, allowed_notes = read_allowed(tree)
    return Topology(
        nodes=tuple(replace(node, gpu_memory=node.id in own) for node in nodes), sockets=sockets, gpus=gpus,
        cpus_allowed=cpus_allowed, mems_allowed=mems_allowed, hypervisor=read_hypervisor(tree), coherent=bool(own),
        notes=(*memory_notes, *gpu_notes, *socket_notes, *allowed_notes),
    )  # fmt: skip


def read_nodes(tree: Tree) -> tuple[NumaNode, ...]:
    """Every online node, memory-less and CPU-less ones too; CPU numbers come from cpulist, never from arithmetic."""
    ids = tree.need_numbers(f"{_NODE}/online")
    return tuple(_node(tree, number, ids) for number in ids)


def read_hypervisor(tree: Tree) -> str | None:
    """The hypervisor by name where DMI knows it; None means that nothing betrays one."""
    if xen := tree.text("sys/hypervisor/type"):
        return xen
    product = " ".join(filter(None, (tree.text(f"sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name"))))
    if re.search(r"^flags\s*:.*\bhypervisor\b", tree.text("proc/cpuinfo") or "", re.M):
        return product or "unnamed (cpuinfo flag)"
    return product if _HYPERVISORS.search(product) else None


def _node(tree: Tree, number: int, ids: tuple[int, ...]) -> NumaNode:
    base = f"{_NODE}/node{number}"
    return NumaNode(
        id=number, cpus=tree.need_numbers(f"{base}/cpulist"), hugepages={
            int(pool[len("hugepages-") : -len("kB")]) << 10: (
                int(tree.need(f"{base}/hugepages/{pool}/nr_hugepages")),
                int(tree.need(f"{base}/hugepages/{pool}/free_hugepages")),
            ) for pool in tree.names(f"{base}/hugepages", r"hugepages-\d+kB")
        },
        distances=parsed(
            lambda text: dict(zip(ids, map(int, text.split()), strict=True)), tree.need(f"{base}/distance"),
            where=f"/{base}/distance", expected=f"{len(ids)} numbers, one per online node",
        ),
        **_memory(tree.need(f"{base}/meminfo"), where=f"/{base}/meminfo"),
    )  # fmt: skip


def _memory(text: str, *, where: str) -> dict[str, Any]:
    """The memory fields of a ``NumaNode`` from one node's meminfo or the whole machine's."""

    def read(text: str) -> dict[str, Any]:
        kib = procfs.parse_meminfo(text)
        reclaimable = kib.get("Inactive(file)", 0) + kib.get("SReclaimable", 0)
        sizes = {"memory_bytes": kib["MemTotal"], "free_bytes": kib["MemFree"], "reclaimable_bytes": reclaimable}
        return {name: size << 10 for name, size in sizes.items()}

    return parsed(read, text, where=where, expected="MemTotal and MemFree in kB")


def read_memory(tree: Tree) -> tuple[tuple[NumaNode, ...], list[str]]:
    """(nodes, notes).  Guests that bring memory up lazily count only the part in use per node; /proc/meminfo knows all.

    With one memory node the whole is that node's; with several nobody says whose it is, so it is only noted.
    """
    nodes = read_nodes(tree)
    text, holders = tree.text("proc/meminfo"), [node.id for node in nodes if node.has_memory]
    whole = _memory(text, where="/proc/meminfo") if text else {"memory_bytes": 0}
    counted = sum(node.memory_bytes for node in nodes)
    if whole["memory_bytes"] <= counted:
        return nodes, []
    note = f"/proc/meminfo has {whole['memory_bytes'] >> 20} MiB, the NUMA nodes' own files only {counted >> 20} MiB"
    if len(holders) != 1:
        return nodes, [f"{note}; on which node the rest lies is unknown"]
    placed = tuple(replace(node, **whole) if node.id in holders else node for node in nodes)
    return placed, [f"{note}; node {holders[0]} alone has memory, so the rest is counted as its own"]


def read_sockets(tree: Tree) -> tuple[dict[int, tuple[int, ...]], list[str]]:
    """Physical packages from each CPU's own file; some arm64 firmware gives -1, which is no socket."""
    cpus = tree.need_numbers(f"{_CPU}/online")
    packages = {cpu: tree.number(f"{_CPU}/cpu{cpu}/topology/physical_package_id") for cpu in cpus}
    known = sorted({package for package in packages.values() if package is not None and package >= 0})
    sockets = {package: tuple(cpu for cpu in cpus if packages[cpu] == package) for package in known}
    lost = len(cpus) - sum(map(len, sockets.values()))
    return sockets, [f"the socket of {lost} CPUs is unknown"] if lost else []


def read_allowed(tree: Tree) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    """Allowed CPUs and nodes: the cpuset's limits, not a policy in force."""
    lines, names = procfs.parse_status(tree.need("proc/self/status")), ("Cpus_allowed_list", "Mems_allowed_list")
    cpus, mems = (parse_list(lines.get(name, ""), where=f"/proc/self/status {name}") for name in names)
    return cpus, mems, [f"/proc/self/status has no {name}" for name in names if name not in lines]

"""The machine as sysfs and procfs describe it: NUMA nodes, sockets, GPUs, and what this process may use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pytest_engram.errors import EngramError
from pytest_engram.model import Gpu, NumaNode, Topology
from pytest_engram.numa.devices import GpuSource, read_gpus
from pytest_engram.numa.tree import Tree, parse_list

_NODE = "sys/devices/system/node"
_CPU = "sys/devices/system/cpu"
_HYPERVISORS = re.compile(r"QEMU|KVM|VMware|Xen|Virtual Machine|Google Compute Engine|Amazon EC2|Firecracker", re.I)


def read_topology(
    root: Path = Path("/"), *, gpu_sources: Mapping[str, GpuSource] | None = None, stand_ins: bool = False
) -> Topology:
    """The machine below ``root`` (a recorded tree reads like the live one).

    ``gpu_sources`` adds answers that sysfs cannot give, each under its own name; a source that raises an
    ``EngramError`` becomes a note.  ``stand_ins`` counts every display-class PCI device as a GPU (for guests).
    Raises ``NotMeasurable`` where /proc or /sys cannot be read, ``EngramError`` on text the kernel never writes.
    """
    tree = Tree(root)
    nodes, memory_notes = _whole_memory(tree, read_nodes(tree))
    gpus, own_nodes, gpu_notes = read_gpus(tree, nodes, gpu_sources or {}, stand_ins=stand_ins)
    nodes = _mark_gpu_memory(tree, nodes, gpus, own_nodes)
    sockets, socket_notes = _sockets(tree)
    cpus_allowed, mems_allowed, allowed_notes = _allowed(tree)
    return Topology(
        nodes=nodes,
        sockets=sockets,
        gpus=gpus,
        cpus_allowed=cpus_allowed,
        mems_allowed=mems_allowed,
        hypervisor=read_hypervisor(tree),
        coherent=any(node.gpu_memory for node in nodes),
        notes=(*memory_notes, *gpu_notes, *socket_notes, *allowed_notes),
    )


def read_nodes(tree: Tree) -> tuple[NumaNode, ...]:
    """Every online node, memory-less and CPU-less ones too; CPU numbers come from cpulist, never from arithmetic."""
    ids = parse_list(tree.need(f"{_NODE}/online"), where=f"/{_NODE}/online")
    return tuple(_node(tree, number, ids) for number in ids)


def read_hypervisor(tree: Tree) -> str | None:
    """The hypervisor by name where DMI knows it; None means that nothing betrays one."""
    if xen := tree.text("sys/hypervisor/type"):
        return xen
    dmi = [tree.text(f"sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    product = " ".join(part for part in dmi if part)
    flagged = re.search(r"^flags\s*:.*\bhypervisor\b", tree.text("proc/cpuinfo") or "", re.M)
    if flagged:
        return product or "unnamed (cpuinfo flag)"
    return product if _HYPERVISORS.search(product) else None


def _node(tree: Tree, number: int, ids: tuple[int, ...]) -> NumaNode:
    base = f"{_NODE}/node{number}"
    memory = _meminfo(tree.need(f"{base}/meminfo"), where=f"/{base}/meminfo")
    return NumaNode(
        id=number,
        cpus=parse_list(tree.need(f"{base}/cpulist"), where=f"/{base}/cpulist"),
        memory_bytes=memory["MemTotal"],
        free_bytes=memory["MemFree"],
        reclaimable_bytes=_reclaimable(memory),
        distances=_distances(tree.need(f"{base}/distance"), ids, where=f"/{base}/distance"),
        hugepages=_hugepages(tree, f"{base}/hugepages"),
    )


def _whole_memory(tree: Tree, nodes: tuple[NumaNode, ...]) -> tuple[tuple[NumaNode, ...], list[str]]:
    """Guests that bring memory up lazily count only the part in use per node; /proc/meminfo knows the whole.

    With one memory node the whole is that node's; with several nobody says whose it is, so it is only noted.
    """
    text, holders = tree.text("proc/meminfo"), [node for node in nodes if node.has_memory]
    whole = _meminfo(text, where="/proc/meminfo") if text else {}
    counted = sum(node.memory_bytes for node in holders)
    if whole.get("MemTotal", 0) <= counted:
        return nodes, []
    note = f"the nodes count {counted >> 20} MiB of {whole['MemTotal'] >> 20} MiB in /proc/meminfo"
    if len(holders) != 1:
        return nodes, [note]
    filled = replace(
        holders[0],
        memory_bytes=whole["MemTotal"],
        free_bytes=whole["MemFree"],
        reclaimable_bytes=_reclaimable(whole),
    )
    return tuple(filled if node.id == filled.id else node for node in nodes), [f"{note}, which is taken"]


def _reclaimable(memory: dict[str, int]) -> int:
    return memory.get("Inactive(file)", 0) + memory.get("SReclaimable", 0)


def _meminfo(text: str, *, where: str) -> dict[str, int]:
    """``Node 1 MemTotal:  263884 kB`` → bytes per name; /proc/meminfo has no node in front."""
    found = {name: int(kib) << 10 for name, kib in re.findall(r"^(?:Node \d+ )?(\S+):\s+(\d+) kB$", text, re.M)}
    if not {"MemTotal", "MemFree"} <= found.keys():
        raise EngramError(
            repr(text[:80]), code="bad-kernel-text", who="topology", where=where, expected="MemTotal and MemFree in kB"
        )
    return found


def _distances(text: str, ids: tuple[int, ...], *, where: str) -> dict[int, int]:
    """One column per online node, in the order of the nodes."""
    columns = text.split()
    if len(columns) != len(ids) or not all(column.isdigit() for column in columns):
        expected = f"{len(ids)} numbers, one per online node"
        raise EngramError(repr(text), code="bad-kernel-text", who="topology", where=where, expected=expected)
    return dict(zip(ids, map(int, columns), strict=True))


def _hugepages(tree: Tree, base: str) -> dict[int, tuple[int, int]]:
    pools: dict[int, tuple[int, int]] = {}
    for name in tree.names(base, r"hugepages-\d+kB"):
        total, free = (tree.number(f"{base}/{name}/{kind}_hugepages") for kind in ("nr", "free"))
        if total is not None and free is not None:
            pools[int(name[len("hugepages-") : -len("kB")]) << 10] = (total, free)
    return pools


def _sockets(tree: Tree) -> tuple[dict[int, tuple[int, ...]], list[str]]:
    """Physical packages from each CPU's own file; some arm64 firmware gives -1, which is no socket."""
    cpus = parse_list(tree.need(f"{_CPU}/online"), where=f"/{_CPU}/online")
    packages = {cpu: tree.number(f"{_CPU}/cpu{cpu}/topology/physical_package_id") for cpu in cpus}
    known = sorted({package for package in packages.values() if package is not None and package >= 0})
    sockets = {package: tuple(cpu for cpu in cpus if packages[cpu] == package) for package in known}
    lost = sum(package is None or package < 0 for package in packages.values())
    return sockets, [f"the socket of {lost} CPUs is unknown"] if lost else []


def _allowed(tree: Tree) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    """Allowed CPUs and nodes: the cpuset's limits, not a policy in force."""
    lines = dict(re.findall(r"^(\w+):\s*(.*)$", tree.need("proc/self/status"), re.M))
    lists, notes = [], []
    for name in ("Cpus_allowed_list", "Mems_allowed_list"):
        lists.append(parse_list(lines.get(name, ""), where=f"/proc/self/status {name}"))
        if name not in lines:
            notes.append(f"/proc/self/status has no {name}")
    return lists[0], lists[1], notes


def _mark_gpu_memory(
    tree: Tree, nodes: tuple[NumaNode, ...], gpus: tuple[Gpu, ...], own_nodes: frozenset[int]
) -> tuple[NumaNode, ...]:
    """Nodes of coherent GPU memory: CPU-less, with memory, and claimed by a GPU, its driver or the firmware.

    A GPU on such a platform is an ACPI generic initiator; without any GPU, CPU-less memory is just CXL or HBM.
    """
    claimed = set(own_nodes)
    if gpus:
        claimed.update(tree.numbers(f"{_NODE}/has_generic_initiator") or ())
    return tuple(
        replace(node, gpu_memory=True) if node.id in claimed and not node.cpus and node.has_memory else node
        for node in nodes
    )

"""GPUs by PCI address, and which NUMA node each is near: every source's own answer, then their agreement."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from pytest_engram.errors import EngramError
from pytest_engram.model import Gpu, NumaNode
from pytest_engram.model.machine import GpuAnswer
from pytest_engram.numa.tree import Tree

Said = Mapping[str, GpuAnswer]  # by PCI address, or by the name of the source
GpuSource = Callable[[], Said]
Paths = Mapping[str, tuple[str, ...]]

ENUMERATES = "cuda host_numa_id"  # the source that names the GPUs in this process's own order: rank r drives the r-th
_BUS = "sys/bus/pci/devices"
_DRIVER = "proc/driver/nvidia/gpus"
_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_CLASSES = ("0300", "0302", "0380", "1200")  # VGA, 3D, other display, processing accelerator
_VENDORS = ("0x10de", "0x1002")  # NVIDIA, AMD: a server's management VGA is no GPU


def read_gpus(
    tree: Tree, nodes: tuple[NumaNode, ...], sources: Mapping[str, GpuSource], *, stand_ins: bool
) -> tuple[tuple[Gpu, ...], set[int], list[str]]:
    """(GPUs, the nodes that a GPU, its driver or the firmware claims, notes).

    The GPUs are those that CUDA shows this process, in CUDA's order: it alone resolves CUDA_VISIBLE_DEVICES (indices,
    UUIDs, MIG) and CUDA_DEVICE_ORDER.  Where CUDA was not asked or refuses, so no rank can run, all in PCI order.
    """
    notes: list[str] = []
    heard = {name: _ask(name, source, notes) for name, source in sources.items()}
    answers = {name: said or {} for name, said in heard.items()}
    found = {pci for pci in tree.names(_BUS, _ADDRESS) if _is_gpu(tree, pci, stand_ins=stand_ins)}
    found = found.union(*answers.values())
    paths = {pci: _path(tree, pci) for pci in sorted(found)}
    claimed = set(tree.numbers("sys/devices/system/node/has_generic_initiator") or ()) if found else set()
    gpus = {}
    for pci in paths:
        said = {**_sysfs(tree, pci, nodes), **{name: known.get(pci, GpuAnswer()) for name, known in answers.items()}}
        gpus[pci] = _gpu(tree, pci, nodes, said, paths)
        claimed.update(answer.own_node for answer in said.values() if answer.own_node is not None)
        claimed.update(map(int, re.findall(r"Node:\s*(\d+)", tree.text(f"{_DRIVER}/{pci}/numa_status") or "")))
    order = heard.get(ENUMERATES)
    if order is None or list(order) == list(gpus):
        return tuple(gpus.values()), claimed, notes
    hidden = ", ".join(pci for pci in gpus if pci not in order) or "none"
    notes.append(f"CUDA shows {len(order)} of {len(gpus)} GPUs, in its own order; hidden: {hidden}")
    return tuple(gpus[pci] for pci in order), claimed, notes


def normal_pci(text: str) -> str:
    """``00000000:3B:00.0`` → ``0000:3b:00.0``, the spelling of sysfs."""
    domain, rest = text.strip().lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def _ask(name: str, source: GpuSource, notes: list[str]) -> dict[str, GpuAnswer] | None:
    try:
        return {normal_pci(pci): answer for pci, answer in source().items()}
    except EngramError as error:
        notes.append(f"{name}: {error.seen}")
        return None


def _is_gpu(tree: Tree, pci: str, *, stand_ins: bool) -> bool:
    kind, vendor = (tree.text(f"{_BUS}/{pci}/{name}") or "" for name in ("class", "vendor"))
    return (kind[2:6] in _CLASSES and vendor in _VENDORS) or (stand_ins and kind[2:4] == "03")


def _sysfs(tree: Tree, pci: str, nodes: tuple[NumaNode, ...]) -> dict[str, GpuAnswer]:
    """With numa_node -1 the kernel lists every online CPU as local: the same "unknown", not a second witness."""
    number, cpus = tree.number(f"{_BUS}/{pci}/numa_node"), tree.numbers(f"{_BUS}/{pci}/local_cpulist")
    by_number, by_cpus = GpuAnswer(reason="absent"), GpuAnswer(cpus=cpus, reason="absent")
    if number is not None:
        by_number = GpuAnswer(nodes=(number,)) if number >= 0 else GpuAnswer(reason=f"says {number}")
    if by_number.nodes is None and set(cpus or ()) >= {cpu for node in nodes for cpu in node.cpus}:
        by_cpus = GpuAnswer(reason="lists every CPU")
    return {"sysfs numa_node": by_number, "sysfs local_cpulist": by_cpus}


def _gpu(tree: Tree, pci: str, nodes: tuple[NumaNode, ...], said: Said, paths: Paths) -> Gpu:
    near = {name: _near(answer, nodes) for name, answer in said.items()}
    node, absent = _settle(near, said)
    if node is not None and node not in {one.id for one in nodes}:
        node, absent = None, f"the sources say node {node}, which is not online here"
    information = dict(re.findall(r"^([^:\n]+):\s*(.+?)\s*$", tree.text(f"{_DRIVER}/{pci}/information") or "", re.M))
    return Gpu(
        pci=pci, numa_node=node, node_absent=absent, pci_path=paths[pci], link=_link(tree, pci),
        name=next((answer.name for answer in said.values() if answer.name), information.get("Model")),
        uuid=next((answer.uuid for answer in said.values() if answer.uuid), information.get("GPU UUID")),
        node_by_source={name: min(one) if len(one) == 1 else None for name, one in near.items()},
        peers=_peers(pci, said, paths),
    )  # fmt: skip


def _near(answer: GpuAnswer, nodes: tuple[NumaNode, ...]) -> frozenset[int]:
    if answer.nodes is not None:
        return frozenset(answer.nodes)
    return frozenset(node.id for node in nodes if set(node.cpus) & set(answer.cpus or ()))


def _settle(near: Mapping[str, frozenset[int]], said: Said) -> tuple[int | None, str | None]:
    """(node, None) where every source that knows leaves exactly one node, else (None, why)."""
    known = {name: nodes for name, nodes in near.items() if nodes}
    if not known:
        return None, "unknown: " + "; ".join(f"{name}: {answer.reason or 'silent'}" for name, answer in said.items())
    common = frozenset.intersection(*known.values())
    if len(common) == 1:
        return min(common), None
    told = ", ".join(f"{name} says {' or '.join(map(str, sorted(nodes)))}" for name, nodes in known.items())
    return None, f"{'ambiguous' if common else 'sources contradict'}: {told}"


def _path(tree: Tree, pci: str) -> tuple[str, ...]:
    """Root port first, the device last: the address-like parts of the place that the bus link leads to."""
    device = tree.root / _BUS / pci
    return tuple(part for part in device.resolve().parts if device.exists() and re.fullmatch(_ADDRESS, part))


def _link(tree: Tree, pci: str) -> str | None:
    """``16.0 GT/s x16``, and the maximum beside it where the link runs below that (idle GPUs do)."""
    now, top = (_speed(tree, f"{_BUS}/{pci}/{kind}_link") for kind in ("current", "max"))
    return f"{now} (max {top})" if now and top and now != top else now


def _speed(tree: Tree, stem: str) -> str | None:
    speed, width = re.match(r"[\d.]+ GT/s", tree.text(f"{stem}_speed") or ""), tree.number(f"{stem}_width")
    return f"{speed[0]} x{width}" if speed and width else None


def _peers(pci: str, said: Said, paths: Paths) -> dict[str, str]:
    """NVLink as a source says, and a shared root port or, where the common path goes deeper, a shared switch."""
    peers = {normal_pci(peer): how for answer in said.values() for peer, how in answer.peers.items()}
    for peer, path in paths.items():
        common = [one for one, other in zip(paths[pci], path, strict=False) if one == other]
        if peer != pci and common:
            how = f"shared {'switch' if len(common) > 1 else 'root port'} {common[-1]}"
            peers[peer] = f"{peers[peer]}, {how}" if peer in peers else how
    return peers

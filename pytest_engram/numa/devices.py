"""GPUs by PCI address, and which NUMA node each is near: every source's own answer, then their agreement."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from pytest_engram.errors import EngramError
from pytest_engram.model import Gpu, NumaNode
from pytest_engram.model.machine import GpuAnswer
from pytest_engram.numa.tree import Tree

GpuSource = Callable[[], Mapping[str, GpuAnswer]]  # PCI address -> answer

_BUS = "sys/bus/pci/devices"
_DRIVER = "proc/driver/nvidia/gpus"
_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_CLASSES = ("0300", "0302", "0380", "1200")  # VGA, 3D, other display, processing accelerator
_VENDORS = ("0x10de", "0x1002")  # NVIDIA, AMD: a server's management VGA is no GPU


def read_gpus(
    tree: Tree, nodes: tuple[NumaNode, ...], sources: Mapping[str, GpuSource], *, stand_ins: bool
) -> tuple[tuple[Gpu, ...], frozenset[int], list[str]]:
    """(GPUs in PCI order, the nodes of their own coherent memory, notes on sources that could not answer)."""
    answers, notes = _ask(sources)
    found = {pci for pci in tree.names(_BUS, _ADDRESS) if _is_gpu(tree, pci, stand_ins=stand_ins)}
    found.update(pci for known in answers.values() for pci in known)
    gpus: list[Gpu] = []
    own_nodes: set[int] = set()
    for pci in sorted(found):
        said = {**_sysfs(tree, pci, nodes), **{name: known.get(pci, GpuAnswer()) for name, known in answers.items()}}
        gpus.append(_gpu(tree, pci, nodes, said))
        own_nodes.update(answer.own_node for answer in said.values() if answer.own_node is not None)
        own_nodes.update(_driver_node(tree, pci))
    return _with_switches(gpus), frozenset(own_nodes), notes


def normal_pci(text: str) -> str:
    """``00000000:3B:00.0`` → ``0000:3b:00.0``, the spelling of sysfs."""
    domain, rest = text.strip().lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def settle(pci: str, said: Mapping[str, frozenset[int]], reasons: Mapping[str, str]) -> tuple[int | None, str | None]:
    """(node, None) where every source that knows leaves exactly one node, else (None, why)."""
    known = {name: nodes for name, nodes in said.items() if nodes}
    if not known:
        return None, "unknown: " + ("; ".join(f"{name}: {why}" for name, why in reasons.items()) or f"{pci} is silent")
    common = frozenset.intersection(*known.values())
    if len(common) == 1:
        return min(common), None
    told = ", ".join(f"{name} says {_spell(nodes)}" for name, nodes in known.items())
    return None, f"{'ambiguous' if common else 'sources contradict'}: {told}"


def _ask(sources: Mapping[str, GpuSource]) -> tuple[dict[str, dict[str, GpuAnswer]], list[str]]:
    replies = {name: _reply(source) for name, source in sources.items()}
    notes = [f"{name}: {reply.seen}" for name, reply in replies.items() if isinstance(reply, EngramError)]
    return {name: {} if isinstance(reply, EngramError) else reply for name, reply in replies.items()}, notes


def _reply(source: GpuSource) -> dict[str, GpuAnswer] | EngramError:
    try:
        return {normal_pci(pci): answer for pci, answer in source().items()}
    except EngramError as error:
        return error


def _is_gpu(tree: Tree, pci: str, *, stand_ins: bool) -> bool:
    kind = (tree.text(f"{_BUS}/{pci}/class") or "")[2:6]
    if stand_ins and kind.startswith("03"):
        return True
    return kind in _CLASSES and tree.text(f"{_BUS}/{pci}/vendor") in _VENDORS


def _sysfs(tree: Tree, pci: str, nodes: tuple[NumaNode, ...]) -> dict[str, GpuAnswer]:
    """With numa_node -1 the kernel lists every online CPU as local: the same "unknown", not a second witness."""
    number = tree.number(f"{_BUS}/{pci}/numa_node")
    cpus = tree.numbers(f"{_BUS}/{pci}/local_cpulist")
    by_number = GpuAnswer(reason="absent") if number is None else GpuAnswer(nodes=(number,))
    if number is not None and number < 0:
        by_number = GpuAnswer(reason=f"says {number}")
    by_cpus = GpuAnswer(cpus=cpus, reason="absent" if cpus is None else None)
    if by_number.nodes is None and set(cpus or ()) >= {cpu for node in nodes for cpu in node.cpus}:
        by_cpus = GpuAnswer(reason="lists every CPU")
    return {"sysfs numa_node": by_number, "sysfs local_cpulist": by_cpus}


def _gpu(tree: Tree, pci: str, nodes: tuple[NumaNode, ...], said: Mapping[str, GpuAnswer]) -> Gpu:
    near = {name: _near(answer, nodes) for name, answer in said.items()}
    node, absent = settle(pci, near, {name: answer.reason or "silent" for name, answer in said.items()})
    if node is not None and node not in {one.id for one in nodes}:
        node, absent = None, f"the sources say node {node}, which is not online here"
    information = dict(re.findall(r"^([^:\n]+):\s*(.+?)\s*$", tree.text(f"{_DRIVER}/{pci}/information") or "", re.M))
    return Gpu(
        pci=pci,
        name=_first(said, "name") or information.get("Model"),
        uuid=_first(said, "uuid") or information.get("GPU UUID"),
        node_by_source={name: min(nodes) if len(nodes) == 1 else None for name, nodes in near.items()},
        numa_node=node,
        node_absent=absent,
        pci_path=_path(tree, pci),
        link=_link(tree, pci),
        peers={normal_pci(peer): how for answer in said.values() for peer, how in answer.peers.items()},
    )


def _near(answer: GpuAnswer, nodes: tuple[NumaNode, ...]) -> frozenset[int]:
    if answer.nodes is not None:
        return frozenset(answer.nodes)
    return frozenset(node.id for node in nodes if set(node.cpus) & set(answer.cpus or ()))


def _first(said: Mapping[str, GpuAnswer], field: str) -> str | None:
    return next((value for answer in said.values() if (value := getattr(answer, field))), None)


def _path(tree: Tree, pci: str) -> tuple[str, ...]:
    """Root port first, the device last: the address-like parts of the place that the bus link leads to."""
    if tree.link(f"{_BUS}/{pci}") is None:
        return ()
    return tuple(part for part in tree.real(f"{_BUS}/{pci}").split("/") if re.fullmatch(_ADDRESS, part))


def _link(tree: Tree, pci: str) -> str | None:
    """``16.0 GT/s x16``, and the maximum beside it where the link runs below that (idle GPUs do)."""
    now, top = (_speed(tree, f"{_BUS}/{pci}/{kind}_link") for kind in ("current", "max"))
    return f"{now} (max {top})" if now and top and now != top else now


def _speed(tree: Tree, stem: str) -> str | None:
    speed = re.match(r"[\d.]+ GT/s", tree.text(f"{stem}_speed") or "")
    width = tree.number(f"{stem}_width")
    return f"{speed[0]} x{width}" if speed and width else None


def _driver_node(tree: Tree, pci: str) -> list[int]:
    """The GPU's own memory node as the NVIDIA driver reports it on coherent platforms (``Node: 2``)."""
    return [int(node) for node in re.findall(r"Node:\s*(\d+)", tree.text(f"{_DRIVER}/{pci}/numa_status") or "")]


def _with_switches(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    return tuple(replace(gpu, peers={**gpu.peers, **_shared(gpu, gpus)}) for gpu in gpus)


def _shared(gpu: Gpu, gpus: list[Gpu]) -> dict[str, str]:
    """Peers below the same root port: through a switch where the common path goes deeper than that port."""
    shared = {}
    for peer in gpus:
        common = [one for one, other in zip(gpu.pci_path, peer.pci_path, strict=False) if one == other]
        if peer is not gpu and common:
            how = f"shared {'switch' if len(common) > 1 else 'root port'} {common[-1]}"
            shared[peer.pci] = ", ".join(filter(None, (gpu.peers.get(peer.pci), how)))
    return shared


def _spell(nodes: frozenset[int]) -> str:
    return " or ".join(map(str, sorted(nodes)))

"""What this machine can prove, experiment by experiment and gate by gate, and why not; then the same as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_engram.model import GATE_NAMES, Claim, Experiment, Gpu, NumaNode, Topology
from pytest_engram.needs import gate_limit, named_nodes, policies_of, requirement
from pytest_engram.numa.tree import format_list

WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One gate of one experiment: ``reason`` says why its evidence cannot be had here, None that it can."""

    gate: int
    name: str
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """One experiment on this machine: the engine that would run it, or every engine's refusal."""

    experiment: str
    title: str
    claim: Claim
    engine: str | None
    refusals: dict[str, str]
    rungs: tuple[Rung, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def reach(self) -> int | None:
        """The last gate that can be decided: none after the first that cannot.  None: not even gate 0."""
        provable = [rung.reason is None for rung in self.rungs]
        first_gap = provable.index(False) if False in provable else len(provable)
        return first_gap - 1 if first_gap else None


def diagnose(
    topology: Topology,
    provenance: Mapping[str, Any],
    experiments: Sequence[Experiment],
    engines: Mapping[str, str | None],
) -> list[Prospect]:
    """Pure.  ``engines`` maps each engine to None when it is ready, else to the reason; cuda is preferred."""
    return [_prospect(topology, provenance, experiment, engines) for experiment in experiments]


def _prospect(
    topology: Topology, provenance: Mapping[str, Any], experiment: Experiment, engines: Mapping[str, str | None]
) -> Prospect:
    refusals, chosen = {}, None
    for engine in sorted(dict.fromkeys((*experiment.engines, *engines)), reverse=True):
        problem = requirement(experiment, topology, engine, engines)
        if problem is None:
            chosen = chosen or engine
        else:
            refusals[engine] = problem.message
    return Prospect(
        experiment=experiment.id,
        title=experiment.title,
        claim=experiment.claim,
        engine=chosen,
        refusals=refusals,
        rungs=tuple(_rungs(experiment, topology, chosen)) if chosen else (),
        cautions=tuple(_cautions(experiment, topology, provenance)) if chosen else (),
    )


def _rungs(experiment: Experiment, topology: Topology, engine: str) -> Iterator[Rung]:
    for gate, name in enumerate(GATE_NAMES):
        limit = gate_limit(experiment, gate, topology, engine)
        yield Rung(gate=gate, name=name, reason=limit.message if limit else None)


def _cautions(experiment: Experiment, topology: Topology, provenance: Mapping[str, Any]) -> Iterator[str]:
    """What does not forbid a measurement but bounds what it says."""
    if experiment.requires:
        yield f"requires {' and '.join(experiment.requires)} to have passed, here or in a file of equal fingerprint"
    if experiment.variable != "policy":
        return
    named = {node for policy in policies_of(experiment) for node in named_nodes(policy)}
    if len(named) > 1 and any(named <= set(nodes) for nodes in topology.socket_nodes().values()):
        yield "its nodes share one socket (sub-NUMA clustering): this is not a comparison of sockets"
    if topology.hypervisor:
        yield "the hypervisor draws this topology: only the local/remote control shows that it is real"
    if _value(provenance, "numa_balancing"):
        yield "numa_balancing is on: the kernel may move pages between the audits"
    if topology.coherent:
        yield "GPU memory is NUMA memory here: results are labelled coherent, never pooled with PCIe machines"


def render(topology: Topology, provenance: Mapping[str, Any], prospects: Sequence[Prospect]) -> str:
    """Plain text, at most 100 columns."""
    parts = (
        _machine(topology, provenance), _node_table(topology), _gpu_table(topology), _knobs(provenance),
        _ladder(prospects),
    )  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _machine(topology: Topology, provenance: Mapping[str, Any]) -> Iterator[str]:
    yield "pytest-engram doctor"
    yield ""
    yield from _field("machine", f"{_say(provenance, 'cpu.model')}, kernel {_say(provenance, 'kernel')}")
    yield from _field("hypervisor", topology.hypervisor or "none seen")
    yield from _field("container", ", ".join(_value(provenance, "container") or ()) or "none seen")
    allowed = f"CPUs {format_list(topology.cpus_allowed)}, NUMA nodes {format_list(topology.mems_allowed)}"
    yield from _field("may use", allowed)
    yield from _field("cgroup room", _size(_value(provenance, "cgroup.headroom"), "no memory limit seen"))
    for note in topology.notes:
        yield from _field("note", note)


def _node_table(topology: Topology) -> Iterator[str]:
    yield f"NUMA nodes: {len(topology.nodes)}, sockets: {len(topology.sockets) or 'unknown'}"
    yield f"  {'node':>4}  {'socket':>6}  {'memory':>10}  {'free':>10}  {'reclaim':>10}  {'distances':<16}  CPUs"
    for node in topology.nodes:
        sizes = "  ".join(_size(n).rjust(10) for n in (node.memory_bytes, node.free_bytes, node.reclaimable_bytes))
        row = f"  {node.id:>4}  {_socket_of(topology, node):>6}  {sizes}  {_distances(node):<16}  "
        yield from textwrap.wrap(row + _kind(node), WIDTH, subsequent_indent=" " * 68, drop_whitespace=True)
        for page, (total, free) in node.hugepages.items():
            if total:
                yield f"        {_size(page)} pages: {free} of {total} free"


def _kind(node: NumaNode) -> str:
    cpus = format_list(node.cpus).replace(",", ", ")
    if node.gpu_memory:
        return "none: a GPU's own memory"
    if not node.has_memory:
        return f"{cpus or 'none'}; no memory"
    return cpus or "none: memory only"


def _socket_of(topology: Topology, node: NumaNode) -> str:
    return next((str(one) for one, cpus in topology.sockets.items() if set(cpus) & set(node.cpus)), "-")


def _distances(node: NumaNode) -> str:
    return " ".join(map(str, node.distances.values()))


def _gpu_table(topology: Topology) -> Iterator[str]:
    yield f"GPUs: {len(topology.gpus) or 'none seen'}"
    for gpu in topology.gpus:
        about = ", ".join(filter(None, (gpu.name, gpu.link)))
        yield f"  {gpu.pci}  {about or 'unnamed'}"
        yield from _gpu_lines(gpu)


def _gpu_lines(gpu: Gpu) -> Iterator[str]:
    node = f"NUMA node {gpu.numa_node}" if gpu.numa_node is not None else str(gpu.node_absent)
    yield from _field("near", node, indent=4)
    told = (f"{name}: {'unknown' if answer is None else answer}" for name, answer in gpu.node_by_source.items())
    yield from _field("sources", "; ".join(told), indent=4)
    if len(gpu.pci_path) > 1:
        yield from _field("path", " > ".join(gpu.pci_path), indent=4)
    for peer, how in gpu.peers.items():
        yield from _field("peer", f"{peer}: {how}", indent=4)


def _knobs(provenance: Mapping[str, Any]) -> Iterator[str]:
    yield "Mounts and knobs"
    free, size = (_size(_value(provenance, f"shm.{what}_bytes")) for what in ("free", "size"))
    yield from _field("shm mount", _say(provenance, "shm.mount"))
    yield from _field("shm room", f"{free} free of {size}")
    yield from _field("shm policy", f"mpol {_say(provenance, 'shm.mpol')}, huge {_say(provenance, 'shm.huge')}")
    thp = f"enabled {_say(provenance, 'thp.enabled')}, shmem_enabled {_say(provenance, 'thp.shmem_enabled')}"
    yield from _field("huge pages", thp)
    yield from _field("balancing", f"numa_balancing {_say(provenance, 'numa_balancing')}")
    yield from _field("memlock", _say(provenance, "limit.memlock"))
    yield from _field("driver", _say(provenance, "driver"))


def _ladder(prospects: Sequence[Prospect]) -> Iterator[str]:
    yield "What this machine can prove"
    told: set[str] = set()
    for one in prospects:
        yield ""
        yield from _wrapped(f"{one.experiment}  ", f"{one.title} ({one.claim.value})", indent=2)
        yield from _wrapped("", _verdict(one), indent=6)
        for engine, reason in one.refusals.items():
            yield from _wrapped("- ", f"{engine}: {'as above' if reason in told else reason}", indent=6)
        told.update(reason for reason in one.refusals.values() if len(reason) > WIDTH // 2)
        for rung in one.rungs:
            if rung.reason:
                yield from _wrapped("- ", f"gate {rung.gate} {rung.name}: {rung.reason}", indent=6)
        for caution in one.cautions:
            yield from _wrapped("! ", caution, indent=6)


def _verdict(one: Prospect) -> str:
    if one.engine is None:
        return "NOT_MEASURED here"
    last = len(GATE_NAMES) - 1
    if one.reach == last:
        return f"gates 0-{last} can be decided on the {one.engine} engine"
    reach = "no gate" if one.reach is None else f"gates 0-{one.reach} of 0-{last}"
    return f"{reach} can be decided on the {one.engine} engine"


def _field(name: str, text: str, *, indent: int = 2) -> list[str]:
    return _wrapped(f"{name:<13}", text, indent=indent)


def _wrapped(head: str, text: str, *, indent: int) -> list[str]:
    first = " " * indent + head
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first.rstrip()]


def _value(provenance: Mapping[str, Any], name: str) -> Any:
    return provenance.get(name, {}).get("value")


def _say(provenance: Mapping[str, Any], name: str) -> str:
    item = provenance.get(name, {"reason": "not collected"})
    return f"unknown ({item['reason']})" if item.get("value") is None else str(item["value"])


def _size(number: int | None, absent: str = "unknown") -> str:
    if not number:
        return absent if number is None else "0"
    scale, unit = next(((s, u) for s, u in ((40, "TiB"), (30, "GiB"), (20, "MiB")) if number >> s), (10, "KiB"))
    return f"{number / (1 << scale):.1f} {unit}"

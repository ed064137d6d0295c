"""What this machine can prove, experiment by experiment and gate by gate, and why not; then the same as text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytest_engram.experiment_rules import places
from pytest_engram.model import GATE_NAMES, Experiment, Gpu, NumaNode, Topology
from pytest_engram.needs import Engines, gate_limit, named_nodes, policies_of, requirement
from pytest_engram.numa.tree import format_list

WIDTH = 100
Facts = Mapping[str, Any]  # as provenance.collect gives them


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """One experiment on this machine: the engine that would run it, or every engine's refusal.

    ``rungs`` holds per gate why its evidence cannot be had here, None where it can.
    """

    experiment: Experiment
    engine: str | None
    refusals: dict[str, str]
    rungs: tuple[str | None, ...]
    cautions: tuple[str, ...]

    @property
    def reach(self) -> int | None:
        """The last gate that can be decided: none after the first that cannot.  None: not even gate 0."""
        first_gap = next((gate for gate, reason in enumerate(self.rungs) if reason), len(self.rungs))
        return first_gap - 1 if first_gap else None


def diagnose(
    topology: Topology, provenance: Facts, experiments: Iterable[Experiment], engines: Engines
) -> Iterator[Prospect]:
    """Pure.  ``engines`` maps each engine to None when it is ready, else to the reason; cuda is preferred."""
    for experiment in experiments:
        names = sorted({*experiment.engines, *engines}, reverse=True)
        problems = {name: requirement(experiment, topology, name, engines) for name in names}
        engine = next((name for name, problem in problems.items() if problem is None), None)
        limits = [gate_limit(experiment, gate, topology, engine) for gate in range(len(GATE_NAMES))] if engine else []
        yield Prospect(
            experiment=experiment, engine=engine,
            refusals={name: problem.message for name, problem in problems.items() if problem},
            rungs=tuple(limit.message if limit else None for limit in limits),
            cautions=tuple(_cautions(experiment, topology, provenance)) if engine else (),
        )  # fmt: skip


def _cautions(experiment: Experiment, topology: Topology, provenance: Facts) -> Iterator[str]:
    """What does not forbid a measurement but bounds what it says."""
    if experiment.requires:
        yield f"requires {' and '.join(experiment.requires)} to have passed, here or in a file of equal fingerprint"
    if not places(experiment):
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


def render(topology: Topology, provenance: Facts, prospects: Iterable[Prospect]) -> str:
    """Plain text, at most 100 columns."""
    say = partial(_say, provenance)
    parts = (
        ("pytest-engram doctor", "", *_fields(_machine(topology, provenance, say))), _node_table(topology),
        _gpu_table(topology), ("Mounts and knobs", *_fields(_knobs(provenance, say))), _ladder(prospects),
    )  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _machine(topology: Topology, provenance: Facts, say: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    yield "machine", f"{say('cpu.model')}, kernel {say('kernel')}"
    yield "hypervisor", topology.hypervisor or "none seen"
    yield "container", ", ".join(_value(provenance, "container") or ()) or "none seen"
    yield "may use", f"CPUs {format_list(topology.cpus_allowed)}, NUMA nodes {format_list(topology.mems_allowed)}"
    yield "policy calls", _policy_calls(provenance)
    yield "cgroup room", _size(_value(provenance, "cgroup.headroom"), "no memory limit seen")
    yield from (("note", note) for note in topology.notes)


def _policy_calls(provenance: Facts) -> str:
    """The calls that work, and each that does not with its error; what they need stands once."""
    calls: Mapping[str, str] = _value(provenance, "policy.calls") or {}
    works = ", ".join(name for name, said in calls.items() if said == "works")
    refused = [said.removeprefix("probe: ").partition("; expected ") for said in calls.values() if said != "works"]
    if not refused:
        done = "a page was bound to each allowed node, touched, and found there"
        return f"{works} work: {done}" if works else _say(provenance, "policy.calls")
    needs = f"; need {refused[0][2]}" if refused[0][2] else ""
    return f"{'; '.join(head for head, *_ in refused)}{needs}; works: {works or 'none'}"


def _knobs(provenance: Facts, say: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    free, size = (_size(_value(provenance, f"shm.{what}_bytes")) for what in ("free", "size"))
    yield "shm mount", say("shm.mount")
    yield "shm room", f"{free} free of {size}"
    yield "shm policy", f"mpol {say('shm.mpol')}, huge {say('shm.huge')}"
    yield "huge pages", f"enabled {say('thp.enabled')}, shmem_enabled {say('thp.shmem_enabled')}"
    yield "balancing", f"numa_balancing {say('numa_balancing')}"
    yield "memlock", say("limit.memlock")
    yield "driver", say("driver")
    yield "socket link", say("perf.uncore").replace("unknown (", "not available (")


def _node_table(topology: Topology) -> Iterator[str]:
    yield f"NUMA nodes: {len(topology.nodes)}, sockets: {len(topology.sockets) or 'unknown'}"
    yield f"  {'node':>4}  {'socket':>6}  {'memory':>10}  {'free':>10}  {'reclaim':>10}  {'distances':<16}  CPUs"
    for node in topology.nodes:
        socket = next((str(one) for one, cpus in topology.sockets.items() if set(cpus) & set(node.cpus)), "-")
        sizes = "  ".join(_size(n).rjust(10) for n in (node.memory_bytes, node.free_bytes, node.reclaimable_bytes))
        row = f"  {node.id:>4}  {socket:>6}  {sizes}  {' '.join(map(str, node.distances.values())):<16}  "
        yield from textwrap.wrap(row + _kind(node), WIDTH, subsequent_indent=" " * 68)
        pools = ((page, free, total) for page, (total, free) in node.hugepages.items() if total)
        yield from (f"        {_size(page)} pages: {free} of {total} free" for page, free, total in pools)


def _kind(node: NumaNode) -> str:
    if node.gpu_memory:
        return "none: a GPU's own memory"
    cpus = format_list(node.cpus).replace(",", ", ")
    return cpus or "none: memory only" if node.has_memory else f"{cpus or 'none'}; no memory"


def _gpu_table(topology: Topology) -> Iterator[str]:
    yield f"GPUs: {len(topology.gpus) or 'none seen'}"
    for gpu in topology.gpus:
        yield f"  {gpu.pci}  {', '.join(filter(None, (gpu.name, gpu.link))) or 'unnamed'}"
        yield from _fields(_gpu_facts(gpu), indent=4)


def _gpu_facts(gpu: Gpu) -> Iterator[tuple[str, str]]:
    yield "near", f"NUMA node {gpu.numa_node}" if gpu.numa_node is not None else str(gpu.node_absent)
    told = (f"{name}: {'unknown' if answer is None else answer}" for name, answer in gpu.node_by_source.items())
    yield "sources", "; ".join(told)
    if len(gpu.pci_path) > 1:
        yield "path", " > ".join(gpu.pci_path)
    yield from (("peer", f"{peer}: {how}") for peer, how in gpu.peers.items())


def _ladder(prospects: Iterable[Prospect]) -> Iterator[str]:
    yield "What this machine can prove"
    told: set[str] = set()
    for one in prospects:
        title = f"{one.experiment.title} ({one.experiment.claim.value})"
        yield from ("", *_wrapped(f"  {one.experiment.id}  ", title), f"      {_verdict(one)}")
        points = [f"- {name}: {'as above' if why in told else why}" for name, why in one.refusals.items()]
        points += [f"- gate {n} {GATE_NAMES[n]}: {why}" for n, why in enumerate(one.rungs) if why]
        for point in (*points, *(f"! {caution}" for caution in one.cautions)):
            yield from _wrapped(f"      {point[:2]}", point[2:])
        told.update(why for why in one.refusals.values() if len(why) > WIDTH // 2)


def _verdict(one: Prospect) -> str:
    last, reach = len(GATE_NAMES) - 1, "no gate" if one.reach is None else f"gates 0-{one.reach}"
    reach += f" of 0-{last}" if one.reach is not None and one.reach < last else ""
    return f"{reach} can be decided on the {one.engine} engine" if one.engine else "NOT_MEASURED here"


def _fields(facts: Iterable[tuple[str, str]], *, indent: int = 2) -> Iterator[str]:
    for name, text in facts:
        yield from _wrapped(" " * indent + f"{name:<13}", text)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]


def _value(provenance: Facts, name: str) -> Any:
    return provenance.get(name, {}).get("value")


def _say(provenance: Facts, name: str) -> str:
    item = provenance.get(name, {"reason": "not collected"})
    return f"unknown ({item['reason']})" if item.get("value") is None else str(item["value"])


def _size(number: int | None, absent: str = "unknown") -> str:
    if not number:
        return absent if number is None else "0"
    scale, unit = next(((s, u) for s, u in ((40, "TiB"), (30, "GiB"), (20, "MiB")) if number >> s), (10, "KiB"))
    return f"{number / (1 << scale):.1f} {unit}"

"""What an experiment needs from a machine: the one place that turns it into NOT_MEASURED.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pytest_engram.experiment_rules import places, settings
from pytest_engram.model import Experiment, Gpu, Problem, Status, Topology

Engines = Mapping[str, str | None]  # each probed engine: None when it is ready, else the reason why not
Unmet = Iterator[tuple[str, str]]  # (code, message)

_NAMED_NODES = re.compile(r"(?:bind|preferred|interleave|weighted-interleave):([0-9,\-:=]+)$")


def requirement(experiment: Experiment, topology: Topology, engine: str, engines: Engines) -> Problem | None:
    """Why ``experiment`` cannot run here with ``engine``, or None if it can.

    ``engines`` maps each probed engine to None when it is ready, else to the reason why it is not.
    """
    return _first(experiment, _unmet(experiment, topology, engine, engines))


def gate_limit(experiment: Experiment, gate: int, topology: Topology, engine: str) -> Problem | None:
    """Why gate ``gate`` of an experiment that can run will still lack its evidence here, or None."""
    if gate == 2 and engine == "cuda" and places(experiment):
        return _first(experiment, _distances(experiment, topology))
    if gate == 4 and experiment.serving is None:
        return _first(experiment, iter([("no-load", "declares no open-loop load, so there is no goodput to compare")]))
    return None


def policies_of(experiment: Experiment) -> tuple[str, ...]:
    """The distinct placement policies that its arms ask for, in the order of the arms."""
    return tuple(dict.fromkeys(str(settings(experiment, arm)["policy"]) for arm in experiment.arms))


def named_nodes(policy: str) -> tuple[int, ...]:
    """The NUMA nodes that a policy names itself: ``bind:1`` → (1,); a weight after ``=`` is no node."""
    match = _NAMED_NODES.match(policy)
    parts = match.group(1).split(",") if match else []
    return tuple(int(number) for part in parts if (number := re.split("[=:]", part)[0]).isdecimal())


def _first(experiment: Experiment, unmet: Unmet) -> Problem | None:
    problems = (Problem(code=code, message=text, who=experiment.id, status=Status.NOT_MEASURED) for code, text in unmet)
    return next(problems, None)


def _unmet(experiment: Experiment, topology: Topology, engine: str, engines: Engines) -> Unmet:
    if engine == "cpu" and experiment.variable == "cap":
        yield "no-grid", "needs a GPU: the CPU engine has no grid to cap"
    if engine == "cpu" and any(settings(experiment, arm)["graph"] for arm in experiment.arms):
        yield "no-graph", "needs a GPU: the CPU engine has no graph to replay"
    if engine not in experiment.engines:
        yield "engine-excluded", f"runs on the {' or '.join(experiment.engines)} engine, not on {engine}"
    reason = engines.get(engine, None if engine == "cpu" else "it was not probed")
    if reason is not None:
        yield "engine-unavailable", f"the {engine} engine is not available: {reason}"
    yield from _nodes(experiment, topology)
    if engine == "cuda":
        yield from _gpus(experiment, topology)


def _nodes(experiment: Experiment, topology: Topology) -> Unmet:
    usable = [node.id for node in topology.memory_nodes]
    if len(usable) < experiment.memory_nodes:
        hidden = sum(node.has_memory and not node.gpu_memory for node in topology.nodes) - len(usable)
        told = f"found {_count(len(usable))}" + (f" (the cpuset hides {hidden} more)" if hidden else "")
        yield "too-few-memory-nodes", f"needs {_count(experiment.memory_nodes, 'memory NUMA node')}, {told}"
    for policy in policies_of(experiment):
        missing = [node for node in named_nodes(policy) if node not in usable]
        if missing:
            places = f"node {', '.join(map(str, usable))} only" if usable else "no node"
            yield "node-unusable", f"{policy} names NUMA node {missing[0]}; this process can place tables on {places}"
        sockets = len(list(filter(None, topology.socket_nodes().values())))
        if policy == "per-socket" and sockets < 2:  # sub-NUMA clustering gives nodes, not sockets
            yield "too-few-sockets", f"needs two sockets with their own memory, found {_count(sockets)}"


def _gpus(experiment: Experiment, topology: Topology) -> Unmet:
    if len(topology.gpus) < experiment.ranks:
        told = f"needs {_count(experiment.ranks, 'GPU')}, one per rank, found {_count(len(topology.gpus))}"
        yield "too-few-gpus", f"{told}: ranks that take turns on one GPU measure its scheduler"
    unknown = _unknown(topology.gpus[: experiment.ranks])
    if unknown and "per-gpu-node" in policies_of(experiment):
        yield "gpu-node-unknown", f"per-gpu-node needs each GPU's NUMA node: {unknown}"


def _distances(experiment: Experiment, topology: Topology) -> Unmet:
    """A1's shape: the arms bind one table to different nodes, so each rank's prediction is its distance's."""
    if not all(policy.startswith("bind:") for policy in policies_of(experiment)):
        return
    gpus = topology.gpus[: experiment.ranks]
    if unknown := _unknown(gpus):
        yield "gpu-distance-unknown", f"needs GPU-to-NUMA-node distances: {unknown}"
    ends = {node for policy in policies_of(experiment) for node in named_nodes(policy)}
    known = {node.id for node in topology.nodes if ends <= node.distances.keys()}
    if any(gpu.numa_node not in known for gpu in gpus):
        yield "gpu-distance-unknown", "the firmware gives no distances from the GPUs' nodes"


def _unknown(gpus: tuple[Gpu, ...]) -> str:
    return "; ".join(f"GPU {gpu.pci}: {gpu.node_absent or 'unknown'}" for gpu in gpus if gpu.numa_node is None)


def _count(number: int, noun: str = "") -> str:
    word = ("none", "one", "two", "three", "four")[number] if number < 5 else str(number)
    return f"{word} {noun}{'' if number == 1 else 's'}" if noun else word

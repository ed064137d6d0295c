"""What an experiment needs from a machine: the one place that turns it into NOT_MEASURED.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pytest_engram.model import Experiment, Gpu, Problem, Status, Topology

_NAMED_NODES = re.compile(r"(?:bind|preferred|interleave|weighted-interleave):([0-9,\-:=]+)$")


def requirement(
    experiment: Experiment, topology: Topology, engine: str, engines: Mapping[str, str | None]
) -> Problem | None:
    """Why ``experiment`` cannot run here with ``engine``, or None if it can.

    ``engines`` maps each probed engine to None when it is ready, else to the reason why it is not.
    """
    return next(_unmet(experiment, topology, engine, engines), None)


def gate_limit(experiment: Experiment, gate: int, topology: Topology, engine: str) -> Problem | None:
    """Why gate ``gate`` of an experiment that can run will still lack its evidence here, or None."""
    if gate == 2 and _moves_one_table(experiment) and engine == "cuda":
        return _distances_known(experiment, topology)
    if gate == 4 and experiment.serving is None:
        return _problem(experiment, "no-load", "declares no open-loop load, so there is no goodput to compare")
    return None


def policies_of(experiment: Experiment) -> tuple[str, ...]:
    """The distinct placement policies that its arms ask for, in the order of the arms."""
    settings = ({**experiment.hold, **arm} for arm in experiment.arms.values())
    return tuple(dict.fromkeys(str(one["policy"]) for one in settings if "policy" in one))


def named_nodes(policy: str) -> tuple[int, ...]:
    """The NUMA nodes that a policy names itself: ``bind:1`` → (1,); a weight after ``=`` is no node."""
    match = _NAMED_NODES.match(policy)
    parts = match.group(1).split(",") if match else []
    return tuple(int(number) for part in parts if (number := re.split("[=:]", part)[0]).isdigit())


def _moves_one_table(experiment: Experiment) -> bool:
    """A1's shape: the arms bind one table to different nodes, so each rank's prediction is its distance's."""
    return experiment.variable == "policy" and all(name.startswith("bind:") for name in policies_of(experiment))


def _unmet(
    experiment: Experiment, topology: Topology, engine: str, engines: Mapping[str, str | None]
) -> Iterator[Problem]:
    yield from _engine(experiment, engine, engines)
    yield from _nodes(experiment, topology)
    if engine == "cuda":
        yield from _gpus(experiment, topology)


def _engine(experiment: Experiment, engine: str, engines: Mapping[str, str | None]) -> Iterator[Problem]:
    if engine == "cpu" and experiment.variable == "cap":
        yield _problem(experiment, "no-grid", "needs a GPU: the CPU engine has no grid to cap")
    if engine not in experiment.engines:
        wanted = " or ".join(experiment.engines)
        yield _problem(experiment, "engine-excluded", f"runs on the {wanted} engine, not on {engine}")
    reason = engines.get(engine, None if engine == "cpu" else "it was not probed")
    if reason is not None:
        yield _problem(experiment, "engine-unavailable", f"the {engine} engine is not available: {reason}")


def _nodes(experiment: Experiment, topology: Topology) -> Iterator[Problem]:
    usable = [node.id for node in topology.memory_nodes]
    if len(usable) < experiment.memory_nodes:
        present = sum(node.has_memory and not node.gpu_memory for node in topology.nodes)
        hidden = f" (the cpuset hides {present - len(usable)} more)" if present > len(usable) else ""
        yield _problem(
            experiment, "too-few-memory-nodes",
            f"needs {_count(experiment.memory_nodes, 'memory NUMA node')}, found {_number(len(usable))}{hidden}",
        )  # fmt: skip
    for policy in policies_of(experiment):
        missing = [node for node in named_nodes(policy) if node not in usable]
        if missing:
            yield _problem(
                experiment, "node-unusable",
                f"{policy} names NUMA node {missing[0]}; this process can place tables on {_list(usable)}",
            )  # fmt: skip
        if policy == "per-socket":
            yield from _sockets(experiment, topology)


def _sockets(experiment: Experiment, topology: Topology) -> Iterator[Problem]:
    """Sub-NUMA clustering gives nodes, not sockets: a copy per socket needs two packages with memory."""
    sockets = [socket for socket, nodes in topology.socket_nodes().items() if nodes]
    if len(sockets) < 2:
        found = _number(len(sockets))
        yield _problem(experiment, "too-few-sockets", f"needs two sockets with their own memory, found {found}")


def _gpus(experiment: Experiment, topology: Topology) -> Iterator[Problem]:
    if len(topology.gpus) < experiment.ranks:
        yield _problem(
            experiment, "too-few-gpus",
            f"needs {_count(experiment.ranks, 'GPU')}, one per rank, found {_number(len(topology.gpus))}: "
            "ranks that take turns on one GPU measure its scheduler",
        )  # fmt: skip
    unknown = _unknown(topology.gpus[: experiment.ranks])
    if unknown and "per-gpu-node" in policies_of(experiment):
        yield _problem(experiment, "gpu-node-unknown", f"per-gpu-node needs each GPU's NUMA node: {unknown}")


def _distances_known(experiment: Experiment, topology: Topology) -> Problem | None:
    gpus = topology.gpus[: experiment.ranks]
    unknown = _unknown(gpus)
    if unknown:
        return _problem(experiment, "gpu-distance-unknown", f"needs GPU-to-NUMA-node distances: {unknown}")
    homes = [topology.node(gpu.numa_node) for gpu in gpus if gpu.numa_node is not None]
    ends = {node for policy in policies_of(experiment) for node in named_nodes(policy)}
    lacking = next((home for home in homes if home is None or not ends <= home.distances.keys()), gpus)
    if lacking is not gpus:
        return _problem(experiment, "gpu-distance-unknown", "the firmware gives no distances from the GPUs' nodes")
    return None


def _unknown(gpus: tuple[Gpu, ...]) -> str:
    return "; ".join(f"GPU {gpu.pci}: {gpu.node_absent or 'unknown'}" for gpu in gpus if gpu.numa_node is None)


def _problem(experiment: Experiment, code: str, message: str) -> Problem:
    return Problem(code=code, message=message, who=experiment.id, status=Status.NOT_MEASURED)


def _count(number: int, noun: str) -> str:
    return f"{_number(number)} {noun}{'' if number == 1 else 's'}"


def _number(number: int) -> str:
    return ("none", "one", "two", "three", "four")[number] if number < 5 else str(number)


def _list(numbers: list[int]) -> str:
    return "no node" if not numbers else "node " + ", ".join(map(str, numbers)) + " only"

"""What an experiment needs from a machine, and the doctor's account of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_engram.doctor import WIDTH, diagnose, render
from pytest_engram.model import Claim, Experiment, Gpu, Status, Topology
from pytest_engram.needs import gate_limit, named_nodes, requirement
from pytest_engram.numa.topology import read_topology
from pytest_engram.provenance import collect

Grow = Callable[..., Path]
Make = Callable[..., Experiment]
BOTH: dict[str, str | None] = {"cpu": None, "cuda": None}
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def two_sockets(grow: Grow) -> Topology:
    """Two sockets, two memory nodes, a GPU on each."""
    return read_topology(grow("two-sockets"))


@pytest.mark.parametrize("engine", ["cpu", "cuda"])
def test_a_fitting_machine_lacks_nothing(two_sockets: Topology, make_experiment: Make, engine: str) -> None:
    """The negative control of every refusal below."""
    experiment = make_experiment()
    assert requirement(experiment, two_sockets, engine, BOTH) is None
    assert all(gate_limit(experiment, gate, two_sockets, engine) is None for gate in range(5))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one-node-recorded", "needs two memory NUMA nodes, found one"),
        ("eight-gpus", "needs two memory NUMA nodes, found one (the cpuset hides 1 more)"),
        ("memoryless-and-cxl", "bind:1 names NUMA node 1; this process can place tables on node 0, 2 only"),
    ],
)
def test_too_few_nodes_is_not_measured(grow: Grow, make_experiment: Make, name: str, message: str) -> None:
    """A1 needs two places for its table: a cpuset or a memory-less node takes one away and is named."""
    problem = requirement(make_experiment(), read_topology(grow(name)), "cpu", BOTH)
    assert problem is not None
    assert (problem.message, problem.status, problem.who) == (message, Status.NOT_MEASURED, "A1")


def test_gpu_memory_is_not_a_second_node(grow: Grow, make_experiment: Make) -> None:
    """K9: a Grace machine with one CPU node left has one memory node, whatever its GPUs hold."""
    topology = replace(read_topology(grow("grace")), mems_allowed=(0, 2, 10))
    problem = requirement(make_experiment(), topology, "cpu", BOTH)
    assert problem is not None
    assert problem.code == "too-few-memory-nodes"


def test_a_copy_per_socket_needs_sockets_not_nodes(grow: Grow, make_experiment: Make) -> None:
    """K11: two nodes of one socket are no second socket; two sockets with sub-NUMA clustering are fine."""
    experiment = make_experiment(id="A3", arms={"A": {"policy": "bind:0"}, "B": {"policy": "per-socket"}})
    clustered = read_topology(grow("two-sockets-snc2"))
    assert requirement(experiment, clustered, "cpu", BOTH) is None
    one_socket = replace(clustered, mems_allowed=(0, 1))
    problem = requirement(experiment, one_socket, "cpu", BOTH)
    assert problem is not None
    assert problem.message == "needs two sockets with their own memory, found one"


def test_a_cap_needs_a_grid(two_sockets: Topology, make_experiment: Make) -> None:
    """B2: the CPU engine has no grid to cap, also where an experiment forgets to exclude it."""
    experiment = make_experiment(id="B2", variable="cap", arms={"A": {"cap": None}, "B": {"cap": 16}})
    problem = requirement(experiment, two_sockets, "cpu", BOTH)
    assert problem is not None
    assert problem.message == "needs a GPU: the CPU engine has no grid to cap"
    assert requirement(experiment, two_sockets, "cuda", BOTH) is None


@pytest.mark.parametrize(
    ("engine", "engines", "message"),
    [
        ("cuda", {"cuda": "no torch"}, "engine-unavailable: the cuda engine is not available: no torch"),
        ("cuda", {}, "engine-unavailable: the cuda engine is not available: it was not probed"),
        ("rocm", BOTH, "engine-excluded: runs on the cpu or cuda engine, not on rocm"),
    ],
)
def test_an_engine_must_be_there(
    two_sockets: Topology, make_experiment: Make, engine: str, engines: dict[str, str | None], message: str
) -> None:
    """An engine that was not probed is not taken for available."""
    problem = requirement(make_experiment(), two_sockets, engine, engines)
    assert problem is not None
    assert f"{problem.code}: {problem.message}" == message


def test_ranks_do_not_take_turns_on_one_gpu(two_sockets: Topology, make_experiment: Make) -> None:
    """One GPU per rank, else the GPU's scheduler is measured; the CPU engine needs none."""
    alone = replace(two_sockets, gpus=two_sockets.gpus[:1])
    problem = requirement(make_experiment(), alone, "cuda", BOTH)
    assert problem is not None
    assert problem.message.startswith("needs two GPUs, one per rank, found one")
    assert requirement(make_experiment(), alone, "cpu", BOTH) is None
    assert requirement(make_experiment(ranks=1), alone, "cuda", BOTH) is None


def test_unknown_gpu_nodes_stop_the_mechanism_not_the_treatment(grow: Grow, make_experiment: Make) -> None:
    """K7: A1 on GPUs of unknown node can prove gates 0 and 1, gate 2 lacks the distances; the CPU engine has them."""
    topology = read_topology(grow("vm-unknown"))
    experiment = make_experiment()
    assert requirement(experiment, topology, "cuda", BOTH) is None
    limit = gate_limit(experiment, 2, topology, "cuda")
    assert limit is not None
    assert "needs GPU-to-NUMA-node distances: GPU 0000:00:05.0: unknown: sysfs numa_node: says -1" in limit.message
    assert gate_limit(experiment, 2, topology, "cpu") is None
    interleaved = make_experiment(id="A2", arms={"A": {"policy": "bind:0"}, "B": {"policy": "interleave"}})
    assert gate_limit(interleaved, 2, topology, "cuda") is None


def test_missing_distances_stop_the_mechanism(two_sockets: Topology, make_experiment: Make) -> None:
    """A GPU's node without a distance to the table's nodes predicts nothing."""
    near, far = two_sockets.nodes
    blind = replace(two_sockets, nodes=(replace(near, distances={0: 10}), far))
    limit = gate_limit(make_experiment(), 2, blind, "cuda")
    assert limit is not None
    assert limit.code == "gpu-distance-unknown"


def test_a_policy_by_gpu_node_needs_the_gpus_nodes(grow: Grow, make_experiment: Make) -> None:
    """per-gpu-node cannot be resolved from "unknown"."""
    experiment = make_experiment(arms={"A": {"policy": "bind:0"}, "B": {"policy": "per-gpu-node"}})
    problem = requirement(experiment, read_topology(grow("vm-unknown")), "cuda", BOTH)
    assert problem is not None
    assert problem.code == "gpu-node-unknown"


def test_without_a_load_there_is_no_goodput(two_sockets: Topology, make_experiment: Make) -> None:
    """Gate 4 needs an open-loop load; the gates before it do not."""
    experiment = make_experiment(serving=None)
    limit = gate_limit(experiment, 4, two_sockets, "cpu")
    assert limit is not None
    assert limit.code == "no-load"
    assert gate_limit(experiment, 3, two_sockets, "cpu") is None


@pytest.mark.parametrize(
    ("policy", "nodes"),
    [
        ("bind:1", (1,)), ("preferred:12", (12,)), ("interleave:0,3", (0, 3)), ("interleave", ()), ("per-socket", ()),
        ("weighted-interleave:0=3,1=1", (0, 1)), ("weighted-interleave:0:3,2:1", (0, 2)), ("default", ()),
    ],
)  # fmt: skip
def test_a_policy_names_its_nodes(policy: str, nodes: tuple[int, ...]) -> None:
    """Weights are no nodes, and a policy without numbers names none."""
    assert named_nodes(policy) == nodes


def experiments(make: Make) -> list[Experiment]:
    """One of each kind: placement, capacity, prefetch, cap."""
    shared = {"A": {"policy": "bind:0"}, "B": {"policy": "per-socket"}}
    early = {"A": {"submission": "at_consumption"}, "B": {"submission": "early"}}
    caps = {"A": {"cap": None}, "B": {"cap": 16}}
    return [
        make(),
        make(id="A3", title="one shared table against one per socket", claim=Claim.IMPROVES, arms=shared,
             requires=("A1", "B1")),
        make(id="B1", title="submit early against at consumption", claim=Claim.IMPROVES, variable="submission",
             arms=early, memory_nodes=1),
        make(id="B2", title="caps of the background grid", variable="cap", arms=caps, memory_nodes=1,
             engines=("cuda",), serving=None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cuda"),
    [
        ("one-node-recorded", "torch sees no GPU"), ("two-sockets", None), ("two-sockets-snc2", "no torch"),
        ("grace", None), ("vm-unknown", None), ("memoryless-and-cxl", None), ("eight-gpus", None),
    ],
)  # fmt: skip
def test_the_doctors_text(grow: Grow, make_experiment: Make, name: str, cuda: str | None) -> None:
    """The whole text of each machine, at most 100 columns, as a person reads it."""
    root = grow(name)
    topology, found = read_topology(root), collect(root)
    prospects = diagnose(topology, found, experiments(make_experiment), {"cpu": None, "cuda": cuda})
    text = render(topology, found, prospects)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text == (GOLDEN / f"doctor-{name}.txt").read_text()


def test_a_gate_behind_a_gap_is_out_of_reach(grow: Grow, make_experiment: Make) -> None:
    """Gate 2 cannot be decided, so 3 and 4 cannot either, although they lack nothing themselves."""
    root = grow("vm-unknown")
    (prospect,) = diagnose(read_topology(root), collect(root), [make_experiment()], BOTH)
    assert (prospect.engine, prospect.reach) == ("cuda", 1)
    assert [reason is None for reason in prospect.rungs] == [True, True, False, True, True]


def test_a_refused_experiment_has_no_rungs(grow: Grow, make_experiment: Make) -> None:
    """Every engine's refusal is kept, and nothing can be reached."""
    root = grow("one-node-recorded")
    (prospect,) = diagnose(read_topology(root), collect(root), [make_experiment()], {"cpu": None, "cuda": "no torch"})
    assert (prospect.engine, prospect.reach, prospect.rungs) == (None, None, ())
    assert prospect.refusals.keys() == {"cpu", "cuda"}


def test_many_gpus_are_not_silently_dropped(two_sockets: Topology, grow: Grow) -> None:
    """Every GPU has its lines, an unknown one says unknown."""
    lonely = replace(two_sockets, gpus=(*two_sockets.gpus, Gpu(pci="0000:ff:00.0", node_absent="unknown: silent")))
    text = render(lonely, {}, [])
    assert "GPUs: 3" in text
    assert "0000:ff:00.0  unnamed\n    near         unknown: silent" in text
    assert "unknown (not collected)" in text


def test_the_doctor_names_a_blocked_policy_call(grow: Grow) -> None:
    """K1: calls that the sandbox refuses stand there with one way out, beside those that work."""
    root, need = grow("two-sockets"), "; expected CAP_SYS_NICE. Way out: --cap-add SYS_NICE"
    calls = {"get_mempolicy": "works", **{name: f"probe: {name}: EPERM{need}" for name in ("set_mempolicy", "mbind")}}

    def told(calls: dict[str, str]) -> str:
        found = {**collect(root), "policy.calls": {"value": calls}}
        return " ".join(render(read_topology(root), found, []).split())

    assert (
        "policy calls set_mempolicy: EPERM; mbind: EPERM; need CAP_SYS_NICE. Way out: --cap-add SYS_NICE; "
        "works: get_mempolicy"
    ) in told(calls)
    assert "policy calls mbind work: a page was bound to each allowed node" in told({"mbind": "works"})
    stub = "a page bound to node 1 is answered with status 0: policy calls have no effect here"
    assert f"policy calls {stub}; works: none" in told({"mbind": stub})

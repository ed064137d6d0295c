"""The script for every GPU of a host, run without one; and what it would plan on recorded hosts with eight and two."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_engram import experiment, planning
from pytest_engram.errors import NotMeasurable
from pytest_engram.model import Experiment, Topology
from pytest_engram.numa.topology import read_topology

SCRIPT = Path(__file__).with_name("sockets_on_gpu.py")
FIXTURES = Path(__file__).parents[2] / "fixtures"
PEERS = FIXTURES / "experiments" / "peers"
BOTH_NODES = (
    ("Cpus_allowed_list:\t0-5", "Cpus_allowed_list:\t0-7"),
    ("Mems_allowed_list:\t0", "Mems_allowed_list:\t0-1"),
)
ALL = "0 1 2 3 4 5 6 7"
GOLDEN = {  # experiment -> arm -> "mode node: ranks" of each table
    "A1": {"A": [f"bind 0: {ALL}"], "B": [f"bind 1: {ALL}"]},
    "A2": {"A": [f"bind 0: {ALL}"], "B": [f"interleave 0,1: {ALL}"]},
    "A3": {"A": [f"bind 0: {ALL}"], "B": ["bind 0: 0 1 2 3", "bind 1: 4 5 6 7"]},
    "B1": {"A": [f"default : {ALL}"], "B": [f"default : {ALL}"]},
    "B2": {arm: [f"default : {ALL}"] for arm in ("A", "cap16", "cap132")},
}
Machine = Callable[..., Topology]
Records = list[dict[str, Any]]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """``machine(name, *(old, new))``: the topology of a recorded host, its process status changed by the pairs."""

    def build(name: str, *changes: tuple[str, str]) -> Topology:
        recorded, root = json.loads((FIXTURES / "topologies" / f"{name}.json").read_text()), tmp_path / name
        for old, new in changes:
            assert old in recorded["files"]["proc/self/status"]
            recorded["files"]["proc/self/status"] = recorded["files"]["proc/self/status"].replace(old, new)
        for kind, make in (("files", Path.write_text), ("links", Path.symlink_to)):
            for path, content in recorded[kind].items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                make(root / path, content)
        return read_topology(root)

    return build


HYPERTHREADS = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)


def planned(host: Topology, ranks: int) -> dict[str, Any]:
    """Experiment -> its plan with that many peers, or the code of its refusal."""
    return {one.id: plan_or_code(replace(one, ranks=ranks), host) for one in experiment.load_all(PEERS).values()}


def plan_or_code(one: Experiment, host: Topology) -> Any:
    try:
        return planning.make_plan(one, host, planning.Choices(engine="cuda", engines={"cpu": None, "cuda": None}))
    except NotMeasurable as absent:
        return absent.code


def test_eight_gpus_on_two_sockets_have_golden_plans(machine: Machine) -> None:
    """Eight ranks share one table, or one per socket with the socket's own four; every rank runs beside its GPU."""
    host = machine("eight-gpus", *BOTH_NODES)
    plans = planned(host, 8)
    assert {
        name: {
            arm: [f"{t.mode} {','.join(map(str, t.nodes))}: {' '.join(map(str, t.ranks))}" for t in placement.tables]
            for arm, placement in plan.placements.items()
        }
        for name, plan in plans.items()
    } == GOLDEN
    assert [host.node_of_cpu(cpus[0]) for cpus in plans["A3"].cpus] == [gpu.numa_node for gpu in host.gpus]
    assert {name: len(plan.schedule) for name, plan in plans.items()} == {
        "A1": 24, "A2": 24, "A3": 24, "B1": 24, "B2": 32
    }  # fmt: skip
    assert {name: plan.experiment.unit for name, plan in plans.items() if name[0] == "A"} == dict.fromkeys(
        ("A1", "A2", "A3"), "allocation"
    )


def test_a_rank_lives_beside_its_gpu_however_cpus_are_numbered(machine: Machine) -> None:
    """With hyperthreads numbered last an even split of CPUs is no split by node: each GPU's node decides."""
    host = machine("eight-gpus", *BOTH_NODES)
    low, high = (replace(node, cpus=cpus) for node, cpus in zip(host.memory_nodes, HYPERTHREADS, strict=True))
    host = replace(host, nodes=(low, high), cpus_allowed=tuple(range(16)))
    cpus = planning.rank_cpus(host, 8, "cuda")
    assert cpus == ((0, 1), (2, 3), (8, 9), (10, 11), (4, 5), (6, 7), (12, 13), (14, 15))
    assert [host.node_of_cpu(own[0]) for own in cpus] == [gpu.numa_node for gpu in host.gpus]
    assert [host.node_of_cpu(own[0]) for own in planning.rank_cpus(host, 8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    unknown = replace(host, gpus=tuple(replace(gpu, numa_node=None) for gpu in host.gpus))
    assert planning.rank_cpus(unknown, 8, "cuda") == planning.rank_cpus(unknown, 8)


@pytest.mark.parametrize(("name", "ranks"), [("eight-gpus", 8), ("two-h200-vm-recorded", 2)])
def test_one_memory_node_leaves_the_sweep_over_peers(machine: Machine, name: str, ranks: int) -> None:
    """Where a cpuset or a hypervisor shows one node, A1 to A3 say so, and B1 and B2 keep all their peers."""
    host = machine(name)
    plans = planned(host, ranks)
    assert [plans[name] for name in ("A1", "A2", "A3")] == ["too-few-memory-nodes"] * 3
    assert [len(plans[name].cpus) for name in ("B1", "B2")] == [ranks, ranks]
    assert planned(host, ranks + 1)["B1"] == "too-few-gpus"


def test_the_yamls_ask_what_the_originals_ask() -> None:
    """Arms, what is held, metrics, margins and blocks are those of the originals; shapes and ranks are not."""
    peers = experiment.load_all(PEERS)
    for name, mine in peers.items():
        original = experiment.load(PEERS.parent / ("cuda" if name[0] == "B" else ".") / f"{name}.yaml")
        assert mine.ranks == 2
        assert mine.arms.items() <= original.arms.items()
        assert question(mine) == question(original)


def question(one: Experiment) -> tuple[Any, ...]:
    """What an experiment asks and by which rules."""
    rules = (one.mechanism, one.no_offset, one.end_to_end, one.guards)
    return (
        one.claim,
        one.variable,
        one.hold,
        one.unit,
        one.blocks,
        one.alpha,
        one.aa_level,
        rules,
        one.requires,
        one.positive_control,
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_copies_are_experiments_for_any_number_of_gpus(tmp_path: Path, ranks: int) -> None:
    """Only the ranks change on GPUs; the dry run takes the CPUs' own model and load."""
    script = runpy.run_path(str(SCRIPT))
    names, originals = list(experiment.load_all(PEERS)), experiment.load_all(PEERS)
    for engine in ("cuda", "cpu"):
        options = Namespace(out=tmp_path / engine, experiments=names, ranks=ranks, engine=engine)
        made = experiment.load_all(script["copies"](options))
        assert {one.ranks for one in made.values()} == {ranks}
        for name, one in made.items():
            same = replace(one, ranks=2, source=originals[name].source) == originals[name]
            assert same == (engine == "cuda")


def called(out: Path, *options: str) -> tuple[Records, str]:
    """Records and printed text of one call that succeeded."""
    command = [sys.executable, str(SCRIPT), "--engine", "cpu", "--ranks", "2", "--rows", "20000", "--out", str(out)]
    light = {**os.environ, "PYTEST_ADDOPTS": "-p no:hypothesispytest"}  # its import takes as long as a phase
    done = subprocess.run([*command, *options], env=light, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (out / "sockets.jsonl").read_text().splitlines()], done.stdout


def phases(records: Records) -> dict[str, str]:
    return {record["phase"]: record["status"] for record in records if "phase" in record}


def test_what_cannot_be_had_here_is_said_by_its_own_code(tmp_path: Path) -> None:
    """Without a second node and a GPU nothing runs: each experiment has its reason, hypothesis 2 was not measured."""
    if len(read_topology().memory_nodes) > 1:
        pytest.skip("this machine has two memory nodes")
    records, _ = called(tmp_path, "--only", "doctor", "experiments", "gate", "--experiments", "A1", "A2", "A3", "B2")
    assert phases(records) == {"doctor": "done", "experiments": "done", "gate": "done"}
    told = {one["experiment"]: (one["status"], one["reason"]) for one in records if {"experiment", "status"} <= {*one}}
    few = ("NOT_MEASURED", "too-few-memory-nodes")
    assert told == {"A1": few, "A2": few, "A3": few, "B2": ("NOT_MEASURED", "no-grid")}
    (second,) = (record for record in records if record.get("hypothesis") == 2)
    assert (second["outcome"], second["lines"][0].split(":")[0]) == ("undecided", "not measured")
    assert (tmp_path / "doctor.txt").read_text().startswith("pytest-engram doctor")


def test_a_phase_over_its_time_ends_and_the_next_one_speaks(tmp_path: Path) -> None:
    """A call of about a second measures nothing and says so, phase by phase."""
    records, _ = called(tmp_path, "--only", "experiments", "gate", "--minutes", "0.01")
    (stopped,) = (record for record in records if record.get("phase") == "experiments")
    assert (stopped["status"], stopped["reason"].split(":")[0]) == ("NOT_MEASURED", "over-time")
    assert phases(records)["gate"] in ("done", "NOT_MEASURED"), "whether pytest came to write that nothing ran"
    assert not any("aggregate_gb_s" in record for record in records)


@pytest.mark.slow
def test_two_peers_measure_everything_that_one_node_allows(tmp_path: Path) -> None:
    """Phases, contention over 1 and 2 peers with its tail, audits at three moments on each rank, hypothesis 2."""
    pytest.importorskip("torch")
    records, printed = called(tmp_path)
    assert phases(records) == dict.fromkeys(("doctor", "nccl", "experiments", "gate"), "done"), printed
    assert {record["rank"] for record in records if "gather" in record and record["gather"]["256"]["right"]} == {0, 1}
    points = [record for record in records if "aggregate_gb_s" in record]
    assert {(point["arm"], point["peers"]) for point in points} == {("A", 1), ("A", 2), ("B", 1), ("B", 2)}
    assert all(0 < point["p50_us"] <= point["p95_us"] and point["aggregate_gb_s"] > 0 for point in points)
    (audits,) = (record["audits"] for record in records if "audits" in record)
    assert {key.split()[2] for key in audits} == {"registered", "loaded", "replayed"}
    assert (audits["rank 0 replayed"], audits["rank 1 replayed"]) == (24, 24)
    (second,) = (record for record in records if record.get("hypothesis") == 2)
    assert second["outcome"] in ("supported", "weakened", "undecided")
    assert any(re.match(r"B1: 64 tokens, 2 peers against 1: .* n = 16 runs", line) for line in second["lines"]), second
    if len(read_topology().memory_nodes) == 1:
        few = [one["reason"] for one in records if one.get("experiment") in ("A1", "A2", "A3")]
        assert few == ["too-few-memory-nodes"] * 3

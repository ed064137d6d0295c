"""From an experiment and a machine to a plan: who runs where, over which tables, in which order.  Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pytest_engram import ledger, policies, schedule
from pytest_engram.errors import NotMeasurable
from pytest_engram.experiment_rules import settings
from pytest_engram.layout import EngramLayout, head_shard
from pytest_engram.model import Experiment, PlacementPlan, Plan, Topology
from pytest_engram.needs import requirement
from pytest_engram.numa.mounts import mount_policy

DEFAULT_TABLE_BYTES = 24 << 30
MEMORY_SHARE = 8  # the default table takes at most this fraction of a node: bystanders come first


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the command line chose; everything else stands in the experiment."""

    engine: str = "cpu"
    engines: Mapping[str, str | None] = field(default_factory=dict)
    backend: str = "reference"
    candidate: str | None = None
    rows: int | str | None = None
    blocks: int | None = None
    seed: int = 20261


def make_plan(experiment: Experiment, topology: Topology, choices: Choices) -> Plan:
    """The plan for ``experiment`` here; raises ``NotMeasurable`` (named) where this machine cannot run it."""
    problem = requirement(experiment, topology, choices.engine, choices.engines)
    if problem is not None:
        raise NotMeasurable(problem.message, code=problem.code, who=experiment.id)
    if experiment.workload.tensor_parallel:
        head_shard(EngramLayout.deepseek_v41().primes[0], experiment.ranks, 0)  # refuses a rank without heads
    experiment = replace(experiment, blocks=choices.blocks or experiment.blocks)
    placements = {arm: _placement(experiment, arm, topology, choices.engine) for arm in experiment.arms}
    plan = Plan(
        experiment=experiment, schedule=schedule.make(experiment, choices.seed), seed=choices.seed, protocol_hash="",
        rows=table_rows(experiment, topology, choices.rows, copies=max(len(p.tables) for p in placements.values())),
        engine=choices.engine, backends={arm: _backend(experiment, arm, choices) for arm in experiment.arms},
        placements=placements, cpus=rank_cpus(topology, experiment.ranks, choices.engine),
    )  # fmt: skip
    return replace(plan, protocol_hash=schedule.plan_hash(plan))


def layout_for(plan: Plan) -> EngramLayout:
    """The table layout of a plan: the model's own when its full size is asked for, else scaled to ``plan.rows``."""
    full = EngramLayout.deepseek_v41()
    if plan.rows >= min(full.num_embeddings):
        return full
    return EngramLayout.for_rows(plan.rows, layers=plan.experiment.workload.engram_layers)


def step_ledger(plan: Plan, rank: int = 0, tokens: int | None = None) -> ledger.ByteLedger:
    """The bytes of one step on ``rank``: of its head shard where the ranks share the heads, else of all."""
    work, ranks = plan.experiment.workload, plan.experiment.ranks
    shards, shard = (ranks, rank) if work.tensor_parallel else (1, 0)
    return ledger.step_bytes(tokens or work.tokens, layout_for(plan), shards=shards, shard=shard, hidden=work.hidden)


def table_rows(experiment: Experiment, topology: Topology, asked: int | str | None, *, copies: int) -> int:
    """Rows per Engram layer: as asked, or 24 GiB per table where that leaves every node most of its memory."""
    layers = len(experiment.workload.engram_layers)
    asked = asked if asked is not None else experiment.workload.rows or None
    if asked == "full":
        return min(EngramLayout.deepseek_v41().num_embeddings)
    if asked is not None:
        return int(asked)
    room = min((node.available_bytes for node in topology.memory_nodes), default=0) // (MEMORY_SHARE * copies)
    budget = min(DEFAULT_TABLE_BYTES, 1 << max(room.bit_length() - 1, 20))
    return budget // (ledger.row_bytes(EngramLayout.deepseek_v41().head_dim) * layers)


def rank_cpus(topology: Topology, ranks: int, engine: str = "cpu") -> tuple[tuple[int, ...], ...]:
    """CPUs per rank: a share of its GPU's NUMA node where every GPU's is known, else one node's CPUs each where there
    are enough nodes, else an even split of the allowed."""
    allowed = topology.cpus_allowed or tuple(sorted(os.sched_getaffinity(0)))
    own = {node.id: tuple(cpu for cpu in node.cpus if cpu in allowed) for node in topology.nodes}
    near = [gpu.numa_node for gpu in topology.gpus[:ranks]] if engine == "cuda" else []
    if len(near) == ranks and all(node is not None and own.get(node) for node in near):
        shares = enumerate(node for node in near if node is not None)
        return tuple(_share(own[node], near[:rank].count(node), near.count(node)) for rank, node in shares)
    homes = list(filter(None, (own[node.id] for node in topology.memory_nodes)))
    if ranks > 1 and len(homes) >= ranks:
        return tuple(homes[:ranks])
    return tuple(_share(allowed, rank, ranks) for rank in range(ranks))


def _share(cpus: tuple[int, ...], index: int, parts: int) -> tuple[int, ...]:
    size = max(1, len(cpus) // parts)
    return cpus[(index * size) % len(cpus) :][:size]


def _placement(experiment: Experiment, arm: str, topology: Topology, engine: str) -> PlacementPlan:
    chosen, shared = settings(experiment, arm), experiment.workload.tensor_parallel
    homes = [topology.node_of_cpu(cpus[0]) for cpus in rank_cpus(topology, experiment.ranks, engine)]
    policy, backing = str(chosen["policy"]), str(chosen["backing"])
    plan = policies.resolve(policy, topology, experiment.ranks, backing=backing, rank_nodes=homes)
    if plan.notes and not (shared and len(plan.tables) == experiment.ranks):  # a split
        seen = f"ranks that share no heads would each read a whole copy; {'; '.join(plan.notes)}"
        raise NotMeasurable(seen, code="no-head-shards", who=experiment.id)
    if chosen["placement_by"] == "mount":
        mount_policy(plan)
    return plan


def _backend(experiment: Experiment, arm: str, choices: Choices) -> str:
    if experiment.variable != "backend" or arm == "A":
        return choices.backend
    if choices.candidate is None:
        raise NotMeasurable(
            "no candidate was given", code="no-candidate", who=experiment.id,
            expected="--engram-candidate NAME or pkg.mod:Class", way_out="name the backend that the patch builds",
        )  # fmt: skip
    return choices.candidate


def minimum_seconds(plan: Plan) -> float:
    """The schedule's own floor: cool-downs and the open-loop load, which no fast machine can shorten."""
    load = plan.experiment.serving
    online = load.requests / load.rate if load else 0.0
    return len(plan.schedule) * (plan.experiment.cooldown_s + online)

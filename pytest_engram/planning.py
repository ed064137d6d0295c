"""From an experiment and a machine to a plan: who runs where, over which tables, in which order.  Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_engram import gates, policies, schedule
from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.layout import EngramLayout
from pytest_engram.model import Experiment, PlacementPlan, Plan, Topology
from pytest_engram.needs import requirement

ROW_BYTES = 264
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
    deadline_s: float = 60.0


def make_plan(experiment: Experiment, topology: Topology, choices: Choices) -> Plan:
    """The plan for ``experiment`` here; raises ``NotMeasurable`` (named) where this machine cannot run it."""
    problem = requirement(experiment, topology, choices.engine, choices.engines)
    if problem is not None:
        raise NotMeasurable(problem.message, code=problem.code, who=experiment.id)
    if choices.blocks is not None:
        experiment = _with_blocks(experiment, choices.blocks)
    placements = {arm: _placement(experiment, arm, topology) for arm in experiment.arms}
    rows = table_rows(experiment, topology, choices.rows, copies=max(len(p.tables) for p in placements.values()))
    order = schedule.make(experiment, choices.seed)
    backends = {arm: _backend(experiment, arm, choices) for arm in experiment.arms}
    extra = {"rows": rows, "engine": choices.engine, "backends": backends}
    return Plan(
        experiment=experiment,
        schedule=order,
        seed=choices.seed,
        protocol_hash=gates.protocol_hash(experiment, choices.seed, extra),
        engine=choices.engine,
        backends=backends,
        placements=placements,
        cpus=rank_cpus(topology, experiment.ranks),
        rows=rows,
        deadline_s=choices.deadline_s,
    )


def layout_for(plan: Plan) -> EngramLayout:
    """The table layout of a plan: the model's own when its full size is asked for, else scaled to ``plan.rows``."""
    full = EngramLayout.deepseek_v41()
    if plan.rows >= min(full.num_embeddings):
        return full
    return EngramLayout.for_rows(plan.rows, layers=plan.experiment.workload.engram_layers)


def table_rows(experiment: Experiment, topology: Topology, asked: int | str | None, *, copies: int) -> int:
    """Rows per Engram layer: as asked, or 24 GiB per table where that leaves every node most of its memory."""
    layers = len(experiment.workload.engram_layers)
    if asked == "full":
        return min(EngramLayout.deepseek_v41().num_embeddings)
    if asked is not None:
        return int(asked)
    if experiment.workload.rows:
        return experiment.workload.rows
    room = min((node.available_bytes for node in topology.memory_nodes), default=0) // (MEMORY_SHARE * copies)
    budget = min(DEFAULT_TABLE_BYTES, 1 << max(room.bit_length() - 1, 20))
    return budget // (ROW_BYTES * layers)


def rank_cpus(topology: Topology, ranks: int) -> tuple[tuple[int, ...], ...]:
    """CPUs per rank: one NUMA node's CPUs each where there are enough nodes, else an even split of the allowed."""
    allowed = topology.cpus_allowed or tuple(sorted(os.sched_getaffinity(0)))
    homes = [tuple(c for c in node.cpus if c in allowed) for node in topology.memory_nodes]
    homes = [cpus for cpus in homes if cpus]
    if ranks > 1 and len(homes) >= ranks:
        return tuple(homes[:ranks])
    share = max(1, len(allowed) // ranks)
    return tuple(allowed[(r * share) % len(allowed) :][:share] for r in range(ranks))


def _placement(experiment: Experiment, arm: str, topology: Topology) -> PlacementPlan:
    settings = {**experiment.hold, **experiment.arms[arm]}
    homes = [topology.node_of_cpu(cpus[0]) for cpus in rank_cpus(topology, experiment.ranks)]
    return policies.resolve(
        str(settings.get("policy", "default")),
        topology,
        experiment.ranks,
        backing=str(settings.get("backing", "tmpfs")),
        rank_nodes=homes,
    )


def _backend(experiment: Experiment, arm: str, choices: Choices) -> str:
    if experiment.variable != "backend" or arm == "A":
        return choices.backend
    if choices.candidate is None:
        raise NotMeasurable(
            "no candidate was given", code="no-candidate", who=experiment.id,
            expected="--engram-candidate NAME or pkg.mod:Class", way_out="name the backend that the patch builds",
        )  # fmt: skip
    return choices.candidate


def _with_blocks(experiment: Experiment, blocks: int) -> Experiment:
    from dataclasses import replace

    if blocks < schedule.MINIMUM_BLOCKS:
        raise UsageError(
            f"{blocks} pairs", code="too-few-blocks", where="--engram-pairs",
            expected=f"at least {schedule.MINIMUM_BLOCKS}: with fewer no signed-rank test can reach 2.5 %",
        )  # fmt: skip
    return replace(experiment, blocks=blocks)


def minimum_seconds(plan: Plan) -> float:
    """The schedule's own floor: cool-downs and the open-loop load, which no fast machine can shorten."""
    load = plan.experiment.serving
    online = load.requests / load.rate if load else 0.0
    return len(plan.schedule) * (plan.experiment.cooldown_s + online)

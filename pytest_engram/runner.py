"""The one runner: a plan in, evidence out.  Everything else (pytest, another interpreter, a guest) launches it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_engram import codec
from pytest_engram.engines import engine_class
from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.gpu.nvml import gpu_sources
from pytest_engram.model import Evidence, Plan, Problem, RunRecord, ScheduledRun, Status
from pytest_engram.numa.topology import read_topology
from pytest_engram.numa.world import RankSpec, run_world
from pytest_engram.provenance import collect

PEER = "pytest_engram.peer:main"
CONTROL_RUNS = 12
_STOPPED = Problem(
    code="stopped-after-correctness", message="an earlier run gave wrong rows", status=Status.BLOCKED
)  # a peer ends its world there
Progress = Callable[[str, Any], None]
Launch = Callable[..., Any]  # as run_world


def run(plan: Plan, *, progress: Progress | None = None, launch: Launch = run_world) -> Evidence:
    """Run every scheduled run of ``plan`` in worlds of peer processes; a failed world leaves problems, not gaps.

    ``progress`` receives ("pages", (done, total)) and ("run", RunRecord) events.  ``launch`` starts
    the worlds: ``partial(run_world, python=…)`` in another interpreter, ``engines.torchrun`` in ranks that exist.
    """
    tell = progress or (lambda _kind, _value: None)
    user = {f"user.{name}": {"value": text} for name, text in plan.user.items()}
    topology = codec.to_builtins(read_topology(gpu_sources=gpu_sources()))
    provenance = {**collect(), **user, "topology": {"value": topology}}
    records: list[RunRecord] = []
    problems: list[Problem] = []
    ended: Problem | None = None
    for world in _worlds(plan):
        done, problem = ([], None) if ended else _run_world(plan, world, tell, launch)
        records += done
        problems += [problem] if problem else []
        ended = ended or (None if all(record.correct for record in done) else _STOPPED)
        records += [_lost(run, ended or problem or _STOPPED) for run in world[len(done) :]]
    control = _control(plan, tell, launch) if plan.experiment.positive_control and not problems else ()
    return Evidence(
        plan=plan, runs=tuple(records), provenance=provenance, problems=tuple(problems), control=tuple(control)
    )


def pilot(plan: Plan, runs: int) -> Evidence:
    """Base-arm runs only, before anything is judged: their noise and duration feed the plan's estimates."""
    order = tuple(ScheduledRun(index=i, block=i // 2, arm="A" if i % 2 == 0 else "A'") for i in range(runs))
    quiet = replace(plan, schedule=order, experiment=replace(plan.experiment, positive_control=False))
    return run(quiet)


def _worlds(plan: Plan) -> Iterator[tuple[ScheduledRun, ...]]:
    """One world per run where placement is the change (a fresh allocation each), one for all otherwise."""
    if plan.experiment.unit == "allocation":
        yield from ((run,) for run in plan.schedule)
    else:
        yield plan.schedule


def _run_world(
    plan: Plan, runs: tuple[ScheduledRun, ...], tell: Progress, launch: Launch
) -> tuple[list[RunRecord], Problem | None]:
    done: list[RunRecord] = []

    def on_event(_rank: int, event: Any) -> None:
        kind, value = event["kind"], event["value"]
        if kind == "run":
            value = codec.from_builtins(value, RunRecord, source="a peer's record")
            done.append(value)
        tell(kind, value)

    payload = {"plan": codec.to_builtins(plan), "runs": [codec.to_builtins(run) for run in runs]}
    threads = engine_class(plan.engine).threads_env
    ranks = [RankSpec(cpus=cpus, env=threads(cpus)) for cpus in plan.cpus]
    try:
        launch(PEER, payload, ranks, deadline_s=plan.deadline_s, on_event=on_event)
    except EngramError as error:
        absent = any(isinstance(one, NotMeasurable) for one in (error, error.__cause__))  # a rank's own is the cause
        status = Status.NOT_MEASURED if absent else Status.INVALID
        who, where = error.who or "", error.where or ""
        return done, Problem(code=error.code, message=str(error), who=who, where=where, status=status)
    return done, None


def _lost(run: ScheduledRun, problem: Problem) -> RunRecord:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return RunRecord(
        index=run.index, block=run.block, arm=run.arm, started_at=now, seconds=0.0, fingerprint={}, problems=(problem,)
    )


def _control(plan: Plan, tell: Progress, launch: Launch) -> list[RunRecord]:
    """The positive control: rank 0 alone, its table on its own node and then on the other, in alternation."""
    nodes = sorted({node for placement in plan.placements.values() for t in placement.tables for node in t.nodes})
    if len(nodes) < 2:
        return []
    placements = {
        f"control-{node}": replace(
            plan.placements["A"],
            policy=f"bind:{node}",
            tables=(replace(plan.placements["A"].tables[0], ranks=(0,), mode="bind", nodes=(node,), weights=()),),
        )
        for node in nodes[:2]
    }
    arms = {name: {"policy": placement.policy} for name, placement in placements.items()}
    order = tuple(
        ScheduledRun(index=i, block=i // 2, arm=f"control-{nodes[(i + i // 2) % 2]}") for i in range(CONTROL_RUNS)
    )
    hold = {**plan.experiment.hold, "placement_by": "order"}  # an engine that is asked for near and far need not obey
    experiment = replace(plan.experiment, arms=arms, hold=hold, serving=None, positive_control=False, ranks=1)
    backends = dict.fromkeys(arms, plan.backends["A"])
    alone = replace(
        plan, experiment=experiment, placements=placements, backends=backends, schedule=order, cpus=plan.cpus[:1]
    )
    return [record for world in _worlds(alone) for record in _run_world(alone, world, tell, launch)[0]]


def main(argv: list[str] | None = None, *, launch: Launch = run_world) -> int:
    """``python -m pytest_engram.runner PLAN.json EVIDENCE.json``: how another interpreter or kernel is driven."""
    plan_path, evidence_path = (Path(name) for name in (argv or sys.argv[1:]))
    plan = codec.decode(plan_path.read_bytes(), Plan, source=str(plan_path))
    codec.write_atomic(evidence_path, codec.encode(run(plan, launch=launch)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What an experiment will cost and can resolve, said before anything is measured (``pytest-engram plan``)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from pytest_engram import metrics, planning, runner, session, stats
from pytest_engram.engines.tables import table_bytes
from pytest_engram.errors import NotMeasurable
from pytest_engram.experiment_rules import RULE_LISTS
from pytest_engram.model import Evidence, Plan

GIB = 1 << 30


def lines(arguments: Any) -> Iterator[str]:
    """One paragraph per experiment: allocations, bytes, minutes, detectable effect, or why it cannot run here."""
    here = session.Session(lambda option: getattr(arguments, option.removeprefix("--engram-")))
    known, choices = here.experiments, here.choices
    session.check_ids(arguments.experiment, known)
    for name in arguments.experiment or known:
        yield f"{name}  {known[name].title}"
        try:
            plan = planning.make_plan(known[name], here.topology, choices)
        except NotMeasurable as absent:
            yield f"    cannot run here: {absent.seen}"
            continue
        yield from _costs(plan)
        if arguments.pilot:
            yield from _resolution(plan, runner.pilot(plan, arguments.pilot))


def _costs(plan: Plan) -> Iterator[str]:
    size = table_bytes(planning.layout_for(plan))
    copies = max(len(placement.tables) for placement in plan.placements.values())
    worlds = len(plan.schedule) if plan.experiment.unit == "allocation" else 1
    yield f"    protocol   {plan.protocol_hash[:16]}, seed {plan.seed}, {plan.engine} engine, {len(plan.cpus)} rank(s)"
    yield f"    tables     {copies} × {size / GIB:.2f} GiB ({plan.rows:,} rows per layer), allocated {worlds} time(s)"
    yield f"    runs       {len(plan.schedule)} in {plan.experiment.blocks} blocks"
    yield f"    time       at least {planning.minimum_seconds(plan) / 60:.1f} min by its own schedule"


def _resolution(plan: Plan, pilot: Evidence) -> Iterator[str]:
    runs = [run for run in pilot.runs if not run.problems]
    if len(runs) < 4:
        lost = pilot.problems[0].message if pilot.problems else "fewer than four pilot runs"
        yield f"    pilot      no estimate: {lost}"
        return
    seconds = sum(run.seconds for run in runs) / len(runs) + plan.experiment.cooldown_s
    minutes = seconds * len(plan.schedule) / 60
    yield f"    pilot      {len(runs)} runs of arm A, {seconds:.1f} s each: about {minutes:.1f} min"
    rules = [rule for name in RULE_LISTS for rule in getattr(plan.experiment, name)]
    for metric in dict.fromkeys(rule.metric for rule in rules):
        known = [value for run in runs if (value := metrics.value(run, metric) or 0.0) > 0]
        if len(known) < len(runs):
            yield f"    {metric:18} no estimate: absent or zero in the pilot"
            continue
        noise = statistics.stdev(map(math.log, known))
        effect = stats.detectable_effect(noise, plan.experiment.blocks)
        yield f"    {metric:18} noise {noise:6.2%} per run: detects {effect:+.1%} with {plan.experiment.blocks} blocks"

"""A laboratory of synthetic evidence: chosen effects and noise, whole and sound unless a test breaks it."""

import functools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_engram import codec, experiment, experiment_rules, gates, schedule
from pytest_engram.model import (
    ComputeSample,
    CorrectnessSample,
    Evidence,
    LookupMark,
    MetricRule,
    Moment,
    NumaNode,
    OverlapSample,
    PageDistribution,
    PlacementPlan,
    PlacementSample,
    Plan,
    RequestRecord,
    RunRecord,
    ScheduledRun,
    ServingSample,
    Slo,
    Span,
    Status,
    TablePlan,
    Timeline,
    Topology,
)

EXPERIMENTS = Path(__file__).resolve().parents[2] / "fixtures" / "experiments"
BASE = {
    "lookup": 1e6, "exposed_wait": 4e5, "main_compute": 1e7, "goodput": 50.0, "ttft": 20.0, "itl": 5.0,
    "rejected": 0.0, "communication": 1e6,
}  # fmt: skip
GAIN = {"lookup": -0.3, "exposed_wait": -0.5, "goodput": 0.2}  # log effects of a change that works
PAGE, PAGES = 4096, 10_000


TAILS = ("ttft_p95", "ttft_p99", "itl_p95", "itl_p99")


def rule(metric, direction, margin):
    """One tested metric."""
    return MetricRule(metric=metric, direction=direction, margin=margin)


def shares_of(table):
    """NUMA node -> pages that a table plan asks for, over two nodes."""
    nodes = table.nodes or (0,)
    return {node: PAGES // len(nodes) for node in nodes}


@functools.cache
def loaded(name):
    """One of the suite's own experiments."""
    return experiment.load(EXPERIMENTS / f"{name}.yaml")


class Lab:
    """Builds evidence of the suite's own experiments; every number is seeded, what was built once is kept."""

    def __init__(self):
        self._kept = {}

    def experiment(self, name, requests=120, steps=1, **changes):
        """The suite's own experiment with numbers of this laboratory, so that tuning a YAML breaks no test."""
        original = loaded(name)
        peers = (rule("communication", "down", 0.02),) if original.ranks > 1 else ()
        fixed = {
            "blocks": 9 if name == "B2" else 8, "alpha": 0.025, "aa_level": 0.01,
            "no_offset": (rule("main_compute", "down", 0.05), *peers), "end_to_end": (rule("goodput", "up", 0.0),),
            "guards": (rule("rejection_rate", "down", 0.01), *(rule(tail, "down", 0.02) for tail in TAILS)),
        }  # fmt: skip
        if original.serving is None:  # what engines do today: no load, so nothing of a server to compare
            fixed |= {"end_to_end": (), "guards": ()}
        chosen = replace(original, **{**fixed, **changes})
        work = replace(chosen.workload, tokens=64, engram_layers=(1, 6), steps=steps)
        load = chosen.serving and replace(
            chosen.serving, rate=60.0, requests=requests, slo=Slo(ttft_ms=1e3, itl_ms=1e3)
        )
        return replace(chosen, workload=work, serving=load)

    def topology(self):
        nodes = tuple(
            NumaNode(id=n, cpus=(2 * n, 2 * n + 1), memory_bytes=1 << 34, free_bytes=1 << 33, reclaimable_bytes=0,
                     distances={n: 10, 1 - n: 21})
            for n in (0, 1)
        )  # fmt: skip
        return Topology(nodes=nodes, sockets={0: (0, 1), 1: (2, 3)})

    def placement(self, chosen, arm):
        policy = str(experiment_rules.settings(chosen, arm)["policy"])
        ranks = tuple(range(chosen.ranks))
        if policy == "per-socket":
            tables = tuple(TablePlan(ranks=(rank,), mode="bind", nodes=(rank,)) for rank in ranks)
        elif policy == "interleave":
            tables = (TablePlan(ranks=ranks, mode="interleave", nodes=(0, 1)),)
        elif policy.startswith("bind:"):
            tables = (TablePlan(ranks=ranks, mode="bind", nodes=(int(policy[-1]),)),)
        else:
            tables = (TablePlan(ranks=ranks, mode="default"),)
        return PlacementPlan(policy=policy, backing="tmpfs", tables=tables)

    def plan(self, chosen, seed=7, engine="cpu"):
        placements = {arm: self.placement(chosen, arm) for arm in chosen.arms}
        plan = Plan(
            experiment=chosen, schedule=schedule.make(chosen, seed), seed=seed, protocol_hash="", engine=engine,
            backends=dict.fromkeys(chosen.arms, "reference"), placements=placements,
            cpus=tuple((2 * rank, 2 * rank + 1) for rank in range(chosen.ranks)), rows=1000,
        )  # fmt: skip
        return replace(plan, protocol_hash=gates.plan_hash(plan))

    def evidence(self, name="B1", **asked):
        """See :meth:`_evidence`; nobody may change it in place."""
        if "seed" in asked:  # one of many
            return self._evidence(name, **asked)
        key = repr((name, sorted(asked.items())))
        if key not in self._kept:
            self._kept[key] = self._evidence(name, **asked)
        return self._kept[key]

    def _evidence(self, name, *, effects=None, noise=0.003, seed=11, engine="cpu", by_rank=None, **changes):
        """``effects``: arm -> metric -> log effect (default: a change that works in every candidate);
        ``by_rank``: arm -> rank -> log effect on that rank's lookups."""
        chosen = self.experiment(name, **changes)
        plan = self.plan(chosen, engine=engine)
        effects = {arm: dict(GAIN) for arm in chosen.arms if arm != "A"} if effects is None else effects
        rng = np.random.default_rng(seed)
        runs = tuple(
            self._run(plan, run, rng, effects=effects, by_rank=by_rank or {}, noise=noise) for run in plan.schedule
        )
        control = self._control(plan, rng) if chosen.positive_control else ()
        return Evidence(plan=plan, runs=runs, provenance=self.provenance(self.topology()), control=control)

    def provenance(self, machine):
        """A machine as the runner records it."""
        return {"topology": {"value": codec.to_builtins(machine)}}

    def _control(self, plan, rng, ratio=0.3):
        cells = [ScheduledRun(index=i, block=i // 2, arm=f"control-{i % 2}") for i in range(12)]
        values = {"control-0": 1e6, "control-1": 1e6 * math.exp(ratio)}
        return tuple(
            RunRecord(
                index=cell.index, block=cell.block, arm=cell.arm, started_at=_stamp(cell.index), seconds=1.0,
                fingerprint={},
                overlap=(overlap(plan, "A", 0, values[cell.arm] * math.exp(0.01 * rng.standard_normal()), 1e5),),
            )
            for cell in cells
        )  # fmt: skip

    def _run(self, plan, cell, rng, *, effects, by_rank, noise):
        arm = schedule.base_arm(cell.arm)
        shift = effects.get(arm, {}) if cell.arm == arm else {}
        value = {
            name: base * math.exp(shift.get(name, 0.0) + noise * rng.standard_normal()) for name, base in BASE.items()
        }
        value["rejected"] = shift.get("rejected", 0)
        step, main = int(1.2e7 * math.exp(shift.get("step", 0.0))), int(value["main_compute"])
        steps = plan.experiment.workload.steps
        ranks = range(plan.experiment.ranks)
        ranked = by_rank.get(arm, {}) if cell.arm == arm else {}
        return RunRecord(
            index=cell.index, block=cell.block, arm=cell.arm, started_at=_stamp(cell.index), seconds=3.0,
            fingerprint=self.fingerprint(plan, arm),
            correctness_before=self.cases() * len(ranks), correctness_after=self.cases() * len(ranks),
            placement=tuple(self.audits(plan, arm, rank) for rank in ranks),
            overlap=tuple(
                overlap(plan, arm, rank, value["lookup"] * math.exp(ranked.get(rank, 0.0)), value["exposed_wait"])
                for rank in ranks
            ),
            compute=tuple(
                ComputeSample(rank=rank, tokens=64, step_ns=(step,) * steps, main_ns=(main,) * steps) for rank in ranks
            ),
            serving=tuple(serving(rank, value, plan.experiment.serving) for rank in ranks if plan.experiment.serving),
            drift={"cpu_mhz": 3000.0, "load_1min": 1.0,
                   "graph_replays": 24.0 * experiment_rules.settings(plan.experiment, arm)["graph"]},
        )  # fmt: skip

    def fingerprint(self, plan, arm):
        chosen = experiment_rules.settings(plan.experiment, arm)
        steps = {name: str(chosen[name]) for name in ("submission", "cap", "wait", "inline_above", "streams", "graph")}
        return {
            "machine.kernel": "6.12", "backend.commit": str(chosen.get("backend", "c0ffee")),
            "groups": str([table.ranks for table in plan.placements[arm].tables]), "policy": str(chosen.get("policy")),
            **steps, "protocol": plan.protocol_hash,
        }  # fmt: skip

    def cases(self):
        names = (
            ("engine", "L1"), ("engine-edges", "L1"), ("padding", "H9"), ("dead-id", "L3"), ("shared-bytes", "S6"),
            ("prefix-hit", "H12"),
        )  # fmt: skip
        sound = tuple(CorrectnessSample(case=case, contract=contract, passed=True) for case, contract in names)
        return (*sound, CorrectnessSample(case="replay", contract="P5", passed=False, supported=False))

    def audits(self, plan, arm, rank):
        found = tuple(
            PageDistribution(
                rank=rank, moment=moment, table=number, identity=f"0:{number + 40}", address=0x1000,
                table_bytes=PAGE * PAGES, page_bytes=PAGE, pages=shares_of(table), unplaced={},
                covered_bytes=PAGE * PAGES, policy_text="bind:0", routes=("move_pages", "numa_maps"),
            )
            for number, table in enumerate(plan.placements[arm].tables)
            if rank in table.ranks
            for moment in Moment
        )  # fmt: skip
        return PlacementSample(rank=rank, distributions=found)


def _stamp(index):
    return f"2026-11-20T10:{index // 60:02}:{index % 60:02}Z"


def overlap(plan, arm, rank, lookup, exposed):
    """One marked step whose two lookups take ``lookup`` ns and whose first consumer waits ``exposed`` ns more."""
    settings = experiment_rules.settings(plan.experiment, arm)
    early = settings["submission"] == "early" and (settings["inline_above"] or 64) >= 64
    length, wait = int(lookup), min(int(exposed), int(lookup))
    grid = min(96, settings["cap"] or 66)
    marks, spans = [], []
    if early:
        submits, starts = (1000, 1001), (1001, 1001 + length * (2 - settings["streams"]))
    else:
        submits = starts = (2000, 2000 + 3 * length)
    for number, layer in enumerate((1, 6)):
        done = starts[number] + length
        before = done - wait if number == 0 else done
        marks.append(
            LookupMark(layer=layer, hash_ready=900, submit=submits[number], start=starts[number], done=done,
                       wait_before=before, rows=1536, tiles=96, grid=grid,
                       wait_after=starts[1] + length if early and settings["wait"] == "stream" else done)
        )  # fmt: skip
    spans.append(Span(name="compute", layer=0, start=1100 if early else 1000, end=1200 if early else 1900))
    spans.append(Span(name="compute", layer=1, start=marks[0].done, end=marks[0].done + 50))
    line = Timeline(rank=rank, step=0, begin=0, end=10 * length, tokens=64, lookups=tuple(marks), spans=tuple(spans))
    lines = tuple(replace(line, step=step) for step in range(plan.experiment.workload.steps))
    return OverlapSample(
        rank=rank, state=plan.experiment.workload.reuse, timelines=lines, resolution_ns=50, source_bytes=811_008,
        staging_bytes=1,
    )  # fmt: skip


def serving(rank, value, load):
    """The planned requests; those that were not rejected meet the limits, over a duration that gives the goodput."""
    planned = load.requests
    served = planned - int(value["rejected"])
    requests = [
        RequestRecord(arrival_ms=float(number), prompt_tokens=8, output_tokens=4, status="ok",
                      ttft_ms=value["ttft"] * (0.5 + number / planned), itl_ms=(value["itl"],) * 3)
        for number in range(served)
    ]  # fmt: skip
    requests += [
        RequestRecord(arrival_ms=float(number), prompt_tokens=8, output_tokens=0, status="rejected")
        for number in range(served, planned)
    ]
    duration = served / value["goodput"] if value["goodput"] > 0 else 2.0
    return ServingSample(rank=rank, slo=load.slo, rate=load.rate, duration_s=duration, requests=tuple(requests))


def change_runs(evidence, change, where=None):
    """The evidence with ``change(run)`` in place of every run for which ``where`` holds, by default all."""
    return replace(evidence, runs=tuple(change(run) if where is None or where(run) else run for run in evidence.runs))


@pytest.fixture(scope="session")
def lab():
    """The laboratory."""
    return Lab()


@pytest.fixture(scope="session")
def change():
    """See :func:`change_runs`."""
    return change_runs


@pytest.fixture
def reached(lab):
    """A check that the evidence which ``build(lab, change)`` gives stops at its gate, with its reason and a way out."""

    def check(code, gate, build):
        verdict = gates.evaluate(build(lab, change_runs))
        result = verdict.gates[gate]
        assert (result.reason, result.status) == (code, gates.REASONS[code][0])
        before = [earlier for earlier in verdict.gates[:gate] if earlier.judged]
        assert code == "earlier-gate" or all(earlier.status is Status.PASS for earlier in before)
        if result.judged and result.status is not Status.PASS and code != "earlier-gate":
            assert verdict.status is result.status
            assert all(later.reason == "earlier-gate" for later in verdict.gates[gate + 1 :])
        if result.status is not Status.PASS:
            assert result.next_step

    return check

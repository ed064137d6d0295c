"""What a rank records beside the judged steps: other sizes, idle peers, shared heads, absent counters."""

import functools
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from pytest_engram import codec, experiment, ledger, planning, runner
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.errors import NotMeasurable, PeerError, UsageError
from pytest_engram.gates.comparison import Case
from pytest_engram.gates.treatment import treatment
from pytest_engram.hashing import hash_ids, synthetic_token_map
from pytest_engram.model import Evidence, RunRecord, Status
from pytest_engram.numa.group import SoloGroup
from pytest_engram.peer import Peer
from pytest_engram.planning import step_ledger
from pytest_engram.replay import VOCABULARY
from pytest_engram.serving.replay import fixed_batches
from pytest_engram.session import this_machine

FOLDER = Path(__file__).parents[2] / "fixtures/experiments"
ROWS = 5000


def plan_of(name, *, runs, **changes):
    """The shortest plan of one of the suite's experiments: its first ``runs`` runs over a small table."""
    chosen = experiment.load(FOLDER / f"{name}.yaml")
    work = replace(chosen.workload, hidden=64, layers=8, steps=2, warmup=1, **changes.pop("workload", {}))
    chosen = replace(chosen, serving=None, cooldown_s=0.0, workload=work, **changes)
    plan = planning.make_plan(chosen, this_machine(), planning.Choices(engine="cpu", rows=ROWS))
    return replace(plan, schedule=plan.schedule[:runs])


def run_here(plan):
    """The records of a one-rank plan, made in this process."""
    records = []
    peer = Peer(SoloGroup(lambda event: records.append(event["value"])), plan, "A")
    try:
        for run in plan.schedule:
            peer.perform(run)
    finally:
        peer.close()
    return [codec.from_builtins(record, RunRecord) for record in records[-len(plan.schedule) :]]


@pytest.fixture(scope="module")
def alone():
    """Two runs of B1 on one rank."""
    return run_here(plan_of("B1", runs=3))


def test_every_size_has_its_steps(alone):
    """A run has one point per size: five steps of each kind, its bytes, and the last marked step."""
    for run in alone:
        assert [(point.tokens, point.peers) for point in run.sweep] == [(1, 1), (16, 1)]
        for point in run.sweep:
            series = point.lookup_ns, point.exposed_ns, point.main_ns, point.quiet_main_ns
            assert [len(one) for one in series] == [5] * 4
            assert point.timeline.tokens == point.tokens
            assert point.source_bytes == point.tokens * 12_672


def test_quiet_steps_are_the_run_s_own_where_lookups_are_at_consumers(alone):
    """Nothing is beside the main compute there, so the same steps serve; an early arm measures its own."""
    quiet = {run.arm: all(point.quiet_main_ns == point.main_ns for point in run.sweep) for run in alone}
    assert quiet == {"A": True, "A'": True, "B": False}


def test_lookups_are_timed_alone_and_distinct_rows_counted(alone):
    """Some batches run without main compute; rows that a small table's ids repeat count once."""
    for sample in (run.overlap[0] for run in alone):
        assert len(sample.alone_ns) == 4
        assert min(sample.alone_ns) > 0
        assert 0 < sample.distinct_bytes < sample.source_bytes == 64 * 12_672


def test_distinct_rows_are_those_of_the_marked_steps(alone, monkeypatch):
    """The share of distinct rows is over the marked steps alone, which come after the warm-up."""
    plan = plan_of("B1", runs=1)
    work, asked = plan.experiment.workload, []
    monkeypatch.setattr(ledger, "distinct_share", lambda steps: asked.append(list(steps)) or 0.5)
    (run,) = run_here(plan)
    (steps,) = asked
    batches = [*islice(fixed_batches(work, plan.seed, VOCABULARY, work.reuse), work.warmup + work.steps)]
    layout = planning.layout_for(plan)
    wanted = [hash_ids(layout, one, synthetic_token_map(layout.compressed_vocab, VOCABULARY)) for one in batches]
    assert [one.tolist() for one in steps] == [one.tolist() for one in wanted[work.warmup :]]
    assert run.overlap[0].distinct_bytes == run.overlap[0].source_bytes // 2


def test_a_counter_is_a_number_or_a_reason(monkeypatch):
    """What cannot be read is recorded with its reason, apart from what was; the socket link's is the rank's own."""
    monkeypatch.setattr(CpuEngine, "drift", lambda _self: {"cpu_mhz": 2000.0, "pcie_rx_kb_per_s": "not supported"})
    (run,) = run_here(plan_of("B1", runs=1))
    assert (run.drift["cpu_mhz"], run.drift_absent["pcie_rx_kb_per_s"]) == (2000.0, "not supported")
    assert len([key for key in run.drift | run.drift_absent if key.startswith("cross_socket_in_bytes")]) >= 1
    assert not run.drift.keys() & run.drift_absent.keys()


@pytest.mark.parametrize("name", ["B1-inline", "B1-wait", "B1-streams", "B1-repeated"])
def test_what_engines_do_today_runs_on_a_cpu(name):
    """Each further experiment runs as its YAML says: rows right, settings in the fingerprint, gate 1 has a word."""
    plan = plan_of(f"more/{name}", runs=3)
    runs = run_here(plan)
    assert all(run.correct for run in runs)
    variable = plan.experiment.variable
    for run in runs:
        arm = plan.experiment.arms["A" if run.arm == "A'" else run.arm]
        assert run.fingerprint[variable] == str(arm[variable])
    found = next(treatment(Case(Evidence(plan=plan, runs=tuple(runs), provenance={}))))
    assert found.reason in ("treatment-delivered", "no-treatment"), found


def test_an_absence_in_a_rank_is_no_error():
    """What a rank finds that this machine lacks is NOT_MEASURED; any other error of a rank is INVALID."""
    plan = plan_of("B1", runs=1)
    for error, status in ((NotMeasurable("no torch", code="no-torch"), Status.NOT_MEASURED),
                          (PeerError("a rank died", code="rank-died"), Status.INVALID)):  # fmt: skip

        def lose(*_given, error=error, **_fields):
            raise error

        evidence = runner.run(plan, launch=lose)
        assert [problem.status for problem in (*evidence.problems, *evidence.runs[0].problems)] == [status] * 2


def test_a_graph_needs_a_gpu():
    """Replayed graphs are NOT_MEASURED on the CPU engine, with the reason."""
    with pytest.raises(NotMeasurable, match="no graph to replay"):
        plan_of("cuda/B1-graph", runs=1, engines=("cpu", "cuda"))


def test_idle_peers_leave_one_rank_at_work():
    """Two replicas: at every size rank 0 alone, then both over batches of their own; a rank's counters kept apart."""
    plan = plan_of("B1", runs=1, ranks=2, workload={"sizes": (4,)})
    evidence = runner.run(plan)
    assert evidence.problems == ()
    (run,) = evidence.runs
    points = sorted((point.tokens, point.peers, point.rank) for point in run.sweep)
    assert points == [(tokens, *who) for tokens in (4, 64) for who in ((1, 0), (2, 0), (2, 1))]
    assert "rank1.load_1min" in run.drift
    assert [sample.communication_absent for sample in run.compute] == ["the ranks share no heads"] * 2


SHARED = {"ranks": 2, "variable": "policy", "unit": "allocation", "workload": {"tensor_parallel": True, "sizes": (4,)}}


def test_ranks_that_share_heads_gather_them():
    """A whole table and one split by heads give the same right rows; each step's collectives have their time."""
    pytest.importorskip("torch")
    arms = {"A": {"policy": "default"}, "B": {"policy": "split"}}
    plan = plan_of("B1", runs=3, arms=arms, hold={"backing": "memfd"}, **SHARED)
    plan = replace(plan, schedule=tuple(run for run in plan.schedule if run.arm != "A'"))
    evidence = runner.run(plan)
    assert evidence.problems == ()
    sizes = {}
    for run in evidence.runs:
        assert run.correct
        assert [len(sample.communication_ns) for sample in run.compute] == [2, 2]
        assert {(point.peers, point.tokens) for point in run.sweep} == {(2, 4)}
        sizes[run.arm] = [sample.distributions[-1].table_bytes for sample in run.placement]
    whole, parts = sizes["A"], sizes["B"]
    assert whole[0] == whole[1]
    assert sum(parts) == pytest.approx(whole[0], rel=0.02)
    prints = [{k: v for k, v in run.fingerprint.items() if k.startswith("table.")} for run in evidence.runs]
    assert all(one == prints[0] for one in prints)
    assert step_ledger(plan, 1).collectives == 2


@pytest.mark.parametrize(
    ("policy", "shared", "says"),
    [("split", False, "share no heads"), ("split:1", True, "share no heads"), ("split", True, None)],
)
def test_a_split_needs_ranks_that_share_the_heads(policy, shared, says):
    """A split is NOT_MEASURED where each rank would read a whole copy, or where ranks share a shard."""
    arms = {"A": {"policy": "default"}, "B": {"policy": policy}}
    work = {**SHARED, "workload": {"tensor_parallel": shared}}
    make = functools.partial(plan_of, "B1", runs=1, arms=arms, hold={}, **work)
    if says is None:
        assert len(make().placements["B"].tables) == 2
        return
    with pytest.raises(NotMeasurable, match=says) as refused:
        make()
    assert refused.value.code == "no-head-shards"


def test_ranks_without_heads_are_refused_before_anything_is_allocated():
    """24 heads over 7 ranks leave the last without one: the plan says so; 5 ranks get five heads each, 5 of 4."""
    shared = {**SHARED, "workload": {"tensor_parallel": True}, "runs": 1, "hold": {}, "arms": {"A": {}, "B": {}}}
    with pytest.raises(UsageError, match="24 heads over 7 shards") as refused:
        plan_of("B1", **{**shared, "ranks": 7})
    assert refused.value.code == "shard-without-heads"
    assert plan_of("B1", **{**shared, "ranks": 5}).experiment.ranks == 5
    assert plan_of("B1", **{**shared, "ranks": 7, "workload": {}}).experiment.ranks == 7

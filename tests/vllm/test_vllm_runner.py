"""The real vLLM through the one runner and the gates: its own tables, its own kernels, stock against patched."""

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_engram import experiment, gates, planning, runner
from pytest_engram.backends.vllm_source import PINNED
from pytest_engram.gates.comparison import Case
from pytest_engram.gates.timing import validity
from pytest_engram.model import Status
from pytest_engram.session import this_machine

PATCH = Path(__file__).parents[2] / "fixtures" / "experiments" / "more" / "placement-patch.yaml"
CANDIDATE = "pytest_engram.backends.vllm_patch:PatchedVllmBackend"


@pytest.mark.slow
def test_stock_against_patched_allocation_is_judged(vllm_backend, vllm_version):
    """Engine modules on both arms, each with its own ``DPSharedEngramStorage``: audited, correct, and told apart."""
    if not vllm_backend.interpreted or vllm_version != PINNED:
        pytest.skip("the patched backend is of the pinned release; on a GPU machine the ranks would share one GPU")
    node = this_machine().memory_nodes[0].id
    chosen = experiment.load(PATCH)
    work = replace(chosen.workload, hidden=64, layers=8, engram_layers=(1, 6), tokens=12, steps=2, warmup=1)
    chosen = replace(
        chosen, workload=work, serving=None, end_to_end=(), guards=(), blocks=1, cooldown_s=0.0, memory_nodes=1,
        hold={**chosen.hold, "policy": f"bind:{node}"},
    )  # fmt: skip
    choices = planning.Choices(engine="cpu", rows=20_000, backend=f"vllm@{PINNED}", candidate=CANDIDATE)
    before = set(Path("/dev/shm").glob("vllm_engram_*"))
    evidence = runner.run(planning.make_plan(chosen, this_machine(), choices))
    assert set(Path("/dev/shm").glob("vllm_engram_*")) == before
    assert evidence.problems == ()
    for run in evidence.runs:
        assert run.correct
        assert [[receipt.step for receipt in one.receipts] for one in run.startup] == [["allocate", "load"]] * 2
        audits = [audit for one in run.placement for audit in one.distributions]
        assert len({audit.identity for audit in audits}) == 1, "one object for both ranks"
        wanted = f"bind:{node}" if run.arm == "B" else "default"
        assert {audit.policy_text for audit in audits} == {wanted}, "the patch set a policy, stock code none"
    verdict = gates.evaluate(evidence)
    assert verdict.subject == "engine modules"
    assert (verdict.gates[0].status, verdict.gates[0].observed) == (Status.PASS, "252 cases passed in 3 arms")
    if len(this_machine().memory_nodes) == 1:
        assert verdict.gates[1].reason == "no-treatment", "one node: nothing could move"
    assert "interpreted-kernels" in {found.reason for found in validity(Case(evidence))}, "nothing timed may be judged"

"""torchrun's ranks: the same Group over gloo, and one plan through the one runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_engram import codec, experiment, planning
from pytest_engram.model import Evidence
from pytest_engram.numa.topology import read_topology

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


def torchrun(*program: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of a program on this machine; no network but the loopback."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *program], env=environment, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """[rank][world] -> (outcome, events) of torch_entries.py."""
    out = tmp_path_factory.mktemp("torchrun") / "seen"
    done = torchrun(str(Path(__file__).with_name("torch_entries.py")), str(out))
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_collectives_and_events(worlds: list[Any]) -> None:
    """broadcast gives rank 0's value, all_gather all of them by rank; rank 1's event arrives in rank 0 only."""
    expected = {"told": {"rank": 0, "x": 1}, "gathered": [[0], [1]]}
    assert worlds[0][0] == [[expected] * 2, [[1, {"kind": "news", "value": 7}]]]
    assert worlds[1][0] == [[expected] * 2, []]


@pytest.mark.slow
def test_a_failure_is_everybodys(worlds: list[Any]) -> None:
    """A rank that raises makes every rank raise the same text with its code; the next world is sound again."""
    for number, code, text in ((1, "planted", "the table is gone"), (2, "error", "KeyError: 'x'")):
        first, second = (rank[number][0] for rank in worlds)
        assert first == second == ["PeerError", code, f"rank 1: {text}"]
    assert worlds[0][4][0][0]["told"] == {"rank": 0, "x": 2}


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_told(worlds: list[Any]) -> None:
    """Different steps in one collective are an error in every rank."""
    assert {rank[3][0][1] for rank in worlds} == {"ranks-do-not-meet"}
    assert "step of rank 1" in worlds[0][3][0][2]


@pytest.mark.slow
def test_a_silent_rank_is_an_error_at_the_deadline(worlds: list[Any]) -> None:
    """gloo's timeout becomes a PeerError that names the step."""
    kind, code, text = worlds[0][5][0]
    assert (kind, code) == ("PeerError", "peer-deadline")
    assert "wait for rank 1" in text


@pytest.mark.slow
def test_a_world_leaves_no_connection_open(worlds: list[Any]) -> None:
    """Each world's connections end with it, also where a rank failed: a plan has a world per run."""
    for rank in worlds:
        first, *_, last = rank[6][:5]  # the sixth one's other rank still sleeps
        assert last - first < 5, "one world's; four had left 20"


def small_plan() -> Any:
    """B1 on two ranks, three short runs."""
    found = experiment.load(ROOT / "fixtures" / "experiments" / "B1.yaml")
    work = replace(found.workload, tokens=8, steps=2, warmup=1, layers=16)
    asked = replace(found, ranks=2, cooldown_s=0.0, workload=work, serving=None, positive_control=False)
    plan = planning.make_plan(asked, read_topology(), planning.Choices(engine="cpu", rows=5000))
    return replace(plan, schedule=plan.schedule[:3])


@pytest.mark.slow
def test_one_plan_in_torchruns_ranks(tmp_path: Path) -> None:
    """The runner's evidence for a plan: every run of both ranks, correct rows, no problem."""
    (tmp_path / "plan.json").write_bytes(codec.encode(small_plan()))
    done = torchrun(
        "-m", "pytest_engram.engines.torchrun", str(tmp_path / "plan.json"), str(tmp_path / "evidence.json")
    )
    assert done.returncode == 0, done.stderr
    evidence = codec.decode((tmp_path / "evidence.json").read_bytes(), Evidence)
    assert evidence.problems == ()
    assert len(evidence.runs) == 3
    for run in evidence.runs:
        assert {sample.rank for sample in run.compute} == {0, 1}
        assert all(sample.passed or not sample.supported for sample in run.correctness_before)

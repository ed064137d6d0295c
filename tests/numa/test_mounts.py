"""A private /dev/shm for one world: all ranks see it, the machine does not, and its policy is the request."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_engram import experiment, planning, runner
from pytest_engram.errors import NotMeasurable, PeerError
from pytest_engram.model import PlacementPlan, TablePlan
from pytest_engram.numa import _syscalls, mounts, procfs
from pytest_engram.numa.group import SoloGroup
from pytest_engram.numa.world import RankSpec, run_world
from pytest_engram.session import this_machine

ENTRIES = Path(__file__).with_name("entries.py")
FOLDER = Path(__file__).parents[2] / "fixtures/experiments"


def asked(mode: str = "bind", nodes: tuple[int, ...] = (0,), *, backing: str = "tmpfs", tables: int = 1) -> Any:
    """A placement of one or more equal tables."""
    table = TablePlan(ranks=(0, 1), mode=mode, nodes=nodes)
    return PlacementPlan(policy=f"{mode} {nodes}", backing=backing, tables=(table,) * tables)


def world(entry: str) -> list[Any]:
    """Two ranks in a private mount, or the skip that says why not."""
    try:
        return run_world(f"{ENTRIES}:{entry}", None, [RankSpec()] * 2, deadline_s=20)
    except PeerError as error:
        if error.code == "no-private-mount":
            pytest.skip(str(error))
        raise


def test_an_unpatched_engine_obeys_the_mount() -> None:
    """Ranks share a file by its path, as engines do; the kernel shows the mount's policy on it; capacity is equal."""
    before = Path("/proc/mounts").read_text()
    ranks = world("in_a_private_mount")
    assert Path("/proc/mounts").read_text() == before
    assert "engine-table" not in os.listdir("/dev/shm")
    for rank in ranks:
        assert f"mpol=bind:0 of {shutil.disk_usage('/dev/shm').total} bytes as before" in rank["told"]
        assert f"{os.readlink('/proc/self/ns/ipc')} as before" in rank["told"]
        assert "mpol=default, stays: " in rank["told"]
        assert (rank["names"], rank["same"]) == (["engine-table"], True)
        assert rank["policy"] == "bind:0"
        assert rank["pages"] == {"0": 512}
    assert ranks[0]["namespace"] == ranks[1]["namespace"] != os.readlink("/proc/self/ns/mnt")


def test_other_users_of_the_machines_mount_are_reported() -> None:
    """A process that maps a file there is named by its pid; the private mount does not hide that it exists."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            ranks = world("in_a_private_mount")
    assert all(str(os.getpid()) in rank["told"].partition("mapped by")[2] for rank in ranks)


def test_without_the_right_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused unshare is an absence that names the capability, and nothing was mounted."""

    def refuse(_flags: int) -> None:
        raise PermissionError(1, "unshare: EPERM")

    monkeypatch.setattr(_syscalls, "unshare", refuse)
    with pytest.raises(NotMeasurable, match="CAP_SYS_ADMIN") as caught:
        mounts.enter(SoloGroup(), asked())
    assert caught.value.code == "no-private-mount"


@pytest.mark.parametrize("lost", [0, 4096])
def test_a_private_mount_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """The mount that comes back must hold as much as the machine's, or the arms differ in more than placement."""
    whole, calls = shutil.disk_usage("/dev/shm"), []

    def usage(_path: str) -> Any:
        calls.append(1)
        return whole if len(calls) == 1 else whole._replace(total=whole.total - lost)

    for name in ("unshare", "mount"):
        monkeypatch.setattr(_syscalls, name, lambda *_given: None)
    monkeypatch.setattr(procfs.Mount, "option", lambda _self, name, *_default: "bind:0" if name == "mpol" else "never")
    monkeypatch.setattr(mounts.shutil, "disk_usage", usage)
    if not lost:
        assert f"mpol=bind:0 of {whole.total} bytes as before" in (mounts.enter(SoloGroup(), asked()).detail or "")
        return
    with pytest.raises(NotMeasurable) as caught:
        mounts.enter(SoloGroup(), asked())
    assert caught.value.code == "other-capacity"


@pytest.mark.parametrize(
    ("placement", "policy"),
    [
        (asked("interleave", (0, 1, 3)), "interleave:0-1,3"), (asked("preferred", (1,)), "prefer:1"),
        (asked("default", ()), None), (asked(backing="memfd"), None), (asked(tables=2), None),
        (asked("weighted-interleave", (0, 1)), None),
    ],
)  # fmt: skip
def test_one_mount_says_one_policy(placement: PlacementPlan, policy: str | None) -> None:
    """The request in the kernel's words; what a mount cannot say is an absence before anything is mounted."""
    if policy:
        assert mounts.mount_policy(placement) == policy
    else:
        with pytest.raises(NotMeasurable) as caught:
            mounts.mount_policy(placement)
        assert caught.value.code == "not-by-mount"


def test_the_runner_places_a_backends_own_table_by_mount() -> None:
    """``placement_by: mount``: the backend is asked nothing, the mount's policy shows, the machine's facts stay."""
    chosen = experiment.load(FOLDER / "B1.yaml")
    work = replace(chosen.workload, hidden=64, layers=8, steps=2, warmup=1)
    node = this_machine().memory_nodes[0].id
    hold = {**chosen.hold, "policy": f"bind:{node}", "placement_by": "mount"}
    chosen = replace(chosen, serving=None, cooldown_s=0.0, workload=work, ranks=2, hold=hold)
    plan = planning.make_plan(chosen, this_machine(), planning.Choices(engine="cpu", rows=5000))
    evidence = runner.run(replace(plan, schedule=plan.schedule[:1]))
    if any(one.code == "no-private-mount" for one in evidence.problems):
        pytest.skip(evidence.problems[0].message)
    assert evidence.problems == ()
    (run,) = evidence.runs
    assert {audit.policy_text for one in run.placement for audit in one.distributions} == {f"bind:{node}"}
    steps = [[receipt.step for receipt in one.receipts] for one in run.startup]
    assert steps == [["mount", "allocate", "load"]] * 2
    assert (run.fingerprint["placement_by"], run.fingerprint["machine.shm.mpol"]) == ("mount", "default")
    assert {one.worker.staging for one in run.placement if one.worker} == {f"NUMA node {node} 100%"}
    with pytest.raises(NotMeasurable, match="one policy for all its files"):
        planning.make_plan(replace(chosen, hold={**hold, "policy": "default"}), this_machine(), planning.Choices())


def test_a_ranks_absence_is_not_measured() -> None:
    """What a rank cannot do here is a named absence of the experiment, never INVALID."""
    chosen = replace(experiment.load(FOLDER / "B1.yaml"), serving=None)
    plan = planning.make_plan(chosen, this_machine(), planning.Choices(engine="cpu", rows=5000))

    def launch(*_: Any, **__: Any) -> None:
        raise PeerError("no", code="no-private-mount") from NotMeasurable("no", code="no-private-mount")

    (problem,) = runner.run(replace(plan, schedule=plan.schedule[:1]), launch=launch).problems
    assert (problem.code, problem.status.value) == ("no-private-mount", "NOT_MEASURED")

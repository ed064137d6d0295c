"""Worlds of rank processes and their group: collectives, deadlines, and nobody left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_engram.errors import EngramError, PeerError, UsageError
from pytest_engram.numa import hub
from pytest_engram.numa import world as world_module
from pytest_engram.numa.group import Channel, LocalGroup, SoloGroup
from pytest_engram.numa.world import RankSpec, load_entry, run_world

ENTRIES = Path(__file__).with_name("entries.py")


def test_collectives_events_affinity_and_environment() -> None:
    """Results come by rank; broadcast is rank 0's; each rank runs on its CPUs with its own environment."""
    events: list[Any] = []
    cpus = sorted(os.sched_getaffinity(0))
    specs = [RankSpec(cpus=(cpus[rank % len(cpus)],), env={"TEST": f"rank {rank}"}) for rank in range(3)]
    results = run_world(f"{ENTRIES}:echo", {"x": 1}, specs, deadline_s=20, on_event=lambda *event: events.append(event))
    assert results == [
        [[0, 10, 20], {"x": 1}, [cpus[rank % len(cpus)]], f"rank {rank}"] for rank in range(3)
    ]  # fmt: skip
    assert sorted(events) == [(rank, ["event", rank]) for rank in range(3)]


def test_entries_by_module_name() -> None:
    """An entry is a module's or a file's function."""
    assert load_entry("os.path:join") is os.path.join
    assert load_entry(f"{ENTRIES}:echo").__name__ == "echo"
    with pytest.raises(AttributeError):
        load_entry("os.path:nothing")


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "rank 1, step 'start': ValueError: planted"),
        ("exit", "rank 1, step 'start': it exited with status 3 before its result"),
    ],
)
def test_a_lost_rank_interrupts_the_others(world: Any, how: str, text: str, *, busy: bool) -> None:
    """A rank that raises or exits is named to ranks that wait and to ranks that are at work, with one text."""
    with pytest.raises(PeerError) as caught:
        world("fail", ranks=3, how=how, busy=busy)
    assert str(caught.value) == text
    assert world.told == {0: text, 2: text}
    assert world.survivors == []


def test_a_rank_that_skips_a_collective_is_an_error(world: Any) -> None:
    """Ranks that do not meet at the same step are told so, at once and not by the deadline."""
    begin = time.monotonic()
    with pytest.raises(PeerError, match="rank 0 is at end, rank 1 is at the end") as caught:
        world("fail", how="skip", busy=False, deadline_s=120)
    assert caught.value.code == "ranks-do-not-meet"
    assert time.monotonic() - begin < 100  # two interpreters start meanwhile


def test_a_silent_rank_meets_the_deadline(world: Any) -> None:
    """A rank that sleeps is named although the others never wait in a collective."""
    with pytest.raises(PeerError, match=r"rank 1 \(step 'start'\): nothing was heard for 5 s; expected") as caught:
        world("fail", how="sleep", busy=True, deadline_s=5)  # the other rank must not be as late on a busy machine
    assert world.told == {0: str(caught.value)}


def test_a_stopped_rank_that_takes_no_answer_meets_the_deadline(world: Any) -> None:
    """An answer larger than a socket's buffer does not hang the launcher behind a rank that no longer reads."""
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 2 \(step 'large'\): nothing was heard for 5 s; expected") as caught:
        world("stopped", ranks=3, length=2_000_000, deadline_s=5)
    assert caught.value.code == "peer-deadline"
    assert time.monotonic() - begin < 100
    assert world.told == dict.fromkeys((0, 1), str(caught.value)), "ranks that are well had time to end"
    assert world.survivors == []


def test_the_deadline_covers_silence_not_work(world: Any) -> None:
    """Long work with check() between its pieces outlives the deadline; nobody is blamed."""
    assert world("patient", seconds=6, deadline_s=5)[0] >= 6


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGINT])
def test_ranks_do_not_outlive_the_launcher(tmp_path: Path, deed: int) -> None:
    """Whether the launcher is killed or interrupted, its ranks are gone a moment later."""
    code = f"""
import signal
from pytest_engram.numa.world import RankSpec, run_world
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
def note(rank, event): print(event["pid"], flush=True)
payload = {{"how": "sleep", "busy": False, "folder": {str(tmp_path)!r}}}
run_world({f"{ENTRIES}:fail"!r}, payload, [RankSpec()] * 2, deadline_s=60, on_event=note)
"""
    environment = {**os.environ, "PYTHONPATH": str(ENTRIES.parents[2])}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as launcher:
        assert launcher.stdout
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(deed)
        launcher.wait(60)
        end = time.monotonic() + 60
        while time.monotonic() < end and any(alive(pid) for pid in pids):
            time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


def alive(pid: int) -> bool:
    """A zombie that nobody reaped yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_an_event_handler_that_raises_ends_the_world(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the launcher's own callback is raised as it is, and the ranks are ended."""

    def refuse(rank: int, event: Any) -> None:
        world.events.append((rank, event))
        raise UsageError("planted")

    monkeypatch.setattr(world, "_note", refuse)
    with pytest.raises(UsageError, match="planted"):
        world("fail", how="sleep", busy=True)
    assert world.survivors == []


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every group that was signalled, which must still be a child's: a zombie is, a pid that was reaped is not."""
    signalled, honest = [], os.killpg

    def killpg(group: int, number: int) -> None:
        signalled.append((group, number))
        try:
            os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            pytest.fail(f"{group} was reaped before signal {number}")
        honest(group, number)

    monkeypatch.setattr(os, "killpg", killpg)
    return signalled


@pytest.mark.parametrize("how", ["exit", "raise", "skip"])
def test_no_rank_is_reaped_before_the_last_signal(world: Any, killed: list[tuple[int, int]], how: str) -> None:
    """Each group is signalled twice while its leader's pid cannot be another process's, however the leader ended."""
    with pytest.raises(PeerError):
        world("fail", how=how, busy=False)
    pids = [event["pid"] for _, event in world.events]
    assert sorted(killed) == sorted((pid, number) for pid in pids for number in (signal.SIGKILL, signal.SIGTERM))
    assert world.survivors == []


def test_ranks_that_ended_well_are_not_reaped_before_the_last_signal(world: Any, killed: list[tuple[int, int]]) -> None:
    """A world that succeeds ends what its ranks forked, by groups that are still theirs."""
    world("patient", seconds=0)
    assert len(killed) == 4


def test_a_reaped_process_gets_no_signal(killed: list[tuple[int, int]]) -> None:
    """A rank that somebody else reaped is left alone; negative control: one that nobody reaped is signalled."""
    gone, here = (subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) for _ in range(2))
    assert hub.exit_status(here, 10) == 0
    assert gone.wait(10) == 0
    assert hub.exit_status(gone, 0) is None, "unknown"
    world_module._end([gone, here])
    assert killed == [(here.pid, signal.SIGTERM), (here.pid, signal.SIGKILL)]
    assert here.returncode == 0


def test_an_exit_status_is_read_without_reaping() -> None:
    """None while it runs, minus the signal that ended it afterwards, as often as asked."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert hub.exit_status(process, 0) is None
        process.kill()
        assert [hub.exit_status(process, 10), hub.exit_status(process, 10)] == [-signal.SIGKILL] * 2


def test_a_rank_notices_that_the_launcher_is_gone() -> None:
    """EOF from the hub fails the next check and every collective."""
    ours, theirs = socket.socketpair()
    group = LocalGroup(Channel(theirs), 0, 2)
    ours.close()
    with pytest.raises(PeerError, match="the launcher is gone"):
        group.barrier(step="lonely")
    with pytest.raises(EngramError, match="the launcher is gone"):
        group.check()
    theirs.close()


def test_frames_survive_any_split() -> None:
    """A frame that arrives byte by byte is the same frame; NaN never leaves."""
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    sender.send({"text": "ü", "n": [1, None]})
    data = theirs.recv(1000)
    for start in range(len(data)):
        ours.send(data[start : start + 1])
        frames = receiver.poll()
        assert frames == ([{"text": "ü", "n": [1, None]}] if start == len(data) - 1 else [])
    with pytest.raises(ValueError, match="JSON compliant"):
        sender.send({"x": float("nan")})
    sender.close()
    assert receiver.poll() is None
    receiver.close()


def test_solo_group_is_a_world_of_one() -> None:
    """In-process use needs no launcher; events go to the given callback."""
    events: list[Any] = []
    group = SoloGroup(events.append)
    group.barrier(step="x")
    group.check()
    group.emit("hello")
    assert (group.broadcast(5, step="x"), group.all_gather(6, step="x"), events) == (5, [6], ["hello"])

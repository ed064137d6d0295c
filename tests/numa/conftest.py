"""Worlds for the placement tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_engram.numa import capacity, hub
from pytest_engram.numa import world as launcher
from pytest_engram.numa.world import RankSpec, run_world

ENTRIES = Path(__file__).with_name("entries.py")


def pytest_configure(config: pytest.Config) -> None:
    """Markers of tests that only some machines can run."""
    config.addinivalue_line("markers", "two_nodes: needs two memory NUMA nodes with CPUs")
    config.addinivalue_line("markers", "guest: counts all of a machine's pages, or changes its settings")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip from here, not from each test, so that one reason is one line of the summary with its number of tests."""
    if item.get_closest_marker("two_nodes"):
        if sum(bool(node.cpus) for node in capacity.live_memory().memory_nodes) < 2:
            pytest.skip("one memory node: nothing can be elsewhere")
        if item.get_closest_marker("guest") and "PYTEST_ENGRAM_GUEST" not in os.environ:
            pytest.skip("several memory nodes, but not the guest, whose pages and settings are the test's own")


@dataclass
class World:
    """Runs entries, collects events, and knows which processes it started."""

    folder: Path
    events: list[tuple[int, Any]] = field(default_factory=list)

    def __call__(self, name: str, *, ranks: int = 2, deadline_s: float = 20, **payload: Any) -> list[Any]:
        payload = {
            "folder": str(self.folder),
            "backing": "tmpfs",
            "bytes": 3 << 20,
            "mode": "bind",
            "nodes": [0],
        } | payload
        payload.setdefault("groups", [list(range(ranks))])
        specs = [RankSpec(env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})] * ranks
        return run_world(f"{ENTRIES}:{name}", payload, specs, deadline_s=deadline_s, on_event=self._note)

    def _note(self, rank: int, event: Any) -> None:
        self.events.append((rank, event))

    @property
    def told(self) -> dict[int, str]:
        """What each rank was told, by rank."""
        return {int(file.name.split("-")[1]): file.read_text() for file in self.folder.glob("told-*")}

    @property
    def seconds_until_told(self) -> float:
        """From the deed to the last rank's report of it."""
        last = max(file.stat().st_mtime for file in self.folder.glob("told-*"))
        return last - (self.folder / "deed").stat().st_mtime

    @property
    def survivors(self) -> list[int]:
        pids = [event["pid"] for _, event in self.events if isinstance(event, dict)]
        assert pids, "the ranks did not report their pids"
        return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world whose ranks leave neither a process nor a name in /dev/shm, whatever happens to them.

    On a busy machine a rank may need long to write what it was told, or to be seen as dead: nobody is cut short here.
    """
    monkeypatch.setattr(launcher, "GRACE_S", 60.0)
    monkeypatch.setattr(hub, "_EXIT_WAIT_S", 60.0)
    before = names_in_shm()
    yield World(tmp_path)
    end = time.monotonic() + 10
    while (left := names_in_shm() - before) and time.monotonic() < end:
        time.sleep(0.02)  # a name that another worker's test has for a moment goes by itself, a leftover stays
    assert left == set()


def names_in_shm() -> set[str]:
    """Only ours: other programs of this machine come and go."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("pytest-engram")}


WorldFixture = Callable[..., list[Any]]

"""Capacity is checked before anything is touched, against every limit, by number."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_engram.errors import UsageError
from pytest_engram.model import NumaNode, PlacementPlan, TablePlan, Topology
from pytest_engram.numa import capacity
from pytest_engram.numa import topology as machine
from pytest_engram.numa.capacity import GIB, cgroup_free, check_capacity, default_reserve


def topology(*free: int, reclaimable: int = 0, pool: int = 0) -> Topology:
    """Nodes with that many free bytes."""
    nodes = (
        NumaNode(
            id=number, cpus=(number,), memory_bytes=256 * GIB, free_bytes=size, reclaimable_bytes=reclaimable,
            distances={}, hugepages={2 << 20: (pool, pool)},
        )
        for number, size in enumerate(free)
    )  # fmt: skip
    return Topology(nodes=tuple(nodes), sockets={})


def plan(*tables: TablePlan, backing: str = "memfd") -> PlacementPlan:
    """Tables of one placement."""
    return PlacementPlan(policy="test", backing=backing, tables=tables)


def one(mode: str, *nodes: int, weights: tuple[int, ...] = (), ranks: tuple[int, ...] = (0, 1)) -> TablePlan:
    """One table."""
    return TablePlan(ranks=ranks, mode=mode, nodes=nodes, weights=weights)


@pytest.mark.parametrize(
    ("asked", "free", "limits", "said"),
    [
        (plan(one("bind", 1)), (100, 39), {}, "NUMA node 1 has, less its reserve, 40802189312"),
        (plan(one("interleave", 0, 1)), (19, 100), {}, "NUMA node 0 has"),
        (plan(one("weighted-interleave", 0, 1, weights=(3, 1))), (29, 100), {}, "NUMA node 0 has"),
        (plan(one("bind", 0, ranks=(0,)), one("bind", 0, ranks=(1,))), (79, 100), {}, "need 85899345920 bytes"),
        (plan(one("bind", 0), backing="anon-thp"), (79, 100), {}, "need 85899345920 bytes"),
        (plan(one("default")), (20, 21), {}, "the allowed NUMA nodes have"),
        (plan(one("bind", 0), backing="tmpfs"), (100, 100), {"shm": 39}, "/dev/shm has 41875931136"),
        (plan(one("bind", 0)), (100, 100), {"cgroup": 39}, "the memory cgroup has 41875931136"),
        (plan(one("bind", 0), backing="hugetlb"), (100, 100), {}, "the 2 MiB page pool of NUMA node 0 has 20971520"),
    ],
)
def test_each_limit_is_named(asked: PlacementPlan, free: tuple[int, ...], limits: dict[str, int], said: str) -> None:
    """K19, K31: a 40 GiB table that exceeds one limit is refused with both numbers."""
    shm, cgroup = (limits[name] * GIB if name in limits else None for name in ("shm", "cgroup"))
    where = topology(*(size * GIB for size in free), pool=10)
    with pytest.raises(UsageError) as caught:
        check_capacity(asked, 40 * GIB, where, shm, cgroup, reserve=GIB)
    assert caught.value.code == "too-large"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "free", "limits"),
    [
        (plan(one("bind", 1)), (1, 41), (None, None)),
        (plan(one("interleave", 0, 1)), (21, 21), (None, 40)),
        (plan(one("weighted-interleave", 0, 1, weights=(3, 1))), (31, 11), (None, None)),
        (plan(one("preferred", 0)), (5, 100), (None, None)),
        (plan(one("bind", 0), backing="tmpfs"), (41, 1), (40, 40)),
    ],
)
def test_what_fits_exactly_passes(
    asked: PlacementPlan, free: tuple[int, ...], limits: tuple[int | None, int | None]
) -> None:
    """Negative control: the same table with just enough room everywhere is accepted."""
    shm, cgroup = (limit * GIB if limit is not None else None for limit in limits)
    check_capacity(asked, 40 * GIB, topology(*(size * GIB for size in free)), shm, cgroup, reserve=GIB)


def test_reclaimable_memory_counts() -> None:
    """Page cache that can be reclaimed is room; without it the same table is refused."""
    check_capacity(plan(one("bind", 0)), 40 * GIB, topology(1 * GIB, reclaimable=40 * GIB), None, None, reserve=GIB)
    with pytest.raises(UsageError):
        check_capacity(plan(one("bind", 0)), 40 * GIB, topology(1 * GIB, reclaimable=39 * GIB), None, None, reserve=GIB)


@pytest.mark.parametrize(
    ("node", "table", "reserve"),
    [
        (256 * GIB, 94 * GIB, 256 * GIB // 20),
        (8 * GIB, 4 * GIB, GIB),
        (8 * GIB, 4096, 64 << 20),
        (GIB, 64 << 20, 128 << 20),
    ],
)
def test_the_reserve_scales_with_the_table(node: int, table: int, reserve: int) -> None:
    """The default reserve is 1 GiB or 5 %, less for small tables, never under 64 MiB."""
    assert default_reserve(node, table) == reserve


def group(path: Path, **files: Any) -> None:
    """A cgroup folder; ``__`` stands for a dot."""
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (path / name.replace("__", ".")).write_text(f"{value}\n")


def member(root: Path, membership: str, kind: str = "cgroup2", options: str = "rw", mount: str = "") -> Path:
    """``root`` as the machine of a process in that cgroup; its cgroup files lie below ``sys/fs/cgroup``."""
    group(root / "proc/self", cgroup=membership)
    group(root / "proc/self", mountinfo=f"1 0 0:1 / /sys/fs/cgroup{mount} rw - {kind} none {options}")
    return root


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    """The least head-room on the way up counts, inactive file pages included; ``max`` is no limit."""
    base = tmp_path / "sys/fs/cgroup"
    group(base / "a", memory__max=1000, memory__current=900, memory__stat="anon 1\ninactive_file 50")
    group(base / "a/b", memory__max="max", memory__current=70, memory__stat="inactive_file 1")
    group(base / "a/b/c", memory__max=500, memory__current=100, memory__stat="inactive_file 7")
    assert cgroup_free(member(tmp_path, "0::/a/b/c")) == 150
    assert cgroup_free(member(tmp_path, "0::/a/b")) == 150
    assert cgroup_free(member(tmp_path, "0::/elsewhere")) is None


def test_cgroup_v1_has_its_own_names(tmp_path: Path) -> None:
    """The v1 memory controller is read below its own mount; its huge number means no limit."""
    names = {"memory__usage_in_bytes": 300, "memory__stat": "total_inactive_file 20"}
    base = tmp_path / "sys/fs/cgroup/memory/x"
    group(base, memory__limit_in_bytes=1000, **names)
    assert cgroup_free(member(tmp_path, "5:cpu:/x\n4:memory:/x", "cgroup", "rw,memory", "/memory")) == 720
    group(base, memory__limit_in_bytes=9223372036854771712, **names)
    assert cgroup_free(member(tmp_path, "4:memory:/x", "cgroup", "rw,memory", "/memory")) is None


def test_live_figures_are_plausible() -> None:
    """This machine's own figures can be read."""
    live = capacity.live_memory()
    assert live.memory_nodes
    assert all(node.available_bytes > 0 for node in live.memory_nodes)
    assert (capacity.shm_free() or 0) > 0


SMALL = """
import sys
from pytest_engram.errors import PlacementError
from pytest_engram.numa import _syscalls, backing
from pytest_engram.numa.populate import populate
backing.SHM = sys.argv[1]
if sys.argv[2] == "touch":
    _syscalls.MADV_POPULATE_WRITE = 9999
table = backing.BACKINGS["tmpfs"](4 << 20)
table.create()
table.map()
try:
    populate(table, lambda *_: None, write=True)
except PlacementError as error:
    print(error.code, error)
"""


@pytest.mark.parametrize(("way", "said"), [("madvise", "madvise: EFAULT"), ("touch", "No space left on device")])
def test_a_full_tmpfs_is_an_error_not_sigbus(tmp_path: Path, way: str, said: str) -> None:
    """K31: where the room ends after all, on a real tmpfs of 1 MiB, populating says so and the process lives on."""
    mount = f"mount --make-rprivate / && mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    enter = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs in a namespace of its own here")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [*enter, sys.executable, "-c", SMALL, str(tmp_path), way]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cannot-populate populate: ")
    assert said in result.stdout


def test_a_guest_that_grows_counts_its_whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazily grown one-node guest has room for a table that its node does not count yet, as /proc/meminfo knows."""
    node = NumaNode(id=0, cpus=(0,), memory_bytes=4 << 30, free_bytes=3 << 30, reclaimable_bytes=0, distances={0: 10})
    monkeypatch.setattr(machine, "read_nodes", lambda _tree: (node,))
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    expected = max(total, 4 << 30)
    assert capacity.live_memory().nodes[0].memory_bytes == expected

"""Receipts of the machine: every fact is a value, or None with its reason."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_engram import provenance
from pytest_engram.numa.cgroup import memory_limit
from pytest_engram.provenance import FACTS, cgroup_headroom, collect, machine_fingerprint

Grow = Callable[..., Path]


@pytest.mark.parametrize("name", ["two-sockets", "two-sockets-snc2", "grace", "vm-unknown", "one-node-recorded"])
def test_every_fact_is_a_value_or_a_reason(grow: Grow, name: str) -> None:
    """One form for all: ``{"value": …}`` or ``{"value": None, "reason": text}``, and strict JSON."""
    found = collect(grow(name))
    assert found.keys() == FACTS.keys()
    assert all(
        item.keys() == ({"value"} if item["value"] is not None else {"value", "reason"}) for item in found.values()
    )
    assert all(item["reason"] for item in found.values() if item["value"] is None)
    json.dumps(found, allow_nan=False)


def test_the_live_machine_is_collected() -> None:
    """This interpreter's own facts are there, and the CPU list is the kernel's text."""
    found = collect()
    assert found["python"]["value"].count(".") == 2
    assert found["package.numpy"]["value"]
    assert found["cpuset.cpus"]["value"] in Path("/proc/self/status").read_text()


def test_a_checkout_without_a_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither commit nor cleanliness is known before the first commit, and the reason names no path of the machine."""
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "package" / "provenance.py"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    for name in ("git.commit", "git.dirty"):
        assert collect()[name] == {"value": None, "reason": "git rev-parse ended with 128"}
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert collect()["git.dirty"] == {"value": False}


def test_a_recorded_tree_never_borrows_from_the_live_interpreter(grow: Grow) -> None:
    """What is not in the tree is absent, not this machine's."""
    found = collect(grow("two-sockets"))
    for name in ("python", "package.numpy", "cuda", "git.commit", "shm.size_bytes", "clock.gpu_sm_mhz"):
        assert found[name] == {"value": None, "reason": "a recorded tree does not hold it"}


@pytest.mark.parametrize(
    ("name", "fact", "value"),
    [
        ("two-sockets", "kernel", "6.12.43-generic"),
        ("two-sockets", "cpu.model", "Intel(R) Xeon(R) Platinum 8480+"),
        ("grace", "cpu.model", "CPU part : 0xd4f"),
        ("two-sockets", "driver", "580.159.04"),
        ("grace", "driver", "580.65.06"),
        ("two-sockets", "thp.enabled", "always"),
        ("two-sockets", "thp.shmem_enabled", "advise"),
        ("two-sockets", "thp.sizes", {"64kB": "never/never", "2048kB": "inherit/inherit"}),
        ("two-sockets", "numa_balancing", 1),
        ("two-sockets", "limit.memlock", "unlimited/unlimited"),
        ("grace", "limit.memlock", "8388608/8388608"),
        ("two-sockets", "clock.cpu_mhz", {"lowest": 2000, "highest": 2001}),
        ("vm-unknown", "hypervisor", "QEMU Standard PC (Q35 + ICH9, 2009)"),
        ("two-sockets", "hypervisor", "none seen"),
        ("vm-unknown", "container", ["docker"]),
        ("two-sockets-snc2", "container", ["podman"]),
        ("two-sockets", "container", []),
        ("eight-gpus", "cpuset.cpus", "0-5"),
        ("eight-gpus", "cpuset.mems", "0"),
        ("two-sockets", "namespace.ipc", "ipc:[4026531839]"),
        ("two-sockets", "load", "0.31 0.42 0.53"),
    ],
)
def test_facts_are_read_from_their_files(grow: Grow, name: str, fact: str, value: Any) -> None:
    """Each number differs between the machines, so a parser that reads the wrong line is seen."""
    assert collect(grow(name))[fact] == {"value": value}


@pytest.mark.parametrize(
    ("path", "content", "fact", "reason"),
    [
        ("proc/sys/kernel/numa_balancing", None, "numa_balancing", "/proc/sys/kernel/numa_balancing is absent or"),
        ("proc/driver/nvidia/version", "no version here\n", "driver", "/proc/driver/nvidia/version does not say"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "never\n", "thp.enabled", "says 'never'"),
        ("proc/cpuinfo", "flags : fpu\n", "clock.cpu_mhz", "neither cpufreq nor cpuinfo gives a clock"),
        ("proc/self/mountinfo", "\n", "shm.mount", "nothing is mounted on /dev/shm"),
        ("proc/self/mountinfo", "\n", "shm.mpol", "nothing is mounted on /dev/shm"),
    ],
)
def test_an_absent_fact_says_why(grow: Grow, path: str, content: str | None, fact: str, reason: str) -> None:
    """None with a reason, never 0 or an empty text."""
    item = collect(grow("two-sockets", {path: content}))[fact]
    assert item["value"] is None
    assert reason in item["reason"]


@pytest.mark.parametrize(
    ("name", "mpol", "huge"),
    [
        ("two-sockets", "interleave:0-1", "always"),
        ("memoryless-and-cxl", "bind:0,2", "never"),
        ("eight-gpus", "default", "never"),
    ],
)
def test_the_shm_mount_may_fix_a_policy(grow: Grow, name: str, mpol: str, huge: str) -> None:
    """K18, K35: mpol= (with commas in its node list) and huge= of the mount in force."""
    found = collect(grow(name))
    assert (found["shm.mpol"]["value"], found["shm.huge"]["value"]) == (mpol, huge)


def test_the_later_mount_on_one_point_is_in_force(grow: Grow) -> None:
    """Octal escapes are undone, and a second tmpfs over /dev/shm hides the first."""
    text = (
        "25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw,size=1k\n30 25 0:27 / /dev/shm ro - tmpfs tmpfs rw,size=2k\n"
        "31 25 0:28 / /mnt/a\\040b rw - tmpfs tmpfs rw\n"
    )
    found = collect(grow("two-sockets", {"proc/self/mountinfo": text}))
    assert found["shm.mount"]["value"] == "tmpfs ro rw,size=2k"


@pytest.mark.parametrize(
    ("name", "limit", "headroom"),
    [
        ("two-sockets", 137438953472, 137438953472 - 60129542144 + 1073741824),
        ("two-sockets-snc2", 17179869184, 17179869184 - 3221225472 + 2097152),
        ("vm-unknown", 68719476736, 68719476736 - 21474836480 + 4294967296),
        ("grace", None, None),
        ("one-node-recorded", None, None),
    ],
)
def test_the_tightest_group_bounds_what_may_be_charged(
    grow: Grow, name: str, limit: int | None, headroom: int | None
) -> None:
    """Both cgroup versions, every ancestor, inactive page cache given back; no limit is None, not 0."""
    root = grow(name)
    assert (memory_limit(root), cgroup_headroom(root)) == (limit, headroom)
    assert collect(root)["cgroup.headroom"]["value"] == headroom


def test_the_tightest_headroom_may_be_an_ancestors(grow: Grow) -> None:
    """A full parent leaves nothing, however wide the own group's limit is."""
    base = "sys/fs/cgroup/memory/burstable"
    root = grow("two-sockets-snc2", {f"{base}/memory.usage_in_bytes": f"{40 << 30}\n"})
    assert cgroup_headroom(root) == 0


def test_version_1_without_limits_is_no_limit(grow: Grow) -> None:
    """cgroup v1 writes "none" as a huge number: it is no limit, not 8 EiB of room."""
    folders = [f"sys/fs/cgroup/memory/burstable{part}" for part in ("", "/pod7")]
    root = grow("two-sockets-snc2", {f"{folder}/memory.limit_in_bytes": "9223372036854771712\n" for folder in folders})
    assert (memory_limit(root), cgroup_headroom(root)) == (None, None)


def test_the_fingerprint_leaves_out_what_changes_by_itself(grow: Grow) -> None:
    """Clocks, load and free sizes do not make two arms different; knobs, mounts and cpusets do."""
    base = machine_fingerprint(collect(grow("two-sockets")))
    busy = machine_fingerprint(collect(grow("two-sockets", {"proc/loadavg": "9.1 9.2 9.3 7/8 9\n"})))
    balanced = machine_fingerprint(collect(grow("two-sockets", {"proc/sys/kernel/numa_balancing": "0\n"})))
    assert base == busy
    assert {name for name in base if base[name] != balanced[name]} == {"numa_balancing"}
    assert not {"load", "clock.cpu_mhz", "shm.free_bytes", "cgroup.headroom"} & base.keys()
    assert base["python"] == "absent: a recorded tree does not hold it"


def test_counters_of_the_socket_link_are_named_or_missed(grow: Grow) -> None:
    """Without an uncore unit, or on a CPU whose events are not known, the reason stands there; else the unit."""
    assert "a virtual machine hides them" in collect(grow("two-sockets"))["perf.uncore"]["reason"]
    unit = "sys/bus/event_source/devices/uncore_upi_0"
    xeon = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
    paths = {
        f"{unit}/type": "37", f"{unit}/cpumask": "0-1", f"{unit}/format/event": "config:0-7",
        f"{unit}/format/umask": "config:8-15", "proc/sys/kernel/perf_event_paranoid": "2",
    }  # fmt: skip
    unknown = collect(grow("two-sockets", paths))["perf.uncore"]
    assert unknown["reason"] == "uncore_upi_0: no known event counts this socket's link on this CPU"
    found = collect(grow("two-sockets", {**paths, "proc/cpuinfo": xeon}))["perf.uncore"]
    assert found["value"] == "bytes that arrive (cross_socket_in_bytes) by uncore_upi_0; perf_event_paranoid 2"

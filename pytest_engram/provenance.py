"""Receipts of the machine: one flat table of facts, each a value, or None with the reason why it is absent."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.gpu.nvml import Nvml
from pytest_engram.numa import policy_calls, procfs, uncore
from pytest_engram.numa.cgroup import cgroup_headroom, cgroup_paths, memory_limit
from pytest_engram.numa.topology import read_hypervisor
from pytest_engram.numa.tree import Tree

Value = TypeVar("Value")

_SHM = "/dev/shm"  # noqa: S108 - the place under test, not a scratch file
_THP = "sys/kernel/mm/transparent_hugepage"
_PACKAGES = ("pytest-engram", "numpy", "torch", "triton", "vllm", "sglang", "scipy", "msgspec", "pytest",
             "pytest-benchmark", "pytest-xdist")  # fmt: skip


def collect(root: Path = Path("/"), *, standing: bool = False) -> dict[str, Any]:
    """Every fact of :data:`FACTS` as ``{"value": …}`` or ``{"value": None, "reason": "…"}``, JSON-able.

    Below another root than ``/`` only files are read: what belongs to the running interpreter is absent.  With
    ``standing`` what changes by itself, which no fingerprint holds, is not asked: some of it takes its time.
    """
    tree = Tree(root)
    return {name: _item(name, tree) for name in FACTS if not (standing and name in _CHANGING)}


def machine_fingerprint(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The facts that must not differ between two arms, as text; what changes by itself (clocks, load) is left out."""
    items = {name: provenance[name] for name in FACTS if name in provenance and name not in _CHANGING}
    return {
        name: f"absent: {item.get('reason')}" if item["value"] is None else str(item["value"])
        for name, item in items.items()
    }


def _item(name: str, tree: Tree) -> dict[str, Any]:
    try:
        if name in _LIVE and not tree.live:
            raise NotMeasurable("a recorded tree does not hold it")
        return {"value": _known(FACTS[name](tree), "not reported")}
    except (EngramError, OSError, metadata.PackageNotFoundError, subprocess.SubprocessError) as absence:
        return {"value": None, "reason": getattr(absence, "seen", str(absence))}


def _known(value: Value | None, reason: str) -> Value:
    if value is None:
        raise NotMeasurable(reason)
    return value


def _find(tree: Tree, name: str, *patterns: str) -> str:
    """The first group of the first pattern that the file holds, runs of white space made one space."""
    text = _known(tree.text(name), f"/{name} is absent or unreadable")
    found = next((match for pattern in patterns if (match := re.search(pattern, text, re.M))), None)
    return " ".join(_known(found, f"/{name} does not say, it says {text[:40]!r}")[1].split())


def _file(name: str, *patterns: str, kind: Callable[[str], Any] = str) -> Callable[[Tree], Any]:
    return lambda tree: kind(_find(tree, name, *(patterns or (r"(.*)",))))


def _thp_sizes(tree: Tree) -> dict[str, str] | None:
    """Page size → ``enabled/shmem_enabled`` of kernels with one pair of knobs per size."""

    def chosen(name: str) -> str:
        return next(iter(re.findall(r"\[(.+)\]", tree.text(f"{_THP}/{name}") or "")), "?")

    sizes = (folder[len("hugepages-") :] for folder in tree.names(_THP, r"hugepages-\d+kB"))
    knobs = ("enabled", "shmem_enabled")
    return {size: "/".join(chosen(f"hugepages-{size}/{knob}") for knob in knobs) for size in sizes} or None


def _shm(tree: Tree) -> procfs.Mount:
    found = procfs.mount_of(_SHM, procfs.parse_mounts(tree.text("proc/self/mountinfo") or ""))
    return _known(found if found and found.point == _SHM else None, f"nothing is mounted on {_SHM}")


def _namespace(name: str, tree: Tree) -> str:
    return os.readlink(tree.root / "proc/self/ns" / name)


def _container(tree: Tree) -> list[str]:
    """Hints only: an empty list proves no bare host."""
    marks = {".dockerenv": "docker", "run/.containerenv": "podman", "var/run/secrets/kubernetes.io": "kubernetes"}
    hints = [what for name, what in marks.items() if (tree.root / name).exists()]
    return hints + (["gVisor"] if "gVisor" in (tree.text("proc/version") or "") else [])


def _cpu_mhz(tree: Tree) -> dict[str, int]:
    """The slowest and the fastest CPU now: cpufreq where there is a governor, else what cpuinfo prints."""
    cpus = tree.names("sys/devices/system/cpu", r"cpu\d+")
    khz = [tree.number(f"sys/devices/system/cpu/{cpu}/cpufreq/scaling_cur_freq") for cpu in cpus]
    printed = re.findall(r"^cpu MHz\s*:\s*(\d+)", tree.text("proc/cpuinfo") or "", re.M)
    found = [value // 1000 for value in khz if value is not None] or list(map(int, printed))
    if not found:
        raise NotMeasurable("neither cpufreq nor cpuinfo gives a clock")
    return {"lowest": min(found), "highest": max(found)}


def _git(*arguments: str) -> str:
    """Optional locks off: a read-only checkout stays readable and is not written to."""
    home = Path(__file__).resolve().parent.parent
    if not (home / ".git").exists():
        raise NotMeasurable("no checkout around the package")
    command = [shutil.which("git") or "git", "--no-optional-locks", "-C", str(home), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise NotMeasurable(f"git {arguments[0]} ended with {done.returncode}")
    return done.stdout.strip()


def _dirty() -> bool:
    """A checkout without a commit has nothing that it could differ from: unknown, not clean."""
    return bool(_git("rev-parse", "HEAD") and _git("status", "--porcelain", "--untracked-files=no"))


_LIVE: dict[str, Callable[[Tree], Any]] = {  # what belongs to the running interpreter
    "cuda": lambda _tree: Nvml().cuda_version(),
    "policy.calls": lambda _tree: policy_calls.probe_calls(),
    "python": lambda _tree: platform.python_version(),
    **{f"package.{name}": partial(lambda name, _tree: metadata.version(name), name) for name in _PACKAGES},
    "git.commit": lambda _tree: _git("rev-parse", "HEAD"),
    "git.dirty": lambda _tree: _dirty(),
    "shm.size_bytes": lambda _tree: shutil.disk_usage(_SHM).total,
    "shm.free_bytes": lambda _tree: shutil.disk_usage(_SHM).free,
    "clock.gpu_sm_mhz": lambda _tree: Nvml().sm_clocks(),
    "clock.gpu_throttle": lambda _tree: Nvml().throttle_reasons(),
    "pcie.kb_per_s": lambda _tree: Nvml().pcie_kb_per_s(),
}
FACTS: dict[str, Callable[[Tree], Any]] = {
    "kernel": _file("proc/sys/kernel/osrelease"),
    "cpu.model": _file("proc/cpuinfo", r"^model name\s*:\s*(.+)$", r"^(CPU part\s*:.+)$"),
    "hypervisor": lambda tree: read_hypervisor(tree) or "none seen",
    "container": _container,
    "driver": _file("proc/driver/nvidia/version", r"^NVRM version:.*?\s(\d{3,}\.[\d.]+)\s"),
    "shm.mount": lambda tree: "{0.kind} {0.options} {0.super_options}".format(_shm(tree)),
    "shm.mpol": lambda tree: _shm(tree).option("mpol"),
    "shm.huge": lambda tree: _shm(tree).option("huge", "never"),
    "thp.enabled": _file(f"{_THP}/enabled", r"\[(.+?)\]"),
    "thp.shmem_enabled": _file(f"{_THP}/shmem_enabled", r"\[(.+?)\]"),
    "thp.sizes": _thp_sizes,
    "numa_balancing": _file("proc/sys/kernel/numa_balancing", kind=int),
    "vm.max_map_count": _file("proc/sys/vm/max_map_count", kind=int),
    "perf.uncore": uncore.describe,
    "cpuset.cpus": _file("proc/self/status", r"^Cpus_allowed_list:\s*(\S+)"),
    "cpuset.mems": _file("proc/self/status", r"^Mems_allowed_list:\s*(\S+)"),
    "cgroup.paths": cgroup_paths,
    "cgroup.memory_limit": lambda tree: _known(memory_limit(tree.root), "no memory limit is set or seen"),
    "cgroup.headroom": lambda tree: _known(cgroup_headroom(tree.root), "no memory limit is set or seen"),
    "limit.memlock": _file("proc/self/limits", r"^Max locked memory +(\S+ +\S+)", kind=lambda it: it.replace(" ", "/")),
    **{f"namespace.{name}": partial(_namespace, name) for name in ("ipc", "mnt", "pid")},
    "clock.cpu_mhz": _cpu_mhz,
    "load": _file("proc/loadavg", r"^(\S+ \S+ \S+)"),
    **_LIVE,
}
_CHANGING = {"git.dirty", "shm.free_bytes", "cgroup.paths", "cgroup.headroom", "policy.calls", "clock.cpu_mhz",
             "clock.gpu_sm_mhz", "clock.gpu_throttle", "pcie.kb_per_s", "load"}  # fmt: skip

"""Receipts of the machine: one flat table of facts, each a value, or None with the reason why it is absent."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_engram.errors import EngramError
from pytest_engram.gpu.nvml import Nvml
from pytest_engram.numa.cgroup import Mount, cgroup_headroom, cgroup_paths, memory_limit, mount_at
from pytest_engram.numa.topology import read_hypervisor
from pytest_engram.numa.tree import Tree

__all__ = ["FACTS", "cgroup_headroom", "collect", "machine_fingerprint"]

Reader = Callable[[Tree], Any]

_THP = "sys/kernel/mm/transparent_hugepage"
_PACKAGES = ("pytest-engram", "numpy", "torch", "triton", "vllm", "sglang", "scipy", "msgspec", "pytest",
             "pytest-benchmark", "pytest-xdist")  # fmt: skip


class Absent(Exception):  # noqa: N818 - not a failure: its text becomes the reason beside a null value
    """A fact that cannot be read here."""


def collect(root: Path = Path("/")) -> dict[str, Any]:
    """Every fact of :data:`FACTS` as ``{"value": …}`` or ``{"value": None, "reason": "…"}``, JSON-able.

    Below another root than ``/`` only files are read: what belongs to the running interpreter is absent.
    """
    tree = Tree(root)
    return {name: _item(reader, tree) for name, (reader, _) in FACTS.items()}


def machine_fingerprint(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The facts that must not differ between two arms, as text; what changes by itself (clocks, load) is left out."""
    return {name: _words(provenance[name]) for name, (_, stable) in FACTS.items() if stable and name in provenance}


def _item(reader: Reader, tree: Tree) -> dict[str, Any]:
    try:
        value = reader(tree)
    except metadata.PackageNotFoundError:
        return {"value": None, "reason": "not installed"}
    except (Absent, EngramError, OSError) as absence:
        return {"value": None, "reason": getattr(absence, "seen", str(absence))}
    return {"value": value} if value is not None else {"value": None, "reason": "not reported"}


def _words(item: Mapping[str, Any]) -> str:
    return f"absent: {item.get('reason')}" if item["value"] is None else str(item["value"])


def _file(name: str) -> Reader:
    def read(tree: Tree) -> str:
        text = tree.text(name)
        if text is None:
            raise Absent(f"/{name} is absent or unreadable")
        return text

    return read


def _number(name: str) -> Reader:
    return lambda tree: int(_file(name)(tree))


def _chosen(name: str) -> Reader:
    """``always [madvise] never`` → ``madvise``."""
    return lambda tree: _match(r"\[(.+?)\]", _file(name)(tree), f"/{name}")


def _pattern(name: str, *patterns: str) -> Callable[[Tree], str]:
    """The first group of the first pattern that the file holds."""

    def read(tree: Tree) -> str:
        text = _file(name)(tree)
        found = next((match for pattern in patterns if (match := re.search(pattern, text, re.M))), None)
        if found is None:
            raise Absent(f"/{name} does not say")
        return " ".join(found[1].split())

    return read


def _limit(name: str) -> Reader:
    """A resource limit as ``soft/hard``, in the kernel's own unit."""
    read = _pattern("proc/self/limits", rf"^{name}\s+(\S+\s+\S+)")
    return lambda tree: read(tree).replace(" ", "/")


def _package(name: str) -> Reader:
    return _live(lambda: metadata.version(name))


def _live(read: Callable[[], Any]) -> Reader:
    def guarded(tree: Tree) -> Any:
        if not tree.live:
            raise Absent("a recorded tree does not hold it")
        return read()

    return guarded


def _match(pattern: str, text: str, where: str) -> str:
    if (match := re.search(pattern, text)) is None:
        raise Absent(f"{where} says {text[:40]!r}")
    return str(match[1])


def _thp_sizes(tree: Tree) -> dict[str, str]:
    """Page size → ``enabled/shmem_enabled`` of kernels with one pair of knobs per size."""
    sizes = {}
    for folder in tree.names(_THP, r"hugepages-\d+kB"):
        pair = (tree.text(f"{_THP}/{folder}/{knob}") or "" for knob in ("enabled", "shmem_enabled"))
        sizes[folder[len("hugepages-") :]] = "/".join(re.sub(r".*\[(.+)\].*", r"\1", text) or "?" for text in pair)
    if not sizes:
        raise Absent("this kernel has no knobs per size")
    return sizes


def _shm(tree: Tree) -> Mount:
    mount = mount_at(tree, "/dev/shm")  # noqa: S108 - the place under test, not a scratch file
    if mount is None:
        raise Absent("nothing is mounted on /dev/shm")
    return mount


def _shm_option(name: str, default: str) -> Reader:
    """A tmpfs option; node lists hold commas themselves (``mpol=bind:0,2``)."""

    def read(tree: Tree) -> str:
        match = re.search(rf"(?:^|,){name}=([^,]+(?:,\d[\d-]*)*)", _shm(tree).super_options)
        return match[1] if match else default

    return read


def _statvfs(field: str) -> Reader:
    return _live(lambda: getattr(os.statvfs("/dev/shm"), field) * os.statvfs("/dev/shm").f_frsize)  # noqa: S108


def _namespace(name: str) -> Reader:
    def read(tree: Tree) -> str:
        text = tree.link(f"proc/self/ns/{name}")
        if text is None:
            raise Absent(f"/proc/self/ns/{name} is absent")
        return text

    return read


def _hypervisor(tree: Tree) -> str:
    return read_hypervisor(tree) or "none seen"


def _container(tree: Tree) -> list[str]:
    """Hints only: an empty list proves no bare host."""
    marks = {".dockerenv": "docker", "run/.containerenv": "podman", "var/run/secrets/kubernetes.io": "kubernetes"}
    hints = [what for name, what in marks.items() if (tree.root / name).exists()]
    return hints + (["gVisor"] if "gVisor" in (tree.text("proc/version") or "") else [])


def _limited(read: Callable[[Path], int | None]) -> Reader:
    def bounded(tree: Tree) -> int:
        limit = read(tree.root)
        if limit is None:
            raise Absent("no memory limit is set or seen")
        return limit

    return bounded


def _cpu_mhz(tree: Tree) -> dict[str, int]:
    """The slowest and the fastest CPU now: cpufreq where there is a governor, else what cpuinfo prints."""
    cpus = tree.names("sys/devices/system/cpu", r"cpu\d+")
    khz = [tree.number(f"sys/devices/system/cpu/{cpu}/cpufreq/scaling_cur_freq") for cpu in cpus]
    found = [value // 1000 for value in khz if value is not None]
    found = found or [int(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*(\d+)", tree.text("proc/cpuinfo") or "", re.M)]
    if not found:
        raise Absent("neither cpufreq nor cpuinfo gives a clock")
    return {"lowest": min(found), "highest": max(found)}


def _git(*arguments: str) -> str:
    """Optional locks off: a read-only checkout stays readable and is not written to."""
    git, home = shutil.which("git"), Path(__file__).resolve().parent.parent
    if git is None or not (home / ".git").exists():
        raise Absent("no git, or no checkout around the package")
    command = [git, "--no-optional-locks", "-C", str(home), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        raise Absent("git did not answer within 20 s") from None
    if done.returncode:
        raise Absent(f"git: {done.stderr.strip().splitlines()[0][:120]}" if done.stderr.strip() else "git failed")
    return done.stdout.strip()


def _cuda_version() -> str:
    return Nvml().cuda_version()


FACTS: dict[str, tuple[Reader, bool]] = {  # name -> (reader, whether two arms must agree on it)
    "kernel": (_file("proc/sys/kernel/osrelease"), True),
    "cpu.model": (_pattern("proc/cpuinfo", r"^model name\s*:\s*(.+)$", r"^(CPU part\s*:.+)$"), True),
    "hypervisor": (_hypervisor, True),
    "container": (_container, True),
    "driver": (_pattern("proc/driver/nvidia/version", r"^NVRM version:.*?\s(\d{3,}\.[\d.]+)\s"), True),
    "cuda": (_live(_cuda_version), True),
    "python": (_live(platform.python_version), True),
    **{f"package.{name}": (_package(name), True) for name in _PACKAGES},
    "git.commit": (_live(lambda: _git("rev-parse", "HEAD")), True),
    "git.dirty": (_live(lambda: bool(_git("status", "--porcelain", "--untracked-files=no"))), False),
    "shm.mount": (lambda tree: f"{_shm(tree).fstype} {_shm(tree).options} {_shm(tree).super_options}", True),
    "shm.mpol": (_shm_option("mpol", "default"), True),
    "shm.huge": (_shm_option("huge", "never"), True),
    "shm.size_bytes": (_statvfs("f_blocks"), True),
    "shm.free_bytes": (_statvfs("f_bavail"), False),
    "thp.enabled": (_chosen(f"{_THP}/enabled"), True),
    "thp.shmem_enabled": (_chosen(f"{_THP}/shmem_enabled"), True),
    "thp.sizes": (_thp_sizes, True),
    "numa_balancing": (_number("proc/sys/kernel/numa_balancing"), True),
    "vm.max_map_count": (_number("proc/sys/vm/max_map_count"), True),
    "vm.overcommit_memory": (_number("proc/sys/vm/overcommit_memory"), True),
    "cpuset.cpus": (_pattern("proc/self/status", r"^Cpus_allowed_list:\s*(\S+)"), True),
    "cpuset.mems": (_pattern("proc/self/status", r"^Mems_allowed_list:\s*(\S+)"), True),
    "cgroup.paths": (cgroup_paths, False),
    "cgroup.memory_limit": (_limited(memory_limit), True),
    "cgroup.headroom": (_limited(cgroup_headroom), False),
    "limit.memlock": (_limit("Max locked memory"), True),
    "limit.address_space": (_limit("Max address space"), True),
    "limit.open_files": (_limit("Max open files"), True),
    **{f"namespace.{name}": (_namespace(name), True) for name in ("ipc", "mnt", "pid")},
    "clock.cpu_mhz": (_cpu_mhz, False),
    "clock.gpu_sm_mhz": (_live(lambda: Nvml().sm_clocks()), False),
    "clock.gpu_throttle": (_live(lambda: Nvml().throttle_reasons()), False),
    "load": (_pattern("proc/loadavg", r"^(\S+ \S+ \S+)"), False),
}

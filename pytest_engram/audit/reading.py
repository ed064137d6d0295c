"""Live workers read from outside: limits, requests and the mappings that may be tables.  No page of theirs is touched.

``maps`` is cheap; ``smaps`` and ``numa_maps`` hold the worker's mmap lock for a whole mapping at a time, so a walk
whose estimate exceeds the limit is left out, with its reason.
"""

from __future__ import annotations

import errno
import mmap
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pytest_engram import probe
from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.model import Problem, Status, Topology
from pytest_engram.numa import _syscalls, pages, procfs
from pytest_engram.numa.tree import Tree

PAGE = mmap.PAGESIZE
WALK_RATE = 15e6  # pages/s of smaps and numa_maps, rounded down from 19 M and 25 M measured on Linux 6.18
ENGRAM = r"(vllm|sglang|pytest)[_-]engram"
SHM = "/dev/shm"  # noqa: S108 - where the engines put their tables
_KINDS = {  # the first that matches; all but the first only from the minimum size on
    "engram": rf"^(?!.*\.so).*{ENGRAM}[^/]*$",  # the file's own name: a checkout's libraries are no tables
    "memfd": r"^/memfd:",
    "unlinked-shm": rf"^{SHM}/.* \(deleted\)$",
    "shm": rf"^{SHM}/",
    "cumem": r"^/dev/nvidiactl",
    "pinned": r"^/dev/zero",
    "hugetlb": r"^/anon_hugepage|^/dev/hugepages/",
}
_SHORT = r"|numactl (?:-\S+ (?:\d[\d,-]* )?)*?-%s ?(\S+)"
_ASKED = {
    "membind": r"--membind[ =](\S+)" + _SHORT % "m",
    "cpunodebind": r"--cpunodebind[ =](\S+)" + _SHORT % "N",
    "numa-bind-nodes": r"--numa-bind-nodes[ =]\[?((?:\d+[ ,]*)+)",
    "numa-bind": r"(--numa-bind)(?![-\w])",
}
_WRAPPED = "_VLLM_INTERNAL_NUMACTL_ARGS"  # numactl replaces itself by the worker; only this names its arguments
_NEED = "PTRACE_MODE_READ: the worker's own user (and a dumpable worker), or CAP_SYS_PTRACE in its user namespace"
_SECCOMP = "a seccomp profile that allows move_pages (containers: CAP_SYS_NICE)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What to look for and how much may be asked.  ``pages`` 0: every page; ``stall_s`` bounds one hold of the lock."""

    min_bytes: int = 64 << 20
    pages: int = 1 << 20
    stall_s: float = 0.5
    numa_maps: bool = False
    probe: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A mapped range that may hold a table.  Equal ``key`` and ``offset`` are the same page in every worker."""

    start: int
    end: int
    offset: int
    vma: int  # start of the VMA that it lies in
    key: str  # "dev:inode", "dev:inode+first offset" of a recorded table, or "pid@address" where there is no identity
    kind: str
    name: str
    kb: dict[str, int] | None = None  # smaps of its VMA
    line: procfs.NumaMapsLine | None = None  # numa_maps of its VMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process as found; None is unknown, and a problem says why.  ``node`` is the one near its GPUs."""

    pid: int
    title: str
    cpus: str | None
    mems: str | None
    task_policy: str | None
    shm: str | None
    gpus: dict[str, int | None]  # PCI address -> node
    visible: str | None
    engine: str | None
    asked: dict[str, str]
    numastat: dict[int, int] | None
    spans: tuple[Span, ...]
    problems: tuple[Problem, ...]

    @property
    def node(self) -> int | None:
        """None where no GPU is mapped, one's node is unknown, or they differ."""
        return next(iter(self.gpus.values())) if len(set(self.gpus.values())) == 1 else None


@dataclass(frozen=True, slots=True)
class Source:
    """Process files below ``root`` and the answers of ``move_pages``; both may be recorded ones."""

    root: Path = Path("/")
    status: Callable[[int, Sequence[int]], bytes] = _syscalls.page_status

    @property
    def tree(self) -> Tree:
        """Small files whose absence needs no reason."""
        return Tree(self.root)

    def text(self, pid: int, name: str) -> str:
        """A whole file; raises ``OSError``."""
        return (self.root / f"proc/{pid}/{name}").read_bytes().decode(errors="replace")

    def titles(self, pid: int) -> dict[int, str]:
        """Command lines, or the titles that processes gave themselves, of a process and its ancestors."""
        found: dict[int, str] = {}
        while pid > 0 and pid not in found:
            text = self.tree.text(f"proc/{pid}/cmdline") or self.tree.text(f"proc/{pid}/comm") or "?"
            found[pid] = text.replace("\0", " ")
            parent = re.search(r"^PPid:\s*(\d+)", self.tree.text(f"proc/{pid}/status") or "", re.M)
            pid = int(parent[1]) if parent else 0
        return found


def problem(pid: int, what: str, error: Exception) -> Problem:
    """Why something could not be read, and which permission would change that."""
    number, text, code = getattr(error, "errno", None), str(error), getattr(error, "code", "not-readable")
    if number:
        name = errno.errorcode[number]
        gone = name == "ESRCH" or (name, what) in (("ENOENT", "status"), ("EINVAL", "move_pages"))  # without an mm
        code, text = "gone" if gone else code, f"{name} {text}"
    if number in (errno.EPERM, errno.EACCES):
        text += f"; needs {_NEED}" + (f", and {_SECCOMP}" if what == "move_pages" else "")
    return Problem(code=code, message=text, who=f"worker {pid}", where=what, status=Status.NOT_MEASURED)


def read_worker(source: Source, pid: int, limits: Limits, topology: Topology) -> Worker:
    """Everything but the pages; a part that cannot be read is a problem and the rest goes on."""
    problems: list[Problem] = []

    def attempt(what: str, read: Callable[[], Any], default: Any = None) -> Any:
        try:
            return read()
        except (OSError, EngramError, ValueError, LookupError, TypeError) as error:
            problems.append(problem(pid, what, error))
            return default

    status = attempt("status", lambda: procfs.parse_status(source.text(pid, "status")), {})
    vmas = attempt("maps", lambda: procfs.parse_smaps(source.text(pid, "maps")), ())
    names = attempt("environ", lambda: _environment(source.text(pid, "environ")), {})
    titles = list(source.titles(pid).values()) or ["?"]
    engine = re.search(r"DP(\d+)", " ".join(titles))
    spans, numastat = _spans(source, pid, limits, vmas, status, names, attempt)
    return Worker(
        pid=pid, title=titles[0], cpus=status.get("Cpus_allowed_list"), mems=status.get("Mems_allowed_list"),
        task_policy=attempt("task policy", lambda: _task_policy(source, pid, vmas, spans)) if vmas else None,
        shm=attempt("mountinfo", lambda: _shm(source.text(pid, "mountinfo"))), gpus=_gpus(source.tree, vmas, topology),
        visible=names.get("CUDA_VISIBLE_DEVICES"), engine=engine[1] if engine else None,
        asked=_asked([*titles, f"numactl {names.get(_WRAPPED, '')}"]), numastat=numastat,
        spans=tuple(one for one in spans if one.kind != "anonymous" or not one.kb or one.kb.get("AnonHugePages")),
        problems=tuple(problems),
    )  # fmt: skip


def _spans(
    source: Source, pid: int, limits: Limits, vmas: Sequence[procfs.Vma], status: dict[str, str],
    names: dict[str, str], attempt: Callable[..., Any],
) -> tuple[list[Span], dict[int, int] | None]:  # fmt: skip
    """(Recorded and candidate ranges with what smaps and numa_maps say about them, numastat)."""
    resident = sum(int(status.get(name, "0").split()[0]) << 10 for name in ("VmRSS", "HugetlbPages"))
    seconds = min(resident, max((vma.end - vma.start for vma in vmas), default=0)) / PAGE / WALK_RATE

    def walked(name: str) -> str:
        if seconds > limits.stall_s:
            seen = f"left out: one walk may hold the worker's mmap lock for {seconds:.2f} s"
            raise NotMeasurable(seen, code="stall", way_out=f"allow it with --stall {seconds + 1:.0f}")
        return source.text(pid, name)

    def smaps() -> dict[int, dict[str, int]]:
        return {vma.start: vma.kb for vma in procfs.parse_smaps(walked("smaps"))}

    def numa_maps() -> dict[int, procfs.NumaMapsLine]:
        lines = map(procfs.parse_numa_maps_line, walked("numa_maps").split("\n")[:-1])
        return {line.start: line for line in lines}

    spans, inside = [], names.get(probe.VARIABLE, "")
    base = source.root / f"proc/{pid}" / ("root" if inside.startswith("/") else "cwd")
    if folder := limits.probe or (inside and base / inside.lstrip("/")):
        for one in attempt("probe", lambda: _recorded(source, pid, folder, status), []):
            spans += attempt("probe", partial(_clipped, pid, vmas, one), [])
    told = {one.vma for one in spans}  # a recorded range stands in place of the candidate that it lies in
    spans += filter(None, (_candidate(pid, vma, limits.min_bytes) for vma in vmas if vma.start not in told))
    kb = attempt("smaps", smaps, {}) if spans else {}
    maps = attempt("numa_maps", numa_maps, {}) if limits.numa_maps else {}
    spans = [replace(one, kb=kb.get(one.vma), line=maps.get(one.vma)) for one in spans]
    return spans, pages.node_bytes(maps.values()) if maps else None


def _environment(text: str) -> dict[str, str]:
    """Three named variables; the others, which may hold secrets, are not kept."""
    pairs = (item.partition("=") for item in text.split("\0"))
    return {name: value for name, _, value in pairs if name in (_WRAPPED, "CUDA_VISIBLE_DEVICES", probe.VARIABLE)}


def _asked(texts: Sequence[str]) -> dict[str, str]:
    """NUMA requests, the nearest process first."""
    hits = [(name, match) for text in texts for name, form in _ASKED.items() if (match := re.search(form, text))]
    return {name: next(filter(None, match.groups())).strip() for name, match in reversed(hits)}


def _gpus(tree: Tree, vmas: Sequence[procfs.Vma], topology: Topology) -> dict[str, int | None]:
    """The GPUs whose device file the worker maps most often: free of CUDA's renumbering, known in containers too.

    CUDA maps every visible GPU's file twice and more often where it has a context (seen with driver 580).
    """
    mapped, folder = Counter(vma.path for vma in vmas), "proc/driver/nvidia/gpus"
    texts = {pci: tree.text(f"{folder}/{pci}/information") or "" for pci in tree.names(folder)}
    minors = {pci: match[1] for pci, text in texts.items() if (match := re.search(r"Device Minor:\s*(\d+)", text))}
    counts = {pci: mapped[f"/dev/nvidia{minor}"] for pci, minor in minors.items()}
    near, most = {gpu.pci: gpu.numa_node for gpu in topology.gpus}, max(counts.values(), default=0)
    return {pci: near.get(pci) for pci, count in counts.items() if count == most > 0}


def _candidate(pid: int, vma: procfs.Vma, least: int) -> Span | None:
    kind = next((kind for kind, form in _KINDS.items() if re.search(form, vma.path)), None)
    if not vma.path and not vma.inode and vma.permissions == "rw-p":
        kind = "anonymous"
    if kind is None or vma.permissions[0] != "r" or (kind != "engram" and vma.end - vma.start < least):
        return None
    return _span(pid, vma, vma.start, vma.end, kind=kind)


def _span(pid: int, vma: procfs.Vma, start: int, end: int, *, kind: str, name: str = "") -> Span:
    """Anonymous memory has no identity, and every cuMem mapping has the device's: their key is the address.

    The pages of a private mapping are its own once written: its key is the object's and, behind a plus, the address.
    """
    own = not vma.inode or "nvidiactl" in vma.path
    return Span(
        start=start, end=end, offset=start if own else vma.offset + start - vma.start, vma=vma.start, kind=kind,
        name=name or vma.path or "[anon]",
        key=f"{pid}@{start:#x}" if own else vma.identity + f"+{pid}@{start:#x}" * (vma.permissions[3] == "p"),
    )  # fmt: skip


def _recorded(source: Source, pid: int, folder: Path, status: dict[str, str]) -> list[dict[str, Any]]:
    """The tables that the engine recorded with ``pytest_engram.probe``."""
    inner = status.get("NSpid", str(pid)).split()[-1]  # the pid in the worker's own namespace
    records, _torn = probe.read_records(folder / f"{inner}.jsonl")
    begun = probe.started(source.text(pid, "stat"))
    if begun not in [record.get("started") for record in records]:
        raise NotMeasurable(f"{folder}/{inner}.jsonl is of an earlier process", code="stale-probe")
    return [one for one in records if one.get("kind") == "table"]


def _clipped(pid: int, vmas: Sequence[procfs.Vma], record: dict[str, Any]) -> list[Span]:
    low, high = record["data_ptr"] // PAGE * PAGE, -(-(record["data_ptr"] + record["nbytes"]) // PAGE) * PAGE
    name = f"heads {record.get('head_range')}, group {record.get('group')}, {record.get('path') or 'no path'}"
    parts = [_span(pid, vma, max(low, vma.start), min(high, vma.end), kind="probe", name=name)
             for vma in vmas if vma.start < high and low < vma.end]  # fmt: skip
    if sum(part.end - part.start for part in parts) != high - low:
        raise NotMeasurable(f"the recorded range {low:#x}-{high:#x} is not mapped whole", code="not-mapped")
    key = parts[0].key if "@" in parts[0].key else f"{parts[0].key}+{parts[0].offset:#x}"
    return [replace(part, key=key) for part in parts]


def _task_policy(source: Source, pid: int, vmas: Sequence[procfs.Vma], spans: Sequence[Span]) -> str:
    """The word at [heap], which has no policy of its own and so shows the task's; reading stops there."""
    heap = next((vma.start for vma in vmas if vma.path == "[heap]"), None)
    if heap is None or any(span.start < heap for span in spans):
        raise NotMeasurable("no [heap], or tables lie below it and would be walked", code="policy-unknown")
    with (source.root / f"proc/{pid}/numa_maps").open("rb", buffering=0) as file:  # so that it walks nothing behind
        lines = (procfs.parse_numa_maps_line(line.decode(errors="replace")) for line in file)
        policy = next((line.policy for line in lines if line.start == heap), None)
    if policy is None:
        raise NotMeasurable("numa_maps shows no [heap]", code="policy-unknown")
    return policy


def _shm(mounts: str) -> str | None:
    mount = procfs.mount_of(SHM, procfs.parse_mounts(mounts))
    if mount is None:
        return None
    return " ".join([mount.point, mount.kind, *(f"{name}={mount.option(name)}" for name in ("size", "huge", "mpol"))])

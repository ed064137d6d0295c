"""Live workers read from outside: their limits, mappings and requests.  No page of theirs is touched.

``maps`` is cheap; ``smaps`` and ``numa_maps`` hold the worker's mmap lock for a whole mapping at a time, so a walk
whose estimate exceeds the limit is left out, with its reason.
"""

from __future__ import annotations

import errno
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_engram import probe
from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.model import Problem, Status
from pytest_engram.numa import _syscalls, procfs
from pytest_engram.numa.tree import Tree

PAGE = mmap.PAGESIZE
WALK_RATE = 15e6  # pages/s of smaps and numa_maps, rounded down from 19 M and 25 M measured on Linux 6.18
_KINDS = (  # the first that matches; all but the first only from the minimum size on
    ("engram", re.compile(r"(vllm|sglang|pytest)[_-]engram")),
    ("memfd", re.compile(r"/memfd:")),
    ("unlinked-shm", re.compile(r"/dev/shm/.* \(deleted\)")),
    ("cumem", re.compile(r"/dev/nvidiactl")),
    ("pinned", re.compile(r"/dev/zero")),
    ("hugetlb", re.compile(r"/anon_hugepage|/dev/hugepages/")),
)
_SHORT = r"|numactl (?:-\S+ (?:[\d,-]+ )?)*?-%s ?(\S+)"
_ASKED = {
    "membind": r"--membind[ =](\S+)" + _SHORT % "m",
    "cpunodebind": r"--cpunodebind[ =](\S+)" + _SHORT % "N",
    "numa-bind-nodes": r"--numa-bind-nodes[ =]\[?((?:\d+[ ,]*)+)",
    "numa-bind": r"(--numa-bind)(?![-\w])",
}
_WRAPPED = "_VLLM_INTERNAL_NUMACTL_ARGS"  # numactl replaces itself by the worker; only this names its arguments
_NEED = "PTRACE_MODE_READ: the worker's own user (and a dumpable worker), or CAP_SYS_PTRACE in its user namespace"


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
    key: str  # "dev:inode", "dev:inode+first offset" of a recorded table, or "pid@address" where there is no identity
    kind: str
    name: str
    kb: dict[str, int] | None = None  # smaps of its VMA
    line: procfs.NumaMapsLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process as found; None is unknown, with a problem that says why."""

    pid: int
    title: str
    cpus: str | None
    mems: str | None
    task_policy: str | None
    shm: str | None
    minors: tuple[int, ...]
    visible: str | None
    engine: str | None
    asked: dict[str, str]
    numastat: dict[int, int] | None
    spans: tuple[Span, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Process files below ``root`` and the answers of ``move_pages``; both may be recorded ones."""

    root: Path = Path("/")
    status: Callable[[int, Sequence[int]], bytes] = _syscalls.page_status
    tree: Tree = field(default_factory=Tree)

    def text(self, pid: int, name: str) -> str:
        """A whole file; raises ``OSError``."""
        return (self.root / f"proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")

    def lines(self, pid: int, name: str) -> Iterator[str]:
        """Unbuffered: the kernel walks no mapping behind the line that the reader stops at."""
        with (self.root / f"proc/{pid}/{name}").open("rb", buffering=0) as file:
            yield from (line.decode(errors="replace") for line in file)


def problem(pid: int, what: str, error: Exception) -> Problem:
    """Why something could not be read, and which permission would change that."""
    number = getattr(error, "errno", None)
    text, code = f"{errno.errorcode.get(number or 0, '')} {error}".strip(), getattr(error, "code", "not-readable")
    if number in (errno.EPERM, errno.EACCES):
        blocked = what == "move_pages" and _blocked()
        text += f"; needs {'CAP_SYS_NICE, or a seccomp profile that allows move_pages' if blocked else _NEED}"
    return Problem(code="gone" if number == errno.ESRCH else code, message=text, who=f"worker {pid}", where=what,
                   status=Status.NOT_MEASURED)  # fmt: skip


def _blocked() -> bool:
    """Not even this process's own pages may be asked about."""
    try:
        with mmap.mmap(-1, PAGE) as own:
            _syscalls.page_status(0, (_syscalls.address_of(own),))
    except OSError:
        return True
    return False


def read_worker(source: Source, pid: int, limits: Limits) -> Worker:
    """Everything but the pages; a part that cannot be read is a problem and the rest goes on."""
    problems: list[Problem] = []

    def attempt(what: str, read: Callable[[], Any], default: Any = None) -> Any:
        try:
            return read()
        except (OSError, EngramError, ValueError, KeyError) as error:
            problems.append(problem(pid, what, error))
            return default

    status = attempt("status", lambda: procfs.parse_status(source.text(pid, "status")), {})
    vmas = attempt("maps", lambda: procfs.parse_smaps(source.text(pid, "maps")), ())
    names = attempt("environ", lambda: _environment(source.text(pid, "environ")), {})
    titles = _titles(source, pid)
    spans = [span for vma in vmas if (span := _candidate(pid, vma, limits.min_bytes))]
    if folder := limits.probe or names.get(probe.VARIABLE) and source.root / f"proc/{pid}/root/{names[probe.VARIABLE]}":
        spans = attempt("probe", lambda: _recorded(source, pid, folder, vmas, status) + spans, spans)
    resident = sum(int(status.get(name, "0").split()[0]) << 10 for name in ("VmRSS", "HugetlbPages"))
    walk = min(resident, max((vma.end - vma.start for vma in vmas), default=0)) / PAGE / WALK_RATE
    kb = attempt("smaps", lambda: _smaps(source, pid, walk, limits), {}) if spans else {}
    maps = attempt("numa_maps", lambda: _numa_maps(source, pid, walk, limits), {}) if limits.numa_maps else {}
    found = {vma.start: vma.end for vma in vmas}
    spans = [replace(one, kb=_of(one, kb, found), line=_of(one, maps, found)) for one in _disjoint(spans)]
    engine = re.search(r"DP(\d+)", " ".join(titles))
    return Worker(
        pid=pid, title=titles[0], cpus=status.get("Cpus_allowed_list"), mems=status.get("Mems_allowed_list"),
        task_policy=attempt("task policy", lambda: _task_policy(source, pid, vmas, spans)) if vmas else None,
        shm=attempt("mounts", lambda: _shm(source.text(pid, "mounts"))),
        minors=tuple(sorted({int(m[1]) for vma in vmas if (m := re.fullmatch(r"/dev/nvidia(\d+)", vma.path))})),
        visible=names.get("CUDA_VISIBLE_DEVICES"), engine=engine[1] if engine else None,
        asked=_asked([*titles, f"numactl {names.get(_WRAPPED, '')}"]), numastat=_total(maps) if maps else None,
        spans=tuple(one for one in spans if one.kind != "anonymous" or not one.kb or one.kb.get("AnonHugePages")),
        problems=tuple(problems),
    )  # fmt: skip

"""Kernel objects that can hold a table.  ``BACKINGS`` is the one list: one class, one row.

No object ever has a name that outlives a call: peers open ``/proc/<pid>/fd/<n>`` and verify device and inode, so
SIGKILL at any step leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

from pytest_engram.errors import NotMeasurable, PlacementError
from pytest_engram.model import TablePlan
from pytest_engram.numa import _syscalls, procfs
from pytest_engram.numa.pages import mapped_vmas
from pytest_engram.numa.tree import Tree

SHM = "/dev/shm"  # noqa: S108 - the tmpfs that the measured engines use
PMD_BYTES = 2 << 20


class Backing:
    """One object of ``num_bytes``: ``create`` in the leader or ``attach`` in a peer, then ``map``, then ``close``."""

    name = ""
    shared = True  # False: every rank has its own object
    policy_per_mapper = False  # True: each mapper sets the policy, not only the leader
    huge = False  # True: as far as is known its pages come as huge ones
    wants_huge = False  # True: transparent huge pages are asked for and collapse is tried
    resident = False  # True: a driver makes the pages, in ``create`` or ``map``, where ``ask`` said
    registered = False  # True: whoever made the memory registered it as well
    detail = ""  # what ``map`` found worth telling
    label = ""  # names the object where all mappings of its device share one ``identity``
    page_bytes = mmap.PAGESIZE

    def __init__(self, num_bytes: int) -> None:
        self.nbytes = -(-num_bytes // self.page_bytes) * self.page_bytes
        self._view: memoryview | None = None
        self._descriptor = -1
        self._map: mmap.mmap | None = None

    def ask(self, plan: TablePlan) -> None:
        """Hear the plan before ``create``; only a backing without a policy step has use for it."""

    def create(self) -> dict[str, str]:
        """Make the object with its length and without a page; the handle that peers attach to."""
        self._descriptor = self._open()
        os.ftruncate(self._descriptor, self.nbytes)
        return {"path": self.path, "identity": self.identity}

    def attach(self, handle: dict[str, str]) -> None:
        """Open a peer's object and verify that it is the same one."""
        try:
            self._descriptor = os.open(handle["path"], os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            seen = f"cannot open {handle['path']}: {error.strerror}"
            way_out = "run all ranks as one user in one PID namespace"
            raise PlacementError(seen, code="peer-object-unreachable", where="map", way_out=way_out) from error
        if self.identity != (expected := handle["identity"]):
            seen = f"{handle['path']} is object {self.identity}"
            raise PlacementError(seen, code="wrong-object", where="map", expected=expected)

    def map(self) -> None:
        """Map the whole object shared and writable; touches nothing."""
        self._map = mmap.mmap(self._descriptor, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._view = memoryview(self._map)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate a range where ``MADV_POPULATE_WRITE`` is unknown: ENOSPC here instead of SIGBUS at the touch."""
        os.posix_fallocate(self._descriptor, offset, nbytes)

    @property
    def path(self) -> str:
        """Where other processes of this user can open the object while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def is_mapped(self) -> bool:
        """Between ``map`` and ``close``."""
        return self._view is not None

    @property
    def mapped(self) -> memoryview:
        """All mapped bytes, writable."""
        if self._view is None:
            raise PlacementError("the object is not mapped", code="not-mapped", where=self.name)
        return self._view

    @property
    def address(self) -> int:
        """First mapped byte's address."""
        return _syscalls.address_of(self.mapped)

    @property
    def identity(self) -> str:
        """ "major:minor:inode" as in smaps, or "anon"."""
        status = os.fstat(self._descriptor)
        return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"

    @property
    def allocated_bytes(self) -> int | None:
        """Bytes of pages that the object holds, whoever faulted them; None where there is no object."""
        return os.fstat(self._descriptor).st_blocks * 512 if self._descriptor >= 0 else None

    def close(self) -> None:
        """Drop the descriptor and the mapping; a mapping with live views goes with its last view."""
        mapping, descriptor = self._map, self._descriptor
        self._view, self._map, self._descriptor = None, None, -1
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self) -> int:
        """Make the object, with no name that outlives this call."""
        raise NotImplementedError


class Tmpfs(Backing):
    """An unnamed file in /dev/shm, as the measured engines use it."""

    name = "tmpfs"

    def _open(self) -> int:
        mount = procfs.mount_of(SHM, procfs.parse_mounts(Tree().need("proc/self/mountinfo")))
        if mount is None or mount.kind != "tmpfs":
            seen, expected = f"{SHM} is {mount.kind if mount else 'absent'}", "tmpfs: an ordinary file ignores mbind"
            raise NotMeasurable(
                seen, code="shm-not-tmpfs", where="create", expected=expected, way_out="use the memfd backing"
            )
        self.huge = mount.option("huge") in ("always", "within_size")
        with tempfile.TemporaryFile(prefix=f"pytest-engram-{os.getpid()}-", dir=SHM) as file:
            return os.dup(file.fileno())


class Memfd(Backing):
    """An anonymous shmem object, not limited by the size of /dev/shm."""

    name = "memfd"
    flags = os.MFD_CLOEXEC

    def _open(self) -> int:
        return os.memfd_create("pytest-engram", self.flags)


class Hugetlb(Memfd):
    """2 MiB pages from the reserved pool; the policy of the faulting mapper decides, so each mapper sets it."""

    name = "hugetlb"
    policy_per_mapper = huge = True
    page_bytes = PMD_BYTES
    flags = os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB

    def map(self) -> None:
        """Map the object; the pool must hold all its pages."""
        try:
            super().map()
        except OSError as error:
            raise NotMeasurable(
                f"mapping {self.nbytes} bytes of huge pages: {error.strerror}", code="hugetlb-pool", where="map",
                expected=f"{self.nbytes // self.page_bytes} free 2 MiB pages",
                way_out="reserve them in /sys/devices/system/node/node*/hugepages/hugepages-2048kB/nr_hugepages",
            ) from error  # fmt: skip


class AnonThp(Backing):
    """Private anonymous memory, PMD-aligned, with MADV_HUGEPAGE: one copy per rank."""

    name = "anon-thp"
    shared = False
    huge = wants_huge = True

    def __init__(self, num_bytes: int) -> None:
        super().__init__(-(-num_bytes // PMD_BYTES) * PMD_BYTES)

    def create(self) -> dict[str, str]:
        """Nothing to create before mapping."""
        return {"path": "", "identity": self.identity}

    def map(self) -> None:
        """Map with a margin on both sides, so that no neighbour merges with the table's VMA."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self.nbytes + 2 * PMD_BYTES, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        base = _syscalls.address_of(self._map)
        start = PMD_BYTES - base % PMD_BYTES
        self._view = memoryview(self._map)[start : start + self.nbytes]
        _syscalls.madvise(base + start, self.nbytes, _syscalls.MADV_HUGEPAGE)

    def reserve(self, offset: int, nbytes: int) -> None:
        """There is no object to allocate; the touch does it."""

    @property
    def identity(self) -> str:
        """There is no object that could be named."""
        return "anon"


BACKINGS: dict[str, type[Backing]] = {kind.name: kind for kind in (Tmpfs, Memfd, Hugetlb, AnonThp)}


class Adopted(Backing):
    """Memory that an engine allocates, shares and registers itself, in ``map``: only its pages are of interest here.

    ``make`` gives what the contract's storage cases ask for: ``buffer``, u8 of at least ``num_bytes``, and ``close``.
    """

    registered = True

    def __init__(self, num_bytes: int, make: Callable[[], Any], *, like: type[Backing]) -> None:
        self.name, self.shared, self.page_bytes = like.name, like.shared, like.page_bytes
        super().__init__(num_bytes)
        self._make, self._least = make, num_bytes
        self._table: Any = None

    def map(self) -> None:
        """Let the engine make its table; less than was asked for is refused."""
        self._table = self._make()
        whole = memoryview(self._table.buffer)
        if whole.nbytes < self._least:
            expected = f"at least {self._least} bytes"
            raise PlacementError(f"{whole.nbytes} bytes", code="short-table", where="allocate", expected=expected)
        self._view = whole[: self._least]

    @property
    def identity(self) -> str:
        """ "major:minor:inode" of the file that the engine mapped, "anon" where there is none, "" before."""
        return mapped_vmas(self.address, self.nbytes, name="maps")[0].identity if self.is_mapped else ""

    def close(self) -> None:
        """Let go of the view, then of the engine's table."""
        self._view, table, self._table = None, self._table, None
        if table is not None:
            table.close()

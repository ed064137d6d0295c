"""One rank's view of one shared table: its bytes, its receipts, its audits."""

from __future__ import annotations

import mmap
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pytest_engram.model import Moment, PageDistribution, StepReceipt, TablePlan
from pytest_engram.numa import pages, procfs
from pytest_engram.numa.backing import Backing
from pytest_engram.numa.group import Group

Bytes = npt.NDArray[np.uint8]


class Registration(Protocol):
    """A registered host range; ``close`` unregisters exactly once."""

    def close(self) -> None:
        """Unregister."""


@dataclass
class Note:
    """What a step adds to its receipt."""

    not_applicable: str | None = None
    detail: str = ""


def _shmem() -> dict[int, int]:
    """Bytes of tmpfs and memfd pages per node, whosever they are: the kernel's account beside the page audit."""
    files = Path("/sys/devices/system/node").glob("node[0-9]*/meminfo")
    return {int(file.parent.name[4:]): procfs.parse_meminfo(file.read_text())["Shmem"] << 10 for file in files}


@dataclass(eq=False)
class SharedTable:
    """``receipts`` has one entry per protocol step, ``distributions`` one per audit so far."""

    plan: TablePlan
    index: int
    nbytes: int
    rank: int
    backing: Backing
    receipts: list[StepReceipt] = field(default_factory=list)
    distributions: list[PageDistribution] = field(default_factory=list)
    registration: Registration | None = None
    _buffer: Bytes | None = None
    _shmem_before: dict[int, int] = field(default_factory=_shmem)

    @property
    def buffer(self) -> Bytes:
        """The table: uint8 [nbytes], writable, zero until loaded."""
        if self._buffer is None:
            self._buffer = np.frombuffer(self.backing.mapped, dtype=np.uint8)[: self.nbytes]
        return self._buffer

    @property
    def address(self) -> int:
        """First byte's address in this process."""
        return self.backing.address

    @property
    def identity(self) -> str:
        """ "dev:inode" of the object, or "anon"."""
        return self.backing.identity

    @property
    def leads(self) -> bool:
        """Whether this rank places and loads the pages that it maps."""
        return self.rank == self.plan.ranks[0] or not self.backing.shared

    def load(self, fill: Callable[[Bytes], None], group: Group) -> None:
        """The leader calls ``fill(buffer)`` once; every rank returns when every table is loaded.

        A long ``fill`` calls ``group.check()`` between its chunks.
        """
        with self.step("load", group) as note:
            if self.leads:
                fill(self.buffer)
            else:
                note.not_applicable = "the leader loads"
        group.barrier(step="load")

    def audit(self, moment: Moment) -> PageDistribution:
        """Where this rank's mapping lies now; coverage equals the table and both routes agree, else an error."""
        distribution = pages.audit_range(
            self.address, self.backing.nbytes, rank=self.rank, moment=moment, table=self.index, identity=self.identity,
            page_bytes=self.backing.page_bytes,
        )  # fmt: skip
        growth = {node: size - self._shmem_before.get(node, 0) for node, size in _shmem().items()}
        seen = replace(distribution, shmem_growth=growth, identity=self.backing.label or self.identity)
        self.distributions.append(seen)
        return seen

    def close(self) -> None:
        """Unregister, then drop the mapping and the object; idempotent."""
        registration, self.registration = self.registration, None
        try:
            if registration is not None:
                registration.close()
        finally:
            self._buffer = None
            self.backing.close()

    @contextmanager
    def step(self, name: str, group: Group) -> Iterator[Note]:
        """Announce a protocol step and append its receipt: seconds, faults and residency before and after."""
        group.check(step=name)
        note, counts, begin = Note(), self._counts(), time.monotonic()
        yield note
        seconds, after = time.monotonic() - begin, self._counts()
        faults, objects, mapped = (None if None in pair else pair for pair in zip(counts, after, strict=True))
        self.receipts.append(StepReceipt(
            step=name, rank=self.rank, seconds=seconds, minor_faults=faults or (0, 0), object_pages=objects,
            mapped_pages=mapped, not_applicable=note.not_applicable, detail=note.detail,
        ))  # fmt: skip

    def residency(self) -> tuple[int | None, int | None]:
        """Bytes of the object, whoever faulted them, and bytes that this rank maps."""
        vmas = pages.mapped_vmas(self.address, self.backing.nbytes) if self.backing.is_mapped else ()
        return self.backing.allocated_bytes, pages.sum_kb(vmas, pages.MAPPED)

    def _counts(self) -> list[Any]:
        """Minor faults so far, pages of the object, pages that this rank maps."""
        sizes = [None if size is None else size // mmap.PAGESIZE for size in self.residency()]
        return [resource.getrusage(resource.RUSAGE_SELF).ru_minflt, *sizes]

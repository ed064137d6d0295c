"""One rank's view of one shared table: its bytes, its receipts, its audits."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pytest_engram.model import Moment, PageDistribution, StepReceipt, TablePlan
from pytest_engram.numa import pages
from pytest_engram.numa.backing import Backing
from pytest_engram.numa.group import Group

Bytes = npt.NDArray[np.uint8]
_BASE_PAGE = 4096


class Registration(Protocol):
    """A registered host range; ``close`` unregisters exactly once."""

    def close(self) -> None:
        """Unregister."""


@dataclass
class Note:
    """What a step adds to its receipt."""

    not_applicable: str | None = None
    detail: str = ""


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
            self.address, self.backing.nbytes, rank=self.rank, moment=moment, table=self.index, identity=self.identity
        )
        self.distributions.append(distribution)
        return distribution

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
        note = Note()
        residency, faults, begin = self._residency(), _minor_faults(), time.monotonic()
        yield note
        seconds, faults_after = time.monotonic() - begin, _minor_faults()
        objects, mapped = (_pair(*counts) for counts in zip(residency, self._residency(), strict=True))
        self.receipts.append(
            StepReceipt(
                step=name, rank=self.rank, seconds=seconds, minor_faults=(faults, faults_after),
                object_pages=objects, mapped_pages=mapped, not_applicable=note.not_applicable, detail=note.detail,
            )
        )  # fmt: skip

    def _residency(self) -> tuple[int | None, int | None]:
        """Bytes of the object, whoever faulted them, and bytes that this rank maps."""
        mapped = pages.mapped_bytes(self.address, self.backing.nbytes) if self.backing.is_mapped else None
        return self.backing.allocated_bytes, mapped


def _pair(before: int | None, after: int | None) -> tuple[int, int] | None:
    return None if before is None or after is None else (before // _BASE_PAGE, after // _BASE_PAGE)


def _minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

"""What the ranks of the test worlds run; loaded by path, as a user's own entry may be."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import time
from pathlib import Path
from typing import Any

from pytest_engram.codec import to_builtins
from pytest_engram.errors import EngramError, PlacementError
from pytest_engram.model import Moment, PlacementPlan, TablePlan
from pytest_engram.numa import _syscalls, mounts, pages
from pytest_engram.numa import table as building
from pytest_engram.numa.table import build_table

building._NEWS_S = 60.0  # a busy machine may bring the news of a dead leader late


class Saboteur:
    """A group that does something terrible the first time a step is announced in the chosen rank."""

    def __init__(self, group: Any, step: str, rank: int, deed: str, folder: Path) -> None:
        self._folder = folder
        self._group, self._step, self._deed = group, step if group.rank == rank else None, deed
        self.rank, self.size = group.rank, group.size

    def check(self, step: str = "") -> None:
        self._reach(step)
        self._group.check(step)

    def barrier(self, *, step: str) -> None:
        self._reach(step)
        self._group.barrier(step=step)

    def all_gather(self, obj: Any, *, step: str) -> list[Any]:
        self._reach(step)
        return self._group.all_gather(obj, step=step)

    def _reach(self, step: str) -> None:
        if step != self._step:
            return
        self._step = None
        self._group.check(step)
        (self._folder / "deed").touch()
        if self._deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._deed == "hang":
            time.sleep(60)
        raise PlacementError(f"planted at {step}", code="planted")


class Registered:
    """Counts its own closes in a file."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def close(self) -> None:
        with self._log.open("a") as stream:
            stream.write("closed\n")


def placement(payload: dict[str, Any]) -> PlacementPlan:
    """What the payload asks for."""
    nodes = [payload["nodes"]] * len(payload["groups"])
    if payload.get("spread"):  # one node per table
        nodes = [[node] for node in payload["nodes"]]
    tables = [
        TablePlan(ranks=tuple(ranks), mode=payload["mode"], nodes=tuple(own))
        for ranks, own in zip(payload["groups"], nodes, strict=True)
    ]
    return PlacementPlan(policy="test", backing=payload["backing"], tables=tuple(tables))


def protocol(group: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """The whole protocol, sabotaged as the payload says; every rank writes down what it was told."""
    folder = Path(payload["folder"])
    group.emit({"pid": os.getpid()})
    group.barrier(step="start")
    if payload.get("deed"):
        group = Saboteur(group, payload["step"], payload["rank"], payload["deed"], folder)
    try:
        return _steps(group, payload, folder)
    except EngramError as error:
        (folder / f"told-{group.rank}").write_text(str(error))
        raise


def _steps(group: Any, payload: dict[str, Any], folder: Path) -> dict[str, Any]:
    def register(_table: Any) -> Registered:
        return Registered(folder / f"registration-{group.rank}")

    plan = placement(payload)
    callback = register if payload.get("register") else None
    table = build_table(group, plan, payload["bytes"], register=callback, order=payload.get("order", "placed"))
    try:
        table.load(lambda buffer: buffer.fill(group.rank + 7), group)
        table.audit(Moment.LOADED)
        group.barrier(step="replay")
        table.audit(Moment.REPLAYED)
        group.barrier(step="end")
        first, total = int(table.buffer[0]), int(table.buffer.sum(dtype="u8"))
        receipts, distributions = to_builtins(table.receipts), to_builtins(table.distributions)
        return {"receipts": receipts, "distributions": distributions, "first": first, "sum": total}
    finally:
        table.close()
        table.close()


def echo(group: Any, payload: Any) -> list[Any]:
    """Use every collective once and tell where this rank runs."""
    group.emit(["event", group.rank])
    everyone = group.all_gather(group.rank * 10, step="gather")
    group.barrier(step="barrier")
    return [
        everyone,
        group.broadcast(payload, step="broadcast"),
        sorted(os.sched_getaffinity(0)),
        os.environ.get("TEST"),
    ]


def fail(group: Any, payload: dict[str, Any]) -> None:
    """Rank 1 ends as the payload says while the others work without a collective, checking for peers."""
    group.emit({"pid": os.getpid()})
    group.barrier(step="start")
    if group.rank == 1:
        if payload["how"] == "raise":
            raise ValueError("planted")
        if payload["how"] == "exit":
            os._exit(3)
        if payload["how"] == "skip":
            return
        time.sleep(60)
    try:
        while payload["busy"]:
            group.check()
            time.sleep(0.01)
        group.barrier(step="end")
    except EngramError as error:
        Path(payload["folder"], f"told-{group.rank}").write_text(str(error))
        raise


def stopped(group: Any, payload: dict[str, Any]) -> None:
    """The last rank sends its part of a large collective and stops before it takes the answer; then the others send."""
    group.emit({"pid": os.getpid()})
    *_, pid = group.all_gather(os.getpid(), step="start")
    if os.getpid() == pid:
        hear = group._hear
        group._hear = lambda flags=0: hear(flags) if flags else os.kill(pid, signal.SIGSTOP)
    while os.getpid() != pid and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        group.check()
        time.sleep(0.01)
    try:
        group.all_gather("x" * payload["length"], step="large")
        group.barrier(step="end")
    except EngramError as error:
        time.sleep(0.5)  # it undoes what it registered
        Path(payload["folder"], f"told-{group.rank}").write_text(str(error))
        raise


def patient(group: Any, payload: dict[str, Any]) -> float:
    """Rank 0 works longer than the deadline but gives signs of life; the others wait for it."""
    begin = time.monotonic()
    while group.rank == 0 and time.monotonic() - begin < payload["seconds"]:
        group.check(step="long work")
        time.sleep(0.02)
    group.barrier(step="after")
    return time.monotonic() - begin


def without_mbind(group: Any, payload: dict[str, Any]) -> Any:
    """Forbid ``mbind`` with a real seccomp filter, as container runtimes do, then build a table."""
    forbid({"x86_64": 237, "aarch64": 235}[platform.machine()])
    return protocol(group, payload)


def forks(group: Any, payload: dict[str, Any]) -> Any:
    """Rank 0 forks a child that holds its socket, tells its pid, and ends as asked; the other rank waits for it."""
    if group.rank == 0:
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        group.emit(child)
        if payload["end"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    if payload["end"] == "killed":
        group.barrier(step="never")
    return None


def without_policy_calls(group: Any, payload: dict[str, Any]) -> Any:
    """Forbid all three policy calls: what Docker's default profile does without CAP_SYS_NICE."""
    for call in ("mbind", "set_mempolicy", "get_mempolicy"):
        forbid(_syscalls._NUMBERS[platform.machine()][call])
    return protocol(group, payload)


def forbid(number: int) -> None:
    """Let one system call fail with EPERM in this process from now on."""

    class Instruction(ctypes.Structure):
        _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction)))

    rules = (Instruction * 4)(
        Instruction(0x20, 0, 0, 0),  # load the system call's number
        Instruction(0x15, 0, 1, number),  # equal?
        Instruction(0x06, 0, 0, 0x00050000 | errno.EPERM),  # SECCOMP_RET_ERRNO
        Instruction(0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    )
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(4, rules)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def in_a_private_mount(group: Any, _payload: Any) -> dict[str, Any]:
    """As an engine that knows nothing of placement: a file in /dev/shm, its path to the peers, one writer."""
    receipt = mounts.enter(group, PlacementPlan(policy="bind:0", backing="tmpfs", tables=(TablePlan(
        ranks=(0, 1), mode="bind", nodes=(0,)),)))  # fmt: skip
    size, path = 2 << 20, group.broadcast("/dev/shm/engine-table", step="path")
    if group.rank == 0:
        Path(path).write_bytes(b"\1" * size)
    group.barrier(step="written")
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        same, address = bytes(mapped) == b"\1" * size, _syscalls.address_of(mapped)
        identity = pages.mapped_vmas(address, size)[0].identity
        seen = pages.audit_range(address, size, rank=group.rank, moment=Moment.LOADED, table=0, identity=identity)
    group.barrier(step="audited")
    return {
        "told": receipt.detail, "names": os.listdir("/dev/shm"), "same": same, "pages": to_builtins(seen.pages),
        "policy": seen.policy_text, "namespace": os.readlink("/proc/thread-self/ns/mnt"),
    }  # fmt: skip

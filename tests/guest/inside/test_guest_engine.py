"""vLLM's own shared storage in two ranks on two nodes: placement proven, registration emulated.

The stand-in for ``cudaHostRegister`` faults the pages in its caller, as the real one was measured to do.  Ranks are
forked: emulated, one import of torch takes a minute.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import guestkit
import pytest

torch = pytest.importorskip("torch", reason="NOT_MEASURED: vLLM's storage needs torch")

from pytest_engram import codec, policies  # noqa: E402  after the skip
from pytest_engram.backends import vllm_patch  # noqa: E402
from pytest_engram.backends.vllm_source import PINNED  # noqa: E402
from pytest_engram.backends.vllm_storage import EngineGroup  # noqa: E402
from pytest_engram.model import Moment, PageDistribution, PlacementPlan  # noqa: E402
from pytest_engram.numa import _syscalls, mounts, pages  # noqa: E402
from pytest_engram.numa.topology import read_topology  # noqa: E402

ROWS, DIM = 61_440, 256
NBYTES = ROWS * (DIM + DIM // 32)
LABEL = "placement proven, registration emulated"
FORK = multiprocessing.get_context("fork")


class Emulated:
    """Registers for stock code and for the patch: rank ``first`` before the other."""

    def __init__(self, rank: int, first: int, turn: Any) -> None:
        self._rank, self._first, self._turn = rank, first, turn

    def register(self, address: int, nbytes: int) -> int:
        if self._rank != self._first:
            assert self._turn.poll(200), "the first rank never registered"
        page = os.sysconf("SC_PAGESIZE")
        _syscalls.madvise(address, -(-nbytes // page) * page, _syscalls.MADV_POPULATE_WRITE)
        if self._rank == self._first:
            self._turn.send(None)
        return 0

    def unregister(self, _address: int) -> int:
        return 0

    def pinned(self, _byte: Any) -> bool:
        return True

    def synchronize(self) -> None: ...

    def cudart(self) -> Emulated:
        return self

    def cudaHostRegister(self, pointer: int, nbytes: int, _flags: int) -> Any:
        return SimpleNamespace(value=self.register(pointer, nbytes))

    def cudaHostUnregister(self, _pointer: int) -> Any:
        return SimpleNamespace(value=0)


class Pinned(torch.Tensor):
    def is_pinned(self, _device: Any = None) -> bool:
        return True


class Pair:
    """The rendezvous of two forked ranks."""

    size = 2

    def __init__(self, rank: int, pipe: Any) -> None:
        self.rank, self._pipe = rank, pipe

    def all_gather(self, value: Any, *, step: str) -> list[Any]:
        self._pipe.send(value)
        assert self._pipe.poll(200), f"the peer never came to {step}"
        return [value, self._pipe.recv()][:: 1 - 2 * self.rank]

    def broadcast(self, value: Any, *, step: str) -> Any:
        return self.all_gather(value, step=step)[0]

    def barrier(self, *, step: str) -> None:
        self.all_gather(None, step=step)


@pytest.fixture(scope="module")
def storage() -> Any:
    """The patched class of the pinned release; without a policy it is the stock one."""
    backend = vllm_patch.PatchedVllmBackend(f"vllm@{PINNED}")
    backend.engine.around.torch["from_numpy"] = lambda array: torch.from_numpy(array).as_subclass(Pinned)
    kind = backend.engine.get(vllm_patch.STORAGE)
    kind.around = backend.engine.around.torch
    return kind


def rank_of(
    kind: Any, group: Pair, turn: Any, first: int, policy: str, task: Sequence[int], mount: PlacementPlan | None
) -> dict[str, Any]:
    """One rank: construct, load, audit three times; its pages and whether it sees the checkpoint."""
    os.sched_setaffinity(0, {group.rank})
    if mount:
        mounts.enter(group, mount)  # type: ignore[arg-type]
    if task:
        _syscalls.set_mempolicy(_syscalls.MPOL_BIND, (task[group.rank],))
    os.environ[vllm_patch.ENVIRONMENT] = policy
    kind.cudart = kind.around["cuda"] = Emulated(group.rank, first, turn)
    made = kind(ROWS, DIM, 32, EngineGroup(group))
    address = made.weight.data_ptr()
    identity = pages.mapped_vmas(address, NBYTES, name="maps")[0].identity
    audits = []

    def audit(moment: Moment) -> None:
        audits.append(pages.audit_range(address, NBYTES, rank=group.rank, moment=moment, table=0, identity=identity))
        group.barrier(step=moment.value)

    audit(Moment.REGISTERED)
    parameter = torch.nn.Parameter(made.weight, requires_grad=False)
    parameter.engram_vocab_start = 0  # type: ignore[attr-defined]
    made.load_weight(parameter, torch.full((ROWS, DIM), 7, dtype=torch.uint8).view(torch.float8_e4m3fn))
    audit(Moment.LOADED)
    loaded = bool((made.weight.view(torch.uint8) == 7).all())
    audit(Moment.REPLAYED)
    return {"audits": codec.to_builtins(audits), "loaded": loaded, "identity": identity}


def constructed(
    kind: Any, *, first: int, policy: str = "", task: Sequence[int] = (), mount: PlacementPlan | None = None
) -> tuple[tuple[PageDistribution, ...], set[str]]:
    """(Audits of both ranks, the objects that they map); rank r runs on the CPU of node r."""
    (a, b), (turn_a, turn_b) = FORK.Pipe(), FORK.Pipe()
    answers = [FORK.Pipe(duplex=False) for _ in range(2)]

    def run(rank: int, pipe: Any, turn: Any) -> None:
        torch.set_num_threads(1)
        answers[rank][1].send(rank_of(kind, Pair(rank, pipe), turn, first, policy, task, mount))

    ranks = [FORK.Process(target=run, args=(0, a, turn_a)), FORK.Process(target=run, args=(1, b, turn_b))]
    for process in ranks:
        process.start()
    told = [answer.recv() for answer, _ in answers if answer.poll(300)]
    for process in ranks:
        process.join(30)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert [one["loaded"] for one in told] == [True, True]
    audits = guestkit.distributions(audit for one in told for audit in one["audits"])
    return audits, {one["identity"] for one in told}


def told(situation: str, order: str, asked: PlacementPlan | None, audits: Sequence[PageDistribution]) -> str:
    """One line of the table; gate 1's word where something was asked for."""
    reason = guestkit.gate_one(asked, audits) if asked else "nothing asked"
    shown = "; ".join(f"rank {a.rank} {guestkit.pages_text(a)}" for a in audits if a.moment is Moment.REPLAYED)
    guestkit.say("engine", f"vLLM {PINNED} {order}", situation, shown, reason, LABEL)
    return reason


@pytest.mark.parametrize("first", [0, 1])
def test_stock_follows_the_rank_that_registers_first(storage: Any, first: int) -> None:
    """Stock order: the first registration's node holds the pages of both ranks; gate 1 finds another request unmet."""
    audits, objects = constructed(storage, first=first)
    assert [sorted(audit.pages) for audit in audits] == [[first]] * 6
    assert len(objects) == 1
    asked = guestkit.asked("bind", 1 - first, ranks=(0, 1))
    assert told(f"rank {first} registers first, bind:{1 - first} wanted", "stock", asked, audits) == "not-as-asked"


def test_stock_follows_the_registering_ranks_policy(storage: Any) -> None:
    """Stock order: the task policy of the rank that registers first beats its CPU."""
    audits, _ = constructed(storage, first=0, task=(1, 0))
    assert [sorted(audit.pages) for audit in audits] == [[1]] * 6
    told("rank 0 on node 0 with task policy bind:1 registers first", "stock", None, audits)


@pytest.mark.parametrize("node", [0, 1])
def test_a_private_mount_flips_stock_placement(storage: Any, node: int) -> None:
    """vLLM's own allocator over a /dev/shm with ``mpol=bind:N``: its pages are there, though the other registers."""
    before, asked = Path("/proc/mounts").read_text(), guestkit.asked("bind", node, ranks=(0, 1))
    audits, objects = constructed(storage, first=1 - node, mount=asked)
    assert [sorted(audit.pages) for audit in audits] == [[node]] * 6
    assert len(objects) == 1
    situation = f"private /dev/shm mpol=bind:{node}, rank {1 - node} registers first"
    assert told(situation, "stock", asked, audits) == "as-asked"
    assert Path("/proc/mounts").read_text() == before


@pytest.mark.parametrize("node", [0, 1])
def test_the_patch_follows_the_request(storage: Any, node: int) -> None:
    """Reference order: whoever registers first, under whichever task policy, the pages are where they are asked for."""
    asked = guestkit.asked("bind", node, ranks=(0, 1))
    audits, objects = constructed(storage, first=1 - node, policy=f"bind:{node}", task=(1 - node, 1 - node))
    assert len(objects) == 1
    assert told(f"bind:{node}, rank {1 - node} registers first", "patched", asked, audits) == "as-asked"


@pytest.mark.parametrize(("policy", "copies"), [("interleave", 1), ("per-numa-node", 2)])
def test_the_patch_spreads_and_copies(storage: Any, policy: str, copies: int) -> None:
    """Interleave is half and half in one object; per-numa-node is one loaded copy beside each rank."""
    asked = policies.resolve(policy, read_topology(), 2, backing="tmpfs", rank_nodes=(0, 1))
    audits, objects = constructed(storage, first=0, policy=policy)
    assert len(objects) == copies
    assert [sorted(audit.pages) for audit in audits] == ([[0, 1]] * 6 if copies == 1 else [[0]] * 3 + [[1]] * 3)
    audits = tuple(replace(audit, table=audit.rank * (copies - 1)) for audit in audits)
    assert told(policy, "patched", asked, audits) == "as-asked"


def test_a_failing_patch_is_stock_placement(storage: Any) -> None:
    """A node that is not there: the engine starts all the same, as stock code places it."""
    audits, _ = constructed(storage, first=1, policy="bind:7")
    assert [sorted(audit.pages) for audit in audits] == [[1]] * 6
    told("bind:7, which is no node: stock after a warning", "patched", None, audits)

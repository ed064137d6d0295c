"""The build protocol of shared tables on this machine's real kernel."""

from __future__ import annotations

import errno
from contextlib import closing
from typing import Any

import pytest

from pytest_engram.codec import from_builtins
from pytest_engram.errors import NotMeasurable, PeerError, PlacementError, UsageError
from pytest_engram.model import Moment, PageDistribution, PlacementPlan, StepReceipt, TablePlan
from pytest_engram.numa import _syscalls, pages, populate
from pytest_engram.numa import backing as backings
from pytest_engram.numa.backing import BACKINGS
from pytest_engram.numa.group import SoloGroup
from pytest_engram.numa.table import build_table

PAGES = (3 << 20) // 4096
STEPS = ("create", "broadcast", "map", "policy", "populate", "barrier", "register", "audit", "load", "replay")


def plan(*, backing: str = "tmpfs", mode: str = "bind", nodes: tuple[int, ...] = (0,)) -> PlacementPlan:
    """One rank, one table."""
    return PlacementPlan(policy="test", backing=backing, tables=(TablePlan(ranks=(0,), mode=mode, nodes=nodes),))


def receipt(result: dict[str, Any], step: str) -> StepReceipt:
    """The one receipt of a step."""
    (found,) = [one for one in result["receipts"] if one["step"] == step]
    return from_builtins(found, StepReceipt)


def distributions(result: dict[str, Any]) -> list[PageDistribution]:
    """A rank's audits in order."""
    return [from_builtins(one, PageDistribution) for one in result["distributions"]]


@pytest.mark.parametrize("backing", ["tmpfs", "memfd"])
def test_the_leader_alone_allocates(world: Any, backing: str) -> None:
    """Only the leader's populate step allocates pages; a peer maps pages that exist already."""
    results = world("protocol", ranks=3, backing=backing)
    leader, *peers = results
    assert receipt(leader, "map").object_pages == (0, 0)
    assert receipt(leader, "policy").object_pages == (0, 0)
    assert receipt(leader, "populate").object_pages == (0, PAGES)
    assert receipt(leader, "populate").mapped_pages == (0, PAGES)
    before, after = receipt(leader, "populate").minor_faults
    assert after - before >= PAGES
    for peer in peers:
        assert receipt(peer, "populate").not_applicable
        assert receipt(peer, "register").object_pages == (PAGES, PAGES)
        assert receipt(peer, "register").mapped_pages == (0, PAGES)
        assert receipt(peer, "register").not_applicable
        assert receipt(peer, "load").not_applicable
    assert {result["sum"] for result in results} == {7 * (3 << 20)}


def test_stock_order_allocates_during_registration(world: Any) -> None:
    """Negative control of the receipts: in stock order pages appear during registration, in whoever comes first."""
    results = world("protocol", order="stock", mode="default", nodes=[])
    assert min(receipt(result, "register").object_pages for result in results) < (PAGES, PAGES)
    steps = [one["step"] for one in results[0]["receipts"]]
    assert steps == ["create", "map", "register", "policy", "audit", "load"]


def test_audits_cover_the_table_in_every_rank_at_every_moment(world: Any) -> None:
    """Each rank's audits at the three moments cover the table's bytes, by two agreeing routes."""
    for result in world("protocol", ranks=2):
        audits = distributions(result)
        assert [audit.moment for audit in audits] == [Moment.REGISTERED, Moment.LOADED, Moment.REPLAYED]
        for audit in audits:
            assert audit.covered_bytes == audit.table_bytes == 3 << 20
            assert audit.pages == {0: PAGES}
            assert audit.unplaced == {}
            assert audit.routes == ("move_pages", "numa_maps")


def test_pss_divides_shared_pages_by_their_mappers(world: Any) -> None:
    """PSS over all ranks equals one table, where RSS would count it once per rank."""
    results = world("protocol", ranks=3)
    total = sum(distributions(result)[-1].pss_bytes or 0 for result in results)
    assert abs(total - (3 << 20)) < 64 << 10  # KiB rounding per rank


def test_tables_of_several_sharing_groups_are_built_in_lock_step(world: Any) -> None:
    """One table per sharing group: own object, own leader, own bytes."""
    results = world("protocol", ranks=3, groups=[[0, 2], [1]])
    assert [result["first"] for result in results] == [7, 8, 7]
    identities = [distributions(result)[0].identity for result in results]
    assert identities[0] == identities[2] != identities[1]
    assert [distributions(result)[0].table for result in results] == [0, 1, 0]


def test_private_backing_gives_each_rank_its_own_huge_pages(world: Any) -> None:
    """anon-thp is not shared: each rank populates, loads and audits a PMD-rounded copy of its own."""
    results = world("protocol", backing="anon-thp")
    assert [result["first"] for result in results] == [7, 8]
    for result in results:
        audit = distributions(result)[-1]
        assert (audit.identity, audit.table_bytes) == ("anon", 4 << 20)
        assert audit.huge_bytes is not None
        assert "MADV_COLLAPSE" in receipt(result, "populate").detail


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_a_rank_killed_at_any_step_is_named_to_all(world: Any, step: str, rank: int) -> None:
    """kill -9 of leader or peer at any step: the others raise one text, not by the deadline, and nothing is left."""
    kill(world, step, rank)
    assert world.seconds_until_told < 100


@pytest.mark.alone
@pytest.mark.parametrize("step", ["create", "barrier", "replay"])
def test_a_killed_rank_is_told_within_five_seconds(world: Any, step: str) -> None:
    """How long the others wait for the news, with nothing beside it."""
    kill(world, step, 1)
    assert world.seconds_until_told < 5


def kill(world: Any, step: str, rank: int) -> None:
    """Kill -9 one of three ranks at a step."""
    with pytest.raises(PeerError) as caught:
        world("protocol", ranks=3, register=True, deed="kill", step=step, rank=rank, deadline_s=120)
    assert str(caught.value) == f"rank {rank}, step {step!r}: it was killed by SIGKILL"
    assert world.told == {other: str(caught.value) for other in range(3) if other != rank}
    assert world.survivors == []


@pytest.mark.parametrize("step", STEPS)
def test_an_error_at_any_step_is_told_to_all(world: Any, step: str) -> None:
    """S1, S3: an error in one rank gives every other rank the same text, and every registration is undone once."""
    with pytest.raises(PeerError) as caught:
        world("protocol", register=True, deed="raise", step=step, rank=1)
    assert str(caught.value) == f"rank 1, step {step!r}: planted at {step}"
    assert caught.value.code == "planted"
    assert isinstance(caught.value.__cause__, PlacementError)
    assert world.told == {0: str(caught.value), 1: f"planted at {step}"}
    logs = sorted(file.name for file in world.folder.glob("registration-*"))
    late = STEPS.index(step) > STEPS.index("register")
    expected = ["registration-0", "registration-1"] if late else ["registration-0"] if step == "register" else []
    assert logs == expected or (step == "register" and logs == [])  # rank 0 may not have registered yet
    assert all((world.folder / name).read_text() == "closed\n" for name in logs)


def test_a_hanging_rank_meets_the_deadline(world: Any) -> None:
    """A rank that hangs in a step is named with that step once the deadline is over."""
    with pytest.raises(PeerError, match=r"rank 1 \(step 'register'\): nothing was heard for 5 s") as caught:
        world("protocol", deadline_s=5, deed="hang", step="register", rank=1)
    assert caught.value.code == "peer-deadline"
    assert world.told == {0: str(caught.value)}
    assert world.survivors == []


@pytest.mark.parametrize("entry", ["without_mbind", "without_policy_calls"])
def test_a_real_seccomp_filter_is_named(world: Any, entry: str) -> None:
    """K1: mbind refused by a sandbox is an absence that names CAP_SYS_NICE and seccomp, never a pass."""
    with pytest.raises(PeerError, match="CAP_SYS_NICE or a seccomp profile") as caught:
        world(entry)
    assert caught.value.code == "blocked-by-sandbox"
    assert isinstance(caught.value.__cause__, NotMeasurable)


def test_without_policy_calls_an_unplaced_table_is_built(world: Any) -> None:
    """K1: in a container that forbids every policy call, a table that asks for no policy is built and audited."""
    assert len(world("without_policy_calls", mode="default", nodes=[])) == 2


def test_a_table_that_does_not_fit_is_refused_before_it_is_created() -> None:
    """K31: too large for /dev/shm or a node is a UsageError with both numbers, not SIGBUS or the OOM killer."""
    with pytest.raises(UsageError, match="the tables need 1099511627776 bytes") as caught:
        build_table(SoloGroup(), plan(), 1 << 40)
    assert caught.value.code == "too-large"


def test_a_touched_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """K17: a page that is resident before the policy is set fails the build."""
    kind = BACKINGS["memfd"]
    mapped = kind.map

    def touch(self: Any) -> None:
        mapped(self)
        self.mapped[0] = 1

    monkeypatch.setattr(kind, "map", touch)
    with pytest.raises(PlacementError, match="4096 bytes are allocated") as caught:
        build_table(SoloGroup(), plan(backing="memfd"), 1 << 20)
    assert caught.value.code == "already-touched"


def test_kernels_without_populate_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MADV_POPULATE is unknown (EINVAL), the pages are reserved and touched one by one."""
    monkeypatch.setattr(_syscalls, "MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(_syscalls, "MADV_POPULATE_READ", 9999)
    table = build_table(SoloGroup(), plan(), 1 << 20)
    assert [one.detail for one in table.receipts if one.step == "populate"] == ["touch_write by 2 threads"]
    assert table.distributions[0].pages == {0: 256}
    table.close()


def test_progress_covers_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress counts up to the whole table, chunk by chunk, and an error in it stops the build."""
    monkeypatch.setattr(populate, "CHUNK_BYTES", 1 << 20)
    seen: list[tuple[int, int]] = []
    build_table(SoloGroup(), plan(), (3 << 20) + 1, progress=lambda *pair: seen.append(pair)).close()
    assert seen == [(done, (3 << 20) + 4096) for done in (1 << 20, 2 << 20, 3 << 20, (3 << 20) + 4096)]


@pytest.mark.parametrize(("backing", "most"), [("tmpfs", 8), ("memfd", 8), ("anon-thp", 16)])
def test_every_thread_takes_chunks_and_no_page_is_left_out(
    monkeypatch: pytest.MonkeyPatch, backing: str, most: int
) -> None:
    """All allowed CPUs share the chunks, up to 8 for new small pages and 16 for huge ones; the receipt tells how many;
    every page is resident afterwards.
    """
    for cpus, threads in ((3, 3), (64, most)):
        monkeypatch.setattr(populate.os, "sched_getaffinity", lambda _pid, cpus=cpus: set(range(cpus)))
        table = build_table(SoloGroup(), plan(backing=backing), 33 << 20)
        (detail,) = [one.detail for one in table.receipts if one.step == "populate"]
        assert detail.startswith(f"populate_write by {threads} threads")
        assert table.distributions[0].pages == {0: table.backing.nbytes // 4096}
        table.close()


@pytest.mark.parametrize(
    ("huge", "small"), [("always", False), ("within_size", False), ("never", True), ("advise", True), ("default", True)]
)
def test_new_small_pages_take_fewer_threads(monkeypatch: pytest.MonkeyPatch, huge: str, *, small: bool) -> None:
    """A tmpfs whose mount gives huge pages is written by 16 threads, any other by 8; to map what is there takes 16."""
    monkeypatch.setattr(populate.os, "sched_getaffinity", lambda _pid: set(range(64)))
    monkeypatch.setattr(backings.procfs.Mount, "option", lambda _self, _name: huge)
    with closing(BACKINGS["tmpfs"](1 << 20)) as one:
        one.create()
        one.map()
        ways = [populate.populate(one, lambda *_: None, write=write) for write in (True, False)]
    assert ways == [f"populate_write by {8 if small else 16} threads", "populate_read by 16 threads"]


def test_the_page_pool_is_huge() -> None:
    """hugetlb's pages are huge whatever any mount says, memfd's are not known to be."""
    assert (BACKINGS["hugetlb"].huge, BACKINGS["memfd"].huge) == (True, False)


@pytest.mark.parametrize(("refusals", "said"), [(0, "done"), (2, "done"), (3, "EAGAIN")])
def test_a_busy_collapse_is_tried_again(monkeypatch: pytest.MonkeyPatch, refusals: int, said: str) -> None:
    """EAGAIN is asked three times in all; its end is told and changes no page."""
    honest, asked = _syscalls.madvise, []

    def busy(address: int, nbytes: int, advice: int) -> None:
        if advice == _syscalls.MADV_COLLAPSE:
            asked.append(nbytes)
            if len(asked) <= refusals:
                raise OSError(errno.EAGAIN, "planted")
        else:
            honest(address, nbytes, advice)

    monkeypatch.setattr(_syscalls, "madvise", busy)
    table = build_table(SoloGroup(), plan(backing="anon-thp"), 4 << 20)
    (detail,) = [one.detail for one in table.receipts if one.step == "populate"]
    assert detail.endswith(f"MADV_COLLAPSE {said}")
    assert asked == [4 << 20] * min(refusals + 1, 3)
    assert table.distributions[0].pages == {0: 1024}
    table.close()


def test_unknown_kernel_errors_keep_their_name() -> None:
    """A policy that the kernel refuses is a PlacementError with the kernel's own errno name."""
    with pytest.raises(PlacementError, match="mbind: EINVAL") as caught:
        build_table(SoloGroup(), plan(backing="anon-thp", mode="bind", nodes=()), 1 << 20)
    assert caught.value.code == "kernel-einval"


@pytest.mark.parametrize(
    ("placement", "code"),
    [
        (plan(backing="punched-cards"), "unknown-backing"),
        (PlacementPlan(policy="test", backing="tmpfs", tables=()), "bad-placement"),
    ],
)
def test_nonsense_placements_are_refused(placement: PlacementPlan, code: str) -> None:
    """A placement that gives a rank no table, or an unknown backing, is a usage error."""
    with pytest.raises(UsageError) as caught:
        build_table(SoloGroup(), placement, 1 << 20)
    assert caught.value.code == code


def test_views_outlive_close() -> None:
    """S5: closing a table leaves live views readable; the mapping goes with the last of them."""
    table = build_table(SoloGroup(), plan(), 1 << 20)
    table.load(lambda buffer: buffer.fill(9), SoloGroup())
    view, start = table.buffer[4096:8192], table.address
    table.close()
    assert int(view.sum()) == 9 * 4096
    assert pages.mapped_vmas(start, 1 << 20)
    del view
    with pytest.raises(PlacementError, match="nothing is mapped"):
        pages.mapped_vmas(start, 1 << 20)

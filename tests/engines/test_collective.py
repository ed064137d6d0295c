"""Head shards: a gather of the staged rows makes the step of all heads, bit by bit."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.engines.collective import Collective
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.engines.protocol import StepSettings
from pytest_engram.errors import NotMeasurable, PeerError, UsageError
from pytest_engram.hashing import HashBatch
from pytest_engram.numa.group import SoloGroup
from pytest_engram.numa.world import RankSpec, run_world

ENTRIES = str(Path(__file__).with_name("shard_entries.py"))
ENV = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
BATCH = HashBatch.sequence(np.arange(9), history=[1, 2, 3])


@pytest.fixture(scope="module")
def sharded():
    """(heads a 2-gram, joins) -> what each of two ranks says of its shard; a world of both variants."""
    pytest.importorskip("torch")
    variants = [(2, False), (3, True)]
    ranks = run_world(f"{ENTRIES}:sharded", variants, [RankSpec(env=ENV)] * 2, deadline_s=60)
    return {variant: [rank[number] for rank in ranks] for number, variant in enumerate(variants)}


@pytest.mark.parametrize(("heads", "joins"), [(2, False), (3, True)])
def test_two_ranks_see_the_rows_and_outputs_of_one(sharded, heads, joins):
    """L4, L8: two processes, each with its heads (of 9 the second has a padded one), equal one with all of them.

    A collective of its own and one in a world that is initialised already, as under torchrun, give the same.
    """
    assert len(sharded[heads, joins]) == 2
    for rank in sharded[heads, joins]:
        assert rank["rows"]
        assert rank["outputs"]
        assert rank["gathers"] == [1, 3]
        whole, shard = rank["communication"]
        assert whole is None
        assert 0 < shard < rank["step"]
        assert rank["main"] <= rank["step"] - shard
        assert rank["launched"] == [22 * -(-3 * heads // 2), 22 * 3 * heads]


def test_a_peer_that_never_comes_is_an_error_at_the_deadline():
    """A gather does not hang: its rank raises a PeerError, and so does the world."""
    pytest.importorskip("torch")
    with pytest.raises(PeerError, match="gather of staged rows") as caught:
        run_world(f"{ENTRIES}:forsaken", None, [RankSpec(env=ENV)] * 2, deadline_s=60)
    assert caught.value.code == "gather-failed"


def assemble(bench, gather):
    """An engine over the second of two shards whose peer's rows ``gather`` brings."""
    engine = bench.engine()
    engine.close()
    bench.engines[-1] = CpuEngine(replace(engine._setup, shard=(1, 2), gather=gather))
    return bench.engines[-1]


def test_a_gather_that_brings_nothing_is_seen(bench):
    """Negative control: without its peer's rows a shard's output is not the whole step's."""
    honest = bench.engine().step(BATCH, StepSettings(), marks=False).output

    def own_only(out, local):
        out[...] = 0
        out[1] = local

    assert (assemble(bench, own_only).step(BATCH, StepSettings(), marks=False).output != honest).any(axis=1).all()


def test_a_shard_looks_up_only_its_heads(bench):
    """The backend sees the shard's ids and rows: half of the heads, rows from the first head of its own."""
    seen = []

    class Spy(ReferenceBackend):
        def lookup(self, shard, ids, out, *, cap=None):
            seen.append((shard.head_start, shard.local_heads, shard.start, len(shard.weight), out.shape[1]))
            return super().lookup(shard, ids, out, cap=cap)

    engine = bench.engine(Spy())
    engine.close()
    bench.engines[-1] = CpuEngine(replace(engine._setup, shard=(1, 2), gather=lambda out, _local: out.fill(0)))
    bench.engines[-1].step(BATCH, StepSettings(), marks=False)
    for table, one in enumerate(seen):
        first, rows = int(bench.layout.offsets[table][3]), bench.layout.rows(table)
        assert one == (3, 3, first, rows - first, 3)
    assert len(seen) == 2


@pytest.mark.parametrize(("shard", "code"), [((0, 2), "no-gather"), ((0, 5), "shard-without-heads")])
def test_shards_that_cannot_work_are_refused(bench, shard, code):
    """L4: a shard without a gather, and one of so many that some would have no head, are usage errors."""
    engine = bench.engine()
    engine.close()
    gather = None if code == "no-gather" else print
    with pytest.raises(UsageError) as caught:
        CpuEngine(replace(engine._setup, shard=shard, gather=gather))
    assert caught.value.code == code


def test_without_torch_there_is_no_gather(monkeypatch):
    """A missing torch is a named absence."""
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NotMeasurable, match="sharded heads need torch") as caught:
        Collective(SoloGroup(), "cpu")
    assert caught.value.code == "no-torch"

"""The fixtures give what their docstrings say: placed tables held by real peers, and one serial prefetch stream."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from pytest_engram.checks import check_engine, explain
from pytest_engram.engines.protocol import StepSettings
from pytest_engram.errors import UsageError
from pytest_engram.model import Workload
from pytest_engram.queueing import queue_report
from pytest_engram.serving.replay import fixed_batches

ROWS = 20_000


def processes():
    """Live child processes of this one."""
    found = set()
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            found.update(task.read_text().split())
    return found


def own_names():
    """What this package would leave in /dev/shm; other tests may run beside this one."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("pytest-engram")}


@pytest.fixture
def table(engram_table):
    """A small table bound to node 0 and held by two peers."""
    return engram_table(policy="bind:0", backing="tmpfs", ranks=2, rows=ROWS)


def test_every_rank_reports_every_page_on_its_node(table):
    """Both ranks' audits cover the table, by two routes, and find all pages on node 0."""
    assert {(d.rank, d.moment.value) for d in table.distributions} >= {(0, "loaded"), (1, "loaded")}
    for found in table.distributions:
        assert found.covered_bytes == found.table_bytes
        assert (set(found.pages), found.unplaced) == ({0}, {})
        assert set(found.routes) == {"move_pages", "numa_maps"}


def test_receipts_show_who_allocated(table):
    """Rank 0's populate step grew the object to its full size; no step of rank 1 did."""
    grown = {
        (receipt.rank, receipt.step): receipt.object_pages[1] - receipt.object_pages[0]
        for receipt in table.receipts
        if receipt.object_pages is not None and receipt.object_pages[1] > receipt.object_pages[0]
    }
    assert (0, "populate") in grown
    steps = {step for rank, step in grown if rank == 1}
    assert steps <= {"populate"}  # rank 1 watched the object grow while it waited at the leader's step


def test_the_test_maps_the_same_pages(table, engram_oracle):
    """What the leader loaded is what this process reads: the oracle's rows, in place."""
    weight, scales = table.views[1]
    expected, expected_scales = engram_oracle.synthetic_rows(17, 19, 256, layer=1, seed=table.seed)
    np.testing.assert_array_equal(weight[17:19], expected)
    np.testing.assert_array_equal(scales[17:19], expected_scales)


def test_nothing_is_left_behind(engram_table):
    """After close no peer lives and /dev/shm holds what it held before."""
    before, names = processes(), own_names()
    placed = engram_table(policy="default", backing="memfd", ranks=2, rows=ROWS)
    assert processes() > before
    placed.close()
    assert (processes(), own_names()) == (before, names)
    placed.close()  # twice is once


def test_a_bad_policy_is_one_sentence(engram_table):
    """An unknown node and an unknown backing are usage errors that say what there is."""
    with pytest.raises(UsageError, match="node 7"):
        engram_table(policy="bind:7", rows=ROWS)
    with pytest.raises(UsageError, match="tmpfs"):
        engram_table(backing="floppy", rows=ROWS)


def test_prefetch_is_one_serial_queue(table, engram_prefetch):
    """A marked step over the placed table is a serial queue whose lookups end before their consumers go on."""
    engine = engram_prefetch(table, hidden=64, layers=16, tokens=16)
    batch = next(fixed_batches(Workload(tokens=16), 3, 129_280, "low-reuse"))
    timeline = engine.step(batch, StepSettings(submission="early"), marks=True).timeline
    report = queue_report(timeline, tolerance_ns=1_000_000)
    assert report.serial, report.reason
    assert all(mark.done <= mark.wait_after for mark in timeline.lookups)


def test_engine_passes_on_the_placed_table(table, engram_prefetch):
    """The engine's ids, rows and outputs over the shared pages equal the oracle's."""
    engine = engram_prefetch(table, hidden=64, layers=16, tokens=24)
    vocabulary = np.arange(129_280, dtype=np.int32) % table.layout.compressed_vocab
    batch = next(fixed_batches(Workload(tokens=24), 3, 129_280, "low-reuse"))
    samples = check_engine(engine, batch, StepSettings(), table.layout, vocabulary, table.seed)
    assert [explain(sample) for sample in samples if not sample.passed] == []


def test_layout_is_the_models(engram_layout):
    """H3: the layout is DeepSeek-V4.1's, two layers of 24 columns with the model's own number of rows."""
    assert engram_layout.layer_ids == (1, 14)
    assert (engram_layout.columns, engram_layout.rows(1)) == (24, 384_016_682)

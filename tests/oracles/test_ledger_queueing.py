"""Bytes, launches and the serial queue."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from pytest_engram.errors import UsageError
from pytest_engram.hashing import EngramLayout
from pytest_engram.ledger import (
    ByteLedger,
    Launch,
    background_cap,
    distinct_share,
    launch,
    link_floor_s,
    row_bytes,
    source_bytes,
    staging_bytes,
    step_bytes,
)
from pytest_engram.model import LookupMark, Timeline
from pytest_engram.queueing import QueueReport, queue_report

MODEL = EngramLayout.deepseek_v41()


@pytest.mark.parametrize(
    ("tokens", "heads", "cap", "expected"),
    [
        (0, 24, 66, (0, 0, 0)),
        (1, 24, 66, (24, 2, 2)),  # a decode batch below the cap: changing the cap changes nothing
        (1, 24, 8, (24, 2, 2)),
        (256, 24, 66, (6144, 384, 66)),
        (256, 24, None, (6144, 384, 384)),
        (3, 5, 1, (15, 1, 1)),
        (17, 1, 1, (17, 2, 1)),
    ],
)
def test_launch_arithmetic(tokens: int, heads: int, cap: int | None, expected: tuple[int, int, int]) -> None:
    """rows = tokens × local heads, tiles = ceil(rows / 16), grid = min(tiles, cap)."""
    assert launch(tokens, heads, cap) == Launch(*expected)


def test_the_cap_is_half_of_the_sms_and_at_least_one() -> None:
    """The background cap is SM_count // 2; a cap below 1 is refused."""
    assert [background_cap(count) for count in (132, 133, 1)] == [66, 66, 1]
    with pytest.raises(UsageError, match="at least 1 program"):
        launch(1, 1, 0)


def test_ledgers_are_separate_lines() -> None:
    """B_source = N·H·(d + d/32), B_staging = 2·N·H_padded·d; a token reads 12,672 and stages 24,576 bytes."""
    assert source_bytes(1, 24, 256) == 6_336
    assert staging_bytes(1, 24, 256) == 12_288
    assert step_bytes(1, MODEL) == ByteLedger(source=12_672, staging=24_576, gather=0)
    assert sum(MODEL.num_embeddings) * row_bytes(256) == 202_758_032_400


def test_padded_heads_are_staged_and_gathered() -> None:
    """24 heads over 5 shards stage 5 each, the last reads 4; what is gathered is a line of its own, per collective."""
    lines = step_bytes(10, MODEL, shards=5, hidden=64)
    assert lines.source == 2 * 10 * 5 * 264
    assert lines.staging == 2 * 2 * 10 * 5 * 256
    assert (lines.gather, lines.collectives) == (4 * lines.staging, 2)
    last = step_bytes(10, MODEL, shards=5, shard=4)
    assert (last.source, last.staging) == (2 * 10 * 4 * 264, lines.staging)
    assert step_bytes(10, MODEL).collectives == 0
    assert lines.projection == 2 * (2 * 10 * 24 * 256) + 2 * (2 * 10 * 64 * 4)
    assert lines.gate == 4 * (2 * 10 * 64 * 4)


def test_repeated_rows_are_counted_once() -> None:
    """Rows that a step or an earlier one reads again are no distinct ones; layers have tables of their own."""
    one = np.arange(24, dtype=np.int32).reshape(2, 2, 6)
    assert distinct_share([one]) == 1.0
    assert distinct_share([one, one]) == 0.5
    assert distinct_share([np.zeros_like(one)]) == 2 / 24
    assert distinct_share([one[:0]]) == 1.0


@pytest.mark.parametrize(
    ("tokens", "gigabytes", "microseconds"),
    [(8, 25, 2.0), (256, 25, 65), (1024, 25, 260), (8192, 25, 2080), (8192, 55, 944)],
)
def test_the_link_floor_is_the_contract_s(tokens: int, gigabytes: int, microseconds: float) -> None:
    """One layer's distinct rows need the contract's microseconds at 25 and 55 GB/s."""
    floor = link_floor_s(source_bytes(tokens, 24, 256), gigabytes * 1e9)
    assert floor * 1e6 == pytest.approx(microseconds, rel=0.02)


def _mark(layer: int = 1, **times: int) -> LookupMark:
    base = {"hash_ready": 100, "submit": 110, "start": 120, "done": 220, "wait_before": 200, "wait_after": 225}
    return LookupMark(layer=layer, rows=24, tiles=2, grid=2, **{**base, **times})


def _report(*marks: LookupMark, tolerance: int = 15) -> QueueReport:
    timeline = Timeline(rank=0, step=0, begin=0, end=1000, tokens=1, lookups=marks)
    return queue_report(timeline, tolerance_ns=tolerance)


SECOND: dict[str, Any] = {"layer": 14, "submit": 115, "start": 222, "done": 322, "wait_before": 400, "wait_after": 401}


def test_queueing_kernel_and_exposed_wait_are_apart() -> None:
    """s_i − r_i, L_i and E_i of two lookups on one serial queue, each on its own."""
    report = _report(_mark(), _mark(**SECOND))
    assert (report.serial, report.reason) == (True, None)
    first, second = report.lookups
    assert (first.queueing, first.kernel, first.exposed, first.waited) == (10, 100, 20, 25)
    assert (second.queueing, second.kernel, second.exposed, second.waited) == (107, 100, 0, 1)


def test_ready_is_the_later_of_hash_and_submit() -> None:
    """r_i = max(hash ready, submit)."""
    assert _report(_mark(hash_ready=118)).lookups[0].ready == 118
    assert _report(_mark(hash_ready=90)).lookups[0].ready == 110


def test_lookups_are_judged_in_order_of_submission() -> None:
    """Marks may come in any order; the queue is the order of submission."""
    report = _report(_mark(**SECOND), _mark())
    assert report.serial
    assert [times.layer for times in report.lookups] == [1, 14]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start": 180}, "layer 14: overlaps the lookup of layer 1 by 40 ns"),
        ({"submit": 260}, "layer 14: starts 38 ns before it is ready"),
        ({"wait_before": 250, "wait_after": 260}, "layer 14: its consumer passed 62 ns before the lookup was done"),
        ({"done": 200}, "layer 14: a mark precedes the one before it"),
    ],
)
def test_contradictions_are_named(change: dict[str, int], reason: str) -> None:
    """Marks that contradict one serial queue are no queue: overlap, early start, consumer too early."""
    report = _report(_mark(), _mark(**{**SECOND, **change}))
    assert not report.serial
    assert report.reason is not None
    assert re.search(reason, report.reason)


def test_the_tolerance_decides() -> None:
    """The same marks are serial within the timer's resolution and not below it; a late start is no contradiction."""
    early, late = _mark(**{**SECOND, "start": 218}), _mark(**{**SECOND, "start": 300})
    assert _report(_mark(), early, tolerance=2).serial
    assert not _report(_mark(), early, tolerance=1).serial
    assert _report(_mark(), late, tolerance=0).serial


def test_no_lookups_are_serial() -> None:
    """A step without lookups contradicts nothing."""
    assert _report() == QueueReport(serial=True, reason=None, lookups=())

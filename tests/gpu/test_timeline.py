"""Marks lie on one integer base, are recorded where the work is launched, and are checked against known lengths."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_engram.errors import EngramError
from pytest_engram.gpu import timeline
from pytest_engram.gpu.timeline import RESOLUTION_NS, Marks, self_test


def test_marks_share_one_base(fake_cuda: Any) -> None:
    """Times are integer ns of the host's clock, and differences are the GPU's own."""
    before = time.perf_counter_ns()
    marks = Marks(fake_cuda, full=True)
    after = time.perf_counter_ns()
    marks.mark("begin")
    fake_cuda.now += 123_456
    marks.mark("end")
    assert before <= marks.ns("begin") <= after
    assert marks.ns("end") - marks.ns("begin") == 123_456
    assert isinstance(marks.ns("end"), int)


def test_marks_are_recorded_on_the_launching_stream(fake_cuda: Any) -> None:
    """X9: an event on another stream than the kernel measures nothing."""
    marks, side = Marks(fake_cuda, full=True), fake_cuda.Stream()
    with fake_cuda.stream(side):
        marks.mark("start", 3)
    marks.mark("end")
    assert [entry[1] for entry in fake_cuda.log if entry[0] == "record"] == ["s1", side.name, "s1"]


def test_an_unmarked_step_records_only_its_clock(fake_cuda: Any) -> None:
    """Unmarked: the step's ends and the consumer waits; spans and lookups cost nothing."""
    marks = Marks(fake_cuda, full=False)
    marks.mark("begin")
    with marks.span("compute", 0):
        fake_cuda.now += 1000
    marks.mark("submit", 1)
    for layer, wait in ((1, 70), (14, 30)):
        marks.mark("wait_before", layer)
        fake_cuda.now += wait
        marks.mark("wait_after", layer)
    marks.mark("end")
    assert len(fake_cuda.events) == 1 + 2 + 4
    assert marks.spent_ns("wait_before", "wait_after") == 100
    assert marks.ns("end") - marks.ns("begin") == 1100


def test_lookups_and_spans_become_records(fake_cuda: Any) -> None:
    """Every mark of a lookup and its actual launch stand in one record per layer."""
    marks = Marks(fake_cuda, full=True)
    names = ("submit", "start", "done", "wait_before", "wait_after")
    marks.mark("hash_ready")
    for name in names:
        fake_cuda.now += 10_000
        marks.mark(name, 5)
    with marks.span("gate", 5):
        fake_cuda.now += 7_000
    (lookup,) = marks.lookups({5: SimpleNamespace(rows=48, tiles=3, grid=2)})
    begin = marks.ns("hash_ready")
    assert [getattr(lookup, name) - begin for name in names] == [10_000, 20_000, 30_000, 40_000, 50_000]
    assert (lookup.layer, lookup.rows, lookup.tiles, lookup.grid) == (5, 48, 3, 2)
    (span,) = marks.spans()
    assert (span.name, span.layer, span.end - span.start) == ("gate", 5, 7_000)


def test_neighbours_share_a_mark(fake_cuda: Any) -> None:
    """A span that follows another, or a wait, directly begins with the event that ended it: half of the events."""
    marks = Marks(fake_cuda, full=True)
    marks.mark("wait_after", 0)
    for layer in range(3):
        with marks.span("compute", layer):
            fake_cuda.now += 10_000
    marks.mark("submit", 3)
    fake_cuda.now += 5_000  # not part of the next span
    with marks.span("gate", 3):
        fake_cuda.now += 1_000
    assert len(fake_cuda.events) == 1 + 1 + 3 + 1 + 2
    assert [span.end - span.start for span in marks.spans()] == [10_000] * 3 + [1_000]
    before, after = marks.spans()[:2]
    assert before.end == after.start


def test_the_self_test_measures_known_lengths(fake_cuda: Any) -> None:
    """A sound clock measures what the kernels were asked for."""
    measured = self_test(fake_cuda, fake_cuda.spin)
    assert all(abs(seen - asked) <= RESOLUTION_NS for asked, seen in measured.items())
    assert len(measured) == 2


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_self_test_finds_a_wrong_clock(fake_cuda: Any, factor: float) -> None:
    """X9: a clock that is 10 % off, either way, stops the measurement with a code."""

    def crooked(nanoseconds: int) -> None:
        fake_cuda.spin(nanoseconds)
        fake_cuda.now += round(nanoseconds * (factor - 1))

    with pytest.raises(EngramError, match="ns measured") as caught:
        self_test(fake_cuda, crooked)
    assert caught.value.code == "timer-self-test"


def test_the_self_test_finds_a_kernel_that_did_not_run(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events cannot show more time than the host saw pass."""
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter_ns=lambda: 7))  # a host that nothing delays

    def skipped(nanoseconds: int) -> None:
        fake_cuda.now += nanoseconds

    with pytest.raises(EngramError) as caught:
        self_test(fake_cuda, skipped)
    assert caught.value.code == "timer-self-test"

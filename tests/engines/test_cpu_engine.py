"""The CPU engine: right rows, one serial queue, real overlap, errors that surface."""

import os
import sys
import threading
import time
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.engines.protocol import StepSettings
from pytest_engram.engines.tables import table_views
from pytest_engram.errors import EngramError, NotMeasurable, PlacementError, UsageError
from pytest_engram.hashing import HashBatch, hash_ids
from pytest_engram.model import Workload
from pytest_engram.queueing import queue_report
from pytest_engram.rows import decode_rows, synthetic_at
from pytest_engram.serving.replay import fixed_batches

HICCUPS = 8  # a busy machine may delay a thread past what a test looks for, but not in so many steps in a row
EARLY, LATE = StepSettings(submission="early"), StepSettings(submission="at_consumption")


class SlowBackend(ReferenceBackend):
    """Lookups that take at least ``seconds`` without using a CPU."""

    seconds = 0.005

    def lookup(self, shard, ids, out, *, cap=None):
        time.sleep(self.seconds)
        return super().lookup(shard, ids, out, cap=cap)


class FailingBackend(ReferenceBackend):
    """The lookup number ``fail_at`` raises."""

    fail_at, calls = 1, 0

    def lookup(self, shard, ids, out, *, cap=None):
        self.calls += 1
        if self.calls - 1 == self.fail_at:
            raise ValueError("row store is gone")
        return super().lookup(shard, ids, out, cap=cap)


class HangingBackend(ReferenceBackend):
    """Lookups that end when the test says so."""

    def __init__(self):
        super().__init__()
        self.end = threading.Event()

    def lookup(self, shard, ids, out, *, cap=None):
        self.end.wait(30)
        return super().lookup(shard, ids, out, cap=cap)


def batches(bench, count, tokens=16, seed=3):
    """Fresh random batches of one chunk each."""
    work = Workload(tokens=tokens)
    return list(islice(fixed_batches(work, seed, bench.vocabulary, "low-reuse"), count))


@pytest.mark.parametrize("settings", [EARLY, LATE], ids=["early", "at_consumption"])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_rows_are_bit_exact(bench, settings, tokens):
    """L1: staged rows equal the row oracle for the oracle's own hash ids, whatever was staged before."""
    engine = bench.engine()
    for batch in batches(bench, 2, tokens):
        ids, rows = engine.rows(batch, settings)
        assert np.array_equal(ids, hash_ids(bench.layout, batch, bench.token_map))
        assert rows.shape == (tokens, 2, 6, 64)
        for layer in range(2):
            flat = ids[:, layer].ravel().astype(np.int64)
            expected = decode_rows(*synthetic_at(flat, 64, layer=layer, seed=bench.seed))
            assert np.array_equal(rows[:, layer].reshape(-1, 64), expected)


@pytest.mark.parametrize("settings", [EARLY, LATE], ids=["early", "at_consumption"])
def test_unstaged_rows_cannot_pass(bench, settings):
    """Negative control: a lookup that writes nothing shows, although right rows were staged just before."""

    class Idle(ReferenceBackend):
        idle = False

        def lookup(self, shard, ids, out, *, cap=None):
            return super().lookup(shard, ids, out.copy() if self.idle else out, cap=cap)

    backend, batch = Idle(), batches(bench, 1)[0]
    engine = bench.engine(backend)
    _, right = engine.rows(batch, settings)
    backend.idle = True
    assert (engine.rows(batch, settings)[1] != right).all()


def test_submission_point_does_not_change_outputs(bench):
    """B1's arms are the same computation: equal bits for early and at-consumption submission."""
    engine = bench.engine()
    for batch in batches(bench, 3):
        early, late = (engine.step(batch, settings, marks=False).output for settings in (EARLY, LATE))
        assert np.array_equal(early, late)
        assert np.isfinite(early).all()
        assert 0.01 < np.abs(early).mean() < 100


def test_every_staged_row_reaches_the_output(bench):
    """A single wrong row of either layer changes its token's output and no other token's."""
    engine, batch = bench.engine(), batches(bench, 1)[0]
    before = engine.step(batch, EARLY, marks=False).output
    ids, _ = engine.rows(batch, EARLY)
    for layer in range(2):
        weight = table_views(bench.buffer, bench.layout)[layer][0]
        for column in range(6):
            row = ids[9, layer, column]
            weight[row] ^= 0x80
            changed = (engine.step(batch, EARLY, marks=False).output != before).any(axis=1)
            weight[row] ^= 0x80
            assert changed[9]
            assert not changed[(ids[:, layer] != row).all(axis=1)].any()


def test_dead_tokens_pass_unchanged_by_rows(bench):
    """L11: a dead token's gate is shut, so wrong rows cannot reach its output."""
    engine, tokens = bench.engine(), np.arange(8)
    batch = HashBatch.sequence(tokens, history=[1, 2, 3], dead=tokens == 4)
    before = engine.step(batch, EARLY, marks=False).output
    for weight, _ in table_views(bench.buffer, bench.layout):
        np.bitwise_xor(weight, 0x80, out=weight)
    changed = (engine.step(batch, EARLY, marks=False).output != before).any(axis=1)
    assert list(np.flatnonzero(~changed)) == [4]


@pytest.mark.parametrize("settings", [EARLY, LATE], ids=["early", "at_consumption"])
def test_marks_describe_one_serial_queue(bench, settings):
    """Lookups run one after the other in the order of the layers, and the launch recorded is the actual one."""
    engine = bench.engine(SlowBackend())
    steps = [engine.step(batch, settings, marks=True, index=i) for i, batch in enumerate(batches(bench, 3))]
    for index, result in enumerate(steps):
        line = result.timeline
        assert (line.step, line.tokens, [mark.layer for mark in line.lookups]) == (index, 16, [1, 3])
        report = queue_report(line, tolerance_ns=4_000_000)
        assert report.serial, report.reason
        assert all(mark.done - mark.start >= 4_900_000 for mark in line.lookups)
        assert {(mark.rows, mark.tiles) for mark in line.lookups} == {(96, 6)}
        for mark in line.lookups:
            assert mark.hash_ready <= mark.submit <= mark.start < mark.done <= mark.wait_after
        assert line.begin <= line.lookups[0].hash_ready <= line.spans[0].start <= line.spans[-1].end <= line.end
        assert [(span.name, span.layer) for span in line.spans][1:4] == [("projection", 1), ("gate", 1), ("compute", 1)]


def test_submission_point_is_visible_in_the_marks(bench):
    """Gate 1 of B1: early lookups are submitted before any compute, the others at their own consumer."""
    engine, batch = bench.engine(), batches(bench, 1)[0]
    early, late = (engine.step(batch, settings, marks=True).timeline for settings in (EARLY, LATE))
    assert all(mark.submit < early.spans[0].start for mark in early.lookups)
    layer_before = {span.layer: span.end for span in late.spans if span.name == "compute"}
    assert all(mark.submit >= layer_before[mark.layer - 1] for mark in late.lookups)


def test_early_submission_hides_waiting(bench):
    """A lookup of known length is exposed whole at its consumer, and less when it was submitted early."""
    engine = bench.engine(SlowBackend(), hidden=512)
    waits = {}
    for settings in (EARLY, LATE):
        results = [engine.step(batch, settings, marks=False) for batch in batches(bench, HICCUPS, tokens=64)]
        waits[settings] = [(result.step_ns - result.main_ns) / 1e6 for result in results]
    assert max(waits[LATE]) >= 9.8  # less where this thread lost its CPU between submission and wait
    assert min(waits[EARLY]) < min(waits[LATE]) - 0.5


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot overlap")
def test_gather_really_runs_beside_matmul(bench):
    """numpy frees the GIL in both: the second layer's lookup is done when its consumer arrives early."""
    engine = bench.engine(hidden=512)
    found = {EARLY: [], LATE: []}
    for batch in batches(bench, 12, tokens=64):
        for settings, waits in found.items():
            mark = engine.step(batch, settings, marks=True).timeline.lookups[1]
            waits.append(max(0, mark.done - mark.wait_before))
    assert min(found[EARLY]) < 0.5 * min(found[LATE])


@pytest.mark.alone
def test_marks_are_cheap(bench):
    """Marks cost less than 1 % of a step of 5 ms, and an unmarked step has no timeline."""
    engine, batch = bench.engine(layers=16), batches(bench, 1)[0]
    shortest = {True: 1 << 62, False: 1 << 62}
    for _ in range(150):
        for marks in (True, False):
            result = engine.step(batch, EARLY, marks=marks)
            shortest[marks] = min(shortest[marks], result.step_ns)
            assert (result.timeline is not None) is marks
    assert shortest[True] - shortest[False] < 50_000


def test_failing_lookup_surfaces_at_its_consumer(bench):
    """A backend's exception reaches the step as `lookup-failed`, and the next step is whole again."""
    engine, (first, second) = bench.engine(FailingBackend()), batches(bench, 2)
    with pytest.raises(EngramError, match="row store is gone") as caught:
        engine.step(first, EARLY, marks=True)
    assert (caught.value.code, caught.value.where) == ("lookup-failed", "lookup of layer 3")
    expected = bench.engine().step(second, EARLY, marks=False).output
    assert np.array_equal(engine.step(second, EARLY, marks=False).output, expected)


def test_hanging_lookup_ends_at_the_deadline(bench):
    """A lookup that never ends is an error within the deadline, and no later step trusts the staging buffer."""
    backend = HangingBackend()
    engine, batch = bench.engine(backend, deadline_s=0.1), batches(bench, 1)[0]
    with pytest.raises(EngramError, match=r"no end in 0\.1 s") as caught:
        engine.step(batch, EARLY, marks=False)
    assert caught.value.code == "lookup-failed"
    backend.end.set()
    engine._deadline_s = 30  # to end in
    with pytest.raises(EngramError, match="never ended"):
        engine.rows(batch, EARLY)


def test_close_joins_the_worker_and_restores_affinity(bench):
    """An engine leaves no thread and no CPU binding behind; closed, it refuses to run."""
    before, others = os.sched_getaffinity(0), set(threading.enumerate())
    engine = bench.engine()
    (worker,) = set(threading.enumerate()) - others
    assert worker.name == "engram-prefetch"
    assert os.sched_getaffinity(worker.native_id) == {max(before)}
    if len(before) > 1:
        assert max(before) not in os.sched_getaffinity(0)
    engine.close()
    engine.close()
    assert not worker.is_alive()
    assert os.sched_getaffinity(0) == before
    with pytest.raises(EngramError, match="closed"):
        engine.step(batches(bench, 1)[0], EARLY, marks=False)


def test_one_cpu_works_and_says_so(bench, monkeypatch):
    """With a single CPU both threads share it: right rows, and a note; an unlimited BLAS is noted too."""
    cpu = (min(os.sched_getaffinity(0)),)
    engine, batch = bench.engine(cpus=cpu), batches(bench, 1)[0]
    assert "shares" in engine.notes[0]
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert any("BLAS" in note for note in bench.engine(cpus=cpu).notes)
    for name, value in CpuEngine.threads_env(cpu).items():
        monkeypatch.setenv(name, value)
    assert not any("BLAS" in note for note in bench.engine(cpus=cpu).notes)
    assert np.array_equal(*(engine.step(batch, s, marks=False).output for s in (EARLY, LATE)))


def test_foreign_cpu_is_refused(bench):
    """CPUs that the kernel does not give are a placement error with the kernel's words, and nothing stays changed."""
    before, others = (os.sched_getaffinity(0), sys.getswitchinterval()), set(threading.enumerate())
    for cpus in ((min(before[0]), 100_000), (100_000, min(before[0]))):
        with pytest.raises(PlacementError, match="sched_setaffinity"):
            bench.engine(cpus=cpus)
        assert (os.sched_getaffinity(0), sys.getswitchinterval()) == before
    for thread in set(threading.enumerate()) - others:
        thread.join(30)
        assert not thread.is_alive()
    bench.engines.clear()


def test_threads_env_leaves_a_cpu_to_the_worker():
    """BLAS gets every CPU but the worker's, and never zero threads."""
    assert CpuEngine.threads_env((4, 5, 6))["OPENBLAS_NUM_THREADS"] == "2"
    assert CpuEngine.threads_env((4,))["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("tokens", "changes", "code"),
    [
        (65, {}, "too-many-tokens"),
        (4, {"submission": "later"}, "bad-submission"),
        (4, {"graph": True}, "no-cuda-graphs"),
    ],
)
def test_what_cannot_run_is_refused(bench, tokens, changes, code):
    """P6: too many tokens for the staging buffer, an unknown submission, a CUDA graph: known before a hash."""
    with pytest.raises((UsageError, NotMeasurable)) as caught:
        bench.engine().step(batches(bench, 1, tokens)[0], StepSettings(**changes), marks=False)
    assert caught.value.code == code


ARMS = [StepSettings(inline_above=8), StepSettings(wait="stream"), StepSettings(streams=2)]


@pytest.mark.parametrize("settings", [*ARMS, replace(LATE, wait="stream"), replace(LATE, inline_above=0)], ids=str)
def test_settings_do_not_change_rows_or_outputs(bench, settings):
    """Where a lookup runs and what its consumer waits for is no part of the result."""
    engine = bench.engine()
    for batch in batches(bench, 3):
        assert np.array_equal(engine.rows(batch, settings)[1], engine.rows(batch, EARLY)[1])
        seen, wanted = (engine.step(batch, each, marks=False).output for each in (settings, EARLY))
        assert np.array_equal(seen, wanted)


@pytest.mark.parametrize("settings", [StepSettings(inline_above=8), replace(LATE, inline_above=8)], ids=str)
def test_an_inline_lookup_is_its_consumers_own_work(bench, settings):
    """More tokens than the threshold: the main thread looks up within its wait; at most as many: the worker does."""
    threads = []

    class Seen(SlowBackend):
        def lookup(self, shard, ids, out, *, cap=None):
            threads.append(threading.get_ident())
            return super().lookup(shard, ids, out, cap=cap)

    engine = bench.engine(Seen())
    large, small = batches(bench, 1, 9)[0], batches(bench, 1, 8)[0]
    result = engine.step(large, settings, marks=True)
    assert set(threads) == {threading.get_ident()}
    for mark in result.timeline.lookups:
        assert mark.wait_before <= mark.submit <= mark.start < mark.done <= mark.wait_after
    assert queue_report(result.timeline, tolerance_ns=2_000).serial
    assert result.step_ns - result.main_ns >= 9_900_000
    threads.clear()
    engine.step(small, settings, marks=False)
    assert threading.get_ident() not in threads


def test_waiting_for_the_stream_waits_for_later_layers(bench):
    """The first consumer waits for both lookups, where its own event would have let it go after one."""
    engine, batch = bench.engine(SlowBackend()), batches(bench, 1)[0]

    def early(settings):
        first, second = engine.step(batch, settings, marks=True).timeline.lookups
        return first.wait_after < second.done

    assert any(early(EARLY) for _ in range(HICCUPS))
    assert not any(early(StepSettings(wait="stream")) for _ in range(HICCUPS))


def test_two_streams_are_no_serial_queue(bench):
    """Negative control: lookups that alternate between two workers overlap, and the queue model says so."""
    engine, batch = bench.engine(SlowBackend()), batches(bench, 1)[0]

    def overlap(streams):
        report = queue_report(engine.step(batch, StepSettings(streams=streams), marks=True).timeline)
        return "overlaps the lookup of layer 1" in (report.reason or "")

    assert any(overlap(2) for _ in range(HICCUPS))
    assert not any(overlap(1) for _ in range(HICCUPS))


def test_a_hanging_stream_ends_at_the_deadline(bench):
    """A consumer that waits for a whole stream has the same deadline, and the engine is not used after it."""
    backend = HangingBackend()
    engine, batch = bench.engine(backend, deadline_s=0.1), batches(bench, 1)[0]
    engine._await = lambda *_: None
    with pytest.raises(EngramError, match="prefetch stream: no end in") as caught:
        engine.step(batch, StepSettings(wait="stream"), marks=False)
    assert caught.value.code == "lookup-failed"
    backend.end.set()
    engine._deadline_s = 30  # to end in
    with pytest.raises(EngramError, match="never ended"):
        engine.rows(batch, EARLY)


@pytest.mark.parametrize("settings", [EARLY, LATE, StepSettings(inline_above=0)], ids=str)
def test_lookups_alone_have_no_main_compute(bench, settings):
    """ΣL_i of two lookups of 5 ms, without the chain."""
    engine, batch = bench.engine(SlowBackend()), batches(bench, 1)[0]
    engine._chain = None
    assert 9_900_000 <= min(engine.alone_ns(batch, settings) for _ in range(HICCUPS)) < 100_000_000


@pytest.mark.parametrize("layers", [(1,), (3, 1), (1, 5)])
def test_engram_layers_must_match_the_tables(bench, layers):
    """One rising layer number per table, below the layer count."""
    with pytest.raises(UsageError, match="Engram layers"):
        bench.engine(engram_layers=layers)


def test_empty_batch_runs(bench):
    """H18: an empty batch has ids [0, L, H] and an empty output."""
    engine = bench.engine()
    empty = HashBatch.sequence([])
    ids, rows = engine.rows(empty, EARLY)
    assert (ids.shape, rows.shape) == ((0, 2, 6), (0, 2, 6, 64))
    assert engine.step(empty, EARLY, marks=True).output.shape == (0, 64)


def test_drift_reads_the_machine(bench):
    """Load is always readable; clocks only where the kernel tells, never as 0."""
    drift = bench.engine().drift()
    assert drift["load_1min"] >= 0
    assert drift.get("cpu_mhz", 1.0) > 0

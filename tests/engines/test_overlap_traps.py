"""Overlap measurements that lie, each by a real engine with one fault, and the gate's reason that names it.

A drifting machine is caught in ``tests/gates/test_gate_2_mechanism.py`` (``machine-drifted``), a drifting GPU timer in
``tests/gpu/test_timeline.py``; rows that a faulty engine gets wrong are the matter of ``tests/faults``.
"""

import sys
import threading
import time
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pytest_engram import gates
from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.engines.protocol import EngineSetup, StepSettings
from pytest_engram.engines.tables import table_views
from pytest_engram.model import Claim, OverlapSample, Status, Workload
from pytest_engram.queueing import queue_report
from pytest_engram.report import markdown
from pytest_engram.report.account import Account
from pytest_engram.serving.replay import fixed_batches

EARLY, ROWS_BYTES = StepSettings(submission="early"), 16 * 2 * 6 * 66
LOOKUP_S = 0.005
LINK = {"link_bytes_per_s": 20 * ROWS_BYTES / (2 * LOOKUP_S)}  # twenty times what the slow lookups need


class Slow(ReferenceBackend):
    """Lookups of five milliseconds, and a gate that is long enough for a lookup that nobody waited for to end."""

    gate_s = 0.0

    def lookup(self, shard, ids, out, *, cap=None):
        time.sleep(LOOKUP_S)
        return super().lookup(shard, ids, out, cap=cap)

    def gate(self, *inputs):
        time.sleep(self.gate_s)
        return super().gate(*inputs)


class Late(Slow):
    """Both gates are long."""

    gate_s = 4 * LOOKUP_S


class Meeting(Slow):
    """A step's two lookups wait for each other: only two queues get past that."""

    def __init__(self):
        super().__init__()
        self.both = threading.Barrier(2, timeout=30)

    def lookup(self, shard, ids, out, *, cap=None):
        self.both.wait()
        return super().lookup(shard, ids, out, cap=cap)


class Held(Slow):
    """A lookup begins to read once the main stream lets it: whatever the scheduler does, somebody is early."""

    def __init__(self):
        super().__init__()
        self.let = threading.Semaphore(0)

    def lookup(self, shard, ids, out, *, cap=None):
        assert self.let.acquire(timeout=30)
        return super().lookup(shard, ids, out, cap=cap)


class Cached(Slow):
    """Ids that were looked up before are served from a copy: the host's rows are not read."""

    def __init__(self):
        super().__init__()
        self.copies = {}

    def lookup(self, shard, ids, out, *, cap=None):
        key = ids.tobytes()
        if key not in self.copies:
            launch = super().lookup(shard, ids, out, cap=cap)
            self.copies[key] = launch, out.copy()
            return launch
        launch, rows = self.copies[key]
        np.copyto(out, rows)
        return launch


class WrongLayer(CpuEngine):
    """Every consumer waits for the first layer's lookup; its own is let go once it went on."""

    def _prepare(self, batch, settings):
        ids, self._made = super()._prepare(batch, settings)
        self._setup.backend.let.release()
        return ids, self._made

    def _await(self, layer, _ticket):
        super()._await(layer, next(iter(self._made.values())))

    def _consume(self, layer, ticket, settings):
        super()._consume(layer, ticket, settings)
        if layer != min(self._made):
            self._setup.backend.let.release()
            assert ticket.wait(30)  # the step reads its marks at its end


class EventAfterConsumer(CpuEngine):
    """The lookup's end is marked on the main stream, once the layer after its consumer has been computed."""

    def _consume(self, layer, ticket, settings):
        super()._consume(layer, ticket, settings)
        self._trace.mark("done", layer)


class EventAtSubmission(CpuEngine):
    """The lookup is bounded by marks on the main stream, which passes them as it submits."""

    def _submit(self, ticket):
        mark, ticket.mark = ticket.mark, lambda _name: None
        for name in ("submit", "start", "done"):
            mark(name)
        super()._submit(ticket)

    def _await(self, layer, ticket):
        self._setup.backend.let.release()
        super()._await(layer, ticket)


@pytest.fixture(scope="module")
def laboratory():
    """Sound synthetic evidence, by the laboratory of the gates' own tests: only its marks are replaced here."""
    path = Path(__file__).parents[1] / "gates/conftest.py"
    spec = spec_from_file_location("gates_laboratory", path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Lab()


@pytest.fixture
def judge(bench, laboratory):
    """(verdict, timelines) of B1 where arm B's marks are those of a real engine of that class."""

    def run(engine_class, backend, *, reuse="low-reuse", drift=None, state=None, settings=EARLY):
        engine = engine_class(
            EngineSetup(
                rank=0, layout=bench.layout, tables=table_views(bench.buffer, bench.layout), token_map=bench.token_map,
                workload=Workload(hidden=64, layers=5, engram_layers=(1, 3), tokens=16), backend=backend,
                cpus=(0,), max_tokens=64, seed=bench.seed,
            )
        )  # fmt: skip
        bench.engines.append(engine)
        batches = list(islice(fixed_batches(Workload(tokens=16), 3, bench.vocabulary, reuse), 3))
        lines = tuple(engine.step(batch, settings, marks=True, index=n).timeline for n, batch in enumerate(batches))[1:]
        sample = OverlapSample(rank=0, state=state or reuse, timelines=tuple(map(renamed, lines)),
                               resolution_ns=engine.resolution_ns, source_bytes=ROWS_BYTES,
                               staging_bytes=1)  # fmt: skip
        work = Workload(reuse=state or reuse)
        evidence = laboratory.evidence("B1", steps=len(lines), claim=Claim.IMPROVES, workload=work)
        runs = [replace(run, overlap=(sample if run.arm == "B" else replace(run.overlap[0], source_bytes=ROWS_BYTES),),
                        drift={**run.drift, **(drift or {})}) for run in evidence.runs]  # fmt: skip
        evidence = replace(evidence, runs=tuple(runs))
        return gates.evaluate(evidence), lines

    return run


def renamed(line):
    """The marked step as one of the laboratory's plan: 64 tokens, Engram layers 1 and 6, its rows and grid."""
    launch = {"rows": 1536, "tiles": 96, "grid": 66}
    marks = tuple(replace(mark, layer={1: 1, 3: 6}[mark.layer], **launch) for mark in line.lookups)
    spans = tuple(replace(span, layer=span.layer if span.layer < 3 else span.layer + 3) for span in line.spans)
    return replace(line, tokens=64, lookups=marks, spans=spans)


def refused(verdict):
    """The reason and the words of gate 2, which must have been reached and must void the evidence."""
    assert [gate.status for gate in verdict.gates[:2]] == [Status.PASS] * 2
    assert (verdict.status, verdict.sentence) == (Status.INVALID, None)
    return verdict.gates[2].reason, verdict.gates[2].observed


def test_a_sound_engine_is_no_trap(judge):
    """The control of all traps: one serial queue passes the checks that name them, within the timer's resolution."""
    verdict, lines = judge(CpuEngine, Late())
    assert verdict.status is not Status.INVALID, verdict.gates[2]
    assert all(queue_report(line, tolerance_ns=2_000).serial for line in lines)


def test_two_streams_are_no_serial_queue(judge):
    """Two worker threads hide more than one queue can: the evidence is void, whatever it gained."""
    reason, seen = refused(judge(CpuEngine, Meeting(), settings=StepSettings(streams=2))[0])
    assert reason == "not-a-serial-queue"
    assert "layer 6: overlaps the lookup of layer 1" in seen


def test_a_consumer_of_the_wrong_layer_is_named(judge):
    """A consumer that waits for another layer's lookup passes before its own is done."""
    reason, seen = refused(judge(WrongLayer, Held())[0])
    assert reason == "not-a-serial-queue"
    assert "layer 6: its consumer passed" in seen


def test_an_end_marked_on_the_consumers_stream_is_named(judge):
    """An event that the main stream records after its wait says that the consumer went on without the rows."""
    reason, seen = refused(judge(EventAfterConsumer, Late())[0])
    assert reason == "not-a-serial-queue"
    assert "its consumer passed" in seen


def test_a_lookup_bounded_on_the_main_stream_is_faster_than_any_link(judge):
    """Marks that the main stream passes as it submits measure no lookup: the floor of the link names them.

    No queue contradicts them, but what the consumers waited is not what the marks say was exposed.
    """
    verdict, lines = judge(EventAtSubmission, Held(), drift=LINK)
    reason, seen = refused(verdict)
    assert (reason, seen[:6]) == ("faster-than-link", "arm B,")
    for times in (times for line in lines for times in queue_report(line).lookups[:1]):
        assert times.exposed == 0
        assert times.waited > LOOKUP_S * 1e9 / 2
    assert judge(CpuEngine, Slow(), drift=LINK)[0].status is not Status.INVALID


def test_cached_rows_are_faster_than_the_link(judge):
    """A lookup that serves low-reuse rows from a copy beats the host's link, and is not believed."""
    verdict, _ = judge(CpuEngine, Cached(), reuse="repeated", state="low-reuse", drift=LINK)
    reason, seen = refused(verdict)
    assert (reason, seen[:6]) == ("faster-than-link", "arm B,")
    assert judge(CpuEngine, Cached(), drift=LINK)[0].status is not Status.INVALID


def test_repeated_rows_are_named(judge, laboratory):
    """Rows that are repeated by design may be cached; the report says what such a gain is worth."""
    verdict, _ = judge(CpuEngine, Cached(), reuse="repeated")
    assert verdict.status is not Status.INVALID
    for reuse, named in (("repeated", True), ("low-reuse", False)):
        evidence = laboratory.evidence("B1", steps=2, claim=Claim.IMPROVES, workload=Workload(reuse="repeated"))
        work = replace(evidence.plan.experiment.workload, reuse=reuse)
        plan = replace(evidence.plan, experiment=replace(evidence.plan.experiment, workload=work))
        text = markdown.render(Account([verdict], [replace(evidence, plan=plan)]), {})
        assert ("a gain may be a cache's" in text) == named


def test_a_queue_on_a_drifting_clock_is_named(laboratory):
    """Lookups timed by a clock that runs 2 % fast end after their consumers went on: two clocks are no timeline."""

    def drifted(line):
        marks = [replace(m, start=m.start + (m.start - line.begin) // 50, done=m.done + (m.done - line.begin) // 50)
                 for m in line.lookups]  # fmt: skip
        return replace(line, lookups=tuple(marks))

    def timed(run):
        samples = [replace(s, timelines=tuple(map(drifted, s.timelines))) for s in run.overlap]
        return replace(run, overlap=tuple(samples))

    sound = laboratory.evidence("B1", claim=Claim.IMPROVES)
    reason, seen = refused(gates.evaluate(replace(sound, runs=tuple(map(timed, sound.runs)))))
    assert reason == "not-a-serial-queue"
    assert "its consumer passed" in seen
    assert gates.evaluate(sound).status is Status.PASS

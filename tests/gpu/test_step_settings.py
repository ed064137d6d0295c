"""What an arm may change of a CUDA step, over its twin on CPUs: inline, whole-stream waits, two streams, graphs."""

from __future__ import annotations

import runpy
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_engram.checks import check_engine
from pytest_engram.engines.protocol import StepSettings
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.hashing import HashBatch, hash_ids
from pytest_engram.queueing import queue_report

torch = pytest.importorskip("torch")
graph = pytest.importorskip("pytest_engram.engines.graph")

twin = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("cuda_twin.py"))))
build, batch = twin.build, twin.batch
EARLY, INLINE, GRAPH = StepSettings(), StepSettings(inline_above=5), StepSettings(graph=True)


def places(cuda: Any) -> list[str]:
    """The streams of the lookups, in order."""
    return [entry[1] for entry in cuda.log if entry[0] == "lookup"]


def test_a_large_batch_looks_up_inline(fake_cuda: Any) -> None:
    """Above the threshold a lookup is its consumer's own work on the main stream; at it, the side stream's."""
    engine = build(fake_cuda)
    line = engine.step(batch(6), INLINE, marks=True).timeline
    assert set(places(fake_cuda)) == {"s1"}
    for mark in line.lookups:
        assert mark.wait_before <= mark.submit <= mark.start < mark.done <= mark.wait_after
        assert mark.wait_after - mark.wait_before == mark.done - mark.start == 50_000
    assert queue_report(line).serial
    fake_cuda.log.clear()
    engine.step(batch(5), INLINE, marks=False)
    assert set(places(fake_cuda)) == {"s2"}


def test_an_inline_lookup_is_no_main_compute(fake_cuda: Any) -> None:
    """Its time belongs to the wait, whichever submission was asked for."""
    for settings in (INLINE, replace(INLINE, submission="at_consumption")):
        result = build(fake_cuda).step(batch(6), settings, marks=False)
        assert (result.step_ns, result.main_ns) == (twin.STEP_NS, twin.HASH_NS)


def test_a_consumer_may_wait_for_the_whole_stream(fake_cuda: Any) -> None:
    """The first consumer waits for its own lookup, then for all that the side stream was given so far."""
    engine = build(fake_cuda)
    engine.step(batch(), StepSettings(wait="stream"), marks=False)
    waits = [entry[2] for entry in fake_cuda.log if entry[:2] == ("wait_event", "s1")]
    done = [event.number for event in engine._prefetch._done]
    assert waits == [done[0], done[1], done[1]]
    fake_cuda.log.clear()
    engine.step(batch(), EARLY, marks=False)
    assert [entry[2] for entry in fake_cuda.log if entry[:2] == ("wait_event", "s1")] == done


def test_two_streams_alternate(fake_cuda: Any) -> None:
    """Negative control: the second layer's lookup runs on a stream of its own, and nothing orders the two."""
    build(fake_cuda).step(batch(), StepSettings(streams=2), marks=False)
    first, second = places(fake_cuda)
    assert first != second
    assert "s1" not in {first, second}
    assert not {("wait_stream", first, second), ("wait_stream", second, first)} & set(fake_cuda.log)


def test_lookups_alone_have_no_main_compute(fake_cuda: Any) -> None:
    """ΣL_i of both lookups, on the same side stream and staging; the chain is not asked."""
    engine = build(fake_cuda)
    engine._chain = None
    assert engine.alone_ns(batch(), EARLY) == 100_000
    assert engine.alone_ns(batch(), GRAPH) == 100_000
    assert set(places(fake_cuda)) == {"s2"}


ARMS = [
    StepSettings(submission=submission, wait=wait, inline_above=above, streams=streams, graph=True)
    for submission, wait, above, streams in product(("early", "at_consumption"), ("layer", "stream"), (None, 5), (1, 2))
]


@pytest.mark.parametrize(
    "settings", ARMS, ids=lambda one: f"{one.submission}-{one.wait}-{one.inline_above}-{one.streams}"
)
def test_a_graph_is_the_eager_step(fake_cuda: Any, settings: StepSettings) -> None:
    """P5: new batches through one graph give the eager step's outputs, bit by bit, for all settings."""
    engine, eager = build(fake_cuda), replace(settings, graph=False)
    for tokens in (8, 3, 7, 8, 4):
        whole = graph.padded(batch(tokens), 8)
        wanted = engine.step(whole, eager, marks=False).output[:tokens]
        seen = engine.step(batch(tokens), settings, marks=False).output
        assert seen.shape == (tokens, 64)
        assert (seen == wanted).all()
    assert np.isfinite(seen).all()
    assert len(engine._graphs) == 2  # of 4 and of 8 tokens


@pytest.mark.parametrize("settings", [EARLY, INLINE, GRAPH, replace(GRAPH, inline_above=5)], ids=str)
def test_gate_0_judges_a_cuda_step_by_its_oracle(fake_cuda: Any, settings: StepSettings) -> None:
    """L11: rows, ids and outputs of bf16 steps pass; a projection of zeros in the place of the rows does not."""
    engine = build(fake_cuda, max_tokens=16)

    def failed() -> list[str]:
        samples = check_engine(engine, batch(8), settings, twin.LAYOUT, twin.TOKEN_MAP, 1)
        return [sample.case for sample in samples if not sample.passed]

    assert failed() == []
    engine._graphs.clear()
    engine._collect = lambda layer, tokens: engine._whole[engine._tables[layer], :tokens] * 0
    assert failed() == ["engine-outputs"]


@pytest.mark.parametrize("above", [5, 6, 7, 8])
def test_padding_does_not_make_a_batch_inline(fake_cuda: Any, above: int) -> None:
    """A graph's lookups lie where its batch's own tokens say, though it is captured with eight."""
    engine, settings = build(fake_cuda), StepSettings(inline_above=above, graph=True)
    for tokens in (6, 8, 6):
        result = engine.step(batch(tokens), settings, marks=True)
        first, second = result.timeline.lookups
        assert (second.submit >= first.wait_after) == (tokens > above)
        assert (result.output == engine.step(graph.padded(batch(tokens), 8), EARLY, marks=False).output[:tokens]).all()
    assert len(engine._graphs) == (2 if 6 <= above < 8 else 1)


def test_a_graph_stages_the_oracles_rows(fake_cuda: Any) -> None:
    """P5, P6: rows read after a replay are the batch's own, in memory that does not move, beside eager steps."""
    engine = build(fake_cuda)
    address = engine.staging.data_ptr()
    for seed, tokens in ((1, 6), (2, 8), (3, 6)):
        one = HashBatch.sequence(np.random.default_rng(seed).integers(0, 1000, tokens), history=[1, 2, 3])
        ids, rows = engine.rows(one, GRAPH)
        assert (ids == hash_ids(twin.LAYOUT, one, twin.TOKEN_MAP)).all()
        assert (rows == engine.rows(one, EARLY)[1]).all()
    assert engine.staging.data_ptr() == address
    replays = next(iter(engine._graphs.values())).graph.replays
    assert replays == 3


def test_a_stale_input_would_be_seen(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a replay whose inputs were not refilled gives the captured batch's rows."""
    engine = build(fake_cuda)
    engine.rows(batch(8), GRAPH)
    monkeypatch.setattr(graph.Captured, "refill", lambda _self, _fresh: None)
    other = HashBatch.sequence(np.arange(8) * 11, history=[1, 2, 3])
    assert (engine.rows(other, GRAPH)[0] != hash_ids(twin.LAYOUT, other, twin.TOKEN_MAP)).any()


def test_marks_inside_a_graph_are_external(fake_cuda: Any) -> None:
    """Each replay stamps the same marks anew; marked and unmarked steps have graphs of their own, both with a clock."""
    engine = build(fake_cuda)
    for index in range(3):
        result = engine.step(batch(8), GRAPH, marks=True, index=index)
        line = result.timeline
        assert [mark.done - mark.start for mark in line.lookups] == [50_000] * 2
        assert all(line.begin <= m.hash_ready <= m.submit <= m.start < m.done <= m.wait_after for m in line.lookups)
        assert {(mark.rows, mark.grid) for mark in line.lookups} == {(8 * twin.LAYOUT.columns, 2)}
        assert queue_report(line).serial
        plain = engine.step(batch(8), GRAPH, marks=False)
        assert plain.timeline is None
        assert plain.step_ns == result.step_ns == twin.STEP_NS
        assert plain.main_ns == result.main_ns
    assert len(engine._graphs) == 2
    assert [entry[0] for entry in fake_cuda.log].count("replay") == 6


def test_the_batch_is_filled_in_outside_the_graph(fake_cuda: Any) -> None:
    """A replayed step launches one thing; capture, staging and the hold are not in its clock."""
    engine = build(fake_cuda)
    engine.step(batch(8), GRAPH, marks=False)
    fake_cuda.log.clear()
    engine.step(batch(8), GRAPH, marks=False)
    assert [entry for entry in fake_cuda.log if entry[0] in {"staged", "replay", "lookup", "hash", "synchronize"}] == [
        ("staged",), ("replay",), ("synchronize",)
    ]  # fmt: skip


def test_a_hasher_without_a_device_has_a_graph_too(fake_cuda: Any) -> None:
    """Ids that were hashed on the host are the graph's input."""
    backend = twin.TwinBackend(fake_cuda)
    backend.on_host = True
    engine = build(fake_cuda, backend=backend)
    for tokens in (8, 6, 7):
        ids, rows = engine.rows(batch(tokens), GRAPH)
        assert (ids == hash_ids(twin.LAYOUT, batch(tokens), twin.TOKEN_MAP)).all()
        assert (rows == engine.rows(batch(tokens), EARLY)[1]).all()


def test_padding_adds_nobodys_dead_tokens() -> None:
    """H9: shapes depend on the bucket only, ids of real tokens do not change, added tokens are dead."""
    shapes = set()
    for lengths in ((5,), (2, 3, 2), (1, 1, 1, 1, 1), (3, 5)):
        parts = [HashBatch.sequence(np.arange(n) * 31 % 1000, history=[9, 8, 7]) for n in lengths]
        one = HashBatch.concat(parts)
        wide, count = graph.padded(one, 20), sum(lengths)
        shapes.add(tuple(each.shape for each in (wide.token_ids, wide.positions, wide.query_start_loc, wide.window)))
        assert wide.dead[count:].all()
        assert (wide.dead[:count] == one.dead).all()
        ids = hash_ids(twin.LAYOUT, wide, twin.TOKEN_MAP)
        assert (ids[:count] == hash_ids(twin.LAYOUT, one, twin.TOKEN_MAP)).all()
    assert shapes == {((8,), (8,), (9,), (8, 3))}
    sizes = {tokens: len(graph.padded(batch(tokens), 20).token_ids) for tokens in (0, 1, 2, 3, 16, 17, 20)}
    assert sizes == {0: 1, 1: 1, 2: 2, 3: 4, 16: 16, 17: 20, 20: 20}


def test_an_empty_batch_has_a_graph(fake_cuda: Any) -> None:
    """H18: one dead token runs, no output remains."""
    assert build(fake_cuda).step(HashBatch.sequence([]), GRAPH, marks=True).output.shape == (0, 64)


def test_a_torch_without_external_events_cannot_time_a_graph(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain timing events do not survive a capture: graphs are then not measurable, and nothing is captured."""
    engine, event = build(fake_cuda), fake_cuda.Event

    def old(*, enable_timing: bool = False) -> Any:
        return event(enable_timing=enable_timing)

    monkeypatch.setattr(fake_cuda, "Event", old)
    with pytest.raises(NotMeasurable) as caught:
        engine.step(batch(), GRAPH, marks=False)
    assert caught.value.code == "no-external-events"
    assert engine._graphs == {}


def test_a_failed_capture_has_a_code(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA refuses to capture is an error that names the rank, not a silent eager step."""
    engine = build(fake_cuda)

    def refused(_graph: Any, **_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(fake_cuda, "graph", refused)
    with pytest.raises(EngramError, match="not permitted when stream") as caught:
        engine.step(batch(), GRAPH, marks=False)
    assert caught.value.code == "graph-capture"


def test_close_drops_the_graphs(fake_cuda: Any) -> None:
    """A graph holds device views of the table: none is left after close."""
    engine = build(fake_cuda)
    engine.step(batch(), GRAPH, marks=False)
    engine.close()
    assert engine._graphs == {}


def test_head_shards_gather_before_the_projection(fake_cuda: Any) -> None:
    """L4: a shard whose gather brings its peer's rows equals the step of all heads, eager and in a graph."""
    whole, peer = build(fake_cuda), build(fake_cuda, shard=(1, 2), gather=lambda *_: None)
    peer.rows(batch(8), EARLY)
    table = iter([])

    def gather(out: Any, local: Any) -> None:
        other = peer.staging[next(table), : len(local)]
        fake_cuda.launch(lambda: fake_cuda.advance(20_000))
        out[0], out[1] = local, other

    engine = build(fake_cuda, shard=(0, 2), gather=gather)
    for settings in (EARLY, GRAPH):
        table = iter([0, 1] * 3)
        result = engine.step(batch(8), settings, marks=True)
        assert (result.output == whole.step(batch(8), settings, marks=False).output).all()
        assert result.communication_ns == result.step_ns - result.main_ns == 40_000
        assert [span.layer for span in result.timeline.spans if span.name == "gather"] == [1, 3]
    table = iter([0, 1])
    assert engine.step(batch(8), EARLY, marks=False).communication_ns == 40_000
    assert whole.step(batch(8), EARLY, marks=False).communication_ns is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"submission": "sometimes"}, "bad-submission"), ({"wait": "none"}, "bad-wait"),
        ({"streams": 3}, "bad-streams"), ({"inline_above": -1}, "bad-inline-above"), ({"graph": "yes"}, "bad-graph"),
    ],
)  # fmt: skip
def test_settings_that_no_engine_knows_are_refused(change: dict[str, Any], code: str) -> None:
    """Known before anything is measured, with what is allowed."""
    with pytest.raises(UsageError, match="expected") as caught:
        StepSettings(**change)
    assert caught.value.code == code

"""The open-loop server: every request accounted for, arrivals by their own clock, outputs that rows decide."""

from collections import Counter

import numpy as np
import pytest

from pytest_engram.checks import check_engine
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.engines.protocol import StepResult, StepSettings
from pytest_engram.engines.tables import table_views
from pytest_engram.errors import EngramError, UsageError
from pytest_engram.model import ServingPlan, Slo, Workload
from pytest_engram.serving.loop import request_outputs, serve
from pytest_engram.serving.replay import fixed_batches, make_load

EARLY = StepSettings()


def plan(**fields):
    """A load that a step of 20 ms cannot keep up with."""
    base = {
        "rate": 200.0, "requests": 40, "prompt_tokens": (3, 20), "output_tokens": (1, 4),
        "slo": Slo(ttft_ms=100, itl_ms=50), "max_batch_tokens": 16, "max_running": 4,
    }  # fmt: skip
    return ServingPlan(**{**base, **fields})


class FakeEngine:
    """Steps that take ``step_s`` of a clock that only this engine and ``sleep`` move."""

    def __init__(self, step_s, fail_at=None, error=None):
        self.time, self.step_s, self.fail_at, self.sizes, self.batches = 0.0, step_s, fail_at, [], []
        self.error = error or EngramError("rows are gone", code="lookup-failed")

    def step(self, batch, settings, *, marks, index=0, output=True):
        self.batches.append(batch)
        self.sizes.append((len(batch.token_ids), len(batch.query_start_loc) - 1))
        self.time += self.step_s
        if len(self.sizes) == self.fail_at:
            raise self.error
        output = np.sin(np.outer(batch.token_ids + 1.0, np.arange(1, 9))).astype(np.float32)
        return StepResult(0, 0, output)

    def sleep(self, seconds):
        self.time += max(seconds, 1e-6)


def run(engine, asked, **fields):
    """(load, sample) on the engine's own clock."""
    load = make_load(asked, 7, 1000)
    return load, serve(engine, load, asked, EARLY, clock=lambda: engine.time, sleep=engine.sleep, **fields)


def counts(sample):
    """Requests per status."""
    return Counter(record.status for record in sample.requests)


def test_unloaded_server_completes_all():
    """Every request is served whole: its output length, one TTFT, one gap less than tokens."""
    load, sample = run(FakeEngine(0.0005), plan(), rank=3)
    assert (counts(sample), sample.rank) == ({"ok": 40}, 3)
    for request, record in zip(load, sample.requests, strict=True):
        assert record.output_tokens == request.output_tokens == len(record.itl_ms) + 1
        assert record.prompt_tokens == len(request.prompt)
        assert record.ttft_ms >= 0.5
    assert sample.duration_s >= load[-1].arrival_s


@pytest.mark.parametrize("fields", [{"max_waiting": 2}, {"timeout_s": 0.05}], ids=str)
def test_overload_is_accounted_for(fields):
    """Completed + rejected + failed + incomplete = planned; an overload rejects or times out, and says which."""
    _, sample = run(FakeEngine(0.02, fail_at=5), plan(**fields))
    found = counts(sample)
    assert sum(found.values()) == len(sample.requests) == 40
    assert found["failed"] >= 1
    assert ("rejected" in found) is ("max_waiting" in fields)
    assert ("incomplete" in found) is ("timeout_s" in fields)
    for record in sample.requests:
        assert record.status in {"ok", "rejected", "failed", "incomplete"}
        assert (record.ttft_ms is None) is (record.output_tokens == 0)
        assert record.status != "rejected" or record.output_tokens == 0


def test_failed_step_fails_only_its_requests():
    """The rest of the load is served after a step that raised."""
    _, sample = run(FakeEngine(0.0005, fail_at=5), plan())
    found = counts(sample)
    assert 1 <= found["failed"] <= 4
    assert found["ok"] == 40 - found["failed"]


def test_usage_error_is_not_a_failed_request():
    """A wrong plan stops the load instead of passing as a bad server."""
    engine = FakeEngine(0.0005, fail_at=5, error=UsageError("65 tokens", code="too-many-tokens"))
    with pytest.raises(UsageError, match="65 tokens"):
        run(engine, plan())


def test_arrivals_do_not_wait_for_the_server():
    """No coordinated omission: a slow server sees the same arrivals, and its queue shows in TTFT."""
    (fast_load, fast), (slow_load, slow) = (run(FakeEngine(step), plan()) for step in (0.0005, 0.02))
    assert fast_load == slow_load
    assert [r.arrival_ms for r in fast.requests] == [r.arrival_ms for r in slow.requests]
    last_fast, last_slow = fast.requests[-1].ttft_ms, slow.requests[-1].ttft_ms
    assert last_slow > last_fast + 500
    served_until = slow.requests[-1].arrival_ms + last_slow + sum(slow.requests[-1].itl_ms)
    assert served_until <= 1e3 * slow.duration_s + 1e-6


def test_batches_keep_their_limits_and_mix_prefill_with_decode():
    """No step exceeds max_batch_tokens or max_running, and prompt chunks share steps with single decode tokens."""
    engine = FakeEngine(0.02)
    run(engine, plan())
    assert max(tokens for tokens, _ in engine.sizes) == 16
    assert max(requests for _, requests in engine.sizes) == 4
    lengths = [sorted(np.diff(batch.query_start_loc)) for batch in engine.batches]
    assert any(chunk[0] == 1 and chunk[-1] > 1 for chunk in lengths if len(chunk) > 1)


def test_windows_come_from_the_requests_own_history():
    """H8, H14: column j of a window is the token at chunk start − 1 − j of that request, −1 before its start."""
    engine, asked = FakeEngine(0.02), plan()
    load, _ = run(engine, asked)
    first = {request.prompt[:3]: request for request in load}
    checked = 0
    for batch in engine.batches:
        for row, start in enumerate(batch.query_start_loc[:-1]):
            position, window = batch.positions[start], batch.window[row].tolist()
            assert window.count(-1) == max(0, 3 - position)
            if position == 3:
                checked += 1
                assert tuple(reversed(window)) in first
    assert checked > 0


def test_requests_are_served_on_the_real_engine(bench):
    """The real engine and the real clock serve a small load whole."""
    asked = plan(requests=10, rate=500.0)
    sample = serve(bench.engine(), make_load(asked, 1, bench.vocabulary), asked, EARLY)
    assert counts(sample) == {"ok": 10}
    assert 0 < sample.duration_s < 10


def outputs(engine, bench, **ways):
    """Output tokens of eight fixed requests, served in these ways."""
    load = make_load(plan(requests=8, prompt_tokens=(4, 30)), 2, bench.vocabulary)
    return request_outputs(engine, load, ways.pop("settings", EARLY), **ways)[0]


@pytest.mark.parametrize(
    "ways",
    [
        {"chunk": 3}, {"chunk": 17, "running": 2}, {"running": 1}, {"cached": 7}, {"cached": 99}, {"drafts": 2},
        {"settings": StepSettings(submission="at_consumption")},
    ],
    ids=str,
)  # fmt: skip
def test_outputs_do_not_depend_on_how_requests_are_served(bench, ways):
    """H10, H11: chunk borders, batching, prefix hits, rolled-back drafts and the arm leave every output token."""
    engine = bench.engine()
    expected = outputs(engine, bench)
    assert [len(tokens) for tokens in expected] == [
        r.output_tokens for r in make_load(plan(requests=8, prompt_tokens=(4, 30)), 2, bench.vocabulary)
    ]
    assert len(set(expected)) == 8
    assert outputs(engine, bench, **ways) == expected


def test_wrong_rows_change_outputs(bench):
    """Negative control: with one hash column's rows negated, most requests answer differently."""
    engine = bench.engine()
    expected = outputs(engine, bench)
    start, prime = bench.layout.offsets[0][2], bench.layout.primes[0][2]
    table_views(bench.buffer, bench.layout)[0][0][start : start + prime] ^= 0x80
    changed = [seen != wanted for seen, wanted in zip(outputs(engine, bench), expected, strict=True)]
    assert sum(changed) >= 4


class StaleChunks(CpuEngine):
    """A later chunk of a prompt is served from the rows of the step before it; whole prompts and decodes are right."""

    def _stage(self, batch):
        self.stale = self._whole.copy() if batch.positions[0] > 0 and len(batch.token_ids) > 3 else None
        return super()._stage(batch)

    def _collect(self, layer, tokens):
        rows = super()._collect(layer, tokens)
        return rows if self.stale is None else self.stale[self._tables[layer], :tokens]


@pytest.mark.parametrize("kind", [CpuEngine, StaleChunks])
def test_gate_0_serves_requests_in_every_way(bench, kind):
    """L11: an engine whose staging is stale for chunked prompts fails gate 0's own check; the honest one passes."""
    engine = bench.engine(kind=kind)
    batch = next(fixed_batches(Workload(tokens=16), 1, bench.vocabulary, "low-reuse"))
    found = check_engine(engine, batch, EARLY, bench.layout, bench.token_map, bench.seed)
    assert [sample.case for sample in found if not sample.passed] == ["engine-outputs"] * (kind is StaleChunks)
    assert kind is CpuEngine or found[-1].detail.startswith("chunks: ")


def test_told_outputs_are_followed(bench):
    """What is told stands in the place of what is answered, so two engines with other answers keep one history."""
    load = make_load(plan(requests=3, output_tokens=(2, 3)), 2, bench.vocabulary)
    told = [(5, 6, 7)] * 3
    tokens, states = request_outputs(bench.engine(), load, EARLY, told=told)
    assert tokens == tuple(told[0][: request.output_tokens] for request in load)
    assert states.shape == (sum(request.output_tokens for request in load), 64)


def test_lost_window_changes_outputs(bench, monkeypatch):
    """H16's negative control: without the window, a chunk border changes what a request answers."""
    engine = bench.engine()
    expected = outputs(engine, bench)
    monkeypatch.setattr("pytest_engram.serving.batching.window_row", lambda _history, _start: [-1, -1, -1])
    assert outputs(engine, bench, chunk=5) != expected

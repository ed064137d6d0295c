"""The CUDA engine over its twin on CPUs: rows, order of the calls, marks, errors."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_engram.engines.protocol import StepSettings
from pytest_engram.engines.tables import full_shards
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.hashing import hash_ids
from pytest_engram.model import Workload
from pytest_engram.rows import lookup_rows

torch = pytest.importorskip("torch")

twin = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("cuda_twin.py"))))
build, setup, batch, TwinBackend, LAYOUT, WORK = (
    twin.build, twin.setup, twin.batch, twin.TwinBackend, twin.LAYOUT, twin.WORK,
)  # fmt: skip
EARLY, LATE = StepSettings(), StepSettings(submission="at_consumption")


def test_rows_equal_the_oracle(fake_cuda: Any) -> None:
    """Ids and staged rows of both submission points are the oracle's, bit by bit."""
    engine = build(fake_cuda)
    ids, rows = engine.rows(batch(), EARLY)
    expected = hash_ids(LAYOUT, batch(), twin.TOKEN_MAP)
    assert ids.dtype == np.int32
    assert (ids == expected).all()
    for index, shard in enumerate(full_shards(setup(fake_cuda).tables, LAYOUT)):
        oracle = np.empty((6, LAYOUT.columns, 64), np.uint16)
        lookup_rows(shard, expected[:, index], oracle)
        assert (rows[:, index] == oracle).all()
    assert (engine.rows(batch(), LATE)[1] == rows).all()


def test_rows_that_were_not_staged_are_impossible(fake_cuda: Any) -> None:
    """K44: a lookup that writes nothing cannot pass for yesterday's rows."""
    engine = build(fake_cuda)
    engine.rows(batch(), EARLY)
    engine._setup.backend.lazy = True
    assert (engine.rows(batch(), EARLY)[1] == 0x7FFF).all()


def test_the_submission_point_does_not_change_the_output(fake_cuda: Any) -> None:
    """B1 changes when a lookup is submitted: outputs agree bit by bit and are finite."""
    engine = build(fake_cuda)
    early, late = (engine.step(batch(), settings, marks=False).output for settings in (EARLY, LATE))
    assert early.dtype == np.float32
    assert early.shape == (6, 64)
    assert np.isfinite(early).all()
    assert (early == late).all()


def test_the_output_depends_on_the_rows(fake_cuda: Any) -> None:
    """Another table gives another output, except for the dead token, whose hidden state passes the gate unchanged."""
    one, other = (build(fake_cuda, table_seed=seed).step(batch(), EARLY, marks=False).output for seed in (1, 2))
    assert (one != other).any(axis=1).tolist() == [True, True, False, True, True, True]


def order(cuda: Any) -> str:
    """The lookups and the events of the main stream, in order."""
    return "".join("L" if entry[0] == "lookup" else "w" if entry[0] == "wait_event" else "" for entry in cuda.log)


def test_early_submits_everything_before_the_first_layer(fake_cuda: Any) -> None:
    """B1: early is lookup, lookup, wait, wait; at consumption is lookup, wait, lookup, wait, on the same stream."""
    engine = build(fake_cuda)
    for settings, expected in ((EARLY, "LLww"), (LATE, "LwLw")):
        fake_cuda.log.clear()
        engine.step(batch(), settings, marks=False)
        assert order(fake_cuda) == expected
        assert {entry[1] for entry in fake_cuda.log if entry[0] == "lookup"} == {"s2"}


def test_both_submission_points_use_the_same_background_cap(fake_cuda: Any) -> None:
    """B1 must not switch the grid: half of the machine by default, else what B2 asks for."""
    engine = build(fake_cuda)
    for settings in (EARLY, LATE, StepSettings(cap=33)):
        engine.step(batch(), settings, marks=False)
    assert engine._setup.backend.caps == [2, 2, 2, 2, 33, 33]


@pytest.mark.parametrize("settings", [EARLY, LATE])
def test_a_marked_step_has_every_mark_in_order(fake_cuda: Any, settings: StepSettings) -> None:
    """hash ready <= submit <= start < done, and the wait lies around nothing but the wait."""
    result = build(fake_cuda).step(batch(), settings, marks=True, index=4)
    line = result.timeline
    assert (line.step, line.tokens, [mark.layer for mark in line.lookups]) == (4, 6, [1, 3])
    for mark in line.lookups:
        assert line.begin <= mark.hash_ready <= mark.submit <= mark.start < mark.done
        assert mark.done - mark.start == 50_000
        assert mark.wait_before <= mark.wait_after <= line.end
        assert (mark.rows, mark.tiles, mark.grid) == (6 * LAYOUT.columns, 9, 2)
    names = [span.name for span in line.spans]
    assert names.count("compute") == WORK.layers
    assert names.count("projection") == names.count("gate") == 2
    assert result.step_ns == line.end - line.begin
    assert result.main_ns == result.step_ns - sum(mark.wait_after - mark.wait_before for mark in line.lookups)


def test_an_unmarked_step_records_no_more_than_its_clock(fake_cuda: Any) -> None:
    """One base, two ends and two marks per wait; no timeline."""
    engine = build(fake_cuda)
    before = len(fake_cuda.events)
    result = engine.step(batch(), EARLY, marks=False)
    assert result.timeline is None
    assert len(fake_cuda.events) - before == 3 + 2 * 2


def test_the_hold_is_outside_the_step(fake_cuda: Any) -> None:
    """The main stream is held while the host enqueues; the step's own clock does not see it; serving needs none."""
    engine = build(fake_cuda)
    assert engine.hold
    start = fake_cuda.now
    result = engine.step(batch(), EARLY, marks=False)
    assert result.step_ns == twin.STEP_NS
    assert fake_cuda.now - start >= twin.STEP_NS + 200_000
    engine.hold, start = False, fake_cuda.now
    engine.step(batch(), EARLY, marks=False)
    assert fake_cuda.now - start == twin.STEP_NS


def test_hashing_is_part_of_the_step(fake_cuda: Any) -> None:
    """The batch is staged before the step and hashed in it: hash ready is a time of the GPU, before every lookup."""
    result = build(fake_cuda).step(batch(), EARLY, marks=True)
    assert result.timeline is not None
    assert {mark.hash_ready for mark in result.timeline.lookups} == {result.timeline.begin + twin.HASH_NS}
    names = [entry[0] for entry in fake_cuda.log if entry[0] in {"staged", "hash", "lookup"}]
    assert names == ["staged", "hash", "lookup", "lookup"]
    assert ("hash", "s1") in fake_cuda.log


def test_a_hasher_without_a_device_hashes_before_the_step(fake_cuda: Any) -> None:
    """A backend that offers no ``on_device`` gives the same ids and outputs; its hashing is not in the step."""
    backend = TwinBackend(fake_cuda)
    backend.on_host = True
    plain, engine = build(fake_cuda, backend=backend), build(fake_cuda)
    for seen, expected in zip(plain.rows(batch(), EARLY), engine.rows(batch(), EARLY), strict=True):
        assert (seen == expected).all()
    result, other = (each.step(batch(), EARLY, marks=False) for each in (plain, engine))
    assert (result.output == other.output).all()
    assert other.step_ns - result.step_ns == twin.HASH_NS


@pytest.mark.parametrize("hold", [True, False])
def test_a_step_synchronises_once(fake_cuda: Any, hold: bool) -> None:  # noqa: FBT001 - a parameter
    """Serving: nothing waits for the device but the step's end, marked or not."""
    engine = build(fake_cuda)
    engine.hold = hold
    for marks in (False, True):
        fake_cuda.log.clear()
        engine.step(batch(), EARLY, marks=marks)
        assert [entry[0] for entry in fake_cuda.log].count("synchronize") == 1
        assert fake_cuda.log[-1] == ("synchronize",)


def test_bad_batches_and_settings_are_usage_errors(fake_cuda: Any) -> None:
    """Too many tokens, an unknown submission, wrong layers: known before anything is measured."""
    engine = build(fake_cuda)
    with pytest.raises(UsageError, match="9 tokens"):
        engine.step(batch(9), EARLY, marks=False)
    with pytest.raises(UsageError, match="'sometimes'"):
        engine.step(batch(), StepSettings(submission="sometimes"), marks=False)
    with pytest.raises(UsageError) as caught:
        build(fake_cuda, workload=Workload(hidden=64, layers=2, engram_layers=(1, 3)))
    assert caught.value.code == "bad-layers"


def test_a_backend_without_gpu_is_not_measurable(fake_cuda: Any) -> None:
    """A CPU-only backend is a named absence, not a fallback."""
    backend = TwinBackend(fake_cuda)
    backend.engines = frozenset({"cpu"})
    with pytest.raises(NotMeasurable) as caught:
        build(fake_cuda, backend=backend)
    assert caught.value.code == "backend-engine"


def test_a_device_error_has_a_code(fake_cuda: Any) -> None:
    """What CUDA reports at the end of a step is an EngramError that names the rank."""
    engine = build(fake_cuda)

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    fake_cuda.synchronize = broken
    with pytest.raises(EngramError, match="rank 0, step: an illegal memory access") as caught:
        engine.step(batch(), EARLY, marks=False)
    assert caught.value.code == "cuda-failed"


def test_close_drops_the_views_and_ends_the_engine(fake_cuda: Any) -> None:
    """After close nothing holds the table, and a step is an error; a second close does nothing."""
    engine = build(fake_cuda)
    engine.close()
    engine.close()
    with pytest.raises(EngramError) as caught:
        engine.step(batch(), EARLY, marks=False)
    assert caught.value.code == "closed"


def test_without_a_gpu_the_engine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """No silent CPU fallback: unavailable() has a reason, construction and registration raise it."""
    from pytest_engram.engines.cuda import CudaEngine

    monkeypatch.setattr(torch.version, "cuda", None)
    reason = CudaEngine.unavailable()
    assert reason is not None
    assert reason.startswith("cpu-only-torch")
    with pytest.raises(NotMeasurable):
        CudaEngine.registrar(0)(None)
    with pytest.raises(NotMeasurable):
        CudaEngine(setup(None))


def test_drift_gives_a_number_or_a_reason(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks and counters are this GPU's own, found by UUID; one that is not known says why, and is never 0."""
    from pytest_engram.engines import cuda
    from pytest_engram.gpu.nvml import COUNTERS

    found = build(fake_cuda).drift()
    assert {name for name, value in found.items() if isinstance(value, str)} == {"link_bytes_per_s", *COUNTERS}
    assert set(found) - {"link_bytes_per_s", *COUNTERS} == {"enqueue_ms", "graph_replays"}
    answers = {"sm_mhz": 1980, "pcie_to_host_kb_per_s": "Not Supported (3)"}
    monkeypatch.setattr(cuda, "Nvml", lambda: SimpleNamespace(counters=lambda uuid: answers if uuid == "GPU-b" else {}))
    gpu = SimpleNamespace(get_device_properties=lambda _device: SimpleNamespace(uuid="b"))
    here = cuda.Platform(gpu, SimpleNamespace(type="cuda"), None, None)  # type: ignore[arg-type]
    assert cuda._gpu_state(here) == {"sm_mhz": 1980.0, "pcie_to_host_kb_per_s": "Not Supported (3)"}

    def missing() -> Any:
        raise NotMeasurable("no library", code="no-gpu-driver")

    monkeypatch.setattr(cuda, "Nvml", missing)
    assert cuda._gpu_state(here) == dict.fromkeys(COUNTERS, "no library")


def test_the_link_is_the_best_of_its_copies(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes over the shortest of five copies; a device on which a copy takes no time gives a reason, not infinity."""
    from pytest_engram.gpu import link

    times = iter([9_000, 4_000, 5_000, 6_000, 7_000])

    class Slow(torch.Tensor):  # type: ignore[misc,name-defined]
        def copy_(self, source: Any, non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's
            fake_cuda.advance(next(times))
            return super().copy_(source, non_blocking)

    assert isinstance(link.link_bytes_per_s(fake_cuda, torch.device("cpu")), str)
    like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: like(*args, **options).as_subclass(Slow))
    assert link.link_bytes_per_s(fake_cuda, torch.device("cpu")) == pytest.approx((1 << 20) / 4e-6)

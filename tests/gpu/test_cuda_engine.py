"""The CUDA engine's twin on CPUs: the same step over stand-in streams and a numpy lookup."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_engram.backends.protocol import Launch, TableShard
from pytest_engram.backends.reference import ReferenceBackend, ReferenceHasher
from pytest_engram.engines.protocol import EngineSetup, StepSettings
from pytest_engram.engines.tables import fill_table, full_shards, table_bytes, table_views
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.hashing import EngramLayout, HashBatch, hash_ids
from pytest_engram.model import Workload
from pytest_engram.rows import lookup_rows

torch = pytest.importorskip("torch")

EARLY, LATE = StepSettings(), StepSettings(submission="at_consumption")
LAYOUT = EngramLayout.for_rows(5000, (1, 3), head_dim=64, compressed_vocab=500)
WORK = Workload(hidden=64, layers=5, engram_layers=(1, 3), tokens=6)
TOKEN_MAP = np.arange(1000, dtype=np.int32) % 500
HASH_NS, STEP_NS = 30_000, 130_000  # on the virtual GPU: one hash and two lookups of 50 µs


class TwinHasher(ReferenceHasher):
    """The reference hasher whose device is the CPU: staged, then launched."""

    cuda: Any = None

    def on_device(self, batch: HashBatch, device: Any) -> tuple[Any, Any, Any]:
        ids = torch.tensor(self(batch)).as_subclass(Ids)
        self.cuda.log.append(("staged",))

        def launch() -> Any:
            self.cuda.log.append(("hash", self.cuda.current_stream().name))
            self.cuda.now += HASH_NS
            return ids

        return launch, torch.tensor(batch.token_ids, device=device), torch.tensor(~batch.dead, device=device)


class HostHasher:
    """A hasher that knows no device."""

    def __init__(self, honest: ReferenceHasher) -> None:
        self.honest = honest

    def __call__(self, batch: HashBatch) -> Any:
        return self.honest(batch)


class TwinBackend(ReferenceBackend):
    """The reference backend on torch tensors of the CPU; ``lazy`` looks nothing up."""

    on_host = False

    def __init__(self, cuda: Any, *, lazy: bool = False) -> None:
        super().__init__()
        self.cuda, self.lazy, self.caps = cuda, lazy, []  # type: ignore[var-annotated]

    def hasher(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> Any:
        made = TwinHasher(layout, token_map, slot_cache=slot_cache)
        made.cuda = self.cuda
        return HostHasher(made) if self.on_host else made

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        self.cuda.log.append(("lookup", self.cuda.current_stream().name))
        self.cuda.now += 50_000
        self.caps.append(cap)
        if not self.lazy:
            table = TableShard(
                weight=shard.weight.numpy(), scales=shard.scales.numpy(), start=shard.start, end=shard.end,
                head_start=0, local_heads=shard.local_heads, total_heads=shard.total_heads,
            )  # fmt: skip
            lookup_rows(table, ids.numpy(), out.view(torch.int16).numpy().view(np.uint16))
        return Launch(out.shape[0] * out.shape[1], 9, cap or 0)


class Ids(torch.Tensor):  # type: ignore[misc,name-defined]
    """A tensor of the CPU that can be recorded on a stand-in stream."""

    def record_stream(self, stream: Any) -> None:
        stream.cuda.log.append(("record_stream", stream.name))


def setup(cuda: Any, *, table_seed: int = 1, **changes: Any) -> EngineSetup:
    """A small engine's parts; ``changes`` replace fields."""
    buffer = np.zeros(table_bytes(LAYOUT), np.uint8)
    fill_table(buffer, LAYOUT, table_seed)
    fields: dict[str, Any] = {
        "rank": 0, "layout": LAYOUT, "workload": WORK, "tables": table_views(buffer, LAYOUT), "token_map": TOKEN_MAP,
        "backend": TwinBackend(cuda), "cpus": (0,), "max_tokens": 8, "seed": 7,
    }  # fmt: skip
    return EngineSetup(**{**fields, **changes})


def build(cuda: Any, **changes: Any) -> Any:
    """The engine over stand-ins."""
    from pytest_engram.engines.cuda import CudaEngine, Platform

    class Twin(CudaEngine):
        def _upload(self, array: Any) -> Any:
            return super()._upload(array).as_subclass(Ids)

    engine = Twin(setup(cuda, **changes), Platform(cuda, torch.device("cpu"), torch.from_numpy, cuda.spin))
    cuda.log.clear()
    return engine


def batch(tokens: int = 6) -> HashBatch:
    """One request; the third token is dead."""
    dead = np.arange(tokens) == 2
    return HashBatch.sequence(np.arange(tokens) * 37 % 1000, history=[5, 6, 7, 8], dead=dead)


def test_rows_equal_the_oracle(fake_cuda: Any) -> None:
    """Ids and staged rows of both submission points are the oracle's, bit by bit."""
    engine = build(fake_cuda)
    ids, rows = engine.rows(batch(), EARLY)
    expected = hash_ids(LAYOUT, batch(), TOKEN_MAP)
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
    assert result.step_ns == STEP_NS
    assert fake_cuda.now - start >= STEP_NS + 200_000
    engine.hold, start = False, fake_cuda.now
    engine.step(batch(), EARLY, marks=False)
    assert fake_cuda.now - start == STEP_NS


def test_hashing_is_part_of_the_step(fake_cuda: Any) -> None:
    """The batch is staged before the step and hashed in it: hash ready is a time of the GPU, before every lookup."""
    result = build(fake_cuda).step(batch(), EARLY, marks=True)
    assert result.timeline is not None
    assert {mark.hash_ready for mark in result.timeline.lookups} == {result.timeline.begin + HASH_NS}
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
    assert other.step_ns - result.step_ns == HASH_NS


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


def test_drift_reports_only_what_was_read(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks and throttle reasons are this GPU's own, found by UUID; an unknown one is absent, never 0."""
    from pytest_engram.engines import cuda

    engine = build(fake_cuda)
    assert set(engine.drift()) == {"enqueue_ms"}
    answers = {"pci:1": SimpleNamespace(uuid="GPU-a"), "pci:2": SimpleNamespace(uuid="GPU-b")}
    library = SimpleNamespace(
        memory_affinity=lambda: answers, sm_clocks=lambda: {"pci:1": 345, "pci:2": 1980},
        throttle_reasons=lambda: {"pci:1": 4, "pci:2": None},
        pcie_kb_per_s=lambda: {"pci:1": {"to_host": 3}, "pci:2": {"to_host": None, "from_host": 77}},
    )  # fmt: skip
    monkeypatch.setattr("pytest_engram.gpu.nvml.Nvml", lambda: library)
    found = SimpleNamespace(get_device_properties=lambda _device: SimpleNamespace(uuid="b"))
    here = cuda.Platform(found, SimpleNamespace(type="cuda"), None, None)  # type: ignore[arg-type]
    assert cuda._gpu_state(here) == {"sm_mhz": 1980.0, "pcie_from_host_kb_per_s": 77.0}

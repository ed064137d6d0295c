"""The CUDA engine: a decoder-like main stream, and one side stream on which a kernel reads registered host rows.

Hashing and the upload of ids come before the measured step.  With ``hold`` the main stream is occupied until the host
has enqueued the step, so that the events measure the GPU and not the speed of Python; an open-loop load, whose clock
is the host's, switches it off.  Steps run eagerly: no CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pytest_engram.engines.decoder import Decoder
from pytest_engram.engines.protocol import EngineSetup, Registration, StepResult, StepSettings
from pytest_engram.engines.tables import full_shards
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.gpu import gather, registration, timeline
from pytest_engram.gpu.streams import PrefetchStream
from pytest_engram.gpu.views import device_view
from pytest_engram.hashing import HashBatch
from pytest_engram.model import Timeline

_HOLD_NS = (200_000, 20_000_000)  # bounds of a hold; the first steps compile and must not teach it
_HOLD_MARGIN = 1.25
_IMPOSSIBLE = 0x7FFF  # a NaN that no lookup writes: a row that was not staged cannot pass for one that was


@dataclass(frozen=True, slots=True)
class Platform:
    """What the engine needs of CUDA; a test on a CPU gives its own."""

    cuda: Any
    device: Any
    view: Callable[[Any], Any]
    spin: Callable[[int], None]


class CudaEngine:
    """One rank's suite loop on the GPU ``rank`` modulo the visible ones."""

    name = "cuda"

    def __init__(self, setup: EngineSetup, platform: Platform | None = None) -> None:
        if self.name not in setup.backend.engines:
            raise NotMeasurable(
                f"backend {setup.backend.name} has no GPU path", code="backend-engine", who="cuda engine"
            )
        self.resolution_ns, self.hold, self._enqueue_ns = timeline.RESOLUTION_NS, True, _HOLD_NS[0]
        self._platform = _platform(setup.rank) if platform is None else platform
        layout = setup.layout
        self._setup, self._tables = setup, _tables(setup)
        timeline.self_test(self._platform.cuda, self._platform.spin)
        self._hasher = setup.backend.hasher(layout, setup.token_map, slot_cache=False)
        views = tuple((self._platform.view(weight), self._platform.view(scales)) for weight, scales in setup.tables)
        self._shards: tuple[Any, ...] = full_shards(views, layout)
        self._decoder = Decoder(layout, setup.workload, setup.seed, self._platform.device)
        self._prefetch = PrefetchStream(
            len(views), setup.max_tokens, layout.columns, layout.head_dim,
            device=self._platform.device, cuda=self._platform.cuda,
        )  # fmt: skip

    @staticmethod
    def unavailable() -> str | None:
        """Why this engine cannot run here, or None; creates no CUDA context."""
        return registration.unavailable()

    @staticmethod
    def threads_env(cpus: tuple[int, ...]) -> dict[str, str]:  # noqa: ARG004 - the protocol's argument
        """Environment of a rank's process: the GPU computes, so the host's thread pools stay as they are."""
        return {}

    @staticmethod
    def bind(rank: int) -> Any:
        """Make the rank's GPU current and return it; before anything is registered or allocated there."""
        registration.require()
        import torch

        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    @staticmethod
    def register(buffer: Any) -> Registration:
        """Register a host range of this rank for reads by its current GPU."""
        return registration.register(buffer)

    @classmethod
    def registrar(cls, rank: int) -> Callable[[Any], Registration]:
        """What pins a table for this engine: ``register(table)`` on the rank's GPU."""

        def register(table: Any) -> Registration:
            cls.bind(rank)
            return cls.register(table.buffer)

        return register

    def step(self, batch: HashBatch, settings: StepSettings, *, marks: bool, index: int = 0) -> StepResult:
        """See :class:`~pytest_engram.engines.protocol.Engine`.

        Raises:
            UsageError: the batch is larger than ``max_tokens`` or the submission is unknown.
            EngramError: ``cuda-failed`` when the device reports an error of this step.
        """
        ids = self._prepare(batch, settings)
        tokens, keep = self._upload(batch.token_ids).long(), self._upload(~batch.dead)
        trace = timeline.Marks(self._platform.cuda, full=marks)
        if self.hold:
            self._platform.spin(round(self._enqueue_ns * _HOLD_MARGIN))
        step = _Step(ids, keep, settings, trace)
        started = time.perf_counter_ns()
        trace.mark("begin")
        trace.mark("hash_ready")
        hidden = self._forward(step, tokens)
        trace.mark("end")
        self._enqueue_ns = min(max(time.perf_counter_ns() - started, _HOLD_NS[0]), _HOLD_NS[1])
        return self._result(step, self._finish(hidden), index if marks else None)

    def rows(self, batch: HashBatch, settings: StepSettings) -> tuple[Any, Any]:
        """See :class:`~pytest_engram.engines.protocol.Engine`; the same stream and the same staging as a step."""
        import torch

        step = _Step(self._prepare(batch, settings), None, settings, timeline.Marks(self._platform.cuda, full=False))
        self._prefetch.staging.view(torch.int16).fill_(_IMPOSSIBLE)
        self._submit_early(step)
        for layer in self._tables:
            self._consume(step, layer)
        staged = self._prefetch.staging[:, : len(step.ids)].transpose(0, 1).contiguous().view(torch.int16)
        return self._finish(step.ids), self._finish(staged).view("uint16")

    def drift(self) -> dict[str, float]:
        """SM clock, active throttle reasons and the last step's enqueue time; what is not readable is absent."""
        return {"enqueue_ms": self._enqueue_ns / 1e6, **_gpu_state(self._platform)}

    def close(self) -> None:
        """Drop the device views, so that the table can be unregistered; a second call does nothing."""
        if self._shards:
            self._platform.cuda.synchronize()
        self._shards = ()

    def _prepare(self, batch: HashBatch, settings: StepSettings) -> Any:
        if not self._shards:
            raise EngramError("the engine is closed", code="closed", who=f"rank {self._setup.rank}")
        if settings.submission not in {"early", "at_consumption"}:
            raise UsageError(
                f"submission {settings.submission!r}", code="bad-submission", who="cuda engine",
                expected="'early' or 'at_consumption'",
            )  # fmt: skip
        self._prefetch.rows(0, len(batch.token_ids))  # refuses a batch that does not fit
        return self._upload(self._hasher(batch))

    def _upload(self, array: Any) -> Any:
        import torch

        tensor = array if isinstance(array, torch.Tensor) else torch.tensor(array)
        return tensor.to(self._platform.device)

    def _forward(self, step: _Step, tokens: Any) -> Any:
        hidden = self._decoder.embed(tokens)
        self._submit_early(step)
        for layer in range(self._setup.workload.layers):
            if layer in self._tables:
                hidden = self._engram(step, layer, hidden)
            with step.trace.span("compute", layer):
                hidden = self._decoder.layer(hidden, layer)
        return hidden

    def _submit_early(self, step: _Step) -> None:
        if step.settings.submission == "early":
            for layer in self._tables:
                self._submit(step, layer)

    def _submit(self, step: _Step, layer: int) -> None:
        """Enqueue one lookup; both submission points use the same stream, staging, kernel and background cap."""
        table, cap = self._tables[layer], step.settings.cap
        step.trace.mark("submit", layer)
        step.launches[layer] = self._prefetch.submit(
            table, step.ids[:, table], partial(self._setup.backend.lookup, self._shards[table]),
            cap=gather.background_cap(self._platform.device) if cap is None else cap,
            mark=lambda name: step.trace.mark(name, layer),
        )  # fmt: skip

    def _consume(self, step: _Step, layer: int) -> Any:
        """Wait for the layer's rows bf16 [T, H, dim], which are submitted only now unless that was done early."""
        if step.settings.submission != "early":
            self._submit(step, layer)
        step.trace.mark("wait_before", layer)
        self._prefetch.consume(self._tables[layer])
        step.trace.mark("wait_after", layer)
        return self._prefetch.rows(self._tables[layer], len(step.ids))

    def _engram(self, step: _Step, layer: int, hidden: Any) -> Any:
        rows = self._consume(step, layer)
        with step.trace.span("projection", layer):
            key, value = self._decoder.project(rows)
        with step.trace.span("gate", layer):
            norms = self._decoder.query_norm, self._decoder.key_norm
            return self._setup.backend.gate(hidden, key, value, *norms, step.keep)

    def _finish(self, tensor: Any) -> Any:
        """Wait for the device and bring a result to numpy."""
        try:
            self._platform.cuda.synchronize()
            return tensor.cpu().numpy()
        except RuntimeError as error:
            raise EngramError(str(error), code="cuda-failed", who=f"rank {self._setup.rank}", where="step") from error

    def _result(self, step: _Step, output: Any, index: int | None) -> StepResult:
        trace = step.trace
        begin, end = trace.ns("begin"), trace.ns("end")
        result = StepResult(end - begin, end - begin - trace.waited_ns(), output)
        if index is None:
            return result
        marked = Timeline(
            rank=self._setup.rank, step=index, begin=begin, end=end, tokens=len(output),
            lookups=trace.lookups(step.launches), spans=trace.spans(),
        )  # fmt: skip
        return replace(result, timeline=marked)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step carries along: ids int32 [T, L, H] and keep bool [T] on the device."""

    ids: Any
    keep: Any
    settings: StepSettings
    trace: timeline.Marks
    launches: dict[int, Any] = field(default_factory=dict)


def _platform(rank: int) -> Platform:
    device = CudaEngine.bind(rank)
    import torch

    return Platform(cuda=torch.cuda, device=device, view=device_view, spin=timeline.spin)


def _tables(setup: EngineSetup) -> dict[int, int]:
    """Layer of the main chain -> index of its table, in the order of the layers."""
    layers = setup.workload.engram_layers
    if len(layers) != len(setup.tables) or sorted(set(layers)) != list(layers) or layers[-1] >= setup.workload.layers:
        raise UsageError(
            f"Engram layers {layers} with {len(setup.tables)} tables and {setup.workload.layers} layers",
            code="bad-layers", who="cuda engine", expected="one rising layer number per table, below the layer count",
        )  # fmt: skip
    return {layer: index for index, layer in enumerate(layers)}


def _gpu_state(platform: Platform) -> dict[str, float]:
    """What the management library says of this GPU, matched by UUID; empty where it is missing."""
    if platform.device.type != "cuda":
        return {}
    from pytest_engram.gpu.nvml import Nvml

    try:
        library = Nvml()
    except NotMeasurable:
        return {}
    uuid = f"GPU-{platform.cuda.get_device_properties(platform.device).uuid}"
    pci = next((pci for pci, answer in library.memory_affinity().items() if answer.uuid == uuid), "")
    known = {"sm_mhz": library.sm_clocks().get(pci), "throttle_reasons": library.throttle_reasons().get(pci)}
    return {name: float(value) for name, value in known.items() if value is not None}

"""The CUDA engine: a decoder-like main stream, and one side stream on which a kernel reads registered host rows.

A batch goes up before the measured step, as in a server whose tokens live on the GPU; hashing is its first piece if
the backend's hasher offers ``on_device(batch, device)``, else it is done before, too.  It gives (launch, token ids,
keep), where ``launch`` is a ``functools.partial`` over the device tensors that it reads of the batch.  With ``hold``
the main stream is occupied until the host has enqueued the step, so that the events measure the GPU and not the speed
of Python; an open-loop load, whose clock is the host's, switches it off.  A step synchronises once, at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pytest_engram.engines.chain import TorchChain
from pytest_engram.engines.graph import Captured, capture, padded
from pytest_engram.engines.prefetch import Ticket
from pytest_engram.engines.protocol import EngineSetup, StepSettings
from pytest_engram.engines.step import Ran, SuiteEngine
from pytest_engram.errors import NotMeasurable
from pytest_engram.gpu import gather, registration, timeline
from pytest_engram.gpu.link import link_bytes_per_s
from pytest_engram.gpu.nvml import COUNTERS, Nvml
from pytest_engram.gpu.streams import PrefetchStream
from pytest_engram.gpu.views import device_view
from pytest_engram.hashing import HashBatch

_HOLD_NS = (200_000, 20_000_000)  # bounds of a hold; the first steps compile and must not teach it
_HOLD_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Platform:
    """What the engine needs of CUDA; a test on a CPU gives its own."""

    cuda: Any
    device: Any
    view: Callable[[Any], Any]
    spin: Callable[[int], None]


class CudaEngine(SuiteEngine):
    """One rank's suite loop on the GPU ``rank`` modulo the visible ones."""

    name = "cuda"
    tolerance = 0.08  # 560 GEMMs in bf16: 0.04

    def __init__(self, setup: EngineSetup, platform: Platform | None = None) -> None:
        if self.name not in setup.backend.engines:
            raise NotMeasurable(
                f"backend {setup.backend.name} has no GPU path", code="backend-engine", who="cuda engine"
            )
        self.resolution_ns, self.hold, self._enqueue_ns = timeline.RESOLUTION_NS, True, _HOLD_NS[0]
        self._platform = here = _platform(setup.rank) if platform is None else platform
        timeline.self_test(here.cuda, here.spin)
        super().__init__(setup, tuple((here.view(weight), here.view(scales)) for weight, scales in setup.tables))
        layout, layers = setup.layout, len(setup.tables)
        self._chain = TorchChain(layout, setup.workload, setup.seed, here.device)
        self._prefetch = PrefetchStream(
            layers, setup.max_tokens, self._shards[0].local_heads, layout.head_dim, device=here.device, cuda=here.cuda
        )
        self._allocate(self._prefetch.staging, self._prefetch.staging.new_zeros)
        self._graphs: dict[Any, Captured] = {}
        self._replays = 0
        self._link = link_bytes_per_s(here.cuda, here.device)

    @staticmethod
    def unavailable() -> str | None:
        """Why this engine cannot run here, or None; creates no CUDA context."""
        return registration.unavailable()

    @staticmethod
    def threads_env(cpus: tuple[int, ...]) -> dict[str, str]:  # noqa: ARG004 - the protocol's argument
        """Environment of a rank's process: the GPU computes, so the host's thread pools stay as they are."""
        return {}

    @staticmethod
    def registrar(rank: int) -> Callable[[Any], registration.HostRegistration]:
        """What pins a table for this engine: ``register(table)`` on the rank's GPU."""
        return partial(_register, rank)

    @staticmethod
    def cudart(rank: int) -> None:
        """What an engine's own storage registers with: CUDA itself, on the rank's GPU."""
        _bind(rank)

    def drift(self) -> dict[str, float | str]:
        """The last step's enqueue time, the link's best rate, graphs replayed since the last call, the GPU's own."""
        own = {"enqueue_ms": self._enqueue_ns / 1e6, "link_bytes_per_s": self._link, "graph_replays": self._replays}
        self._replays = 0
        return {**own, **_gpu_state(self._platform)}

    def close(self) -> None:
        """Drop the device views, so that the table can be unregistered; a second call does nothing."""
        if self._shards:
            self._platform.cuda.synchronize()
        self._shards = ()
        self._graphs.clear()

    def _stage(self, batch: HashBatch) -> tuple[Any, Any]:
        if on_device := getattr(self._hasher, "on_device", None):
            self._launch, tokens, keep = on_device(batch, self._platform.device)
            return tokens, keep
        self._launch = partial(_same, self._upload(self._hasher(batch)))
        return self._upload(batch.token_ids), self._upload(~batch.dead)

    def _ready(self, batch: HashBatch, settings: StepSettings, *, full: bool, main: bool) -> Callable[[], Ran]:
        """Whatever a graph needs but its launch; its rows are those of the whole step."""
        if not settings.graph:
            return super()._ready(batch, settings, full=full, main=main)
        inline = settings.lane(0, len(batch.token_ids)) is None  # what is padded does not count
        settings, wide = replace(settings, inline_above=0 if inline else None), padded(batch, self.max_tokens)
        tokens, keep = self._stage(wide)
        fresh = (tokens, keep, *(each for each in self._launch.args if hasattr(each, "copy_")))
        key = settings, full, tuple(tuple(each.shape) for each in fresh)
        if key not in self._graphs:
            self._graphs[key] = self._capture(partial(self._run, wide, (tokens, keep), settings), fresh, full=full)
        found = self._graphs[key]
        found.refill(fresh)
        found.trace.begin()
        self._trace = found.trace
        self._replays += 1
        return found.replay

    def _capture(self, run: Callable[[], Ran], inputs: tuple[Any, ...], *, full: bool) -> Captured:
        cuda = self._platform.cuda
        trace, self._trace = timeline.Marks(cuda, full=full, external=True), self._marks(full=full)
        run()
        self._trace = trace
        try:
            return capture(cuda, run, inputs, trace)
        except RuntimeError as error:
            raise self._failed(str(error), "graph-capture", "CUDA graph") from error

    def _hash(self, batch: HashBatch) -> Any:  # noqa: ARG002 - it was staged
        return self._launch()

    def _upload(self, array: Any) -> Any:
        import torch

        device = self._platform.device
        tensor = array if isinstance(array, torch.Tensor) else torch.tensor(array, pin_memory=device.type == "cuda")
        return tensor.to(device, non_blocking=True)

    def _marks(self, *, full: bool) -> timeline.Marks:
        return timeline.Marks(self._platform.cuda, full=full)

    @contextmanager
    def _enqueue(self) -> Iterator[None]:
        if self.hold:
            self._platform.spin(round(self._enqueue_ns * _HOLD_MARGIN))
        started = time.perf_counter_ns()
        yield
        self._enqueue_ns = min(max(time.perf_counter_ns() - started, _HOLD_NS[0]), _HOLD_NS[1])

    def _ticket(self, layer: int, table: int, ids: Any, settings: StepSettings) -> Ticket:
        """All submission points use the same staging, kernel and background cap, and but for inline the same stream."""
        mark, lookup = partial(self._trace.mark, layer=layer), partial(self._setup.backend.lookup, self._shards[table])
        cap = gather.background_cap(self._platform.device) if settings.cap is None else settings.cap
        lane = settings.lane(table, len(ids))
        run = partial(self._prefetch.submit, table, ids[:, table], lookup, cap=cap, mark=mark, lane=lane)
        return Ticket(run, mark, lane)

    def _submit(self, ticket: Ticket) -> None:
        ticket.mark("submit")
        ticket.launch = ticket.run()

    def _await(self, layer: int, ticket: Ticket) -> None:  # noqa: ARG002 - its event tells
        self._prefetch.consume(self._tables[layer])

    def _drain(self) -> None:
        self._prefetch.drain()

    def _finish(self, tensor: Any) -> Any:
        """Bring a result to numpy; the one wait for the device."""
        try:
            host = tensor.contiguous().to("cpu", non_blocking=True)
            self._platform.cuda.synchronize()
        except RuntimeError as error:
            raise self._failed(str(error), "cuda-failed", "step") from error
        return host.numpy().copy()  # pinned memory goes back to torch's cache

    def _bits(self, buffer: Any) -> Any:
        import torch

        return buffer.view(torch.int16)


def _same(ids: Any) -> Any:
    return ids


def _bind(rank: int) -> Any:
    """Make the rank's GPU current and return it; before anything is registered or allocated there."""
    registration.require()
    import torch

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _register(rank: int, table: Any) -> registration.HostRegistration:
    _bind(rank)
    held = registration.HeldCudart() if table.backing.registered else getattr(table.backing, "cudart", None)
    return registration.register(table.buffer, cudart=held)


def _platform(rank: int) -> Platform:
    device = _bind(rank)
    import torch

    return Platform(cuda=torch.cuda, device=device, view=device_view, spin=timeline.spin)


def _gpu_state(platform: Platform) -> dict[str, float | str]:
    """What the management library says of this GPU, matched by UUID: each counter, or why it is not known."""
    if platform.device.type != "cuda":
        return dict.fromkeys(COUNTERS, "no GPU")
    try:
        found = Nvml().counters(f"GPU-{platform.cuda.get_device_properties(platform.device).uuid}")
    except NotMeasurable as error:
        return dict.fromkeys(COUNTERS, str(error))
    return {name: value if isinstance(value, str) else float(value) for name, value in found.items()}

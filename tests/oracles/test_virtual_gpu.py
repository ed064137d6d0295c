"""The virtual GPU keeps CUDA's order of streams, events and graphs, and no order that nobody asked for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.backends.virtual import KERNEL_NS, VirtualCuda
from pytest_engram.cases.prefetch import PREFETCH_CASES
from pytest_engram.checks import CASES, check, explain

MS = 1_000_000


class StreamsOnly(ReferenceBackend):
    """The reference whose prefetch queue is the one for GPUs."""

    prefetch = None  # type: ignore[assignment]


def order(*, producer: bool, consumer: bool, late: str) -> list[str]:
    """A write on the main stream, a read and a result on a side stream, its use on the main one."""
    cuda, log = VirtualCuda(), list[str]()
    side, done = cuda.Stream(), cuda.Event()
    if late == "main":
        cuda.spin(MS)
    cuda.launch(partial(log.append, "write"))
    if producer:
        side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        if late == "side":
            cuda.spin(MS)
        cuda.launch(partial(log.append, "read"))
        done.record(side)
    if consumer:
        cuda.current_stream().wait_event(done)
    cuda.launch(partial(log.append, "use"))
    assert log == []
    cuda.synchronize()
    return log


@pytest.mark.parametrize("late", ["main", "side"])
def test_declared_dependencies_hold(late: str) -> None:
    """With both waits the order is the declared one, whichever stream is late."""
    assert order(producer=True, consumer=True, late=late) == ["write", "read", "use"]


def test_missing_dependencies_show() -> None:
    """Without a wait the late stream is overtaken, every time."""
    assert order(producer=False, consumer=True, late="main") == ["read", "write", "use"]
    assert order(producer=True, consumer=False, late="side") == ["write", "use", "read"]


def test_a_reader_sees_what_ended_before_it_began() -> None:
    """What a kernel writes shows at its end, and a kernel reads at its start: in between, nobody's waits show."""
    torch = pytest.importorskip("torch", reason="tensors")
    for waits, long, wanted in ((False, True, 0), (False, False, 0), (True, True, 1)):
        cuda, source, seen = VirtualCuda(), torch.zeros(1), torch.zeros(1)
        side = cuda.Stream()
        with cuda.stream(side):
            cuda.launch(partial(source.fill_, 1), out=source)
        if waits:
            cuda.current_stream().wait_stream(side)
        cuda.launch(partial(seen.copy_, source), 2 * KERNEL_NS if long else KERNEL_NS // 2, out=seen)
        cuda.synchronize()
        assert (source.item(), seen.item()) == (1, wanted)


def test_edges_inside_a_graph_hold_at_its_replays() -> None:
    """A wait that was captured orders each replay; without it the late side stream is overtaken there, too."""
    for wait, wanted in ((True, ["side", "main"]), (False, ["main", "side"])):
        cuda, log = VirtualCuda(), list[str]()
        graph, side = cuda.CUDAGraph(), cuda.Stream()
        with cuda.graph(graph):
            with cuda.stream(side):
                cuda.spin(MS)
                cuda.launch(partial(log.append, "side"))
            if wait:
                cuda.current_stream().wait_stream(side)
            cuda.launch(partial(log.append, "main"))
        graph.replay()
        cuda.synchronize()
        assert log == wanted


def test_events_tell_virtual_time() -> None:
    """Elapsed time is the time of what lies between two records on their streams."""
    cuda = VirtualCuda()
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    begin.record(cuda.current_stream())
    cuda.spin(3 * MS)
    cuda.launch(int)
    end.record(cuda.current_stream())
    cuda.synchronize()
    assert begin.elapsed_time(end) == 3 + KERNEL_NS / MS


def test_a_graph_runs_at_its_replays_only() -> None:
    """A capture runs nothing; each replay runs all of it, behind what came before and ahead of what follows."""
    cuda, log = VirtualCuda(), list[str]()
    graph, side = cuda.CUDAGraph(), cuda.Stream()
    with cuda.graph(graph):
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            cuda.spin(MS)
            cuda.launch(partial(log.append, "captured"))
        cuda.current_stream().wait_stream(side)
    cuda.synchronize()
    assert log == []
    for _ in range(2):
        cuda.launch(partial(log.append, "before"))
        graph.replay()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            cuda.launch(partial(log.append, "after"))
    cuda.synchronize()
    assert log == ["before", "captured", "after"] * 2


@pytest.mark.parametrize("case", [case for case in CASES if case.capability == "prefetch"], ids=lambda case: case.name)
def test_the_gpu_queue_keeps_the_contract(case) -> None:  # type: ignore[no-untyped-def]
    """P1–P9: this package's own stream-ordered queue, as the CUDA engine uses it, in virtual time."""
    pytest.importorskip("torch", reason="CUDA streams need torch")
    sample = check(StreamsOnly(), case)
    assert sample.passed, explain(sample)


class KeepsItsGpu(ReferenceBackend):
    """Drives every case with one virtual GPU, as an engine that was loaded once does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def streams(self, *arguments: Any, **options: Any) -> Any:
        made = super().streams(*arguments, **options)
        self.seen.append(made.cuda)
        return made


def test_a_dependency_that_a_case_took_away_comes_back() -> None:
    """P4 ends with every dependency in force: whoever keeps the virtual GPU is judged fairly by the next case."""
    backend = KeepsItsGpu()
    needed = next(case for case in PREFETCH_CASES if case.name == "needed")
    assert check(backend, needed, seed=0).passed
    assert len(backend.seen) == 4
    assert {cuda.ignored for cuda in backend.seen} == {""}

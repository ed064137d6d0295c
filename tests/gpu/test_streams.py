"""The prefetch stream issues exactly the dependencies that make its rows right, and each of them is needed."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_engram.errors import EngramError, UsageError
from pytest_engram.gpu.streams import PrefetchStream

torch = pytest.importorskip("torch")


class Ids:
    """Hash ids in memory that the allocator hands out again at once, unless a stream was recorded."""

    def __init__(self, tokens: int = 2) -> None:
        self.tokens = tokens
        self.kept: set[str] = set()

    def __len__(self) -> int:
        return self.tokens

    def record_stream(self, stream: Any) -> None:
        self.kept.add(stream.name)


def make(cuda: Any, kind: type[PrefetchStream] = PrefetchStream, layers: int = 2) -> PrefetchStream:
    """A small prefetch stream over the stand-in."""
    return kind(layers, 4, 3, 8, device=torch.device("cpu"), cuda=cuda)


def step(cuda: Any, stream: PrefetchStream, layers: tuple[int, ...] = (0, 1)) -> None:
    """Hash on the main stream, submit all, drop the ids, consume each."""
    ids = Ids()
    cuda.access("ids", "w")
    for layer in layers:

        def lookup(_ids: Any, _out: Any, *, cap: int | None, layer: int = layer) -> None:
            cuda.access("ids", "r")
            cuda.access(f"rows {layer}", "w")

        stream.submit(layer, ids, lookup)
    if stream.stream.name not in ids.kept:
        cuda.access("ids", "w")  # the ids are dropped here, and the main stream's next tensor gets their memory
    for layer in layers:
        stream.consume(layer)
        cuda.access(f"rows {layer}", "r")


class NoProducerWait(PrefetchStream):
    def _await_producer(self, stream: Any) -> None:
        return


class NoKeep(PrefetchStream):
    def _keep(self, ids: Any, stream: Any) -> None:
        return


class NoConsumerWait(PrefetchStream):
    def _await_rows(self, done: Any) -> None:
        return


def test_two_steps_have_no_race(fake_cuda: Any) -> None:
    """P1, P2, P3: two steps in a row leave no unordered pair of accesses to ids or staging rows."""
    stream = make(fake_cuda)
    step(fake_cuda, stream)
    step(fake_cuda, stream)
    assert fake_cuda.races() == []


@pytest.mark.parametrize(("kind", "victim"), [(NoProducerWait, "ids"), (NoKeep, "ids"), (NoConsumerWait, "rows 0")])
def test_each_missing_dependency_is_a_race(fake_cuda: Any, kind: type[PrefetchStream], victim: str) -> None:
    """P4: removing any one of the three dependencies is seen."""
    stream = make(fake_cuda, kind)
    step(fake_cuda, stream)
    step(fake_cuda, stream)
    assert victim in {race[0] for race in fake_cuda.races()}


def test_the_producer_wait_guards_the_staging_rows(fake_cuda: Any) -> None:
    """P1: without it the next step's lookup overwrites rows that the previous step still reads."""
    stream = make(fake_cuda, NoProducerWait)
    step(fake_cuda, stream)
    step(fake_cuda, stream)
    assert ("rows 1", "r on s1", "w on s2") in fake_cuda.races()


def test_the_calls_come_in_order(fake_cuda: Any) -> None:
    """Wait for the producer, look up on the side stream, record the layer's event; the consumer waits for it only."""
    stream = make(fake_cuda)
    step(fake_cuda, stream)
    calls = [entry for entry in fake_cuda.log if entry[0] != "r" or entry[2] != "ids"]
    assert calls == [
        ("w", "s1", "ids"),
        ("wait_stream", "s2", "s1"), ("w", "s2", "rows 0"), ("record", "s2", 0),
        ("wait_stream", "s2", "s1"), ("w", "s2", "rows 1"), ("record", "s2", 1),
        ("wait_event", "s1", 0), ("r", "s1", "rows 0"),
        ("wait_event", "s1", 1), ("r", "s1", "rows 1"),
    ]  # fmt: skip


def test_a_consumer_does_not_wait_for_later_layers(fake_cuda: Any) -> None:
    """P3: after layer 0 is consumed the main stream knows nothing of layer 1's lookup."""
    stream = make(fake_cuda)
    for layer in (0, 1):
        stream.submit(layer, Ids(), lambda *_, **__: fake_cuda.access("rows", "w"))
    done_0, done_1 = (event.clock["s2"] for event in fake_cuda.events)
    stream.consume(0)
    assert done_0 == fake_cuda.current_stream().clock["s2"] < done_1


def test_staging_addresses_are_stable(fake_cuda: Any) -> None:
    """P6: the staging buffer is allocated once and every batch size is a prefix of it."""
    stream = make(fake_cuda)
    begin = stream.rows(1, 4).data_ptr()
    step(fake_cuda, stream)
    assert stream.rows(1, 1).data_ptr() == begin == stream.rows(1, 3).data_ptr()
    assert stream.rows(1, 3).shape == (3, 3, 8)


def test_too_many_tokens_are_refused(fake_cuda: Any) -> None:
    """P6: a batch beyond the staging buffer is an error before anything is enqueued."""
    stream = make(fake_cuda)
    with pytest.raises(UsageError, match="5 tokens in a batch; expected at most 4") as caught:
        stream.submit(0, Ids(5), lambda *_, **__: None)
    assert caught.value.code == "too-many-tokens"
    assert fake_cuda.log == []


def test_a_consumer_without_its_own_submit_is_refused(fake_cuda: Any) -> None:
    """K44: the event of an earlier step would let stale rows through."""
    stream = make(fake_cuda)
    step(fake_cuda, stream)
    with pytest.raises(EngramError, match="consumed without a lookup") as caught:
        stream.consume(0)
    assert caught.value.code == "not-submitted"


def test_marks_and_cap_are_passed_on(fake_cuda: Any) -> None:
    """The lookup runs between its marks, on the side stream, under the caller's cap."""
    seen: list[Any] = []
    stream = make(fake_cuda)

    def lookup(_ids: Any, out: Any, *, cap: int | None) -> str:
        seen.append((fake_cuda.current_stream().name, tuple(out.shape), cap))
        return "launch"

    launch = stream.submit(1, Ids(), lookup, cap=7, mark=seen.append)
    assert launch == "launch"
    assert seen == ["start", ("s2", (2, 3, 8), 7), "done"]

"""The contract cases of the prefetch queue: P1–P9.

A backend with the capability offers ``prefetch(setup: EngineSetup) -> Engine``, an engine whose queue is a thread, or
``streams(layout, tables, most, around)``, lookups on CUDA streams (:class:`~pytest_engram.backends.streams.Prefetch`).
A bench delays a hash or a lookup where it runs, until the mistake that a case looks for would have shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from pytest_engram.cases.bench import LAYERS, MOST, Streams, Threads
from pytest_engram.cases.case import Finding, Parts, Probe, cases, refused
from pytest_engram.hashing import HashBatch


@contextmanager
def _bench(probe: Probe, *, streams: bool = False, rank: int = 0) -> Iterator[Streams]:
    make = None if streams or probe.engine != "cpu" else getattr(probe.backend, "prefetch", None)
    bench: Any = make and Threads(probe, make, rank)  # which answers the same calls
    bench = bench or Streams(probe, partial(probe.optional("streams"), engine=probe.engine))
    try:
        yield bench
    finally:
        bench.close()


def producer_wait(probe: Probe) -> Parts:
    """A lookup starts after its ids are written, however long hashing takes."""
    with _bench(probe) as bench:
        bench.on_hash = bench.pause
        for step in range(2):
            yield f"step {step}", bench.differs(_batch(probe, 9))


def ids_kept(probe: Probe) -> Finding | None:
    """The ids of a submitted lookup stay as they are until it has run, also if it runs late."""
    with _bench(probe) as bench:
        bench.on_lookup = partial(_late, bench, 0)
        return bench.differs(_batch(probe, 9))


def consumer_wait(probe: Probe) -> Parts:
    """A layer's consumer gets its rows after its own lookup has ended."""
    with _bench(probe) as bench:
        for late in range(len(LAYERS)):
            bench.on_lookup = partial(_late, bench, late)
            yield f"layer {LAYERS[late]} late", bench.differs(_batch(probe, 9))


def own_layer(probe: Probe) -> Finding | None:
    """A consumer waits for its own layer only: the first layer's passes while the second's lookup still runs."""
    with _bench(probe) as bench:
        if bench.early(_batch(probe, 9)):
            return None
    return Finding(detail="the first layer's consumer waited for the second layer's lookup", layer=LAYERS[0])


def needed(probe: Probe) -> Parts:
    """Each of the three dependencies counts: take one away, and rows are wrong, as they are right with all."""
    for dependency in ("", "wait_stream", "record_stream", "wait_event"):
        with _bench(probe, streams=True) as bench:
            found = bench.without(dependency, _batch(probe, 9))
        if dependency:
            found = None if found else Finding(detail="rows", expected="wrong ones", seen="right ones")
        yield f"without {dependency or 'nothing'}", found


def fresh_rows(probe: Probe) -> Parts:
    """Every step stages its own rows: new ids, other batch sizes and dead tokens leave nothing of an earlier step."""
    with _bench(probe) as bench:
        for number, count in enumerate((MOST, 1, 5, 5, MOST, 1, 7)):
            submission = "at_consumption" if number % 3 == 2 else "early"
            yield f"step {number}", bench.differs(_batch(probe, count), submission)


def graph_replay(probe: Probe) -> Parts:
    """A captured step hashes late and looks up late at each replay; eager steps between and staging's place hold."""
    with _bench(probe, streams=True) as bench:
        bench.on_hash, bench.on_lookup = bench.pause, partial(_late, bench, len(LAYERS) - 1)
        replay = bench.captured()
        for count in (5, MOST, 1):
            yield "a replay", replay(_batch(probe, MOST))
            yield "an eager step", bench.differs(_batch(probe, count))
        yield "staging", _moved(bench)


def fixed_staging(probe: Probe) -> Parts:
    """The staging rows of a layer keep their address over all batch sizes; a batch that does not fit is refused."""
    with _bench(probe) as bench:
        for count in (MOST, 1, 5):
            bench.step(_batch(probe, count))
        yield "staging", _moved(bench)
        too_many = partial(bench.step, _batch(probe, MOST + 1))
        yield f"{MOST + 1} tokens where {MOST} have room", refused(too_many, "a batch")


def one_side_stream(probe: Probe) -> Finding | None:
    """All lookups run on one stream beside the main one, each after the other, in the order of the layers."""
    with _bench(probe) as bench:
        bench.on_lookup = partial(_late, bench, 0)
        for count in (3, MOST):
            bench.step(_batch(probe, count))
        layers, streams = [call[0] for call in bench.calls], {call[1] for call in bench.calls}
    if layers != [0, 1] * 2:
        return Finding(detail="not first in, first out", expected="[0, 1, 0, 1]", seen=str(layers))
    if len(streams) != 1 or bench.main in streams:
        return Finding(detail="lookups are not on one side stream", seen=f"{len(streams)} streams")
    return None


def same_branch(probe: Probe) -> Finding | None:
    """Ranks with different token counts run their lookups on the same stream, all inline or all beside."""
    inline = []
    for rank, count in enumerate((1, MOST)):
        with _bench(probe, rank=rank) as bench:
            bench.together((1, MOST))
            bench.step(_batch(probe, count))
            inline.append({call[1] == bench.main for call in bench.calls})
    if inline[0] == inline[1] and len(inline[0]) == 1:
        return None
    return Finding(detail="whether a rank looks up inline", expected="the same in both ranks", seen=str(inline))


def cached_views(probe: Probe) -> Finding | None:
    """Lookups read the shared table itself through views that are made once, never a copy of it."""
    with _bench(probe) as bench:
        for _ in range(2):
            bench.step(_batch(probe, 3))
        for layer, _, table, _ in bench.calls:
            first = next(other for number, _, other, _ in bench.calls if number == layer)
            memory = getattr(table, "weight", table)
            copied = isinstance(memory, np.ndarray) and not np.shares_memory(memory, bench.tables[layer][0])
            if table is not first or copied:
                return Finding(detail="a lookup read something else than the first view", layer=LAYERS[layer])
    return None


def _late(bench: Streams, late: int, layer: int) -> None:
    if layer == late:
        bench.pause()


def _batch(probe: Probe, tokens: int) -> HashBatch:
    return HashBatch.sequence(probe.tokens(tokens), dead=np.arange(tokens) % 4 == 3)


def _moved(bench: Any) -> Finding | None:
    places = {(layer, address) for layer, _, _, address in bench.calls}
    if len(places) == len(LAYERS):
        return None
    return Finding(detail="staging moves", expected="one address per layer", seen=str(sorted(places)))


PREFETCH_CASES = cases(
    "prefetch", P1=[producer_wait], P2=[ids_kept], P3=[consumer_wait, own_layer], P4=[needed],
    P5=[fresh_rows, graph_replay], P6=[fixed_staging], P7=[one_side_stream], P8=[same_branch], P9=[cached_views],
)  # fmt: skip

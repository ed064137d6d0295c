"""The contract cases of what an engine's launcher and loader decide: L12, S8–S10 and S12.

Each asks one optional method of the backend, which raises ``NotMeasurable`` where that part of it is out of reach.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pytest_engram.cases.case import Finding, Parts, Probe, cases, refused

_HUGE = 1 << 60  # bytes: more than any tmpfs has
_SHM = "/dev/shm"  # noqa: S108 - where shared tables lie


def scale_names(probe: Probe) -> Parts:
    """``.scale`` and ``.weight_scale`` of an Engram table are its ``weight_scale_inv``; other names stay."""
    name, table = probe.optional("parameter_name"), "layers.1.engram.embed"
    for kind, wanted in (("scale", "weight_scale_inv"), ("weight_scale", "weight_scale_inv"), ("weight", "weight")):
        yield kind, _unequal(name(f"{table}.{kind}"), f"{table}.{wanted}")
    yield "another module's scale", _unequal(name("layers.1.mlp.scale"), "layers.1.mlp.scale")


def explicit_sharing(probe: Probe) -> Parts:
    """Explicit sharing without offload, or without a second replica to share with, is an error at start."""
    share = probe.optional("sharing")
    yield "without offload", refused(partial(share, offload=False, replicas=2), "sharing")
    yield "with nobody", refused(partial(share, offload=True, replicas=1), "sharing")


def rightful_sharing(probe: Probe) -> Finding | None:
    """Explicit sharing of offloaded tables by two replicas is accepted."""
    return _accepted(partial(probe.optional("sharing"), offload=True, replicas=2), "no error")


def elastic_sharing(probe: Probe) -> Finding | None:
    """Explicit sharing in an elastic group, whose ranks come and go, is an error at start."""
    share = probe.optional("sharing")
    return refused(partial(share, offload=True, replicas=2, elastic=True), "sharing in an elastic group")


def node_layouts(probe: Probe) -> Parts:
    """Replicas share within a host only: contiguous whole replicas, as many on every host, else nobody does."""
    group = probe.optional("sharing_group")
    layouts = (
        ("2 hosts of 8 ranks, replicas of 2", [0] * 8 + [1] * 8, 2, 4), ("one host", [0] * 4, 1, 4),
        ("interleaved hosts", [0, 1] * 4, 1, 1), ("interleaved halves of replicas", [0, 1] * 4, 2, 1),
        ("3 and 5 ranks", [0] * 3 + [1] * 5, 1, 1), ("3 and 4 ranks", [0] * 3 + [1] * 4, 1, 1),
        ("replicas over two hosts", [0, 1, 0, 1, 0, 0, 0, 0], 2, 1),
    )  # fmt: skip
    for name, nodes, replica, wanted in layouts:
        yield name, _unequal(group(nodes, replica), wanted)


def fallbacks(probe: Probe) -> Parts:
    """Without /dev/shm, room in it, or a co-located replica the tables are not shared, and a warning says so."""
    may_share = probe.optional("may_share")
    places = (("no tmpfs", 33, "/nonexistent", 2), ("a full tmpfs", _HUGE, _SHM, 2), ("alone", 33, _SHM, 1))
    for name, nbytes, shm, replicas in places:
        with _warnings() as told:
            answer = may_share(nbytes, shm=shm, replicas=replicas)
        if answer or not told:
            seen = f"{answer}, {len(told)} warnings"
            yield name, Finding(detail="the answer", expected="no, with a warning", seen=seen)
    yield "room and a replica", _unequal(may_share(33, shm=_SHM, replicas=2), True)  # noqa: FBT003


def short_cgroup(probe: Probe) -> Finding | None:
    """A memory cgroup with less room than the table is worth a line in the log, and no refusal."""
    return _accepted(partial(probe.optional("fits"), 1 << 20, cgroup_free=1 << 10), "a line in the log")


def _accepted(run: Callable[[], Any], expected: str) -> Finding | None:
    return Finding(detail="refused", expected=expected, seen="an error") if refused(run, "") is None else None


def _unequal(seen: Any, expected: Any) -> Finding | None:
    return None if seen == expected else Finding(detail="the answer", expected=str(expected), seen=str(seen))


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is logged as a warning, by whichever logger."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger().removeHandler(handler)


LAUNCH_CASES = cases(
    "launch", L12=[scale_names], S8=[explicit_sharing, rightful_sharing, elastic_sharing], S9=[node_layouts],
    S10=[fallbacks], S12=[short_cgroup],
)  # fmt: skip

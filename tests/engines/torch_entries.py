"""Entries of ranks for test_torchrun.py; as a program (under torchrun) it runs one and writes what each rank saw."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from pytest_engram.engines.torchrun import TorchGroup
from pytest_engram.errors import EngramError, UsageError


def collectives(group: Any, payload: Any) -> Any:
    """Every operation once; rank 1 emits."""
    if group.rank == 1:
        group.emit({"kind": "news", "value": 7})
    group.check(step="working")
    group.barrier(step="first")
    told = group.broadcast({"rank": group.rank, **payload}, step="second")
    return {"told": told, "gathered": group.all_gather([group.rank], step="third")}


def fail(group: Any, payload: Any) -> None:
    """Rank 1 fails as the payload says, while rank 0 waits."""
    if group.rank == 1:
        if payload == "sleep":
            time.sleep(3)
        raise UsageError("the table is gone", code="planted") if payload == "raise" else KeyError("x")
    group.barrier(step="wait for rank 1")


def stray(group: Any, _payload: Any) -> None:
    """The ranks do not take the same steps."""
    group.barrier(step=f"step of rank {group.rank}")


def main() -> None:
    """``torch_entries.py OUT``: each world in turn; every rank writes its outcomes to OUT.rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    seen: list[Any] = []
    held: list[int] = []
    worlds = (("collectives", {"x": 1}, 60), ("fail", "raise", 60), ("fail", "crash", 60), ("stray", None, 60),
              ("collectives", {"x": 2}, 60), ("fail", "sleep", 1))  # fmt: skip
    for entry, payload, deadline in worlds:
        events: list[Any] = []
        group = TorchGroup(60, lambda *event: events.append(event))  # noqa: B023 - ends with its turn
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=deadline), group._ranks)  # once the ranks have met
        try:
            outcome: Any = group.run(f"{__file__}:{entry}", payload)
        except EngramError as error:
            outcome = [type(error).__name__, error.code, str(error)]
        seen.append([outcome, events])
        gc.collect()
        held.append(len(os.listdir("/proc/self/fd")))
    Path(f"{sys.argv[1]}.{group.rank}").write_text(json.dumps([*seen, held]))
    while group.rank == 0 and not Path(f"{sys.argv[1]}.1").exists():  # rank 1 sleeps through its last world
        time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    main()

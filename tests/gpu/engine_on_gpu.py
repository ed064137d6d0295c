"""vLLM's own shared storage on several GPUs, stock against the reference order: a rank's entry for ``peers_on_gpu``.

Every rank builds the engine's real layer over one shared table, in alternating order, each time from nothing.  The last
of each arm is loaded, audited from outside as a user would (``pytest-engram audit PID PID``), and looked up.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pytest_engram.backends.vllm_patch import ENVIRONMENT, STORAGE, PatchedVllmBackend
from pytest_engram.backends.vllm_storage import EngineLayer
from pytest_engram.layout import EngramLayout
from pytest_engram.numa import _syscalls, pages
from pytest_engram.rows import decode_rows, same_bits, synthetic_at, synthetic_rows

TOKENS, SEED, CHUNK = 512, 13, 16_384


def engine(group: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """``payload``: spec, rows, policy, rounds.  Seconds and pages of every construction; what the last two show."""
    backend, seconds = PatchedVllmBackend(payload["spec"]), list[float]()
    layout = EngramLayout.for_rows(payload["rows"], layers=(1,))
    timed(backend, seconds)
    content = synthetic(group, layout) if group.rank == 0 else (None, None)
    found: dict[str, Any] = {"device": str(backend.receipt()["device"]), "pid": os.getpid(), "constructions": []}
    kept, arms = dict[str, EngineLayer](), {"stock": "", "patched": payload["policy"]}
    for turn in range(payload["rounds"]):
        kept.clear()
        for arm in sorted(arms, reverse=turn % 2 == 1):
            if turn + 1 < payload["rounds"]:
                kept.clear()  # only the last turn's two live side by side
            gc.collect()
            os.environ[ENVIRONMENT] = arms[arm]
            group.barrier(step=f"{arm} {turn}")
            begin = time.monotonic()
            kept[arm] = made(backend, layout, group)
            whole = time.monotonic() - begin
            found["constructions"].append(
                {"arm": arm, "turn": turn, "layer_s": whole, "allocate_s": seconds[-1], "pages": placed(kept[arm])}
            )
            group.barrier(step=f"{arm} {turn} built")
    for arm, layer in kept.items():
        layer.load(*content)
        found[f"{arm}_wrong"] = wrong(layer, layout, group.rank)
        group.barrier(step=f"{arm} looked up")
    del content
    pids = group.all_gather(os.getpid(), step="pids")
    found["audit"] = audit(pids) if group.rank == 0 else None
    group.barrier(step="audited")
    kept.clear()
    gc.collect()
    return found


def made(backend: Any, layout: EngramLayout, group: Any) -> EngineLayer:
    """The engine's layer over a fresh shared table."""
    return EngineLayer(backend, layout, 0, hidden=64, max_tokens=TOKENS, storage="shared", group=group)


def timed(backend: Any, seconds: list[float]) -> None:
    """Seconds of each allocation (create, map, place or not, register): the rest of the constructor is the same."""
    kind = next(vars(one)[STORAGE] for one in backend.engine.entries if STORAGE in vars(one))
    allocate: Callable[..., Any] = kind._allocate

    def stopwatch(self: Any, num_bytes: int) -> Any:
        begin = time.monotonic()
        try:
            return allocate(self, num_bytes)
        finally:
            seconds.append(time.monotonic() - begin)

    kind._allocate = stopwatch


def synthetic(group: Any, layout: EngramLayout) -> tuple[Any, Any]:
    """The checkpoint, by all CPUs: u8 [rows, dim] and u8 [rows, dim // 32]."""
    rows, dim = layout.num_embeddings[0], layout.head_dim
    weight, scales = np.empty((rows, dim), np.uint8), np.empty((rows, dim // 32), np.uint8)

    def write(start: int) -> None:
        stop = min(start + CHUNK, rows)
        weight[start:stop], scales[start:stop] = synthetic_rows(start, stop, dim, layer=0, seed=SEED)

    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(write, range(0, rows, CHUNK)):
            group.check()
    return weight, scales


def placed(layer: EngineLayer) -> dict[str, Any]:
    """Pages of this rank's mapping per node, and those that it has not mapped."""
    weight = layer.module.embed_tokens.weight
    low = weight.data_ptr() // 4096 * 4096
    span = range(low, low + weight.numel() // 4096 * 4096, 4096)
    with ThreadPoolExecutor(2) as pool:
        found, unplaced = pages.query_range(pool, span)
    return {"nodes": found, "unplaced": unplaced, "task_policy": _syscalls.get_mempolicy()}


def wrong(layer: EngineLayer, layout: EngramLayout, rank: int) -> int:
    """Values of random rows that differ from the oracle's; a neighbour's rows must differ (negative control)."""
    import torch

    ids = np.random.default_rng([SEED, rank]).integers(0, layout.rows(0) - 1, (TOKENS, layout.columns), dtype=np.int32)
    device = "cpu" if layer.backend.interpreted else "cuda"
    given = torch.from_numpy(ids).to(device)
    layer.prepare(given)
    seen = layer.embed(given).cpu().view(torch.int16).numpy().view(np.uint16).reshape(-1, layout.head_dim)
    flat = ids.ravel().astype(np.int64)
    expected, other = (decode_rows(*synthetic_at(flat + by, layout.head_dim, layer=0, seed=SEED)) for by in (0, 1))
    if same_bits(seen, other).all(axis=1).any():
        raise AssertionError("the comparison cannot tell a row from its neighbour")
    return int((~same_bits(seen, expected)).sum())


def audit(pids: list[int]) -> dict[str, Any]:
    """The user's own command on the living workers; its text is kept."""
    command = [sys.executable, "-m", "pytest_engram.cli", "audit", *map(str, pids), "--numa-maps", "--stall", "30"]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return {"exit": done.returncode, "seconds": time.monotonic() - begin, "text": done.stdout, "errors": done.stderr}

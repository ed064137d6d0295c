"""Times of the lookup over registered tmpfs memory with fresh random ids; see ``on_gpu.py``."""

from __future__ import annotations

import importlib.util
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pytest_engram.backends.protocol import TableShard
from pytest_engram.backends.vllm_light import LightEngine, Surroundings
from pytest_engram.backends.vllm_source import locate
from pytest_engram.errors import EngramError
from pytest_engram.gpu.gather import full_grid, lookup
from pytest_engram.gpu.registration import register
from pytest_engram.gpu.timeline import spin
from pytest_engram.gpu.views import device_view

HEADS, DIM = 24, 256
TOKENS = (1, 256, 2048, 8192)
CAPS = (8, 16, 33, 66, 132)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Median and quartiles in µs; ``ratio`` is this package's kernel over the peer's, median of the pairs."""

    kernel: str
    memory: str
    tokens: int
    cap: int
    grid: int
    median_us: float
    low_us: float
    high_us: float
    gb_per_s: float
    ratio: float | None = None


def measure(gib: float, repeats: int, peer_kernel: str | None) -> list[Timed]:
    """Every token count and cap over a table of ``gib`` GiB, and the full grid over HBM for comparison."""
    rows = int(gib * 2**30) // (DIM + DIM // 32)
    begin = time.monotonic()
    buffer = tmpfs(rows * (DIM + DIM // 32))
    touched = time.monotonic()
    held = register(buffer)
    print(f"{gib} GiB touched in {touched - begin:.1f} s, registered in {time.monotonic() - touched:.2f} s")
    weight, scales = device_view(buffer[: rows * DIM]), device_view(buffer[rows * DIM :])
    table = shard(weight.view(rows, DIM), scales.view(rows, DIM // 32))
    kernels: dict[str, Callable[..., Any]] = {"ours": lookup, "ours, 8 warps": partial(lookup, warps=8)}
    if peer_kernel is not None:
        try:
            kernels["peer"] = peer(peer_kernel)
        except EngramError as absent:
            print(f"no peer kernel: {absent}")
    found = [
        row
        for tokens in TOKENS
        for cap in CAPS
        for row in compare(table, kernels, repeats, memory="tmpfs", tokens=tokens, cap=cap)
    ]
    few = 2_000_000
    hbm = shard(
        torch.randint(0, 256, (few, DIM), dtype=torch.uint8, device="cuda"),
        torch.full((few, DIM // 32), 127, dtype=torch.uint8, device="cuda"),
    )
    found += [row for tokens in TOKENS for row in compare(hbm, kernels, repeats, memory="hbm", tokens=tokens, cap=132)]
    del weight, scales, table
    held.close()
    return found


def tmpfs(nbytes: int) -> Any:
    """Populated shared memory, 4 KiB pages unless the machine's shmem policy says otherwise."""
    descriptor = os.memfd_create("engram-times")
    os.ftruncate(descriptor, nbytes)
    mapping = mmap.mmap(descriptor, nbytes)
    mapping.madvise(_POPULATE_WRITE)
    return np.frombuffer(mapping, dtype=np.uint8)


def shard(weight: Any, scales: Any) -> Any:
    """A shard that owns every row."""
    return TableShard(
        weight=weight, scales=scales, start=0, end=len(weight), head_start=0, local_heads=HEADS, total_heads=HEADS
    )


def compare(
    table: Any, kernels: dict[str, Callable[..., Any]], repeats: int, *, memory: str, tokens: int, cap: int
) -> list[Timed]:
    """The kernels in rotating order, each launch with fresh ids."""
    out = torch.empty((tokens, HEADS, DIM), dtype=torch.bfloat16, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in kernels}
    names = list(kernels)
    for turn in range(repeats + 3):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            ids = torch.randint(0, table.end, (tokens, HEADS), dtype=torch.int32, device="cuda")
            spent = once(partial(kernels[name], table, ids, out, cap=cap))
            if turn >= 3:
                times[name].append(spent)
    return [row(name, times, out, memory=memory, cap=cap) for name in names]


def once(launch: Callable[[], Any]) -> float:
    """µs of one launch between events on its stream, behind a hold that hides the host."""
    cuda: Any = torch.cuda
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    spin(300_000)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def row(name: str, times: dict[str, list[float]], out: Any, *, memory: str, cap: int) -> Timed:
    """The summary of one kernel's times."""
    own, tokens = times[name], len(out)
    low, median, high = statistics.quantiles(own, n=4)
    pairs = [mine / other for mine, other in zip(own, times.get("peer", ()), strict=False)]
    tiles = -(-tokens * HEADS // 16)
    return Timed(
        kernel=name, memory=memory, tokens=tokens, cap=cap, grid=min(tiles, cap, full_grid(out.device)),
        median_us=round(median, 2), low_us=round(low, 2), high_us=round(high, 2),
        gb_per_s=round(tokens * HEADS * (DIM + DIM // 32) / median / 1e3, 2),
        ratio=round(statistics.median(pairs), 4) if pairs and name != "peer" else None,
    )  # fmt: skip


def peer(source: str) -> Callable[..., Any]:
    """vLLM's lookup kernel, of its own files or of one file, launched as vLLM 0.31.0 launches it."""
    if source.startswith("vllm@"):
        kernel = LightEngine(locate(source[5:]), Surroundings(interpreted=False)).get("_engram_lookup_kernel")
    else:
        spec = importlib.util.spec_from_file_location("peer_kernel", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = module._engram_lookup_kernel

    def run(table: Any, ids: Any, out: Any, *, cap: int) -> None:
        rows = out.shape[0] * out.shape[1]
        grid = min(-(-rows // 16), cap)
        kernel[(grid,)](
            table.weight.view(torch.float8_e4m3fn), table.scales, ids, out, table.start, table.end, rows,
            ids.stride(0), ids.stride(1), HEAD_START=0, LOCAL_HEADS=HEADS, TOTAL_HEADS=HEADS, DIM=DIM,
            QUANT_BLOCK=32, BLOCK_R=16, GRID=grid,
        )  # fmt: skip

    return run

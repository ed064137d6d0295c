"""Checks of hash ids that only a real GPU can answer; see ``on_gpu.py``."""

from __future__ import annotations

import statistics
import time
from typing import Any

import hash_cases
import numpy as np
import torch

from pytest_engram.gpu._kernels import hash_kernel
from pytest_engram.hashing import EngramLayout, HashBatch, hash_ids, synthetic_token_map


class OnGpu(hash_cases.Hasher):
    """The same hasher, compiled."""

    place = "cuda"


class Backend(hash_cases.Backend):
    """The reference backend with it."""

    kind = OnGpu


def check_hash_contract() -> dict[str, Any]:
    """H2-H18: every contract case of hash ids through the compiled kernels, and random ragged batches."""
    failed = {name: text for name, text in hash_cases.contract(Backend()).items() if text}
    assert not failed, failed
    small = OnGpu(hash_cases.LAYOUT, hash_cases.TOKEN_MAP, slot_cache=False)
    wrong = hash_cases.differing(small, hash_cases.LAYOUT, range(50))
    assert wrong is None, wrong
    return {"cases": len(hash_cases.CASES)}


def check_hash_variants_and_time() -> dict[str, Any]:
    """H19: one compiled variant for all token counts; µs of a hash on the GPU, of its launch and of the oracle."""
    layout, token_map, rng = EngramLayout.deepseek_v41(), synthetic_token_map(), np.random.default_rng(1)
    hasher, report = OnGpu(layout, token_map, slot_cache=False), {}
    batches = [HashBatch.sequence(rng.integers(0, 129_000, tokens), history=[1, 2, 3]) for tokens in (1, 7, 256, 8192)]
    hasher(batches[0])
    before = variants()
    for batch in batches:
        begin = time.perf_counter()
        expected = hash_ids(layout, batch, token_map)
        oracle = time.perf_counter() - begin
        assert (hasher(batch).cpu().numpy() == expected).all()
        times = [timed(hasher, batch) for _ in range(20)]
        gpu, host = (statistics.median(column) for column in zip(*times, strict=True))
        report[str(len(expected))] = {"gpu_us": gpu, "host_us": host, "oracle_us": 1e6 * oracle}
    assert variants() == before, f"{before} variants became {variants()}"
    return report


def timed(hasher: Any, batch: HashBatch) -> tuple[float, float]:
    """(µs on the GPU, µs on the host) of staging and launching."""
    cuda: Any = torch.cuda
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    before = time.perf_counter()
    launch, _, _ = hasher.stage(batch)
    begin.record()
    launch()
    end.record()
    host = time.perf_counter() - before
    cuda.synchronize()
    return 1e3 * float(begin.elapsed_time(end)), 1e6 * host


def variants() -> int | None:
    """Compiled variants of the hash kernel so far; None where Triton hides its cache."""
    try:
        return len(hash_kernel.device_caches[0][0])
    except (AttributeError, KeyError, IndexError, TypeError):
        return None

"""Checks of rows, views and registrations that only a real GPU can answer; see ``on_gpu.py``."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import numpy as np
import torch

from pytest_engram.backends.protocol import TableShard
from pytest_engram.errors import EngramError
from pytest_engram.gpu.gather import background_cap, lookup
from pytest_engram.gpu.registration import register
from pytest_engram.gpu.views import device_view
from pytest_engram.rows import lookup_rows, product_table, same_bits, synthetic_rows

HEADS, DIM, ROWS = 24, 256, 60_000


def host(nbytes: int) -> Any:
    """Shared memory as u8, like a table's."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


def shard(weight: Any, scales: Any) -> Any:
    """A shard that owns every row."""
    return TableShard(
        weight=weight, scales=scales, start=0, end=len(weight), head_start=0, local_heads=HEADS, total_heads=HEADS
    )


def in_both_memories(weight: Any, scales: Any) -> tuple[Any, Any, list[Any]]:
    """(shard in HBM, shard over registered host memory, what keeps the latter registered)."""
    hbm = shard(torch.from_numpy(weight).cuda(), torch.from_numpy(scales).cuda())
    buffer = host(weight.nbytes + scales.nbytes)
    buffer[: weight.nbytes], buffer[weight.nbytes :] = weight.ravel(), scales.ravel()
    held = register(buffer)
    parts = buffer[: weight.nbytes].reshape(weight.shape), buffer[weight.nbytes :].reshape(scales.shape)
    return hbm, shard(*map(device_view, parts)), [held]


def staged(table: Any, ids: Any, cap: int | None = None) -> Any:
    """Rows u16 [T, H, dim] by the kernel, over a poisoned output."""
    out = torch.full((len(ids), HEADS, DIM), 0x1234, dtype=torch.int16, device="cuda")
    lookup(table, ids, out.view(torch.bfloat16), cap=cap)
    return out.cpu().numpy().view(np.uint16)


def expect(rows: Any, wanted: Any, what: str) -> None:
    """Bit equality, any NaN equal to any NaN."""
    bad = np.argwhere(~same_bits(rows, wanted))
    if len(bad):
        raise AssertionError(f"{what}: {len(bad)} of {rows.size} differ, first {bad[0].tolist()}")


def check_all_byte_pairs() -> dict[str, Any]:
    """L1, L2: 65,536 pairs, HBM and host."""
    weight = np.tile(np.arange(256, dtype=np.uint8), (264, 1))
    scales = np.repeat((np.arange(264) % 256).astype(np.uint8)[:, None], DIM // 32, axis=1)
    ids = torch.arange(264, dtype=torch.int32, device="cuda").view(11, HEADS)
    wanted = product_table().reshape(256, 256)[np.arange(264) % 256].reshape(11, HEADS, DIM)
    for name, table in zip(("hbm", "host"), in_both_memories(weight, scales)[:2], strict=True):
        expect(staged(table, ids), wanted, name)
    return {"pairs": 65_536}


def check_tokens_and_caps() -> dict[str, Any]:
    """L1, L3, L5, H19: strided ids with dead and foreign ones, any cap, one compiled variant."""
    weight, scales = synthetic_rows(0, ROWS, DIM, layer=0, seed=1)
    hbm, over_host, _held = in_both_memories(weight, scales)
    rng = np.random.default_rng(0)
    for tokens in (1, 7, 256, 2048):
        ids = rng.integers(-1, ROWS + 50, (tokens, 2, HEADS), dtype=np.int32)
        wanted = np.empty((tokens, HEADS, DIM), np.uint16)
        lookup_rows(shard(weight, scales), ids[:, 1], wanted)
        for table in (hbm, over_host):
            for cap in (None, background_cap(torch.device("cuda", 0)), 1, 3):
                expect(staged(table, torch.from_numpy(ids).cuda()[:, 1], cap), wanted, f"{tokens} tokens, cap {cap}")
    compiled = variants()
    assert compiled in {None, 1}, f"{compiled} compiled variants"
    return {"compiled_variants": compiled}


def variants() -> int | None:
    """Compiled variants of the lookup kernel so far; None where Triton hides its cache."""
    from pytest_engram.gpu._kernels import lookup_kernel

    try:
        return len(lookup_kernel.device_caches[0][0])
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def check_view_is_no_copy() -> dict[str, Any]:
    """S2: writes cross both ways, and the GPU allocated nothing."""
    buffer = host(64 << 20)
    held, before = register(buffer), torch.cuda.memory_allocated()
    view = device_view(buffer.reshape(-1, DIM))
    buffer[-1] = 77
    seen = int(view[-1, -1])
    view[0, 5] = 99
    torch.cuda.synchronize()
    assert (seen, int(buffer[5])) == (77, 99)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    del view
    held.close()
    return {"bytes": 64 << 20}


def check_finalizers() -> dict[str, Any]:
    """S5: pinned until the last view is gone; a refused registration leaves no pending error; undone pieces."""
    buffer = host(8 << 20)
    held = register(buffer, chunk_bytes=3 << 20)
    view = device_view(buffer)
    held.close()
    assert torch.from_numpy(buffer).is_pinned()
    del view
    gc.collect()
    assert not torch.from_numpy(buffer).is_pinned()
    again = register(buffer[1 << 20 : 2 << 20])
    try:
        register(buffer, chunk_bytes=1 << 20)
        raise AssertionError("a range was registered twice")
    except EngramError as error:
        code = error.code
    assert int(torch.ones(3, device="cuda").sum()) == 3
    assert not torch.from_numpy(buffer[:1]).is_pinned()
    again.close()
    other = host(1 << 20)
    forgotten = register(other)
    del other
    gc.collect()
    assert not forgotten.active
    return {"refused": code}

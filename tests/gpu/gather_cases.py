"""Cases of the lookup kernel under Triton's interpreter; run as a program it prints {case: null or what was wrong}.

A program of its own, because the interpreter must be chosen before Triton is imported and would leak into other tests.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")

import numpy as np
import torch

from pytest_engram.backends.protocol import TableShard
from pytest_engram.errors import UsageError
from pytest_engram.gpu.gather import lookup
from pytest_engram.ledger import Launch as Shape
from pytest_engram.rows import lookup_rows, product_table, same_bits, synthetic_rows

HEADS, DIM = 4, 256
POISON = 0x1234


def shard_of(weight: Any, scales: Any, **fields: int) -> TableShard:
    """A numpy shard that owns everything unless ``fields`` say otherwise."""
    wanted = {"start": 0, "end": len(weight), "head_start": 0, "local_heads": HEADS, "total_heads": HEADS}
    return TableShard(weight=weight, scales=scales, **{**wanted, **fields})


def synthetic(rows: int, **fields: int) -> TableShard:
    """A shard of synthetic rows."""
    return shard_of(*synthetic_rows(0, rows, DIM, layer=0, seed=3), **fields)


def run(shard: TableShard, ids: Any, *, cap: int | None = None, device: str = "cpu") -> tuple[Any, Shape]:
    """(u16 [T, local_heads, dim], launch) of the kernel, over a poisoned output."""
    out = torch.full((len(ids), shard.local_heads, shard.weight.shape[1]), POISON, dtype=torch.int16)
    table: Any = TableShard(
        weight=torch.from_numpy(shard.weight), scales=torch.from_numpy(shard.scales), start=shard.start,
        end=shard.end, head_start=shard.head_start, local_heads=shard.local_heads, total_heads=shard.total_heads,
    )  # fmt: skip
    launch = lookup(table, torch.from_numpy(ids).to(device), out.view(torch.bfloat16), cap=cap)
    return out.numpy().view(np.uint16), launch


def compare(shard: TableShard, ids: Any, *, cap: int | None = None) -> str | None:
    """None if the kernel agrees with the row oracle bit by bit, else where it does not."""
    expected = np.full((len(ids), shard.local_heads, shard.weight.shape[1]), POISON, dtype=np.uint16)
    lookup_rows(shard, ids, expected)
    return differ(run(shard, ids, cap=cap)[0], expected)


def differ(seen: Any, expected: Any) -> str | None:
    """The first element that differs."""
    bad = np.argwhere(~same_bits(seen, expected))
    return None if not len(bad) else f"{len(bad)} differ, first at {bad[0].tolist()}"


def drawn(tokens: int, rows: int, heads: int = HEADS) -> Any:
    """Random ids int32 [tokens, heads]."""
    return np.random.default_rng(tokens).integers(0, rows, (tokens, heads), dtype=np.int32)


def case_all_byte_pairs() -> str | None:
    """L1, L2: all 65,536 pairs are exact, NaN codes and scale bytes 0, 254 and 255 included.

    Declared artefact of the interpreter: its FP32 to BF16 conversion loses results below 2^-126 (scale bytes 1-9).
    """
    weight = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], DIM // 32, axis=1)
    seen, _ = run(shard_of(weight, scales), np.arange(256, dtype=np.int32).reshape(-1, HEADS))
    expected = product_table().reshape(256, 256)
    bad = ~same_bits(seen.reshape(256, 256), expected)
    subnormal = (expected & 0x7F80) == 0
    if (bad & ~subnormal).any() or bad[0].any() or bad[10:].any():
        return differ(seen.reshape(256, 256), expected)
    changed = expected.copy()
    changed[200, 17] ^= 1  # negative control: one wrong bit is found
    return None if differ(seen.reshape(256, 256)[10:], changed[10:]) else "a wrong bit was not found"


def case_token_counts() -> str | None:
    """L1: 1, 7 and 33 tokens, full and background grids, any cap: the same bits."""
    shard = synthetic(500)
    wrong = (compare(shard, drawn(tokens, 500), cap=cap) for tokens in (1, 7, 33) for cap in (None, 1, 2, 3, 1000))
    return next((text for text in wrong if text), None)


def case_launch_is_counted() -> str | None:
    """tiles = ceil(rows / 16) and grid = min(tiles, cap): the actual launch, nothing for an empty batch."""
    shard = synthetic(100)
    seen = [run(shard, drawn(tokens, 100), cap=cap)[1] for tokens, cap in ((0, 3), (1, 3), (9, 3), (9, 2), (40, None))]
    expected = [Shape(0, 0, 0), Shape(4, 1, 1), Shape(36, 3, 3), Shape(36, 3, 2), Shape(160, 10, 4)]
    return None if seen == expected else f"{seen}"


def case_strided_ids() -> str | None:
    """L5: ids are a slice [:, layer] of [T, L, H], or a transposed array."""
    shard = synthetic(300)
    ids = drawn(40, 300, 2 * HEADS).reshape(20, 2, 2 * HEADS)[:, 1, ::2]
    return compare(shard, ids) or compare(shard, np.asfortranarray(drawn(20, 300)))


def case_bounds() -> str | None:
    """L3: ids at and beyond both ends, DEAD_ID and the extremes of int32; the first and the last are owned."""
    shard = synthetic(64, start=1000, end=1060)
    ids = np.array([[1000, 1059, 999, 1060], [-1, 0, 1063, 1064], [2**31 - 1, -(2**31), 1001, 1058]], dtype=np.int32)
    seen, _ = run(shard, ids)
    zero = (seen == 0).all(axis=2).tolist()
    expected = [[False, False, True, True], [True, True, True, True], [True, True, False, False]]
    return compare(shard, ids) or (None if zero == expected else f"zeros {zero}")


def case_a_table_without_rows() -> str | None:
    """L3: a table without rows owns no id, so every row is zero."""
    seen, _ = run(synthetic(0), np.array([[-1, 0, 1, 31]] * 5, dtype=np.int32))
    return None if not seen.any() else "a row that does not exist was read"


def case_padded_heads() -> str | None:
    """L4: 24 heads over 5 shards: the last shard has one padded head, which gives zeros."""
    ids = drawn(6, 400, 24)
    for rank in range(5):
        shard = synthetic(400, head_start=5 * rank, local_heads=5, total_heads=24)
        wrong = compare(shard, ids)
        if wrong:
            return f"rank {rank}: {wrong}"
    return None if (run(shard, ids)[0][:, 4] == 0).all() else "the padded head is not zero"


def case_dead_ids_read_no_row() -> str | None:
    """L3: row 0 lies in a page without access; dead ids pass, and (negative control) an owned row 0 kills."""
    memory = mmap.mmap(-1, 2 * 4096)
    table = np.frombuffer(memory, dtype=np.uint8)
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(table.ctypes.data), 4096, 0):
        return "mprotect was refused"
    shard = shard_of(table.reshape(-1, DIM), np.full((32, 8), 127, dtype=np.uint8))
    dead = np.full((5, HEADS), -1, dtype=np.int32)
    dead[2, 1] = 20
    ends = [in_child(lambda: run(shard, dead)), in_child(lambda: run(shard, dead + 1))]
    return None if ends == [0, signal.SIGSEGV] else f"ended with {ends}"


def in_child(action: Callable[[], Any]) -> int:
    """The signal that ended a forked child, 0 if it ran through."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def case_addresses_beyond_32_bits() -> str | None:
    """L5: weights beyond 2^31 bytes (row 8,388,608) and scales beyond 2^31 (row 268,435,456) are the right ones."""
    rows = (1 << 28) + 32
    weight, scales = sparse(rows, DIM), sparse(rows, DIM // 32)
    ids = np.array([[3, (1 << 23) + 3, (1 << 24) + 3, (1 << 28) + 3]], dtype=np.int32)
    for number, row in enumerate(ids[0].tolist()):  # a wrapped address would find a neighbour's content
        weight[row], scales[row] = 8 + number, 120 + number
    return compare(shard_of(weight, scales), ids)


def sparse(rows: int, columns: int) -> Any:
    """u8 [rows, columns] that has pages only where it is written."""
    descriptor = os.memfd_create("engram-test")
    os.ftruncate(descriptor, rows * columns)
    return np.frombuffer(mmap.mmap(descriptor, rows * columns), dtype=np.uint8).reshape(rows, columns)


def case_misread_shapes_are_refused() -> str | None:
    """Wrong dtypes, strides, bounds and caps are errors before anything is launched."""
    good = synthetic(32)
    ids = drawn(2, 32)
    wrong: dict[str, Callable[[], Any]] = {
        "int64 ids": lambda: run(good, ids.astype(np.int64)),
        "flat ids": lambda: run(good, ids.ravel()),
        "few heads": lambda: run(good, ids[:, :2]),
        "more ids than rows": lambda: run(synthetic(32, end=33), ids),
        "negative head": lambda: run(synthetic(32, head_start=-1), ids),
        "two devices": lambda: run(good, ids, device="meta"),
        "no program": lambda: run(good, ids, cap=0),
        "strided table": lambda: run(shard_of(good.weight[::2], good.scales[::2]), ids),
        "short scales": lambda: run(shard_of(good.weight, good.scales[:16].copy()), ids),
        "odd rows": lambda: run(shard_of(good.weight[:, :96].copy(), good.scales[:, :3].copy()), ids),
    }
    return next((f"{name} passed" for name, action in wrong.items() if not refused(action)), None)


def refused(action: Callable[[], Any]) -> bool:
    """Whether the action is a usage error."""
    try:
        action()
    except UsageError:
        return True
    return False


def main() -> None:
    """Run every case."""
    np.seterr(all="ignore")  # the interpreter computes NaN and infinity in numpy, loudly
    cases = {name: case for name, case in globals().items() if name.startswith("case_")}
    json.dump({name: case() for name, case in cases.items()}, sys.stdout)


if __name__ == "__main__":
    main()

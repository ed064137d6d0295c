"""Bring-up of 4 KiB tmpfs pages by threads and chunks: ``python tests/gpu/populate_sweep.py --out DIR``; needs no GPU.

Against how engines do it today (one thread writes one byte per page), every way once per round and each round from
another start, on memory that was touched before.  JSON lines go to DIR/populate_sweep.jsonl, medians to the output.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from pytest_engram.numa import populate
from pytest_engram.numa.backing import Backing, Tmpfs

GIB, AHEAD = 1 << 30, 64 << 20
Way = Callable[[Backing], object]


def touched(backing: Backing) -> None:
    """As engines do today."""
    np.frombuffer(backing.mapped, dtype=np.uint8)[::4096] = 0


def populated(backing: Backing, threads: int, chunk: int) -> None:
    """As this package does."""
    populate.CHUNK_BYTES = chunk
    populate.populate(backing, lambda *_: None, write=True, threads=threads)


def ahead(backing: Backing, threads: int, chunk: int) -> None:
    """One thread more allocates; the others zero and map what they find allocated."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: [backing.reserve(at, AHEAD) for at in range(0, backing.nbytes, AHEAD)])
        populated(backing, threads, chunk)


def ways() -> dict[str, Way]:
    """Name -> how a mapped backing becomes resident."""
    counts = sorted({2, 4, 6, 8, 12, 16} & {*range(len(os.sched_getaffinity(0)) + 1)})
    found: dict[str, Way] = {"touched": touched}
    for threads, mib in product(counts, (2, 8, 64)):
        found[f"{threads} threads, {mib} MiB"] = partial(populated, threads=threads, chunk=mib << 20)
    for threads in counts[::2]:
        found[f"{threads} threads, 8 MiB, allocated ahead"] = partial(ahead, threads=threads, chunk=8 << 20)
    return found


def timed(way: Way, nbytes: int) -> float:
    """GiB/s of making a fresh object resident."""
    backing = Tmpfs(nbytes)
    try:
        backing.create()
        backing.map()
        begin = time.perf_counter()
        way(backing)
        return nbytes / GIB / (time.perf_counter() - begin)
    finally:
        backing.close()


def main() -> None:
    """Rounds, then medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    nbytes, todo, rates = int(options.gib * 512) << 21, list(ways().items()), dict[str, list[float]]()
    with mmap.mmap(-1, 2 * nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.madvise(populate._syscalls.MADV_POPULATE_WRITE)  # a virtual machine's memory may come at the first touch
    with (options.out / "populate_sweep.jsonl").open("w", encoding="utf-8") as lines:
        for turn in range(options.rounds):
            for name, way in todo[turn % len(todo) :] + todo[: turn % len(todo)]:
                rates.setdefault(name, []).append(timed(way, nbytes))
                lines.write(json.dumps({"way": name, "round": turn, "gib_s": rates[name][-1]}) + "\n")
    stock = statistics.median(rates["touched"])
    for name, seen in sorted(rates.items(), key=lambda item: -statistics.median(item[1])):
        rate = statistics.median(seen)
        print(f"{name:34} {rate:5.2f} GiB/s [{min(seen):.2f}, {max(seen):.2f}]  {rate / stock:4.2f} x touched")


if __name__ == "__main__":
    main()

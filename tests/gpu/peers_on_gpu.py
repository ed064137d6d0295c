"""Several GPUs over one shared table: ``python tests/gpu/peers_on_gpu.py --out DIR``, from the checkout, on its own.

Phases, each on its own whatever became of the others, one process and one GPU per rank:
``table``: the product's own protocol; every rank checks random rows bit by bit, then looks up fresh random ids in
alternating rounds, each rank alone, then all at once; the gather of staged rows by NCCL stands on its own line.
``engine``: vLLM's own storage, stock and patched, and the audit of its living workers (``engine_on_gpu``).
``cumem``: one cuMem table for all ranks, and which of the driver's calls open imported memory (``cumem_sharing``).
JSON lines go to DIR/peers_on_gpu.jsonl, a short table comes last.  Exit 1 if a row was wrong or a phase failed; what
cannot be had here is NOT_MEASURED.  ``--cpu`` is the dry run without GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from pytest_engram import codec, ledger
from pytest_engram.engines import backings, engine_class
from pytest_engram.engines.tables import full_shards, table_bytes, table_views
from pytest_engram.errors import EngramError, NotMeasurable
from pytest_engram.gpu import registration
from pytest_engram.layout import EngramLayout
from pytest_engram.model import Moment, PlacementPlan, TablePlan
from pytest_engram.numa.table import build_table
from pytest_engram.numa.topology import read_topology
from pytest_engram.numa.world import RankSpec, run_world
from pytest_engram.rows import decode_rows, lookup_rows, same_bits, synthetic_at, synthetic_rows

LAUNCHES = {256: 200, 2048: 40, 8192: 12}  # per turn: 60 to 120 ms on an H200, so that a millisecond of skew is small
VERIFIED, SEED, CHUNK = 2048, 11, 16_384
HERE = Path(__file__).resolve()
ABSENT = {"engine-absent", "no-torch", "no-triton"}  # of an engine that is not here
EDGE = 10  # the first and last tenth of a turn's launches do not count: there the others may not run yet, or any more


class Gpu:
    """A rank's GPU: what it registers, looks up and gathers."""

    collectives = "nccl"

    @staticmethod
    def warm() -> None:
        """Create the context, whose seconds belong to no step of the table."""
        import torch

        torch.zeros(1, device="cuda")

    def __init__(self, layout: EngramLayout, views: Any, rank: int) -> None:
        import torch

        from pytest_engram.gpu.views import device_view

        self.torch: Any = torch
        self.rank, self.heads, self.dim, self.device = rank, layout.columns, layout.head_dim, "cuda"
        (self.shard,) = full_shards(tuple(tuple(map(device_view, pair)) for pair in views), layout)
        self.name = f"{torch.cuda.get_device_name()} {torch.cuda.get_device_properties(0).uuid}"

    def rows(self, ids: Any) -> Any:
        """Staged rows u16 [T, H, dim] of ids int32 [T, H], both numpy."""
        out = self.buffer(len(ids))
        self.lookup(self.torch.from_numpy(ids).to(self.device), out)
        return out.view(self.torch.int16).cpu().numpy().view(np.uint16)

    def buffer(self, tokens: int) -> Any:
        """An output bf16 [T, H, dim]."""
        return self.torch.empty((tokens, self.heads, self.dim), dtype=self.torch.bfloat16, device=self.device)

    def lookup(self, ids: Any, out: Any) -> None:
        """Enqueue one lookup under the full grid."""
        from pytest_engram.gpu.gather import lookup

        lookup(self.shard, ids, out)

    def turn(self, tokens: int, launches: int) -> list[float]:
        """µs of each of ``launches`` lookups back to back, every one with fresh random ids."""
        from pytest_engram.gpu.timeline import spin

        cuda, out = self.torch.cuda, self.buffer(tokens)
        ids = self.torch.randint(
            0, self.shard.end, (launches, tokens, self.heads), dtype=self.torch.int32, device="cuda"
        )
        events = [cuda.Event(enable_timing=True) for _ in range(launches + 1)]
        cuda.synchronize()
        spin(500_000)
        events[0].record()
        for number in range(launches):
            self.lookup(ids[number], out)
            events[number + 1].record()
        cuda.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in pairwise(events)]

    def wait(self) -> None:
        """Wait for the device."""
        self.torch.cuda.synchronize()


class Cpu(Gpu):
    """The dry run's stand-in: numpy looks up, the host's clock times; only the gather imports torch."""

    collectives = "gloo"

    @staticmethod
    def warm() -> None:
        """There is no context."""

    def __init__(self, layout: EngramLayout, views: Any, rank: int) -> None:
        self.rank, self.heads, self.dim, self.device, self.name = rank, layout.columns, layout.head_dim, "cpu", "no GPU"
        (self.shard,) = full_shards(views, layout)

    @cached_property
    def torch(self) -> Any:  # type: ignore[override]
        """Of the gather's buffers."""
        import torch

        return torch

    def rows(self, ids: Any) -> Any:
        """By the oracle."""
        out = np.empty((*ids.shape, self.dim), np.uint16)
        lookup_rows(self.shard, ids, out)
        return out

    def turn(self, tokens: int, launches: int) -> list[float]:
        """µs of each lookup."""
        rng, found = np.random.default_rng(), []
        for _ in range(launches):
            ids = rng.integers(0, self.shard.end, (tokens, self.heads), dtype=np.int32)
            begin = time.perf_counter()
            self.rows(ids)
            found.append(1e6 * (time.perf_counter() - begin))
        return found

    def wait(self) -> None:
        """Nothing is asynchronous."""


def peer(group: Any, payload: Any) -> dict[str, Any]:
    """One rank: build, load, check, measure, gather."""
    layout = EngramLayout.for_rows(payload["rows"], layers=(1,))
    nodes, ranks = tuple(payload["nodes"]), tuple(range(group.size))
    asked = TablePlan(ranks=ranks, mode="bind" if nodes else "default", nodes=nodes)
    plan = PlacementPlan(policy=asked.mode, backing=payload["backing"], tables=(asked,))
    kind: type[Gpu] = Cpu if payload["cpu"] else Gpu
    register = engine_class("cpu" if payload["cpu"] else "cuda").registrar(0)  # its only visible GPU
    kind.warm()
    backings.install(plan.backing, 0)
    table, begin = build_table(group, plan, table_bytes(layout), register=register), time.monotonic()
    try:
        table.load(partial(fill, layout, group), group)
        loaded = time.monotonic() - begin
        audit = table.audit(Moment.LOADED)
        device = kind(layout, table_views(table.buffer, layout), group.rank)
        wrong = verify(device, layout, group.rank)
        times = rounds(group, device, payload["rounds"], {int(t): n for t, n in payload["launches"].items()})
        return {
            "device": device.name, "wrong": wrong, "verified": VERIFIED * layout.columns, "load_s": loaded,
            "pages": codec.to_builtins(audit.pages), "table_bytes": table.nbytes, "times": times,
            "receipts": [codec.to_builtins(receipt) for receipt in table.receipts],
            "gather": gather(group, device, payload) if payload["gather"] and group.size > 1 else None,
        }  # fmt: skip
    finally:
        device = None  # type: ignore[assignment]  # drops the views
        table.close()


def fill(layout: EngramLayout, group: Any, buffer: Any) -> None:
    """Synthetic rows by all CPUs of the leader."""
    ((weight, scales),) = table_views(buffer, layout)

    def write(start: int) -> None:
        stop = min(start + CHUNK, len(weight))
        weight[start:stop], scales[start:stop] = synthetic_rows(start, stop, layout.head_dim, layer=0, seed=SEED)

    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(write, range(0, len(weight), CHUNK)):
            group.check()


def verify(device: Gpu, layout: EngramLayout, rank: int) -> int:
    """Values of random rows that differ from the oracle's; a neighbour's rows must differ (negative control)."""
    rng = np.random.default_rng([SEED, rank])
    ids = rng.integers(0, layout.rows(0) - 1, (VERIFIED, layout.columns), dtype=np.int32)
    seen = device.rows(ids).reshape(-1, layout.head_dim)
    flat = ids.ravel().astype(np.int64)
    expected, other = (decode_rows(*synthetic_at(flat + by, layout.head_dim, layer=0, seed=SEED)) for by in (0, 1))
    if same_bits(seen, other).all(axis=1).any():
        raise AssertionError("the comparison cannot tell a row from its neighbour")
    return int((~same_bits(seen, expected)).sum())


def rounds(group: Any, device: Gpu, count: int, launches: dict[int, int]) -> dict[str, dict[str, list[float]]]:
    """{mode: {tokens: median µs per round}} of this rank; modes are "all", and "alone" for each rank in its turn."""
    modes = [*range(group.size), "all"] if group.size > 1 else [0]
    found: dict[str, dict[str, list[float]]] = {"alone": {}, "all": {}}
    for tokens, number in launches.items():
        device.turn(tokens, max(3, number // 4))  # compiles, warms the clocks
    for turn in range(count):
        for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
            for tokens, number in launches.items():
                group.barrier(step=f"round {turn}, {mode}, {tokens} tokens")
                if mode in ("all", group.rank):
                    spent = device.turn(tokens, number)
                    cut = len(spent) // EDGE
                    name = "all" if mode == "all" else "alone"
                    found[name].setdefault(str(tokens), []).append(statistics.median(spent[cut : len(spent) - cut]))
                group.barrier(step="turn over")
    return found


def gather(group: Any, device: Gpu, payload: Any) -> dict[str, Any]:
    """Every rank's staged rows to every rank: collectives, bytes and µs; a failure is a reason."""
    try:
        return timed_gather(group, device, [int(tokens) for tokens in payload["launches"]])
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}


def timed_gather(group: Any, device: Gpu, sizes: Sequence[int]) -> dict[str, Any]:
    """{tokens: count, bytes per rank, median µs} of one all_gather each."""
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = f"tcp://127.0.0.1:{group.broadcast(port, step='port')}"
    dist.init_process_group(
        device.collectives, init_method=where, rank=group.rank, world_size=group.size, timeout=timedelta(seconds=30)
    )
    found: dict[str, Any] = {"library": device.collectives, "NVLS": os.environ.get("NCCL_NVLS_ENABLE")}
    for tokens in sizes:
        mine, spent = device.buffer(tokens).fill_(group.rank + 1), []
        parts = [device.buffer(tokens) for _ in range(group.size)]
        for _ in range(13):
            device.wait()
            begin = time.perf_counter()
            dist.all_gather(parts, mine)
            device.wait()
            spent.append(1e6 * (time.perf_counter() - begin))
        right = all(bool((part == rank + 1).all()) for rank, part in enumerate(parts))
        received = (group.size - 1) * mine.numel() * mine.element_size()
        found[str(tokens)] = {"collectives": 1, "bytes": received, "us": statistics.median(spent[3:]), "right": right}
    dist.destroy_process_group()
    return found


def summary(size: int, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per token count: medians alone and together, their ratio, aggregate bytes per second."""
    lines = []
    for tokens in ranks[0]["times"]["alone"]:
        moved = ledger.source_bytes(int(tokens), 24, 256)
        alone = [statistics.median(rank["times"]["alone"][tokens]) for rank in ranks]
        line = {
            "ranks": size,
            "tokens": int(tokens),
            "alone_us": alone,
            "alone_gb_s": [moved / us / 1e3 for us in alone],
        }
        if size > 1:
            both = [statistics.median(rank["times"]["all"][tokens]) for rank in ranks]
            pairs = [
                b / a
                for rank in ranks
                for a, b in zip(rank["times"]["alone"][tokens], rank["times"]["all"][tokens], strict=True)
            ]
            line |= {
                "all_us": both, "all_over_alone": statistics.median(pairs),
                "aggregate_gb_s": sum(moved / us / 1e3 for us in both),
            }  # fmt: skip
        lines.append(line)
    return lines


Lines = list[str]
Write = Callable[..., None]


def ranks_of(options: argparse.Namespace, entry: str, payload: Any, size: int, **env: str) -> list[Any]:
    """The ranks' reports of one world; rank r sees GPU r alone."""
    specs = [RankSpec(env={**env, "CUDA_VISIBLE_DEVICES": "" if options.cpu else str(rank)}) for rank in range(size)]
    return run_world(entry, payload, specs, deadline_s=90)


def table(options: argparse.Namespace, write: Write) -> Lines:
    """Every size of world, one after another."""
    return [line for size in options.ranks for line in world(options, write, size, options.backing, options.gib)]


def world(
    options: argparse.Namespace, write: Write, size: int, backing: str, gib: float, nodes: Sequence[int] = ()
) -> Lines:
    """One world of ``size`` ranks over one table."""
    payload = {
        "rows": int(gib * 2**30) // 264, "backing": backing, "nodes": list(nodes), "cpu": options.cpu,
        "rounds": options.rounds, "launches": {256: 3} if options.cpu else LAUNCHES, "gather": not options.no_gather,
    }  # fmt: skip
    nvls, short, begin = os.environ.get("NCCL_NVLS_ENABLE", "0"), list[str](), time.monotonic()
    ranks = ranks_of(options, f"{HERE}:peer", payload, size, NCCL_NVLS_ENABLE=nvls)
    seconds = time.monotonic() - begin
    for rank, report in enumerate(ranks):
        write(ranks=size, backing=backing, rank=rank, seconds=seconds, **report)
        steps = {r["step"]: round(r["seconds"], 2) for r in report["receipts"]}
        short.append(f"{size} ranks, rank {rank}: {report['device']}, {report['wrong']} wrong, steps in s {steps}")
        short += [f"  gather {report['gather']}"] if report["gather"] else []
    for line in summary(size, ranks):
        write(**line)
        short.append("  ".join(f"{key} {rounded(value)}" for key, value in line.items()))
    require_right([report["wrong"] for report in ranks])
    return [*short, f"world of {size}: {seconds:.1f} s"]


def engine(options: argparse.Namespace, write: Write) -> Lines:
    """Stock against patched vLLM, constructed in alternation; a phase without an engine is an absence."""
    payload = {
        "spec": "vllm@0.31.0", "rows": int(options.engine_gib * 2**30) // 264, "rounds": max(3, options.rounds // 2),
        "policy": f"bind:{read_topology().memory_nodes[0].id}",
    }  # fmt: skip
    ranks = ranks_of(options, f"{HERE.with_name('engine_on_gpu.py')}:engine", payload, max(options.ranks))
    text, short, slowest = ranks[0]["audit"]["text"], list[str](), dict[str, list[float]]()
    for rank, report in enumerate(ranks):
        write(engine=payload["spec"], rank=rank, **report)
        short.append(f"rank {rank}: {report['device']}, wrong {report['stock_wrong']} and {report['patched_wrong']}")
    for steps in zip(*(report["constructions"] for report in ranks), strict=True):
        slowest.setdefault(steps[0]["arm"], []).append(max(step["allocate_s"] for step in steps))
    short += [f"{arm}: allocated in {rounded(times)} s, the slower rank" for arm, times in slowest.items()]
    medians = {arm: statistics.median(times) for arm, times in slowest.items()}
    write(engine_allocate_s=slowest, stock_over_patched=medians["stock"] / medians["patched"])
    short += [f"stock / patched {medians['stock'] / medians['patched']:.2f}", "audit of the living workers:", text]
    require_right([report[f"{arm}_wrong"] for report in ranks for arm in slowest])
    tables = set(re.findall(r"/dev/shm/\S+", text))
    if len(tables) != 2 or not any("vllm_engram_" in name for name in tables):  # stock's name, and a nameless one
        raise AssertionError(f"the audit names {tables}: {ranks[0]['audit']}")
    return short


def cumem(options: argparse.Namespace, write: Write) -> Lines:
    """First the driver's answers, then the whole protocol."""
    node, size = read_topology().memory_nodes[0].id, max(options.ranks)
    registration.require()
    entry = f"{HERE.with_name('cumem_sharing.py')}:sharing"
    ranks = ranks_of(options, entry, {"node": node, "bytes": 64 << 20}, size)
    write(cumem_sharing=ranks)
    tried = [f"rank {rank} {name}: {codes}" for rank, one in enumerate(ranks) for name, codes in one["tried"].items()]
    try:
        return tried + world(options, write, size, "cumem", min(1.0, options.gib), (node,))
    except EngramError as error:
        write(phase="cumem", backing="cumem", code=error.code, error=str(error))
        if not isinstance(error.__cause__, NotMeasurable):
            raise
        return [*tried, f"NOT_MEASURED {error.code}: {error}"]


def require_right(wrong: Sequence[int]) -> None:
    """Wrong rows end the phase; its records are written."""
    if any(wrong):
        raise AssertionError(f"wrong values by rank and arm: {list(wrong)}")


PHASES = {"table": table, "engine": engine, "cumem": cumem}


def run_phase(name: str, options: argparse.Namespace, write: Write) -> tuple[bool, Lines]:
    """(Whether it did not fail, lines for a person)."""
    begin, good, short = time.monotonic(), True, list[str]()
    try:
        short = PHASES[name](options, write)
        told = "done"
    except Exception as error:
        cause = error if isinstance(error, NotMeasurable) else error.__cause__
        good = isinstance(cause, NotMeasurable) or getattr(error, "code", "") in ABSENT
        told = f"{'NOT_MEASURED' if good else 'FAILED'} {type(error).__name__}: {error}"
        if not good:
            traceback.print_exc()
    seconds = time.monotonic() - begin
    write(phase=name, ok=good, told=told, seconds=seconds)
    return good, [f"== {name}: {told}, {seconds:.1f} s", *short]


def main() -> int:
    """The phases, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=PHASES, nargs="+", default=list(PHASES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="sizes of the worlds, one after another")
    parser.add_argument("--gib", type=float, default=24.0, help="size of the table")
    parser.add_argument("--engine-gib", type=float, default=8.0, help="size of the engine's tables")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--backing", default="tmpfs")
    parser.add_argument("--no-gather", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="dry run: no GPU, few launches")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "peers_on_gpu.jsonl").open("w", encoding="utf-8") as lines:

        def write(**record: Any) -> None:
            lines.write(json.dumps(record, default=str) + "\n")
            lines.flush()

        done = [run_phase(name, options, write) for name in options.only]
    print("\n".join(line for _, short in done for line in short))
    return 0 if all(good for good, _ in done) else 1


def rounded(value: Any) -> Any:
    """Numbers as a person reads them."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    raise SystemExit(main())

"""Checks of whole steps on a real GPU: graphs, marks, settings, shards, counters; see ``on_gpu.py``."""

from __future__ import annotations

import gc
import math
import time
from contextlib import closing
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_memory_checks import host

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.engines.cuda import CudaEngine
from pytest_engram.engines.graph import padded
from pytest_engram.engines.protocol import EngineSetup, StepSettings
from pytest_engram.engines.tables import fill_table, table_bytes, table_views
from pytest_engram.gpu.registration import register
from pytest_engram.hashing import EngramLayout, HashBatch, hash_ids
from pytest_engram.model import Workload
from pytest_engram.queueing import queue_report

TOKENS, PAIRS, VOCABULARY, Z = 2048, 60, 129_280, 1.645
ARMS = {
    "early": StepSettings(), "at consumption": StepSettings(submission="at_consumption"),
    "inline": StepSettings(inline_above=256), "whole stream": StepSettings(wait="stream"),
    "two streams": StepSettings(streams=2), "cap 16": StepSettings(cap=16),
    "all at once": StepSettings(submission="at_consumption", wait="stream", inline_above=1024, streams=2),
}  # fmt: skip
HELD: list[Any] = []


def setup(**changes: Any) -> EngineSetup:
    """A step of several ms over a registered table of a million rows a layer."""
    layout = EngramLayout.for_rows(1_000_000)
    if not HELD:
        HELD.append(host(table_bytes(layout)))
        fill_table(HELD[0], layout, 5)
        HELD.append(register(HELD[0]))
    fields: dict[str, Any] = {
        "rank": 0, "layout": layout, "tables": table_views(HELD[0], layout), "backend": ReferenceBackend(), "seed": 1,
        "token_map": np.arange(VOCABULARY, dtype=np.int32) % layout.compressed_vocab, "cpus": (0,),
        "max_tokens": TOKENS,
        "workload": Workload(hidden=4096, layers=20, engram_layers=(1, 14), tokens=TOKENS),
    }  # fmt: skip
    return EngineSetup(**{**fields, **changes})


@lru_cache
def engine() -> CudaEngine:
    """The one engine of these checks; the last check closes it."""
    return CudaEngine(setup())


def batch(seed: int, tokens: int = TOKENS) -> HashBatch:
    """Fresh random tokens of one request."""
    return HashBatch.sequence(np.random.default_rng(seed).integers(0, VOCABULARY, tokens), history=[1, 2, 3])


def captured(settings: StepSettings) -> StepSettings:
    """The same in a graph."""
    return replace(settings, graph=True)


def check_graph_steps() -> dict[str, Any]:
    """P5: for all settings, marked or not, replays over new batches give the eager step's output bit by bit."""
    one, differ = engine(), []
    for name, settings in ARMS.items():
        for seed, (tokens, marks) in enumerate(product((2048, 300, 2047), (False, True))):
            fresh = batch(seed, tokens)
            wanted = one.step(padded(fresh, TOKENS), settings, marks=marks).output[:tokens]
            seen = one.step(fresh, captured(settings), marks=marks).output
            if not np.array_equal(seen, wanted):
                differ.append((name, tokens, marks, int((seen != wanted).any(axis=1).sum())))
    assert not differ, differ
    return {"graphs": len(one._graphs), "bit_equal": list(ARMS)}


def check_graph_rows() -> dict[str, Any]:
    """P5, P6: rows of a replay are the eager step's, ids the oracle's, and the staging buffer stays where it is."""
    one = engine()
    address = one.staging.data_ptr()
    for seed, tokens in ((7, 2048), (8, 17), (9, 300), (10, 2048)):
        fresh = batch(seed, tokens)
        ids, rows = one.rows(fresh, captured(ARMS["early"]))
        assert (ids == hash_ids(one._setup.layout, fresh, one._setup.token_map)).all(), f"ids of {tokens} tokens"
        assert (rows == one.rows(fresh, ARMS["early"])[1]).all(), f"rows of {tokens} tokens"
    assert one.staging.data_ptr() == address
    return {"replays": 4}


def check_output_oracle() -> dict[str, Any]:
    """L11: outputs lie within the engine's tolerance of the oracle's, for few tokens and many, eager and captured; with
    zeros in the place of the rows they do not."""
    one, report = engine(), {}
    for tokens in (1, 15, 300, TOKENS):
        fresh = batch(tokens, tokens)
        rows = one.rows(fresh, ARMS["early"])[1].swapaxes(0, 1)
        wanted, without = one.oracle(fresh, rows), one.oracle(fresh, rows * 0)
        for name, settings in (("eager", ARMS["early"]), ("graph", captured(ARMS["early"]))):
            seen = one.step(fresh, settings, marks=False).output
            report[f"{tokens} tokens, {name}"] = {
                "away": away(seen, wanted).max(), "other": np.median(away(seen, without))
            }  # fmt: skip
    assert all(each["away"] <= one.tolerance < each["other"] for each in report.values()), report
    return report


def away(states: Any, wanted: Any) -> Any:
    """Per token, the RMS of a difference as a share of the RMS wanted."""
    return np.sqrt(np.square(states - wanted).mean(axis=1) / np.square(wanted).mean(axis=1))


def check_graph_times() -> dict[str, Any]:
    """Median ms of unmarked steps, eager and captured, in turn; ``served`` starts a step before it is enqueued."""
    one, report = engine(), {}
    for tokens in (16, 256, 2048):
        for held in (True, False):
            one.hold = held
            times: dict[bool, list[float]] = {False: [], True: []}
            for seed in range(12):
                for graph in (False, True):
                    begin = time.perf_counter()
                    step = one.step(batch(seed, tokens), replace(ARMS["early"], graph=graph), marks=False)
                    wall = 1e3 * (time.perf_counter() - begin)
                    times[graph].append(step.step_ns / 1e6 if held else wall)
            where = f"{tokens} tokens, {'held' if held else 'served, wall'}"
            report[where] = {"eager_ms": median(times[False][2:]), "graph_ms": median(times[True][2:])}
    one.hold = True
    return report


def check_marks_cost() -> dict[str, Any]:
    """Marks cost at most 1 % of a step of 5 ms or more: paired steps in turn, eager and captured."""
    one, report, turns = engine(), {}, np.random.default_rng(0)
    for name, settings in (("eager", ARMS["early"]), ("graph", captured(ARMS["early"]))):
        plain, differences = [], []
        for pair in range(-4, PAIRS):
            order = (True, False) if turns.integers(2) else (False, True)
            step = {marks: one.step(batch(pair + 50), settings, marks=marks).step_ns for marks in order}
            if pair >= 0:
                plain.append(step[False])
                differences.append(step[True] - step[False])
        whole, upper = median(plain), sorted(differences)[min(PAIRS - 1, round((PAIRS + Z * PAIRS**0.5) / 2))]
        report[name] = {"step_ms": whole / 1e6, "marks_us": median(differences) / 1e3, "upper_us": upper / 1e3,
                        "share": median(differences) / whole, "upper_share": upper / whole}  # fmt: skip
    assert all(each["step_ms"] >= 5 and each["share"] <= 0.01 for each in report.values()), report
    return report


def check_timelines() -> dict[str, Any]:
    """One serial queue for all settings but two streams, whose overlap is named; eager and captured."""
    one, report, wrong = engine(), {}, []
    for name, settings in ARMS.items():
        for chosen in (settings, captured(settings)):
            where = f"{name}, {'graph' if chosen.graph else 'eager'}"
            lines = [one.step(batch(seed), chosen, marks=True, index=seed).timeline for seed in range(8)][2:]
            found = [queue_report(line, tolerance_ns=one.resolution_ns) for line in lines]
            reasons = [each.reason for each in found if each.reason]
            report[where] = {"serial": len(found) - len(reasons), "of": len(found), "reason": (reasons or [None])[0],
                             "lookups_us": [_microseconds(each) for each in found[-1].lookups]}  # fmt: skip
            if name == "two streams":  # the other arm with two has all of its lookups inline
                wrong += [] if len(reasons) == len(found) and all("overlaps" in each for each in reasons) else [where]
            else:
                wrong += [f"{where}: {reasons}"] if reasons else []
    assert not wrong, {"wrong": wrong, **report}
    return report


def _microseconds(times: Any) -> dict[str, float]:
    return {name: getattr(times, name) / 1e3 for name in ("queueing", "kernel", "exposed", "waited")}


def check_waits() -> dict[str, Any]:
    """An inline lookup is waited for whole; an early one is hidden, whether for a layer or for the whole stream."""
    one, found = engine(), {}
    for name in ("early", "whole stream", "inline"):
        steps = [one.step(batch(seed), ARMS[name], marks=False) for seed in range(10)][2:]
        found[name] = median(step.step_ns - step.main_ns for step in steps) / 1e3
    alone = median(one.alone_ns(batch(seed), ARMS["inline"]) for seed in range(6)) / 1e3
    assert found["inline"] >= 0.8 * alone, (found, alone)
    assert max(found["whole stream"], found["early"]) < 0.5 * alone, (found, alone)
    return {**found, "inline_alone": alone}


def check_lookups_alone() -> dict[str, Any]:
    """ΣL_i without and with main compute beside it, in µs, per cap; repeated calls agree within a half."""
    one, report = engine(), {}
    for name in ("early", "at consumption", "cap 16"):
        alone = [one.alone_ns(batch(seed), ARMS[name]) / 1e3 for seed in range(8)][2:]
        lines = [one.step(batch(seed), ARMS[name], marks=True).timeline for seed in range(8)][2:]
        beside = [sum(mark.done - mark.start for mark in line.lookups) / 1e3 for line in lines]
        report[name] = {"alone_us": median(alone), "beside_us": median(beside), "spread": max(alone) / min(alone)}
        assert max(alone) < 1.5 * min(alone), report
    return report


def check_head_shards() -> dict[str, Any]:
    """L4: half of the heads with its peer's rows gives the output of all heads, eager and captured, bit by bit."""
    one, turn = engine(), []
    peer = CudaEngine(setup(shard=(1, 2), gather=lambda *_: None))

    def gather(out: Any, local: Any) -> None:
        out[0].copy_(local)
        out[1].copy_(peer.staging[len(turn) % 2, : len(local)])
        turn.append(1)

    shard = CudaEngine(setup(shard=(0, 2), gather=gather))
    report = {}
    with closing(peer), closing(shard):
        for settings in (ARMS["early"], captured(ARMS["early"])):
            for seed in (1, 2):
                peer.rows(batch(seed), ARMS["early"])
                step = shard.step(batch(seed), settings, marks=True)
                wanted = one.step(batch(seed), settings, marks=False)
                assert np.array_equal(step.output, wanted.output), (settings, seed)
                assert step.communication_ns, settings
                report["graph" if settings.graph else "eager"] = {
                    "communication_us": step.communication_ns / 1e3, "main_us": step.main_ns / 1e3,
                    "whole_main_us": wanted.main_ns / 1e3, "rows": step.timeline.lookups[0].rows,
                }  # fmt: skip
    return report


def check_counters() -> dict[str, Any]:
    """Every counter is a number or a reason, read while lookups run; the link carries more than the lookups do."""
    one = engine()
    for seed in range(8):
        one.alone_ns(batch(seed), ARMS["early"])
    found = one.drift()
    assert all(isinstance(value, str) or math.isfinite(value) for value in found.values()), found
    link = found["link_bytes_per_s"]
    rows = 2 * TOKENS * one._setup.layout.columns * 264
    rate = rows / one.alone_ns(batch(99), ARMS["early"]) * 1e9
    assert isinstance(link, float), link
    assert link > rate, (link, rate)
    return {**found, "lookup_bytes_per_s": rate, "settings": {name: asdict(arm) for name, arm in ARMS.items()}}


def check_steps_end() -> dict[str, Any]:
    """Closed, the engine holds neither graphs nor views: the table can be unregistered."""
    torch.cuda.synchronize()
    engine().close()
    engine.cache_clear()
    gc.collect()
    held = HELD.pop()
    held.close()
    HELD.clear()
    gc.collect()
    assert not held.active
    return {"allocated_gib": torch.cuda.memory_allocated() / 2**30}

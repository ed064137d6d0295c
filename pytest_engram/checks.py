"""The one check set: correctness suites, gate 0, kill table and conformance table all call :func:`check`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import Backend
from pytest_engram.cases.case import Case, Finding, Probe, Unsupported, engine_differs
from pytest_engram.cases.gate import GATE_CASES
from pytest_engram.cases.hash import HASH_CASES
from pytest_engram.cases.launch import LAUNCH_CASES
from pytest_engram.cases.lookup import LOOKUP_CASES
from pytest_engram.cases.prefetch import PREFETCH_CASES
from pytest_engram.cases.slots import SLOT_CASES
from pytest_engram.cases.storage import STORAGE_CASES
from pytest_engram.engines.protocol import Engine, StepSettings
from pytest_engram.errors import NotMeasurable
from pytest_engram.gates.correctness import explain
from pytest_engram.hashing import EngramLayout, HashBatch
from pytest_engram.model import CorrectnessSample
from pytest_engram.rows import synthetic_at
from pytest_engram.serving.loop import request_outputs
from pytest_engram.serving.replay import Request

__all__ = ["CASES", "check", "check_engine", "compact_cases", "explain"]

CASES: tuple[Case, ...] = (
    *HASH_CASES, *SLOT_CASES, *LOOKUP_CASES, *GATE_CASES, *PREFETCH_CASES, *STORAGE_CASES, *LAUNCH_CASES
)  # fmt: skip

_STORAGE_IN_QUESTION = ("one-mapping", "loaded", "fresh-rows")
OUTPUT_TOLERANCE = 0.15  # of a state's RMS: 560 GEMMs in bf16 differ by 0.04, float32 by 2e-6; other rows by half


def compact_cases(*, regrouped: bool = False) -> tuple[Case, ...]:
    """The cases that gate 0 runs in every arm, before and after timing; quick enough to stand beside a measurement.

    ``regrouped``: the arms share or back their tables differently, so storage and replay stand in question too.
    """
    return tuple(case for case in CASES if case.compact or (regrouped and case.name in _STORAGE_IN_QUESTION))


def check(backend: Backend, case: Case, *, seed: int = 0, engine: str | None = None) -> CorrectnessSample:
    """Run one case on ``engine`` (by default the backend's CPU engine, else CUDA); never raises for a backend's error.

    A failing case whose name or contract number is among ``backend.differences`` is reported as not supported, with
    the declaration and what was seen: a declared difference is shown, it is no pass.
    """
    if case.capability not in backend.capabilities:
        return _sample(case.name, case.contract, Finding(detail=f"no capability {case.capability!r}"), supported=False)
    where = engine or ("cpu" if "cpu" in backend.engines else "cuda")
    declared = backend.differences.get(case.name) or backend.differences.get(case.contract)
    try:
        found = _guarded(partial(case.run, Probe(backend, where, seed, case.name)))
    except Unsupported as absence:
        return _sample(case.name, case.contract, Finding(detail=str(absence)), supported=False)
    return _sample(case.name, case.contract, found, declared=declared)


def check_engine(
    engine: Engine, batch: HashBatch, settings: StepSettings, layout: EngramLayout, token_map: Any, seed: int
) -> tuple[CorrectnessSample, ...]:
    """An engine's own path: ids and staged rows, for ``batch`` and for its tokens with dead ones and boundaries, then
    the outputs of requests.

    ``seed`` is that of the tables (:func:`~pytest_engram.rows.synthetic_rows`).  Ranks that share the heads call this
    together, with the same batch.
    """
    rows = partial(_synthetic, layout, seed)
    batches = {"engine": batch, "engine-edges": _edge_batch(batch.token_ids[:24])}
    found = {
        name: _guarded(partial(engine_differs, partial(engine.rows, each, settings), each, layout, token_map, rows))
        for name, each in batches.items()
    }
    outputs = _guarded(partial(_outputs_differ, engine, batch.token_ids, settings))
    return (*(_sample(name, "L1", each) for name, each in found.items()), _sample("engine-outputs", "L11", outputs))


def _synthetic(layout: EngramLayout, seed: int, layer: int, rows: Any) -> tuple[Any, Any]:
    return synthetic_at(rows, layout.head_dim, layer=layer, seed=seed, block=layout.block)


def _outputs_differ(engine: Engine, tokens: Any, settings: StepSettings) -> Finding | None:
    """Where a way to serve three requests changes the hidden states that their outputs are read from.

    Bits may differ, for a matmul of another batch size adds in another order; rows of another token move half a state.
    """
    most, parts = len(tokens), [part.tolist() for part in np.array_split(tokens[:12], 3) if len(part)]
    load = [
        Request(index=index, arrival_s=0.0, prompt=tuple(part), output_tokens=2, vocabulary=int(tokens.max()) + 1)
        for index, part in enumerate(parts)
    ]
    serve = partial(request_outputs, engine, load, settings, told=[part[-2:] * 2 for part in parts])
    _, whole = serve(chunk=most)
    ways: dict[str, dict[str, Any]] = {
        "chunks": {"chunk": min(5, most)},
        "a prefix hit": {"cached": 2},
        "rolled-back drafts": {"drafts": 1},
    }
    for name, way in ways.items():
        _, states = serve(**{"chunk": most, **way})
        away = np.sqrt(np.square(states - whole).mean(axis=1) / np.square(whole).mean(axis=1))
        if not (away <= OUTPUT_TOLERANCE).all():
            worst = int(np.nan_to_num(away, nan=np.inf).argmax())
            return Finding(
                expected=f"at most {OUTPUT_TOLERANCE:.0%} away", seen=f"{away[worst]:.1%}",
                detail=f"{name}: output {worst % 2} of request {worst // 2} against the request served whole",
            )  # fmt: skip
    return None


def _guarded(run: Callable[[], Finding | None]) -> Finding | None:
    """A backend's exception is a finding with its text, never a crash of the checks."""
    try:
        return run()
    except Unsupported:
        raise
    except NotMeasurable as absence:  # the backend's own word for "not here"
        raise Unsupported(str(absence)) from absence
    except Exception as error:  # noqa: BLE001 - whatever the system under test raises
        return Finding(detail=f"{type(error).__name__}: {error}")


def _sample(
    name: str, contract: str, found: Finding | None, *, supported: bool = True, declared: str | None = None
) -> CorrectnessSample:
    if found is None:
        detail = f"declared difference did not show: {declared}" if declared else ""
        return CorrectnessSample(case=name, contract=contract, passed=True, detail=detail)
    return CorrectnessSample(
        case=name, contract=contract, passed=False, supported=supported and not declared,
        detail=f"declared difference: {declared}; {found.detail}" if declared else found.detail,
        token=found.token, head=found.head, layer=found.layer, expected=found.expected, seen=found.seen,
    )  # fmt: skip


def _edge_batch(tokens: Any) -> HashBatch:
    """The same tokens as three requests: a first chunk with a dead token, a later chunk, one token alone."""
    third = max(1, len(tokens) // 3)
    dead = np.arange(third) == third // 2
    parts = [
        HashBatch.sequence(tokens[:third], dead=dead),
        HashBatch.sequence(tokens[third:-1], history=tokens[:third], history_dead=dead),
        HashBatch.sequence(tokens[-1:]),
    ]
    return HashBatch.concat(parts[: min(3, len(tokens))])

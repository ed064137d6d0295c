"""The one check set: correctness suites, gate 0, kill table and conformance table all call :func:`check`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import Backend
from pytest_engram.cases.case import Case, Finding, Probe, RowSource, Unsupported, engine_differs, oracle_rows
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
from pytest_engram.hashing import IMAGE_SENTINEL_ID, EngramLayout, HashBatch, hash_ids
from pytest_engram.model import CorrectnessSample
from pytest_engram.rows import synthetic_at
from pytest_engram.serving.loop import request_outputs
from pytest_engram.serving.replay import Request

__all__ = ["CASES", "check", "check_engine", "compact_cases", "explain"]

CASES: tuple[Case, ...] = (
    *HASH_CASES, *SLOT_CASES, *LOOKUP_CASES, *GATE_CASES, *PREFETCH_CASES, *STORAGE_CASES, *LAUNCH_CASES
)  # fmt: skip

_STORAGE_IN_QUESTION = ("one-mapping", "loaded", "fresh-rows")
_PROMPTS = 12  # tokens of three prompts: enough that each way splits, skips or forgets some
_WAYS: dict[str, dict[str, Any]] = {
    "whole": {}, "chunks": {"chunk": 5}, "a prefix hit": {"cached": 2}, "rolled-back drafts": {"drafts": 1},
}  # fmt: skip


def compact_cases(*, storage: bool = False) -> tuple[Case, ...]:
    """The cases that gate 0 runs in every arm, before and after timing; quick enough to stand beside a measurement.

    ``storage``: the arms share, back or allocate their tables differently, so storage and replay stand in question too.
    """
    return tuple(case for case in CASES if case.compact or (storage and case.name in _STORAGE_IN_QUESTION))


def check(backend: Backend, case: Case, *, seed: int = 0, engine: str | None = None) -> CorrectnessSample:
    """Run one case on ``engine`` (by default the backend's CPU engine, else CUDA); never raises for a backend's error.

    A failing case whose name or contract number is among ``backend.differences`` is reported as not supported, with
    the declaration and what was seen: a declared difference is shown, it is no pass.
    """
    if case.capability not in backend.capabilities:
        return _sample(case.name, case.contract, Finding(detail=f"no capability {case.capability!r}"), supported=False)
    where = engine or ("cpu" if "cpu" in backend.engines else "cuda")
    declared = backend.differences.get(case.name) or backend.differences.get(case.contract)
    run = partial(case.run, Probe(backend, where, seed, case.name))
    return _guarded(case.name, case.contract, run, declared=declared)


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
    paths = {
        name: partial(engine_differs, partial(engine.rows, each, settings), each, layout, token_map, rows)
        for name, each in batches.items()
    }
    outputs = partial(_outputs_differ, engine, batch.token_ids, settings, layout, token_map, rows)
    return (*(_guarded(name, "L1", path) for name, path in paths.items()), _guarded("engine-outputs", "L11", outputs))


def _synthetic(layout: EngramLayout, seed: int, layer: int, rows: Any) -> tuple[Any, Any]:
    return synthetic_at(rows, layout.head_dim, layer=layer, seed=seed, block=layout.block)


def _outputs_differ(
    engine: Engine, tokens: Any, settings: StepSettings, layout: EngramLayout, token_map: Any, rows: RowSource
) -> Finding | None:
    """Where the hidden states that three requests' outputs are read from differ from the oracle's, whatever the way.

    Bits may differ, for a matmul of another batch size adds in another order; rows of another token move half a state.
    """
    if engine.max_tokens < _PROMPTS:
        raise Unsupported(f"outputs need {_PROMPTS} tokens in a batch, the engine takes {engine.max_tokens}")
    prompts = (np.resize(tokens, _PROMPTS) + 37 * np.arange(_PROMPTS)) % len(token_map)
    if len(token_map) > IMAGE_SENTINEL_ID:
        prompts[7] = IMAGE_SENTINEL_ID  # the last of a prompt: its output is that of a dead token
    parts = [part.tolist() for part in np.split(prompts, 3)]
    load = [
        Request(index=index, arrival_s=0.0, prompt=tuple(part), output_tokens=2, vocabulary=len(token_map))
        for index, part in enumerate(parts)
    ]
    serve = partial(request_outputs, engine, load, settings, told=[part[:2] for part in parts])
    # Every way before any verdict: ranks that share the heads meet in each step.
    found = {name: serve(**{"chunk": _PROMPTS, **way})[1] for name, way in _WAYS.items()}
    histories = [np.array([*part, part[0]], np.int32) for part in parts]
    batch = HashBatch.concat([HashBatch.sequence(each, dead=each == IMAGE_SENTINEL_ID) for each in histories])
    staged = oracle_rows(layout, hash_ids(layout, batch, token_map), rows)
    whole = engine.oracle(batch, staged).reshape(3, len(histories[0]), -1)[:, -2:].reshape(6, -1)
    for name, states in found.items():
        away = np.sqrt(np.square(states - whole).mean(axis=1) / np.square(whole).mean(axis=1))
        if not (away <= engine.tolerance).all():
            worst = int(np.nan_to_num(away, nan=np.inf).argmax())
            return Finding(
                expected=f"at most {engine.tolerance:.2%} away", seen=f"{away[worst]:.2%}",
                detail=f"{name}: output {worst % 2} of request {worst // 2} against the oracle",
            )  # fmt: skip
    return None


def _guarded(
    name: str, contract: str, run: Callable[[], Finding | None], *, declared: str | None = None
) -> CorrectnessSample:
    """A backend's exception is a finding with its text, never a crash of the checks."""
    try:
        found = run()
    except (Unsupported, NotMeasurable) as absence:  # the latter is the backend's own word for "not here"
        return _sample(name, contract, Finding(detail=str(absence)), supported=False)
    except Exception as error:  # noqa: BLE001 - whatever the system under test raises
        found = Finding(detail=f"{type(error).__name__}: {error}")
    return _sample(name, contract, found, declared=declared)


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

"""The contract cases of the gate, by itself and behind hash, rows and projection: L11."""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_engram.backends.arrays import place_bf16, to_numpy
from pytest_engram.cases.case import Finding, Parts, Probe, Unsupported, cases, floats_differ
from pytest_engram.cases.slots import BLOCK, SLOTS, paged
from pytest_engram.hashing import EngramLayout, HashBatch
from pytest_engram.rows import gated_residual, lookup_rows, project, synthetic_rows

_TOLERANCE = 3e-5  # float32 sums of 5,120 terms, then a square root; a wrong clamp moves results by 1e-4


def gate(probe: Probe) -> Parts:
    """hidden + sigmoid(signed sqrt of the normalised dot product) × value, for widths 96, 257 and 5120."""
    for dim in (96, 257, 5120):
        yield f"width {dim}", _differs(probe, _inputs(probe, 4, dim))


def gate_clamp(probe: Probe) -> Finding | None:
    """|dot| is clamped at 1e-6 before the root, and a dot of exactly 0 counts as positive."""
    hidden, key, value, *norms = _inputs(probe, 3, 96)
    hidden[:, ::2] = key[:, 1::2] = 0
    return _differs(probe, (hidden, key, 40 * value, *norms))


def gate_epsilon(probe: Probe) -> Finding | None:
    """eps 1e-20 keeps an all-zero and a tiny hidden state finite, and counts where the mean square is smaller."""
    hidden, *rest = _inputs(probe, 3, 96)
    hidden[0] = 0
    hidden[1] *= np.float32(1e-11)
    return _differs(probe, (hidden, *rest))


def gate_closed(probe: Probe) -> Parts:
    """A padded or masked token passes its hidden state unchanged, bit by bit."""
    inputs = _inputs(probe, 7, 96)
    for keep in (np.zeros(7, dtype=bool), np.arange(7) % 2 == 0):
        seen = to_numpy(probe.backend.gate(*map(probe.place, (*inputs, keep))))
        yield "masked tokens", floats_differ(seen, np.where(keep[:, None], seen, inputs[0]), 0)
    yield "the others", _differs(probe, inputs, keep)


def request_outputs(probe: Probe) -> Parts:
    """Outputs through hash, rows, ``wkv`` and gate: chunks, a rolled-back draft and a prefix hit give the whole's."""
    if "slot-cache" not in probe.backend.capabilities or "lookup" not in probe.backend.capabilities:
        raise Unsupported("outputs need a slot cache and a lookup, too")
    layer, dead = _Layer(probe), np.arange(11) == 2
    whole, draft, own = probe.tokens(11), probe.tokens(2), probe.tokens(3)
    drafted, hit = np.concatenate([whole[:7], draft]), np.concatenate([whole[:BLOCK], own])
    steps = [  # the draft's first token is accepted, the slots of the others are written again
        (whole, 0, 5, [6, 1]), (whole, 5, 6, [6, 1]), (drafted, 6, 9, [6, 1, 9]), (whole, 7, 11, [6, 1, 9]),
        (hit, BLOCK, 7, [6, 5]),
    ]  # fmt: skip
    for tokens, start, end, table in steps:
        chunk = paged(tokens[start:end], table, start=start, dead=dead[start:end])
        whole = HashBatch.sequence(tokens[:end], dead=dead[:end])
        yield f"tokens {start} … {end - 1}", layer.differs(chunk, whole)


class _Layer:
    """One Engram layer, from token ids to hidden states, through the backend and in float64."""

    def __init__(self, probe: Probe) -> None:
        self._probe, self._layout = probe, EngramLayout.for_rows(4000, layers=(1,), n_heads=2, head_dim=64)
        heads, width = self._layout.columns, self._layout.columns * self._layout.head_dim
        weight, scales = synthetic_rows(0, self._layout.rows(0), self._layout.head_dim, layer=0, seed=1)
        self._shard = probe.shard(weight, np.full_like(scales, 119), heads=heads)
        self._hidden, _, _, *self._norms = _inputs(probe, 16, 96)
        self._wkv = probe.rng.standard_normal((width, 2 * 96), dtype=np.float32) / np.float32(width**0.5)
        self._hasher = probe.hasher(SLOTS, self._layout)

    def differs(self, chunk: HashBatch, whole: HashBatch) -> Finding | None:
        """The backend's outputs for ``chunk`` against those of the same positions of ``whole``."""
        probe, ids = self._probe, self._probe.ids(whole, layout=self._layout)[chunk.positions, 0]
        rows = np.empty((*ids.shape, self._layout.head_dim), np.uint16)
        lookup_rows(self._shard, ids, rows)
        rest = self._hidden[chunk.positions], *self._norms
        hidden, *norms = (each.astype(np.float64) for each in rest)
        expected = gated_residual(hidden, *project(rows, self._wkv.astype(np.float64)), *norms, keep=~chunk.dead)
        seen, _ = probe.lookup(self._shard, to_numpy(self._hasher(chunk))[:, 0])
        return floats_differ(self._output(seen, *rest, ~chunk.dead), expected, _TOLERANCE)

    def _output(self, rows: Any, hidden: Any, *rest: Any) -> Any:
        """Through the backend's own projection, or through the oracle's and the backend's gate."""
        place, backend = self._probe.place, self._probe.backend
        if output := getattr(backend, "output", None):
            wkv = place(self._wkv)
            return output(place(hidden), place_bf16(rows, self._probe.engine), wkv, *map(place, rest))
        return backend.gate(*map(place, (hidden, *project(rows, self._wkv), *rest)))


def _inputs(probe: Probe, tokens: int, dim: int) -> tuple[Any, ...]:
    """(hidden, key, value [T, D], query_norm, key_norm [D]) float32."""
    wide = probe.rng.standard_normal((3, tokens, dim), dtype=np.float32)
    norms = 1 + probe.rng.standard_normal((2, dim), dtype=np.float32) / 8
    return (*wide, *norms)


def _differs(probe: Probe, inputs: tuple[Any, ...], keep: Any = None) -> Finding | None:
    mask = np.ones(len(inputs[0]), dtype=bool) if keep is None else keep
    expected = gated_residual(*(each.astype(np.float64) for each in inputs), keep=mask)
    return floats_differ(probe.backend.gate(*map(probe.place, (*inputs, mask))), expected, _TOLERANCE)


GATE_CASES = cases(
    "gate", compact=[gate, gate_closed], L11=[gate, gate_clamp, gate_epsilon, gate_closed, request_outputs],
)  # fmt: skip

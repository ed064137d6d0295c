"""The main compute of the CPU engine: a float32 matmul chain, the projection of staged rows, all preallocated."""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_engram.hashing import EngramLayout
from pytest_engram.model import Workload

_EMBEDDINGS = 1024  # token ids share this many embedding rows: enough to tell tokens apart
_RANK = 64  # of the projection: every row counts, yet it stays a small part of a step
_HALF = np.float32(0.5**0.5)  # keeps x + f(x) at the scale of x


class Dense:
    """Weights from a seed, scaled so that values keep their magnitude over any number of layers.

    T tokens, D hidden size, H hash columns: hidden states float32 [T, D], staged rows u16 [T, H, dim].  Every method
    writes into buffers allocated once for ``max_tokens`` tokens; a result is valid until the next step.
    """

    def __init__(self, layout: EngramLayout, workload: Workload, max_tokens: int, seed: int) -> None:
        rng = np.random.default_rng([seed, 0xD3])
        hidden, width = workload.hidden, layout.columns * layout.head_dim
        self._gemms = tuple(
            tuple(_weight(rng, hidden, hidden) for _ in range(workload.gemms_per_layer)) for _ in range(workload.layers)
        )
        self._embedding = rng.standard_normal((_EMBEDDINGS, hidden), dtype=np.float32)
        self._down = _weight(rng, width, _RANK)
        self._up = _weight(rng, _RANK, 2 * hidden)
        self.query_norm, self.key_norm = (1 + rng.standard_normal((2, hidden), dtype=np.float32) / 8).astype(np.float32)
        self._hidden, self._left, self._right = np.zeros((3, max_tokens, hidden), np.float32)
        self._wide = np.zeros((max_tokens, width), np.uint32)
        self._latent = np.zeros((max_tokens, _RANK), np.float32)
        self._key_value = np.zeros((max_tokens, 2 * hidden), np.float32)

    def embed(self, tokens: Any) -> Any:
        """Hidden states float32 [T, D] of token ids int [T]; dead tokens (−1) have an embedding too."""
        return np.take(self._embedding, tokens, axis=0, out=self._hidden[: len(tokens)], mode="wrap")

    def layer(self, hidden: Any, number: int) -> Any:
        """One layer: ``hidden`` + its matmul chain, in place."""
        source, left, right = hidden, self._left[: len(hidden)], self._right[: len(hidden)]
        for weight in self._gemms[number]:
            source, left, right = np.matmul(source, weight, out=left), right, left
        np.add(hidden, source, out=hidden)
        return np.multiply(hidden, _HALF, out=hidden)

    def project(self, staged: Any) -> tuple[Any, Any]:
        """(key, value), float32 [T, D] each, of bf16 rows u16 [T, H, dim]: a low-rank projection of all of them."""
        count = len(staged)
        wide, latent, both = self._wide[:count], self._latent[:count], self._key_value[:count]
        np.left_shift(staged.reshape(wide.shape), 16, out=wide, dtype=np.uint32)  # bf16 is float32's upper half
        np.matmul(wide.view(np.float32), self._down, out=latent)
        scale = np.sqrt(np.mean(np.square(latent), axis=1, keepdims=True))
        np.divide(latent, scale + np.float32(1e-6), out=latent)
        np.matmul(latent, self._up, out=both)
        return both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]


def _weight(rng: np.random.Generator, rows: int, columns: int) -> Any:
    return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(rows**0.5)

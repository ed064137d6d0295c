"""The main compute: a decoder-like chain of GEMMs, in float32 on numpy, in bf16 with attention on torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_engram.layout import EngramLayout
from pytest_engram.model import Workload
from pytest_engram.rows import gated_residual

_EMBEDDINGS = 1024  # token ids share this many embedding rows: enough to tell tokens apart
_RANK = 64  # of the projection on CPUs: every row counts, yet it stays a small part of a step
_CONTEXT = 1024  # keys and values that every token attends to: memory traffic that GEMMs do not have
_HEAD = 64
_HALF = 0.5**0.5  # keeps x + f(x) at the scale of x


class Chain:
    """Weights from a seed, each used once per step; T tokens, D hidden size, residual stream float32 [T, D]."""

    def __init__(self, layout: EngramLayout, workload: Workload, seed: int) -> None:
        self._rng, hidden = np.random.default_rng([seed, 0xD3]), workload.hidden
        self._gemms = [
            [self._weight(hidden, hidden) for _ in range(workload.gemms_per_layer)] for _ in range(workload.layers)
        ]
        self._embedding = self._draw(_EMBEDDINGS, hidden)
        self._projection = self._wkv(layout.columns * layout.head_dim, 2 * hidden)
        self.query_norm, self.key_norm = 1 + self._draw(2, hidden) / 8

    def embed(self, tokens: Any) -> Any:
        """float32 [T, D] of token ids int [T]."""
        return self._embedding[tokens % _EMBEDDINGS]

    def layer(self, hidden: Any, number: int) -> Any:
        """One layer: ``hidden`` + its chain; float32 [T, D] in and out."""
        state = self._attend(self._normal(hidden))
        for weight in self._gemms[number]:
            state = state @ weight
        return (hidden + self._wide(state)) * _HALF

    def project(self, rows: Any) -> tuple[Any, Any]:
        """(key, value) float32 [T, D] of all staged rows bf16 [T, H, dim]."""
        state, (*down, wkv) = self._decode(rows), self._projection
        for weight in down:
            state = state @ weight
        state = self._wide(self._normal(state) @ wkv)
        half = state.shape[1] // 2
        return state[:, :half], state[:, half:]

    def oracle(self, tokens: Any, keep: Any, rows: dict[int, Any]) -> Any:
        """Hidden states [T, D] of a step over numpy's ``tokens`` int [T], ``keep`` bool [T] and a layer's own ``rows``,
        bf16 bits u16 [T, H, dim].

        Rows, projection and gate are float64 on numpy; the main compute is :meth:`layer`, whose weights may fill a GPU.
        """
        *down, wkv = (self._host(weight).astype(np.float64) for weight in self._projection)
        query, key_norm, embedding = map(self._host, (self.query_norm, self.key_norm, self._embedding))
        hidden = embedding[tokens % _EMBEDDINGS].astype(np.float64)
        for number in range(len(self._gemms)):
            if number in rows:
                state = Chain._decode(self, rows[number]).astype(np.float64)
                for weight in down:
                    state = state @ weight
                key, value = np.split(Chain._normal(self, state) @ wkv, 2, axis=1)
                hidden = gated_residual(hidden, key, value, query, key_norm, keep=keep)
            hidden = self._host(self.layer(self._placed(hidden.astype(np.float32)), number)).astype(np.float64)
        return hidden

    def _host(self, array: Any) -> Any:
        return array

    def _placed(self, array: Any) -> Any:
        return array

    def _wkv(self, rows: int, columns: int) -> list[Any]:
        return [self._weight(rows, _RANK), self._weight(_RANK, columns)]

    def _decode(self, rows: Any) -> Any:
        bits = np.left_shift(rows.reshape(len(rows), self._projection[0].shape[0]), 16, dtype=np.uint32)
        return bits.view(np.float32)  # bf16 is float32's upper half

    def _attend(self, state: Any) -> Any:
        return state

    def _normal(self, state: Any) -> Any:
        return state / np.sqrt(np.square(state).mean(axis=1, keepdims=True) + np.float32(1e-6))

    def _wide(self, state: Any) -> Any:
        return state

    def _draw(self, *shape: int) -> Any:
        return self._rng.standard_normal(shape, dtype=np.float32)

    def _weight(self, rows: int, columns: int) -> Any:
        return self._draw(rows, columns) / rows**0.5


class TorchChain(Chain):
    """The same on ``device``, with attention over a fixed context and a projection of full rank."""

    def __init__(self, layout: EngramLayout, workload: Workload, seed: int, device: Any) -> None:
        import torch

        self._torch: Any = torch
        self._device, self._generator = device, torch.Generator(device).manual_seed(seed)
        self._head = _HEAD if workload.hidden % _HEAD == 0 else workload.hidden
        self._context = self._draw(2, 1, workload.hidden // self._head, _CONTEXT, self._head).bfloat16()
        super().__init__(layout, workload, seed)

    def _host(self, array: Any) -> Any:
        return array.cpu().float().numpy()

    def _placed(self, array: Any) -> Any:
        return self._torch.from_numpy(array).to(self._device)

    def _wkv(self, rows: int, columns: int) -> list[Any]:
        return [self._weight(rows, columns)]

    def _decode(self, rows: Any) -> Any:
        return rows.flatten(1).float()

    def _attend(self, state: Any) -> Any:
        query = state.view(1, len(state), -1, self._head).transpose(1, 2)
        seen = self._torch.nn.functional.scaled_dot_product_attention(query, *self._context)
        return state + seen.transpose(1, 2).reshape(state.shape)

    def _normal(self, state: Any) -> Any:
        scale = self._torch.rsqrt(state.square().mean(dim=1, keepdim=True) + 1e-6)
        return (state * scale).bfloat16()

    def _wide(self, state: Any) -> Any:
        return state.float()

    def _draw(self, *shape: int) -> Any:
        return self._torch.randn(shape, generator=self._generator, device=self._device)

    def _weight(self, rows: int, columns: int) -> Any:
        return super()._weight(rows, columns).bfloat16()

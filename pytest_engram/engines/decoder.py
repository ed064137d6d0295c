"""The main compute of the CUDA engine: a decoder-like chain of bf16 GEMMs and attention over a fixed context."""

from __future__ import annotations

from typing import Any

from pytest_engram.layout import EngramLayout
from pytest_engram.model import Workload

_EMBEDDINGS = 1024  # token ids share this many embedding rows: enough to tell tokens apart
_CONTEXT = 1024  # keys and values that every token attends to: memory traffic that GEMMs do not have
_HEAD = 64
_HALF = 0.5**0.5  # keeps x + f(x) at the scale of x


class Decoder:
    """Weights from a seed, each used once per step; T tokens, D hidden size, residual stream float32 [T, D]."""

    def __init__(self, layout: EngramLayout, workload: Workload, seed: int, device: Any) -> None:
        import torch

        self._torch: Any = torch
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        hidden, width = workload.hidden, layout.columns * layout.head_dim
        self._head = _HEAD if hidden % _HEAD == 0 else hidden
        self._gemms = [
            [self._weight(hidden, hidden) for _ in range(workload.gemms_per_layer)] for _ in range(workload.layers)
        ]
        self._context = self._draw(2, 1, hidden // self._head, _CONTEXT, self._head).bfloat16()
        self._embedding = self._draw(_EMBEDDINGS, hidden)
        self._wkv = self._weight(width, 2 * hidden)
        self.query_norm, self.key_norm = 1 + self._draw(2, hidden) / 8

    def embed(self, tokens: Any) -> Any:
        """float32 [T, D] of token ids int64 [T]."""
        return self._embedding[tokens % _EMBEDDINGS]

    def layer(self, hidden: Any, number: int) -> Any:
        """One layer: attention over the context, then the layer's GEMM chain; float32 [T, D] in and out."""
        state = self._attend(self._normal(hidden))
        for weight in self._gemms[number]:
            state = state @ weight
        return (hidden + state.float()) * _HALF

    def project(self, rows: Any) -> tuple[Any, Any]:
        """(key, value) float32 [T, D] of staged rows bf16 [T, H, dim]: all of them @ wkv [H × dim, 2 × D]."""
        both = (self._normal(rows.flatten(1).float()) @ self._wkv).float()
        key, value = both.chunk(2, dim=1)
        return key, value

    def _attend(self, state: Any) -> Any:
        query = state.view(1, len(state), -1, self._head).transpose(1, 2)
        seen = self._torch.nn.functional.scaled_dot_product_attention(query, *self._context)
        return state + seen.transpose(1, 2).reshape(state.shape)

    def _normal(self, state: Any) -> Any:
        scale = self._torch.rsqrt(state.square().mean(dim=1, keepdim=True) + 1e-6)
        return (state * scale).bfloat16()

    def _draw(self, *shape: int) -> Any:
        return self._torch.randn(shape, generator=self._generator, device=self._device)

    def _weight(self, rows: int, columns: int) -> Any:
        return (self._draw(rows, columns) / rows**0.5).bfloat16()

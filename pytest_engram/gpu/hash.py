"""Hash ids on the GPU, equal to ``hashing.hash_ids`` bit for bit: inputs go up in one copy, two kernels at most."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pytest_engram.hashing import DEAD_ID, HashBatch, check_batch
from pytest_engram.layout import EngramLayout

_TILE = 64  # tokens per program
_ALIGN = 16  # of each input in the copy, so that no alignment is ever news to the compiler


class DeviceHasher:
    """Hash ids on a torch ``device``, on "cpu" under Triton's interpreter; ``token_map`` int32 [vocabulary]."""

    def __init__(self, layout: EngramLayout, token_map: Any, device: Any) -> None:
        import torch

        self._torch: Any = torch
        self._layout, self._device, self._size = layout, torch.device(device), len(token_map)
        self._pad = int(token_map[layout.pad_token_id])
        self._map = torch.tensor(np.ascontiguousarray(token_map, np.int32), device=self._device)
        numbers = (layout.multipliers, layout.primes, layout.offsets)
        self._numbers = [torch.tensor(np.array(each, np.int64), device=self._device) for each in numbers]
        self._cache: Any = None

    def __call__(self, batch: HashBatch) -> Any:
        """Hash ids int32 [T, L, H] on the device."""
        return self.stage(batch)[0]()

    def bind(self, num_slots: int) -> None:
        """(Re)bind a slot cache; history is dropped, new slots are 0 (H12)."""
        self._cache = self._torch.zeros(num_slots, dtype=self._torch.int32, device=self._device)

    def stage(self, batch: HashBatch) -> tuple[Callable[[], Any], Any, Any]:
        """Send the batch to the device without waiting: (launch of the hash, token ids int32 [T], keep bool [T]).

        The launch enqueues on the stream that is then current and returns int32 [T, L, H].  Raises ``UsageError`` for
        token ids beyond the map, for a batch without a window and, where a slot cache is bound, for one without slots
        and block table.
        """
        cached = self._cache is not None
        check_batch(batch, self._layout.pad_token_id, self._size, len(self._cache) if cached else None)
        paged = (batch.slots, batch.block_table) if cached else ()
        plain = (batch.token_ids, batch.positions, batch.query_start_loc, batch.dead, batch.window, batch.window_dead)
        sent = self._send(*plain, *paged)
        return partial(self._launch, batch.block_size, *sent), sent[0], ~sent[3]

    def _launch(self, block_size: int, tokens: Any, positions: Any, starts: Any, dead: Any, window: Any,
                window_dead: Any, slots: Any = None, table: Any = None) -> Any:  # fmt: skip
        from pytest_engram.gpu._kernels import hash_kernel, slot_kernel

        count, requests, layout, cached = len(tokens), len(starts) - 1, self._layout, slots is not None
        out = tokens.new_empty((count, len(layout.layer_ids), layout.columns))
        if not count:
            return out
        tiles, table, cache = -(-count // _TILE), table if cached else window, self._cache if cached else self._map
        if cached:  # a launch of its own: every slot is written before any is read
            slot_kernel[(tiles,)](tokens, dead, slots, self._map, cache, count, DEAD=DEAD_ID, TILE=_TILE)
        hash_kernel[(tiles, out.shape[1])](
            tokens, positions, starts, dead, window, window_dead, table, cache, self._map, *self._numbers, out,
            count, requests, requests.bit_length(), window.shape[1], table.shape[1], block_size, len(cache), self._pad,
            DEAD=DEAD_ID, CACHED=cached, NGRAM=layout.max_ngram, HEADS=layout.n_heads,
            WIDE=1 << (layout.n_heads - 1).bit_length(), TILE=_TILE,
        )  # fmt: skip
        return out

    def _send(self, *arrays: Any) -> list[Any]:
        """The arrays on the device, C-contiguous, by one copy from pinned memory."""
        torch, parts = self._torch, [np.ascontiguousarray(each) for each in arrays]
        starts = np.cumsum([0, *(-(-each.nbytes // _ALIGN) * _ALIGN for each in parts)]).tolist()
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        spans = [slice(start, start + each.nbytes) for start, each in zip(starts, parts, strict=False)]
        for span, each in zip(spans, parts, strict=True):
            host.numpy()[span] = each.reshape(-1).view(np.uint8)
        sent = host.to(self._device, non_blocking=True)
        return [
            sent[span].view(getattr(torch, each.dtype.name)).view(each.shape)
            for span, each in zip(spans, parts, strict=True)
        ]

"""vLLM's own Engram modules as a backend: real hash, lookup and gate kernels behind our protocol.

Without CUDA the kernels run in Triton's interpreter on numpy arrays (keep shapes small: about 300 tokens/s hashed,
2,000 rows/s looked up); with CUDA they are compiled, take torch tensors, and numpy arrays through a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pytest_engram.backends.protocol import Hasher, Launch, TableShard
from pytest_engram.backends.vllm_light import INTERPRETER, LightEngine, Surroundings, prepare_triton
from pytest_engram.backends.vllm_source import locate, parse_spec
from pytest_engram.errors import UsageError
from pytest_engram.hashing import EngramLayout, HashBatch

TILE_ROWS = 16  # vLLM's BLOCK_R

# Artefacts of Triton's interpreter; compiled, vLLM has no difference to declare.
INTERPRETER_DIFFERENCES = {
    "scale-extremes": "Triton's interpreter rounds bf16 results below 2**-126 otherwise than the hardware does",
    "nan-codes": "Triton's interpreter decodes the two FP8 NaN codes as ±480",
}


class VllmBackend:
    """``spec`` is ``vllm``, ``vllm@VERSION`` or ``vllm@PATH`` (wheel, fetched folder or checkout).

    Raises ``EngramError`` if there is no such engine, torch or Triton, with the way out.
    """

    def __init__(self, spec: str = "vllm", *, cache: Path | None = None) -> None:
        source = locate(parse_spec(spec), cache)
        self.interpreted = prepare_triton()
        self.around = Surroundings(interpreted=self.interpreted)
        self.engine = LightEngine(source, self.around)
        self.name = f"vllm@{source.root if source.origin == 'checkout' else source.version}"
        self.engines = frozenset({"cpu"} if self.interpreted else {"cpu", "cuda"})
        kernels = {"hash", "slot-cache", "lookup", "shards", "gate"}
        self.capabilities = frozenset(kernels if self.interpreted else kernels | {"storage", "prefetch"})
        self._tables: dict[tuple[int, ...], Any] = {}
        self.differences = dict(INTERPRETER_DIFFERENCES) if self.interpreted else {}

    def receipt(self) -> dict[str, str]:
        """Which files run (one sha256 each), from where, and on which torch and Triton."""
        mode = "interpreter" if self.interpreted else "compiled"
        versions = {name: import_module(name).__version__ for name in ("torch", "triton")}
        return {**self.engine.source.receipt(), **versions, "mode": mode}

    def layout(self, layout: EngramLayout) -> Any:
        """vLLM's own ``EngramLayout`` for the same model fields."""
        return self.engine.get("EngramLayout")(model_config(layout))

    def hasher(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> Hasher:
        """vLLM's ``NgramHashState`` without its tokenizer: ``token_map`` stands for what it builds from one."""
        return _VllmHasher(self, layout, token_map, slot_cache=slot_cache)

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        """vLLM's ``ParallelEngramEmbedding.lookup``; a cap is its background launch with half of 2 × cap SMs."""
        if cap is not None and cap < 1:
            raise UsageError(f"cap {cap}", code="bad-cap", who=self.name, expected="at least one program")
        weight, scales, indices, rows = map(self.tensor, (shard.weight, shard.scales, ids, out))
        table = self._table(shard, weight.shape[1], scales.shape[1])
        programs = table.device_sms if cap is None else cap
        with self.kernels():
            table.given = (weight.view(_torch().float8_e4m3fn), scales)
            table._num_sms = programs if cap is None else 2 * cap
            table.lookup(indices, rows.view(_torch().bfloat16), background=cap is not None)
            table.given = ()
        if isinstance(out, np.ndarray) and not self.interpreted:
            out[...] = rows.cpu().numpy().view(np.uint16)
        count = len(ids) * shard.local_heads
        tiles = -(-count // TILE_ROWS)
        return Launch(rows=count, tiles=tiles, grid=min(tiles, programs))

    def gate(self, hidden: Any, key: Any, value: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        """vLLM's ``Engram.forward`` with one hyper-connection copy.

        The rows are already projected here, so [key | value] takes the place of the staged rows and the projection
        is the identity; everything after it is the engine's.
        """
        torch = _torch()
        key, value = self.tensor(key), self.tensor(value)
        layer = _bare(self.engine.get("Engram"))
        layer.dim, layer.hc_mult, layer.eps, layer.clamp_value = key.shape[1], 1, 1e-20, 1e-6
        layer.use_sequence_parallel, layer.wkv = False, torch.nn.Identity()
        layer.embed_tokens = SimpleNamespace(tp_size=1, dp_size=1, n_hash_cols=2)
        layer.staged_rows = torch.stack((key, value), dim=1)
        layer.q_weight, layer.k_weight = self.tensor(query_norm)[None], self.tensor(key_norm)[None]
        mask = None if keep is None else self.tensor(keep)
        ids = torch.zeros(len(key), 2, dtype=torch.int32, device=key.device)
        with self.kernels():
            gated = layer.forward(self.tensor(hidden)[:, None], ids, mask)[:, 0]
        return self.give_back(gated, hidden)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Around every launch.  The interpreter keeps its program id in a global, so only one thread may be in it;
        it computes with numpy, where infinities are results and no warnings.
        """
        if not self.interpreted:
            yield
            return
        with INTERPRETER, np.errstate(all="ignore"):
            yield

    def tensor(self, array: Any) -> Any:
        """``array`` as a tensor where the kernels run: memory is shared except from numpy to a CUDA device."""
        tensor = host_tensor(array)
        return tensor if self.interpreted or not isinstance(array, np.ndarray) else tensor.cuda()

    @staticmethod
    def give_back(tensor: Any, like: Any) -> Any:
        """``tensor`` as numpy if ``like`` is numpy."""
        return tensor.cpu().numpy() if isinstance(like, np.ndarray) else tensor

    def _table(self, shard: TableShard, dim: int, groups: int) -> Any:
        """vLLM's embedding for the shard's geometry, made once; the memory is given anew to every lookup, never kept.

        Its constructor runs as one shard, then the ranges are the shard's.  A compiled table counts as offloaded.
        """
        geometry = (shard.start, shard.end, shard.head_start, shard.local_heads, shard.total_heads, dim, groups)
        if geometry not in self._tables:
            kind, torch = self.engine.get("ParallelEngramEmbedding"), _torch()
            nothing = (torch.empty(0, dtype=torch.float8_e4m3fn), torch.empty(0, dtype=torch.uint8))
            ours = {"_allocate_weights": lambda _: nothing, "_storage": lambda table: table.given}
            sizes = (1,) * shard.total_heads
            made = type(kind.__name__, (kind,), ours)(
                len(sizes), dim, sizes, dim // groups, cpu_offload=not self.interpreted
            )
            made.device_sms = made._num_sms
            made.head_start, made.part_n_hash_cols = shard.head_start, shard.local_heads
            made.vocab_start_idx, made.vocab_end_idx = shard.start, shard.end
            self._tables[geometry] = made
        return self._tables[geometry]


class _VllmHasher:
    def __init__(self, backend: VllmBackend, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> None:
        torch = _torch()
        engine = backend.engine
        own = backend.layout(layout)
        state = _bare(engine.get("NgramHashState"))
        state.use_slot_cache, state._cache, state._kv_cache_ref = slot_cache, None, None
        state.swa_cache_module = SimpleNamespace(kv_cache=torch.empty(0))
        state.lookback_depth, state.layout = layout.depth, own
        state.token_map = backend.tensor(token_map)
        state.pad_id = int(state.token_map[own.pad_token_id])
        multipliers = engine.get("compute_hash_multipliers")
        state.multipliers = multipliers(own.layer_ids, own.max_ngram_size, own.compressed_vocab_size)
        state.primes, state.offsets = torch.tensor(own.primes), own.offsets
        for name in ("multipliers", "primes", "offsets"):
            setattr(state, name, getattr(state, name).to(state.token_map.device))
        self._state, self._backend = state, backend

    def __call__(self, batch: HashBatch) -> Any:
        state, tensor = self._state, self._backend.tensor
        if state.use_slot_cache and (state._cache is None or batch.slots is None or batch.block_table is None):
            raise UsageError(
                "a slot cache is asked for, but nothing is bound or the batch has no slots", code="no-slot-cache",
                who=self._backend.name, way_out="call bind(num_slots) and give slots and a block table",
            )  # fmt: skip
        state.block_size = batch.block_size
        paged = (batch.slots, batch.block_table) if state.use_slot_cache else ()
        inputs = (batch.token_ids, batch.positions, batch.query_start_loc, batch.dead, batch.window, batch.window_dead)
        with self._backend.kernels():
            ids = state.forward(*map(tensor, (*inputs, *paged)), *([None] * (2 - len(paged))))
        return self._backend.give_back(ids, batch.token_ids) if self._backend.interpreted else ids

    def dummy(self, tokens: int) -> tuple[Any, Any]:
        """vLLM's contribution of a replica without requests: (ids int32 [tokens, L, H], keep bool [tokens])."""
        device = self._state.token_map.device
        ids, keep = self._state.dummy_hashes(_torch().zeros(tokens, dtype=_torch().int32, device=device))
        return ids, keep

    def bind(self, num_slots: int) -> None:
        """A new KV cache of ``num_slots`` one-slot blocks; vLLM notices it by identity and drops its history."""
        state = self._state
        state.block_size = 1
        state.swa_cache_module.kv_cache = _torch().empty(num_slots, 1, device=state.token_map.device)
        state.ensure_cache()


def host_tensor(array: Any) -> Any:
    """A tensor over the memory of a numpy array (u16 becomes int16); a tensor stays as it is."""
    if not isinstance(array, np.ndarray):
        return array
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()  # torch refuses both
    return _torch().from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)


def model_config(layout: EngramLayout) -> SimpleNamespace:
    """The ``engram_*`` fields of a model configuration as vLLM reads them."""
    return SimpleNamespace(
        engram_layer_ids=layout.layer_ids,
        engram_num_embeddings=layout.num_embeddings,
        engram_max_ngram_size=layout.max_ngram,
        engram_n_heads=layout.n_heads,
        engram_head_dim=layout.head_dim,
        engram_compressed_vocab_size=layout.compressed_vocab,
        engram_pad_token_id=layout.pad_token_id,
        engram_vocab_size=layout.vocab_size,
    )


def _bare(kind: Any) -> Any:
    """An instance whose own constructor did not run, because it wants a whole engine."""
    made = kind.__new__(kind)
    _torch().nn.Module.__init__(made)
    return made


def _torch() -> Any:
    return import_module("torch")

"""vLLM's own Engram modules as a backend: real hash, lookup and gate kernels behind our protocol.

Without CUDA the kernels run in Triton's interpreter on numpy arrays (keep shapes small: about 300 tokens/s hashed,
2,000 rows/s looked up); with CUDA they are compiled, take torch tensors, and numpy arrays through a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pytest_engram import ledger
from pytest_engram.backends.protocol import Hasher, Launch, TableShard
from pytest_engram.backends.vllm_light import INTERPRETER, LightEngine, Surroundings, prepare_triton
from pytest_engram.backends.vllm_source import locate
from pytest_engram.errors import UsageError
from pytest_engram.hashing import EngramLayout, HashBatch

# Artefacts of Triton's interpreter; compiled, vLLM has no difference to declare.
INTERPRETER_DIFFERENCES = {
    "scale-extremes": "Triton's interpreter rounds bf16 results below 2**-126 otherwise than the hardware does",
    "nan-codes": "Triton's interpreter decodes the two FP8 NaN codes as ±480",
}


class VllmBackend:
    """``spec`` is ``vllm``, ``vllm@VERSION`` or ``vllm@PATH`` (wheel, kept folder or checkout).

    Raises ``EngramError`` if there is no such engine, torch or Triton, with the way out.
    """

    capabilities = frozenset({"hash", "slot-cache", "lookup", "shards", "gate"})

    def __init__(self, spec: str = "vllm", *, cache: Path | None = None) -> None:
        source = locate(spec.partition("@")[2], cache)
        self.interpreted = prepare_triton()
        self.around = Surroundings(interpreted=self.interpreted)
        self.engine = LightEngine(source, self.around)
        self.name = f"vllm@{source.root if source.origin == 'checkout' else source.version}"
        self.engines = frozenset({"cpu"} if self.interpreted else {"cpu", "cuda"})
        self.differences = INTERPRETER_DIFFERENCES if self.interpreted else {}
        self._tables: dict[tuple[int, ...], tuple[Any, int]] = {}

    def receipt(self) -> dict[str, str]:
        """Which files run (one sha256 each), from where, on which torch, Triton and device."""
        versions = {name: import_module(name).__version__ for name in ("torch", "triton")}
        mode, device = ("interpreter", "cpu") if self.interpreted else ("compiled", _torch().cuda.get_device_name())
        return {**self.engine.source.receipt(), **versions, "mode": mode, "device": device}

    def layout(self, layout: EngramLayout) -> Any:
        """vLLM's own ``EngramLayout`` for the same model fields."""
        return self.engine.get("EngramLayout")(model_config(layout))

    def hasher(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> Hasher:
        """vLLM's ``NgramHashState`` without its tokenizer: ``token_map`` stands for what it builds from one."""
        return _VllmHasher(self, layout, token_map, slot_cache=slot_cache)

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        """vLLM's ``ParallelEngramEmbedding.lookup``; a cap is its background launch with half of 2 × cap SMs.

        The table's memory is given anew to every lookup and never kept.
        """
        weight, scales, indices, rows = map(self.tensor, (shard.weight, shard.scales, ids, out))
        given = weight.view(_torch().float8_e4m3fn), scales
        table, programs = self._table(shard, weight.shape[1], scales.shape[1])
        launch = Launch(*ledger.launch(len(ids), shard.local_heads, programs if cap is None else cap))
        with self.kernels():
            table._storage, table._num_sms = lambda: given, 2 * cap if cap else programs
            table.lookup(indices, rows.view(_torch().bfloat16), background=cap is not None)
            del table._storage
        if isinstance(out, np.ndarray) and not self.interpreted:
            out[...] = rows.cpu().numpy().view(np.uint16)
        return launch

    def gate(self, hidden: Any, key: Any, value: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        """vLLM's ``Engram.forward`` with one hyper-connection copy.

        The rows are already projected here, so [key | value] takes the place of the staged rows and the projection
        is the identity; everything after it is the engine's.
        """
        torch, key = _torch(), self.tensor(key)
        layer = _bare(
            self.engine.get("Engram"), dim=key.shape[1], hc_mult=1, eps=1e-20, clamp_value=1e-6,
            use_sequence_parallel=False, wkv=torch.nn.Identity(),
            embed_tokens=SimpleNamespace(tp_size=1, dp_size=1, n_hash_cols=2),
            staged_rows=torch.stack((key, self.tensor(value)), dim=1),
            q_weight=self.tensor(query_norm)[None], k_weight=self.tensor(key_norm)[None],
        )  # fmt: skip
        ids = torch.zeros(len(key), 2, dtype=torch.int32, device=key.device)
        with self.kernels():
            gated = layer.forward(self.tensor(hidden)[:, None], ids, self.tensor(keep))[:, 0]
        return gated.cpu().numpy() if isinstance(hidden, np.ndarray) else gated

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Around every launch, in one thread at a time: the interpreter keeps its program id in a global.

        It computes with numpy, where infinities are results and no warnings.
        """
        with INTERPRETER, np.errstate(all="ignore"):
            yield

    def tensor(self, array: Any) -> Any:
        """``array`` as a tensor where the kernels run: memory is shared except from numpy to a CUDA device."""
        tensor = host_tensor(array)
        return tensor if self.interpreted or not isinstance(array, np.ndarray) else tensor.cuda()

    def _table(self, shard: TableShard, dim: int, groups: int) -> tuple[Any, int]:
        """(vLLM's embedding for the shard's geometry, the device's SMs), made once.

        Its constructor runs as one shard with a row per head, then the ranges are the shard's.  A compiled table counts
        as offloaded.
        """
        geometry = (shard.start, shard.end, shard.head_start, shard.local_heads, shard.total_heads, dim, groups)
        found = self._tables.get(geometry)
        if found is None:
            kind, sizes = self.engine.get("ParallelEngramEmbedding"), (1,) * shard.total_heads
            made = kind(len(sizes), dim, sizes, dim // groups, cpu_offload=not self.interpreted)
            made.vocab_start_idx, made.vocab_end_idx, made.head_start, made.part_n_hash_cols = geometry[:4]
            found = self._tables[geometry] = made, made._num_sms
        return found


class _VllmHasher:
    def __init__(self, backend: VllmBackend, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> None:
        torch, engine, own = _torch(), backend.engine, backend.layout(layout)
        token_map = backend.tensor(token_map)
        place = partial(torch.as_tensor, device=token_map.device)
        multipliers = engine.get("compute_hash_multipliers")
        self._backend, self._state = backend, _bare(
            engine.get("NgramHashState"), use_slot_cache=slot_cache, _cache=None, _kv_cache_ref=None,
            swa_cache_module=SimpleNamespace(kv_cache=torch.empty(0)), layout=own, lookback_depth=layout.depth,
            token_map=token_map, pad_id=int(token_map[own.pad_token_id]), primes=place(own.primes),
            offsets=place(own.offsets),
            multipliers=place(multipliers(own.layer_ids, own.max_ngram_size, own.compressed_vocab_size)),
        )  # fmt: skip

    def __call__(self, batch: HashBatch) -> Any:
        state, backend = self._state, self._backend
        if state.use_slot_cache and (state._cache is None or batch.slots is None or batch.block_table is None):
            raise UsageError(
                "a slot cache is asked for, but nothing is bound or the batch has no slots", code="no-slot-cache",
                who=backend.name, way_out="call bind(num_slots) and give slots and a block table",
            )  # fmt: skip
        state.block_size = batch.block_size
        paged = (batch.slots, batch.block_table) if state.use_slot_cache else (None, None)
        inputs = (batch.token_ids, batch.positions, batch.query_start_loc, batch.dead, batch.window, batch.window_dead)
        with backend.kernels():
            ids = state.forward(*map(backend.tensor, (*inputs, *paged)))
        return ids.numpy() if backend.interpreted and isinstance(batch.token_ids, np.ndarray) else ids

    def dummy(self, tokens: int) -> tuple[Any, Any]:
        """vLLM's contribution of a replica without requests: (ids int32 [tokens, L, H], keep bool [tokens])."""
        ids, keep = self._state.dummy_hashes(self._state.token_map.new_zeros(tokens))
        return ids, keep

    def bind(self, num_slots: int) -> None:
        """A new KV cache of ``num_slots`` one-slot blocks; vLLM notices it by identity and drops its history."""
        state = self._state
        state.block_size, state.swa_cache_module.kv_cache = 1, state.token_map.new_empty(num_slots, 1)
        state.ensure_cache()


def host_tensor(array: Any) -> Any:
    """A tensor over the memory of a numpy array (u16 becomes int16); anything else stays as it is."""
    if not isinstance(array, np.ndarray):
        return array
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()  # torch refuses both
    return _torch().from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)


def model_config(layout: EngramLayout) -> SimpleNamespace:
    """The ``engram_*`` fields of a model configuration as vLLM reads them."""
    same = ("layer_ids", "num_embeddings", "n_heads", "head_dim", "pad_token_id", "vocab_size")
    return SimpleNamespace(
        engram_max_ngram_size=layout.max_ngram, engram_compressed_vocab_size=layout.compressed_vocab,
        **{f"engram_{name}": getattr(layout, name) for name in same},
    )  # fmt: skip


def _bare(kind: Any, **attributes: Any) -> Any:
    """An instance with these attributes whose own constructor did not run, because it wants a whole engine."""
    made = kind.__new__(kind)
    _torch().nn.Module.__init__(made)
    vars(made).update(attributes)
    return made


def _torch() -> Any:
    return import_module("torch")

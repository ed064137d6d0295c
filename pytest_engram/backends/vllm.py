"""vLLM's own Engram modules as a backend: real hash, lookup and gate kernels behind our protocol.

Without CUDA the kernels run in Triton's interpreter on numpy arrays (keep shapes small: about 300 tokens/s hashed,
2,000 rows/s looked up); with CUDA they are compiled, take torch tensors, and numpy arrays through a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pytest_engram import ledger
from pytest_engram.backends.arrays import host_tensor
from pytest_engram.backends.protocol import CAPABILITIES, Hasher, Launch, TableShard
from pytest_engram.backends.streams import new_variants
from pytest_engram.backends.vllm_launch import VllmLaunch
from pytest_engram.backends.vllm_light import INTERPRETER, LightEngine, Surroundings, prepare_triton
from pytest_engram.backends.vllm_source import locate
from pytest_engram.backends.vllm_storage import EnginePrefetch
from pytest_engram.backends.vllm_tables import EngineTable, Registrations, model_config
from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.hashing import EngramLayout, HashBatch

ENVIRONMENT = "PYTEST_ENGRAM_PLACEMENT"  # in which a patched build finds the policy
DIFFERENCES = {"placed-first": "the pages of a shared table are first touched inside each rank's registration"}
INTERPRETER_DIFFERENCES = {
    "scale-extremes": "Triton's interpreter rounds bf16 results below 2**-126 otherwise than the hardware does",
    "nan-codes": "Triton's interpreter decodes the two FP8 NaN codes as ±480",
}


class VllmBackend(VllmLaunch):
    """``spec`` is ``vllm``, ``vllm@VERSION`` or ``vllm@PATH`` (wheel, kept folder or checkout).

    Raises ``EngramError`` if there is no such engine, torch or Triton, with the way out.
    """

    capabilities = frozenset(CAPABILITIES)

    def __init__(self, spec: str = "vllm", *, cache: Path | None = None) -> None:
        source = locate(spec.partition("@")[2], cache)
        self.interpreted = prepare_triton()
        self.around = Surroundings(interpreted=self.interpreted)
        self.engine = LightEngine(source, self.around)
        self.name = f"vllm@{source.root if source.origin == 'checkout' else source.version}"
        self.engines = frozenset({"cpu"} if self.interpreted else {"cpu", "cuda"})
        self.differences = DIFFERENCES | (INTERPRETER_DIFFERENCES if self.interpreted else {})
        self._registrations: Any = None
        self._tables: dict[tuple[int, ...], tuple[Any, int]] = {}

    def receipt(self) -> dict[str, str]:
        """What runs, of which files (one sha256 each), from where, on which torch, Triton and device."""
        versions = {name: import_module(name).__version__ for name in ("torch", "triton")}
        mode, device = ("interpreter", "cpu") if self.interpreted else ("compiled", _torch().cuda.get_device_name())
        own = {"subject": "engine modules", "mode": mode, "device": device}
        return {**self.engine.source.receipt(), **versions, **own}

    def layout(self, layout: EngramLayout) -> Any:
        """vLLM's own ``EngramLayout`` for the same model fields."""
        return self.engine.get("EngramLayout")(model_config(layout))

    def hasher(self, layout: EngramLayout, token_map: Any, *, slot_cache: bool) -> Hasher:
        """vLLM's ``NgramHashState`` without its tokenizer: ``token_map`` stands for what it builds from one."""
        return _VllmHasher(self, layout, token_map, slot_cache=slot_cache)

    def hash_variants(self, layout: EngramLayout, token_map: Any, batches: Any) -> int:
        """Variants of vLLM's hash kernel that these batches needed compiled."""
        if self.interpreted:
            raise NotMeasurable("the interpreter compiles nothing", code="no-cuda", way_out="run on a GPU machine")
        hasher = self.hasher(layout, token_map, slot_cache=False)
        return new_variants(self.engine.get("_hash_ids_kernel"), [partial(hasher, batch) for batch in batches])

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        """vLLM's ``ParallelEngramEmbedding.lookup``; a cap is its background launch with half of 2 × cap SMs.

        The table's memory is given anew to every lookup and never kept.
        """
        weight, scales, indices, rows = map(self.tensor, (shard.weight, shard.scales, ids, out))
        given = weight.view(_torch().float8_e4m3fn), scales
        table, programs = self._table(shard, weight.shape[1], scales.shape[1])
        launch = ledger.launch(len(ids), shard.local_heads, programs if cap is None else cap)
        with self.kernels():
            table._storage, table._num_sms = lambda: given, 2 * cap if cap else programs
            try:
                table.lookup(indices, rows.view(_torch().bfloat16), background=cap is not None)
            finally:
                del table._storage
        if isinstance(out, np.ndarray) and not self.interpreted:
            out[...] = rows.cpu().numpy().view(np.uint16)
        return launch

    def gate(self, hidden: Any, key: Any, value: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        """vLLM's ``Engram.forward`` with one hyper-connection copy.

        The rows are already projected here, so [key | value] takes the place of the staged rows and the projection
        is the identity; everything after it is the engine's.
        """
        rows = _torch().stack((self.tensor(key), self.tensor(value)), dim=1)
        return self._gated(hidden, rows, _torch().nn.Identity(), query_norm, key_norm, keep)

    def output(self, hidden: Any, rows: Any, wkv: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        """vLLM's ``Engram.forward`` of staged rows bf16 [T, H, dim]; ``wkv`` float32 [H × dim, 2 D] projects them."""
        project, bf16 = self.tensor(wkv), _torch().bfloat16
        return self._gated(hidden, self.tensor(rows).view(bf16), lambda flat: flat.float() @ project, query_norm,
                           key_norm, keep)  # fmt: skip

    def _gated(self, hidden: Any, rows: Any, wkv: Any, query_norm: Any, key_norm: Any, keep: Any) -> Any:
        layer = _bare(
            self.engine.get("Engram"), dim=hidden.shape[1], hc_mult=1, eps=1e-20, clamp_value=1e-6,
            use_sequence_parallel=False, wkv=wkv, staged_rows=rows,
            embed_tokens=SimpleNamespace(tp_size=1, dp_size=1, n_hash_cols=rows.shape[1]),
            q_weight=self.tensor(query_norm)[None], k_weight=self.tensor(key_norm)[None],
        )  # fmt: skip
        ids = rows.new_zeros(rows.shape[:2], dtype=_torch().int32)
        with self.kernels():
            gated = layer.forward(self.tensor(hidden)[:, None], ids, self.tensor(keep))[:, 0]
        return gated.cpu().numpy() if isinstance(hidden, np.ndarray) else gated

    def streams(self, layout: EngramLayout, tables: Any, most: int, around: Any, *, engine: str) -> Any:  # noqa: ARG002
        """vLLM's own layers with offloaded tables, on this machine's GPU, else on a virtual one."""
        return EnginePrefetch(self, layout, tables, most, around)

    def storage(self, group: Any, nbytes: int, cudart: Any, *, backing: str = "tmpfs", policy: str = "") -> Any:
        """vLLM's ``DPSharedEngramStorage`` of rows of 33 bytes, or its huge-page memory, registered by ``cudart``.

        A patched build reads ``policy`` in the environment, as :mod:`.vllm_patch` does; stock code knows none.
        """
        with INTERPRETER:
            self._registrations = self._registrations or Registrations(self.engine)
        if policy:
            os.environ[ENVIRONMENT] = policy
        return EngineTable(self.engine, self._registrations, group, nbytes, cudart, backing)

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
        if not batch.window.size and len(batch.token_ids) and not self._state.use_slot_cache:
            self._backend.elsewhere()
        ids = self._forward(*self._send(batch))
        return ids.numpy() if self._backend.interpreted and isinstance(batch.token_ids, np.ndarray) else ids

    def on_device(self, batch: HashBatch, device: Any) -> tuple[Any, Any, Any]:  # noqa: ARG002 - the kernels' own
        """(launch of the hash, token ids int32 [T], keep bool [T]), a partial over the batch on the device."""
        sent = self._send(batch)
        return partial(self._forward, *sent), sent[0], ~sent[3]

    def _send(self, batch: HashBatch) -> list[Any]:
        """The arguments of vLLM's ``forward`` where its kernels run."""
        state, backend = self._state, self._backend
        if state.use_slot_cache and (state._cache is None or batch.slots is None or batch.block_table is None):
            raise UsageError(
                "a slot cache is asked for, but nothing is bound or the batch has no slots", code="no-slot-cache",
                who=backend.name, way_out="call bind(num_slots) and give slots and a block table",
            )  # fmt: skip
        state.block_size = batch.block_size
        paged = (batch.slots, batch.block_table) if state.use_slot_cache else (None, None)
        inputs = (batch.token_ids, batch.positions, batch.query_start_loc, batch.dead, batch.window, batch.window_dead)
        return [*map(backend.tensor, (*inputs, *paged))]

    def _forward(self, *sent: Any) -> Any:
        with self._backend.kernels():
            return self._state.forward(*sent)

    def dummy(self, tokens: int) -> tuple[Any, Any]:
        """vLLM's contribution of a replica without requests: (ids int32 [tokens, L, H], keep bool [tokens])."""
        ids, keep = self._state.dummy_hashes(self._state.token_map.new_zeros(tokens))
        return ids, keep

    def bind(self, num_slots: int) -> None:
        """A new KV cache of ``num_slots`` one-slot blocks; vLLM notices it by identity and drops its history."""
        state = self._state
        state.block_size, state.swa_cache_module.kv_cache = 1, state.token_map.new_empty(num_slots, 1)
        state.ensure_cache()


def _bare(kind: Any, **attributes: Any) -> Any:
    """An instance with these attributes whose own constructor did not run, because it wants a whole engine."""
    made = kind.__new__(kind)
    _torch().nn.Module.__init__(made)
    vars(made).update(attributes)
    return made


def _torch() -> Any:
    return import_module("torch")

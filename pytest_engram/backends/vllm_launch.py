"""What vLLM's Engram files decide at start-up: token map, shards, padding, and who shares tables with whom."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

from pytest_engram.backends.streams import require
from pytest_engram.backends.vllm_light import LightEngine, Surroundings
from pytest_engram.errors import NotMeasurable


class VllmLaunch:
    """The part of the backend that needs no kernel."""

    engine: LightEngine
    around: Surroundings
    tensor: Callable[[Any], Any]

    def token_map(self, tokens: Any) -> tuple[Any, int]:
        """vLLM's ``build_compressed_token_map`` of (text, raw token) pairs; it normalises with ``tokenizers``."""
        require("tokenizers", "pip install tokenizers")
        return self.engine.get("build_compressed_token_map")(_Tokenizer(tokens))  # type: ignore[no-any-return]

    def sharing(self, *, offload: bool, replicas: int, elastic: bool = False) -> None:
        """What vLLM's ``ParallelEngramEmbedding`` refuses; elastic groups are refused by its configuration."""
        if elastic:
            self.elsewhere()
        kind, tables = self.engine.get("ParallelEngramEmbedding"), import_module("torch").empty(2, 1)
        with self._one_of(replicas), mock.patch.object(kind, "_allocate_weights", return_value=tables):
            kind(1, 32, (1,), 32, cpu_offload=offload, dp_shared_memory=True)

    def shard_rank(self, tp_rank: int, dp_rank: int, dp_size: int) -> int:
        """vLLM's ``engram_head_shard_rank``."""
        with self._one_of(dp_size, dp_rank, tp_rank=tp_rank):
            return int(self.engine.get("engram_head_shard_rank")())

    def padded_ids(self, ids: Any, tokens_across_dp: Any, group: slice) -> Any:
        """What vLLM's ``gather_engram_hashes`` sends for the first replica of ``group``."""
        counts = None if tokens_across_dp is None else import_module("torch").tensor(tokens_across_dp)
        known = None if counts is None else SimpleNamespace(num_tokens_across_dp_cpu=counts)
        with self._one_of(group.stop - group.start, forward=SimpleNamespace(dp_metadata=known)):
            return self.engine.get("gather_engram_hashes")(self.tensor(ids))

    def may_share(self, nbytes: int, *, shm: str, replicas: int) -> bool:
        """vLLM's ``can_share_engram_tables``."""
        decide = self.engine.get("can_share_engram_tables")
        layout = SimpleNamespace(num_embeddings=(nbytes // 33,), head_dim=32)
        with self._one_of(replicas):
            # Another path in a copy: the engine's module stays as it is.
            there = decide.__globals__ | {"SHM_PATH": type(decide.__globals__["SHM_PATH"])(shm)}
            return bool(FunctionType(decide.__code__, there, None, decide.__defaults__)(layout))

    def elsewhere(self, *_: Any, **__: Any) -> Any:
        """What vLLM decides outside its Engram files, which are all that the light way loads."""
        raise NotMeasurable("vLLM decides that outside its Engram files", code="not-in-engram-files")

    parameter_name = sharing_group = fits = elsewhere

    def _one_of(self, replicas: int, rank: int = 0, **fields: Any) -> Any:
        """One rank of a DP group whose collectives give back what it sends; ``fields`` of its surroundings."""
        own = {"all_gather": lambda value, **_: value, "broadcast_object": lambda value: value}
        group = SimpleNamespace(world_size=replicas, rank_in_group=rank, **own) if replicas > 1 else None
        return mock.patch.multiple(self.around, group=group, **fields)


class _Tokenizer(list[Any]):
    """As much of a tokenizer as vLLM asks, over (text, raw token) pairs."""

    backend_tokenizer = property(lambda self: self)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> Any:
        """The text of one id; special tokens stay."""
        return None if skip_special_tokens else self[ids[0]][0]

    def id_to_token(self, index: int) -> Any:
        """The raw token."""
        return self[index][1]

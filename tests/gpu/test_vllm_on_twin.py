"""vLLM's own kernels in the CUDA engine's step, on its twin: interpreted, over torch tensors of the CPU."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_engram.backends.vllm_source import PINNED, locate
from pytest_engram.engines.protocol import StepSettings
from pytest_engram.engines.tables import full_shards
from pytest_engram.errors import EngramError
from pytest_engram.hashing import hash_ids
from pytest_engram.layout import EngramLayout
from pytest_engram.rows import lookup_rows

torch = pytest.importorskip("torch", reason="vLLM's modules need torch")
pytest.importorskip("triton", reason="vLLM's modules need Triton")


@pytest.mark.parametrize("cap", [None, 2])
def test_the_cuda_engine_drives_vllms_lookup(fake_cuda: Any, cap: int | None) -> None:
    """Ids, staged rows and outputs of a whole step with vLLM's hash, lookup and gate are the oracle's."""
    try:
        locate(PINNED)
    except EngramError as error:
        pytest.skip(f"{error.seen}; {error.way_out}")
    from pytest_engram.backends.vllm import VllmBackend

    twin = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("cuda_twin.py"))))

    class OnTwin(VllmBackend):
        """Launches on the stand-in's streams; hashed before the step, as stand-in streams record no plain tensor."""

        def hasher(self, *inputs: Any, **options: Any) -> Any:
            return twin.HostHasher(super().hasher(*inputs, **options))

        def lookup(self, shard: Any, ids: Any, out: Any, *, cap: int | None = None) -> Any:
            own = partial(super().lookup, shard, ids.as_subclass(torch.Tensor), out, cap=cap)
            fake_cuda.launch(lambda: launches.append(own()))
            return launches[-1] if launches else None

    launches: list[Any] = []
    layout = EngramLayout.for_rows(9000, (1, 3), head_dim=64)
    backend = OnTwin(f"vllm@{PINNED}")
    if not backend.interpreted:
        pytest.skip("a GPU is here: the engine itself runs on it")
    backend.engines = frozenset({"cpu", "cuda"})
    buffer = np.zeros(twin.table_bytes(layout), np.uint8)
    twin.fill_table(buffer, layout, 1)
    tables = twin.table_views(buffer, layout)
    token_map = np.arange(1000, dtype=np.int32)
    engine = twin.build(fake_cuda, layout=layout, tables=tables, token_map=token_map, backend=backend)
    ids, rows = engine.rows(twin.batch(), StepSettings(cap=cap))
    expected = hash_ids(layout, twin.batch(), token_map)
    assert (ids == expected).all()
    for index, shard in enumerate(full_shards(tables, layout)):
        oracle = np.empty((6, layout.columns, 64), np.uint16)
        lookup_rows(shard, expected[:, index], oracle)
        assert (rows[:, index] == oracle).all()
    output = engine.step(twin.batch(), StepSettings(cap=cap), marks=True).output
    assert np.isfinite(output).all()

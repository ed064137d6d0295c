"""Small engines over small tables; every engine that a test builds is closed after it."""

import os

import numpy as np
import pytest

from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.engines.cpu import CpuEngine
from pytest_engram.engines.protocol import EngineSetup
from pytest_engram.engines.tables import fill_table, table_bytes, table_views
from pytest_engram.layout import EngramLayout
from pytest_engram.model import Workload

VOCABULARY, SEED = 1000, 5
LAYOUT = EngramLayout.for_rows(4000, layers=(1, 3), n_heads=2, head_dim=64, compressed_vocab=700)


class Bench:
    """Builds engines over one table; ``buffer`` is that table's bytes."""

    layout, vocabulary, seed = LAYOUT, VOCABULARY, SEED
    token_map = np.arange(VOCABULARY, dtype=np.int32) % LAYOUT.compressed_vocab

    def __init__(self):
        self.buffer = np.zeros(table_bytes(LAYOUT), np.uint8)
        fill_table(self.buffer, LAYOUT, SEED)
        self.engines = []

    def engine(self, backend=None, *, deadline_s=20.0, cpus=None, max_tokens=64, kind=CpuEngine, **workload):
        work = Workload(**{"hidden": 64, "layers": 5, "engram_layers": (1, 3), "tokens": 16, **workload})
        setup = EngineSetup(
            rank=0, layout=LAYOUT, workload=work, tables=table_views(self.buffer, LAYOUT), token_map=self.token_map,
            backend=backend or ReferenceBackend(), cpus=cpus or tuple(sorted(os.sched_getaffinity(0))),
            max_tokens=max_tokens, seed=SEED,
        )  # fmt: skip
        self.engines.append(kind(setup, deadline_s=deadline_s))
        return self.engines[-1]


@pytest.fixture
def bench():
    """One table, and engines over it."""
    made = Bench()
    yield made
    for engine in reversed(made.engines):
        engine.close()

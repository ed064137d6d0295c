"""The check set as a whole: the reference passes it, absences are no passes, real tables and engines are judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_engram.backends.protocol import Launch, TableShard
from pytest_engram.backends.reference import ReferenceBackend, ReferenceHasher
from pytest_engram.cases import storage
from pytest_engram.cases.storage import _Cudart
from pytest_engram.checks import CASES, check, check_engine, compact_cases, explain
from pytest_engram.engines.protocol import StepResult, StepSettings
from pytest_engram.errors import NotMeasurable
from pytest_engram.hashing import EngramLayout, HashBatch, hash_ids, synthetic_token_map
from pytest_engram.rows import lookup_rows, synthetic_rows

BY_NAME = {case.name: case for case in CASES}
ORACLES = ("hash", "slot-cache", "lookup", "shards", "gate")  # what a numpy oracle answers for


class TinyScale(ReferenceBackend):
    """Scale byte 0 is 2^-127, as the e8m0 format says."""

    def lookup(self, shard: TableShard, ids: Any, out: Any, *, cap: int | None = None) -> Launch:
        launch = super().lookup(shard, ids, out, cap=cap)
        out[(shard.scales[:, 0] == 0)[ids[:, 0].clip(0, len(shard.scales) - 1)]] |= 1
        return launch


def _planted(**methods: Any) -> ReferenceBackend:
    """The reference with some methods of its hasher replaced."""
    backend = ReferenceBackend()
    backend.hasher = type("Planted", (ReferenceHasher,), methods)  # type: ignore[method-assign]
    return backend


@pytest.mark.parametrize("case", [case for case in CASES if case.capability in ORACLES and case.contract != "H19"],
                         ids=lambda case: case.name)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_reference_passes(case: Any, seed: int) -> None:
    """The reference backend passes every oracle case for several seeds, and each says what it asserts."""
    sample = check(ReferenceBackend(), case, seed=seed)
    assert (sample.passed, sample.supported, sample.detail) == (True, True, "")
    assert case.run.__doc__


def test_case_names_are_unique_and_gate_0_is_compact() -> None:
    """Names are unique; the compact cases cover padding, DEAD_ID, chunk boundary, prefix hit and rollback."""
    assert len(BY_NAME) == len(CASES)
    compact = {case.name for case in compact_cases()}
    assert compact >= {"dead-blocks-deeper", "window-order", "prefix-hit", "rollback", "bounds", "padded-heads"}
    assert compact < set(BY_NAME)


def test_a_missing_capability_is_not_a_pass() -> None:
    """A case whose capability the backend lacks is not supported, and not passed."""
    backend = ReferenceBackend()
    backend.capabilities = frozenset({"hash"})
    sample = check(backend, BY_NAME["bounds"])
    assert (sample.passed, sample.supported) == (False, False)
    assert "lookup" in sample.detail


def test_a_backend_error_is_a_failed_sample() -> None:
    """An exception of the backend becomes a failed sample with its text."""
    sample = check(_planted(__call__=lambda *_: 1 / 0), BY_NAME["ngrams"])
    assert (sample.passed, sample.supported) == (False, True)
    assert sample.detail == "ZeroDivisionError: division by zero"


def test_not_measurable_is_an_absence_with_its_reason() -> None:
    """A backend that says that it cannot be measured here is not supported, and no case takes that for a refusal."""

    def absent(*_: Any) -> None:
        raise NotMeasurable("no such machine", code="planted")

    for name in ("ngrams", "no-window"):
        sample = check(_planted(__call__=absent), BY_NAME[name])
        assert (sample.passed, sample.supported, sample.detail) == (False, False, "no such machine")


@pytest.mark.parametrize("key", ["scale-byte-0", "L2"])
def test_a_declared_difference_is_shown_and_no_pass(key: str) -> None:
    """A declared difference, by case or contract number, is not supported instead of failed, with what was seen."""
    backend = TinyScale()
    backend.differences = {key: "scale byte 0 is 2^-127 as in the e8m0 format"}
    sample = check(backend, BY_NAME["scale-byte-0"])
    assert (sample.passed, sample.supported) == (False, False)
    assert "as in the e8m0 format" in sample.detail
    assert sample.seen is not None
    assert not check(backend, BY_NAME["bounds"]).detail


def test_a_declared_difference_that_does_not_show_passes() -> None:
    """A declared difference that is not there passes and says so."""
    backend = ReferenceBackend()
    backend.differences = {"L3": "none really"}
    sample = check(backend, BY_NAME["bounds"])
    assert sample.passed
    assert "did not show" in sample.detail


def test_a_hasher_without_dummy_is_not_supported() -> None:
    """H17: a hasher that offers no dummy batch is reported as not supported."""
    sample = check(_planted(dummy=None), BY_NAME["dummy-batch"])
    assert (sample.passed, sample.supported) == (False, False)


def test_explain_names_token_head_layer_expected_and_seen() -> None:
    """A failing sample reads: contract line, token, head, layer, expected, seen."""
    honest = ReferenceHasher.__call__
    sample = check(
        _planted(__call__=lambda self, batch: honest(self, batch) + (np.arange(24, dtype=np.int32) == 5)),
        BY_NAME["ngrams"],
    )
    assert explain(sample).startswith(f"H5 ngrams: token 0, head 5, layer 1; expected {sample.expected}, seen ")
    assert int(str(sample.seen)) == int(str(sample.expected)) + 1


LAYOUT = EngramLayout.for_rows(10_000)
MAP = synthetic_token_map()


def _tables(seed: int = 3) -> list[TableShard]:
    contents = [synthetic_rows(0, rows, 256, layer=i, seed=seed) for i, rows in enumerate(LAYOUT.num_embeddings)]
    return [
        TableShard(weight, scales, 0, LAYOUT.rows(i), 0, LAYOUT.columns, LAYOUT.columns)
        for i, (weight, scales) in enumerate(contents)
    ]


class Engine:
    """The least engine: ids and staged rows through the reference, with an optional fault on the rows.

    Its hidden states are sums over a token's rows; ``spoil`` may change those of a step.
    """

    name, resolution_ns, hold, max_tokens, tolerance = "least", 1, False, 64, 0.08

    def __init__(self, fault: Callable[[Any], Any] = lambda rows: rows, *, seed: int = 3) -> None:
        self.fault, self.shards = fault, _tables(seed)
        self.spoil: Callable[[HashBatch, Any], Any] = lambda _batch, states: states

    def rows(self, batch: HashBatch, _: Any) -> tuple[Any, Any]:
        ids = hash_ids(LAYOUT, batch, MAP)
        rows = np.empty((*ids.shape, 256), np.uint16)
        for layer, shard in enumerate(self.shards):
            out = np.empty((len(ids), LAYOUT.columns, 256), np.uint16)
            lookup_rows(shard, ids[:, layer], out)
            rows[:, layer] = out
        return ids, self.fault(rows)

    def step(self, batch: HashBatch, settings: Any, **_: Any) -> StepResult:
        rows = self.rows(batch, settings)[1].astype(np.uint32) << 16
        return StepResult(0, 0, self.spoil(batch, rows.view(np.float32).sum(axis=(1, 2))))

    def oracle(self, _: HashBatch, rows: Any) -> Any:
        return sum((each.astype(np.uint32) << 16).view(np.float32).sum(axis=1) for each in rows)

    def alone_ns(self, *_: Any) -> int:
        return 0

    def drift(self) -> dict[str, float | str]:
        return {}

    def close(self) -> None: ...


def _checked(engine: Engine, tokens: int = 24) -> dict[str, Any]:
    samples = check_engine(engine, HashBatch.sequence(np.arange(tokens)), StepSettings(), LAYOUT, MAP, 3)
    return {sample.case: sample for sample in samples}


@pytest.mark.parametrize("tokens", [1, 2, 3, 24, 64])
def test_check_engine_passes_on_an_honest_engine(tokens: int) -> None:
    """L1, L11: an engine's staged rows equal the oracle's, and its outputs do not depend on how requests are served."""
    found = _checked(Engine(), tokens)
    assert {case: sample.passed for case, sample in found.items()} == dict.fromkeys(
        ("engine", "engine-edges", "engine-outputs"), True
    )


def test_check_engine_sees_stale_rows() -> None:
    """Rows of the previous step in the staging buffer fail the samples of the rows."""
    found = _checked(Engine(lambda rows: np.roll(rows, 1, axis=0)), 9)
    assert not found["engine"].passed
    assert not found["engine-edges"].passed
    assert found["engine"].layer == 1


def test_check_engine_sees_one_wrong_byte() -> None:
    """L1: one wrong byte in one row that the batch reads, of layer 14, is named with its head."""
    engine = Engine()
    wanted = hash_ids(LAYOUT, HashBatch.sequence(np.arange(24)), MAP)[7, 1, 5]
    engine.shards[1].weight[wanted, 17] ^= 1
    found = _checked(engine)["engine"]
    assert (found.passed, found.head, found.layer) == (False, 5, 14)


def test_check_engine_sees_a_table_of_another_seed() -> None:
    """A stale table, loaded with another seed, fails."""
    assert not _checked(Engine(seed=4))["engine"].passed


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("whole", lambda batch: len(batch.token_ids) == 12),
        ("chunks", lambda batch: batch.positions[0] > 0 and len(batch.token_ids) == 5),
        ("a prefix hit", lambda batch: batch.positions[0] == 2),
        ("rolled-back drafts", lambda batch: batch.positions[0] == 4 and len(batch.token_ids) == 6),
    ],
)
@pytest.mark.parametrize("value", [1.25, np.nan])
def test_check_engine_sees_outputs_that_depend_on_the_way(name: str, wrong: Any, value: float) -> None:
    """L11: states that differ by a quarter, or that are no numbers, in one way only are named with that way."""
    engine, late = Engine(), [1.0]

    def spoil(batch: HashBatch, states: Any) -> Any:
        late[0] = value if wrong(batch) else late[0]
        return states * late[0]

    engine.spoil = spoil
    found = _checked(engine)["engine-outputs"]
    assert (found.passed, found.contract) == (False, "L11")
    assert found.detail.startswith(f"{name}: output ")


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_small_batch_is_served_in_every_way_too(tokens: int) -> None:
    """L11: of a batch of one token twelve are made, so that chunks, windows and drafts still count."""
    engine, seen = Engine(), list[HashBatch]()
    engine.spoil = lambda batch, states: (seen.append(batch), states)[1]
    assert _checked(engine, tokens)["engine-outputs"].passed
    assert {5, 6, 12} <= {len(batch.token_ids) for batch in seen}
    assert any(batch.dead.any() for batch in seen)
    honest = len(seen)
    engine.spoil = lambda batch, states: (seen.append(batch), states * np.where(batch.positions > 1, 2, 1)[:, None])[1]
    assert not _checked(engine, tokens)["engine-outputs"].passed
    assert len(seen) == 2 * honest  # a rank that is wrong meets its peers in as many steps


def test_an_engine_of_few_tokens_is_not_judged_by_its_outputs() -> None:
    """Where twelve tokens do not fit, the outputs are not supported, with the reason, and the rows still judged."""
    engine = Engine()
    engine.max_tokens = 11
    found = _checked(engine, 5)
    sample = found["engine-outputs"]
    assert (sample.passed, sample.supported) == (False, False)
    assert sample.detail == "outputs need 12 tokens in a batch, the engine takes 11"
    assert found["engine"].passed


def test_a_last_bit_is_no_other_output() -> None:
    """What matmuls of other sizes do to the last bits of a state passes."""
    engine = Engine()
    engine.spoil = lambda batch, states: states * (1 + len(batch.token_ids) * 4e-3)
    assert _checked(engine)["engine-outputs"].passed


def test_the_played_cuda_knows_registered_memory_only() -> None:
    """S2: asking CUDA about any other byte, or about none, does not pass for asking about the table's."""
    table, played = np.zeros(8192, np.uint8), _Cudart()
    assert not played.pinned(table[:1])
    played.register(table.ctypes.data, table.nbytes)
    assert played.pinned(table[:1])
    assert played.pinned(table[-1:])
    assert not played.pinned(table[8:8])
    assert not played.pinned(np.zeros(1 << 26, np.uint8)[:1])


def test_counting_files_survives_those_that_go(tmp_path: Path) -> None:
    """A name whose file went between listing and looking hides neither the others nor leaves a folder open."""
    for name in "bd":
        (tmp_path / name).write_bytes(bytes(storage._size()))
    (tmp_path / "a").symlink_to("gone")
    (tmp_path / "c").symlink_to("gone")
    assert (storage._files(str(tmp_path)), storage._files(str(tmp_path / "none"))) == (2, 0)

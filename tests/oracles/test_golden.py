"""The committed golden vectors hold for the package, and the files are what their script writes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_engram.hashing import EngramLayout, HashBatch, hash_ids, synthetic_token_map
from pytest_engram.layout import drawn_multipliers
from pytest_engram.ledger import row_bytes, step_bytes
from pytest_engram.rows import product_table

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
MODEL = EngramLayout.deepseek_v41()


def as_batch(vector: dict[str, Any]) -> HashBatch:
    """A golden vector's inputs with the contract's dtypes."""
    kinds = {"positions": np.int64, "dead": bool, "window_dead": bool}
    names = ("token_ids", "positions", "query_start_loc", "dead", "window", "window_dead")
    return HashBatch(**{name: np.array(vector[name], dtype=kinds.get(name, np.int32)) for name in names})


def test_layout_is_golden(golden: dict[str, Any]) -> None:
    """H3, H4: primes, offsets, row sums, multipliers and byte counts are the published model's."""
    want = golden["layout"]
    assert MODEL.primes.tolist() == want["primes"]
    assert MODEL.multipliers.tolist() == want["multipliers"]
    assert [MODEL.rows(0), MODEL.rows(1)] == want["rows"] == [384_006_168, 384_016_682]
    assert sum(MODEL.num_embeddings) * row_bytes(256) == want["table_bytes"] == 202_758_032_400
    assert step_bytes(1, MODEL).source == want["read_bytes_per_token"] == 48 * row_bytes(256)
    assert step_bytes(1, MODEL).staging == want["staged_bytes_per_token"]


def test_primes_are_consecutive(golden: dict[str, Any]) -> None:
    """H4: the 48 primes run from 16,000,057 to 16,000,889 without a gap or a repetition."""
    flat = [prime for row in golden["layout"]["primes"] for prime in row]
    assert (flat[0], flat[23], flat[24], flat[47]) == (16_000_057, 16_000_463, 16_000_477, 16_000_889)
    assert flat == sorted(set(flat))


def test_this_numpy_draws_the_pinned_multipliers() -> None:
    """H3: the pinned multipliers are what numpy's generator draws today; they are used even if it changes."""
    for index, layer in enumerate(MODEL.layer_ids):
        assert drawn_multipliers(layer, 4, 99_092).tolist() == MODEL.multipliers[index].tolist()


def test_multipliers_keep_products_in_int64(golden: dict[str, Any]) -> None:
    """H3: multipliers are odd, below twice the bound, and no product overflows int64."""
    bound = golden["layout"]["multiplier_bound"]
    assert bound == 46_539_438_283_891
    for value in MODEL.multipliers.ravel().tolist():
        assert value % 2 == 1
        assert value < 2 * bound
        assert value * (99_092 - 1) < 2**63


@pytest.mark.parametrize("name", ["first-chunk", "later-chunk", "dead-token", "image", "unknown-window"])
def test_hash_ids_are_golden(golden: dict[str, Any], name: str) -> None:
    """H5–H8: the committed batches hash to the committed ids."""
    vector = golden["hash_ids"][name]
    assert hash_ids(MODEL, as_batch(vector), synthetic_token_map()).tolist() == vector["ids"]


def test_product_table_is_golden(golden: dict[str, Any]) -> None:
    """L1, L2: all 65,536 products have the committed digest, and the listed ones their value."""
    table = product_table()
    assert hashlib.sha256(table.astype("<u2").tobytes()).hexdigest() == golden["rows"]["sha256_little_endian_u16"]
    for example in golden["rows"]["examples"]:
        assert table[example["scale"] << 8 | example["value"]] == example["bf16"]


def test_files_are_what_the_script_writes(tmp_path: Path, golden: dict[str, Any]) -> None:
    """A fresh run of make_golden.py reproduces every committed file byte by byte."""
    here = Path(__file__).parent
    code = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import make_golden; "
        "make_golden.GOLDEN = pathlib.Path(sys.argv[2]); make_golden.main()"
    )
    subprocess.run([sys.executable, "-c", code, str(here), str(tmp_path)], check=True, timeout=600)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.json" for name in golden)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (GOLDEN / path.name).read_bytes()
        assert json.loads(path.read_text()) == golden[path.stem]

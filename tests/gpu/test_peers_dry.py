"""The script for several GPUs, run without one: everything but the kernels is the real thing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("peers_on_gpu.py")


def test_two_peers_over_one_table(tmp_path: Path) -> None:
    """Two ranks build one table by the protocol, see right rows, take their turns, gather; phases report alone."""
    pytest.importorskip("torch")
    sizes = ["--gib", "0.01", "--engine-gib", "0.01"]
    options = ["--cpu", "--ranks", "2", *sizes, "--rounds", "2", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "peers_on_gpu.jsonl").read_text().splitlines()]
    first, second = (line for line in lines if "receipts" in line)
    assert (first["wrong"], second["wrong"]) == (0, 0)
    assert {len(line["times"][mode]["256"]) for line in (first, second) for mode in ("alone", "all")} == {2}
    assert first["gather"]["256"]["right"] is second["gather"]["256"]["right"] is True
    assert [r["step"] for r in first["receipts"]][:4] == ["create", "map", "policy", "populate"]
    assert next(line for line in lines if "aggregate_gb_s" in line)["aggregate_gb_s"] > 0
    phases = {line["phase"]: line["told"] for line in lines if "phase" in line}
    assert {name: told.split()[0].rstrip(",") for name, told in phases.items()} == {
        "table": "done", "engine": "NOT_MEASURED", "cumem": "NOT_MEASURED"
    }, phases  # fmt: skip

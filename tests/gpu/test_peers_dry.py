"""The script for several GPUs, run without one: everything but the kernels is the real thing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("peers_on_gpu.py")


def test_two_peers_over_one_table(tmp_path: Path) -> None:
    """Two ranks build one table by the protocol, see right rows, take their turns, gather and report."""
    pytest.importorskip("torch")
    options = ["--cpu", "--ranks", "2", "--gib", "0.01", "--rounds", "2", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "peers_on_gpu.jsonl").read_text().splitlines()]
    first, second = (line for line in lines if "receipts" in line)
    assert (first["wrong"], second["wrong"]) == (0, 0)
    assert {len(line["times"][mode]["256"]) for line in (first, second) for mode in ("alone", "all")} == {2}
    assert first["gather"]["256"]["right"] is second["gather"]["256"]["right"] is True
    assert [r["step"] for r in first["receipts"]][:4] == ["create", "map", "policy", "populate"]
    assert lines[-1]["aggregate_gb_s"] > 0

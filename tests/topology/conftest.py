"""Recorded and constructed machines, grown from one JSON file each into a tree that reads like / does."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_engram.model import Claim, Experiment, MetricRule, ServingPlan, Slo, Workload

MACHINES = Path(__file__).parents[2] / "fixtures" / "topologies"


@pytest.fixture
def grow(tmp_path: Path) -> Callable[..., Path]:
    """``grow(name, {path: other content or None})`` → the root of that machine, with files changed or left out."""

    def build(name: str, changes: Mapping[str, str | None] | None = None) -> Path:
        machine = json.loads((MACHINES / f"{name}.json").read_text())
        root = Path(tempfile.mkdtemp(dir=tmp_path))
        for path, content in {**machine["files"], **(changes or {})}.items():
            if content is not None:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(content)
        for path, target in machine["links"].items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)
        return root

    return build


@pytest.fixture
def make_experiment() -> Callable[..., Experiment]:
    """A small valid experiment; keyword arguments replace its fields."""

    def build(**changes: Any) -> Experiment:
        rule = (MetricRule(metric="lookup", direction="down"),)
        slo = Slo(ttft_ms=60.0, itl_ms=20.0)
        load = ServingPlan(rate=9.0, requests=7, prompt_tokens=(3, 5), output_tokens=(1, 2), slo=slo)
        fields: dict[str, Any] = {
            "id": "A1", "title": "one table, node 0 against node 1", "why": "geometry", "claim": Claim.CHARACTERISES,
            "subject": "suite loop", "variable": "policy",
            "arms": {"A": {"policy": "bind:0"}, "B": {"policy": "bind:1"}}, "positive_control": True, "cooldown_s": 0.0,
            "hold": {}, "unit": "allocation", "ranks": 2, "blocks": 8, "aa_level": 0.01, "alpha": 0.025,
            "mechanism": rule, "no_offset": rule, "end_to_end": rule, "guards": rule, "workload": Workload(),
            "serving": load, "memory_nodes": 2,
        }  # fmt: skip
        return Experiment(**{**fields, **changes})

    return build

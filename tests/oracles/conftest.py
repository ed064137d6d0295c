"""The scalar oracle and the golden vectors for the tests of this folder."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

# The same examples on every machine and every run; `HYPOTHESIS_PROFILE=search` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"oracles_{name}", _HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def scalar() -> ModuleType:
    """The independent plain-Python implementation."""
    return _load("scalar")


@pytest.fixture(scope="session")
def scalar_tables(scalar: ModuleType) -> Any:
    """The model's primes, offsets and multipliers by trial division."""
    return scalar.Tables()


@pytest.fixture(scope="session")
def scalar_map(scalar: ModuleType) -> list[int]:
    """The synthetic token map as a list."""
    return scalar.token_map()


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """The committed vectors: file stem -> content."""
    folder = _HERE.parents[1] / "fixtures" / "golden"
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}

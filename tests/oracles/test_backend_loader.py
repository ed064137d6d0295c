"""Backends by entry point or import path, and the reference's receipt."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytest_engram.backends import load_backend
from pytest_engram.backends.reference import ReferenceBackend
from pytest_engram.errors import NotMeasurable, UsageError
from pytest_engram.hashing import EngramLayout, HashBatch, SlotCache, hash_ids, synthetic_token_map


class Strange(ReferenceBackend):
    """Claims a capability that nobody knows."""

    capabilities = frozenset({"hash", "telepathy"})


class Placeless(ReferenceBackend):
    """Runs nowhere."""

    engines = frozenset()


class Half:
    """Has a name and nothing else."""

    name = "half"


class Handless(Half):
    """Declares a lookup that it does not have."""

    engines, capabilities, differences, receipt = frozenset({"cpu"}), frozenset({"lookup"}), {}, dict


class Broken(ReferenceBackend):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no such library")


class Absent(ReferenceBackend):
    """Knows why it cannot run here."""

    def __init__(self) -> None:
        raise NotMeasurable("no GPU", code="no-gpu")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of third-party backends."""
    module = ModuleType("made_up_backends")
    for kind in (Strange, Placeless, Half, Handless, Broken, Absent, ReferenceBackend):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def test_reference_is_found_by_name_and_path(made_up: str) -> None:
    """The reference backend loads by its entry-point name and by import path."""
    for spec in ("reference", f"{made_up}:ReferenceBackend"):
        assert load_backend(spec).name == "reference"


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ("refrence", "unknown-backend", "no such backend; expected one of reference"),
        ("{}:Nothing", "backend-import", "AttributeError"),
        ("no_such_package:Backend", "backend-import", "No module named 'no_such_package'"),
        ("{}:Broken", "backend-import", "OSError: no such library"),
        ("{}:Strange", "backend-protocol", "unknown capabilities .'telepathy'."),
        ("{}:Placeless", "backend-protocol", r"engines \[\]"),
        ("{}:Half", "backend-protocol", "Half lacks engines, capabilities, differences, receipt"),
        ("{}:Handless", "backend-protocol", "Handless lacks lookup"),
    ],
)
def test_bad_backends_are_named(made_up: str, spec: str, code: str, words: str) -> None:
    """A backend that is missing, broken or incomplete is a usage error that names it, the known ones and a way out."""
    with pytest.raises(UsageError, match=words) as caught:
        load_backend(spec.format(made_up))
    assert caught.value.code == code
    assert caught.value.way_out
    assert repr(spec.format(made_up)) in str(caught.value)


def test_a_backend_s_own_absence_is_kept(made_up: str) -> None:
    """A backend that says why it cannot run keeps its own error."""
    with pytest.raises(NotMeasurable, match="no GPU"):
        load_backend(f"{made_up}:Absent")


def test_receipt_has_version_and_hashes() -> None:
    """The receipt proves what runs: a version and one sha256 per file that computes."""
    receipt = ReferenceBackend().receipt()
    assert receipt["backend"] == "reference"
    assert receipt["version"]
    hashes = {name: value for name, value in receipt.items() if name.endswith(".py")}
    assert {"hashing.py", "layout.py", "rows.py"} <= set(hashes)
    assert all(len(value) == 64 for value in hashes.values())


def test_an_unbound_slot_cache_knows_nothing() -> None:
    """H12: a hasher with a slot cache that was never bound is refused at its first batch, not silently stateless."""
    layout, token_map = EngramLayout.for_rows(10_000), synthetic_token_map()
    hasher: Any = ReferenceBackend().hasher(layout, token_map, slot_cache=True)
    batch = HashBatch.sequence([3], start=5, slots=[1], block_table=[0, 0], block_size=4)
    with pytest.raises(UsageError, match="not bound"):
        hasher(batch)
    hasher.bind(8)
    assert np.array_equal(hasher(batch), hash_ids(layout, batch, token_map, SlotCache(8)))


def test_binding_without_a_slot_cache_keeps_the_hasher_stateless() -> None:
    """A hasher without a slot cache ignores a binding: its ids depend on the batch alone."""
    layout, token_map = EngramLayout.for_rows(10_000), synthetic_token_map()
    hasher = ReferenceBackend().hasher(layout, token_map, slot_cache=False)
    hasher.bind(8)
    batch = HashBatch.sequence([3], start=5)
    assert np.array_equal(hasher(batch), hash_ids(layout, batch, token_map))

"""Strict JSON in both directions."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_engram import codec as strict
from pytest_engram.errors import UsageError


def _refuse(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture
def read(tmp_path):
    """What a file with this text reads as."""

    def load(text):
        (tmp_path / "x.json").write_text(text)
        return strict.load(tmp_path / "x.json")

    return load


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('{"a": 1', "line 1 column 8: "),
        ('{\n "a": 1,\n "b": }', "line 3 column 7: "),
        ("not json", "line 1 column 1: "),
        ('{"a": {\n "k": 1,\n "k": 2}, "b": 3}', "key 'k' comes twice"),
        ("[1,\n NaN]", "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_what_is_wrong_is_named(read, text, seen):
    """Truncated and foreign input names its position; a repeated key, a number that is none and a hostile depth too."""
    with pytest.raises(UsageError, match=r"x\.json") as caught:
        read(text)
    assert seen in caught.value.seen


def test_good_json_passes(read):
    """The negative control of the guards: equal keys in different objects and numbers near infinity are fine."""
    assert read('{"a": {"a": 1.7e308}, "b": [{"a": null}]}') == {"a": {"a": 1.7e308}, "b": [{"a": None}]}


def test_bytes_that_are_not_utf8_name_their_offset(tmp_path):
    """A binary file is refused with the first bad byte; a missing one with the system's words."""
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UsageError, match="byte 7 is not UTF-8"):
        strict.load(path)
    with pytest.raises(UsageError, match="No such file"):
        strict.load(tmp_path / "absent.json")


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_TREES = st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(), _TREES, max_size=4))
def test_anything_becomes_strict_json(tree):
    """X4: any tree, NaN and infinities included, is written so that the strictest reader takes it back."""
    clean, lost = strict.finite(tree)
    assert json.loads(strict.dumps(clean), parse_constant=_refuse) == clean
    assert strict.finite(clean) == (clean, [])
    assert bool(lost) == (clean != tree)


def test_lost_numbers_are_named():
    """X4: null in place of NaN is not silent: its path is listed."""
    clean, lost = strict.finite({"stats": [1.0, float("nan")], "ops": float("inf")})
    assert clean == {"stats": [1.0, None], "ops": None}
    assert lost == ["$.stats[1]", "$.ops"]


def test_dumps_refuses_what_was_not_cleaned():
    """The writer itself never writes a NaN."""
    with pytest.raises(ValueError, match="Out of range float"):
        strict.dumps({"x": float("nan")})


def test_gzipped_files_read_like_plain_ones(tmp_path):
    """A name that ends in .gz is unpacked; a torn or a plain file of that name is refused by its name."""
    whole = gzip.compress(b'{"a": 1}')
    for name, data in (("whole", whole), ("torn", whole[:-9]), ("plain", b'{"a": 1}')):
        (tmp_path / f"{name}.json.gz").write_bytes(data)
    assert strict.load(tmp_path / "whole.json.gz") == {"a": 1}
    for name in ("torn", "plain"):
        with pytest.raises(UsageError, match=f"{name}.json.gz"):
            strict.load(tmp_path / f"{name}.json.gz")

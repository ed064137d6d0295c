"""The token map: which tokens share an id (contract H1, H2)."""

from __future__ import annotations

import pytest

from pytest_engram.errors import UsageError
from pytest_engram.hashing import build_token_map

TEXTS = [
    (" The", "ĠThe"), ("the", "the"), ("THE", "THE"), ("é", "Ã©"), ("e\u0301", "eÌģ"), ("E", "E"),
    (" ", "Ġ"), ("", "<empty>"), ("\n", "Ċ"), (" \t\r\n ", "ĠĉčĊĠ"), ("\ufffd", "Ã"), ("\ufffd", "Ä"),
    ("ﬁ", "fi1"),
    ("FI", "fi2"), ("a  b", "a1"), ("A\tB", "a2"), ("\x1c", "fs"), ("ΑΣ", "s1"), ("ας", "s2"), ("ασ", "s3"),
]  # fmt: skip


def ids() -> dict[str, int]:
    """Raw token -> compressed id."""
    mapping, _ = build_token_map(TEXTS)
    return {raw: int(new) for (_, raw), new in zip(TEXTS, mapping, strict=True)}


def test_case_space_and_accents_fold() -> None:
    """H1: " The", "the" and "THE" share an id; so do composed and decomposed accents, ligatures and inner space."""
    found = ids()
    assert found["ĠThe"] == found["the"] == found["THE"]
    assert found["Ã©"] == found["eÌģ"] == found["E"]
    assert found["fi1"] == found["fi2"]
    assert found["a1"] == found["a2"]


def test_one_space_survives() -> None:
    """H1: a text of white space only is one space, and is not merged with the empty text."""
    found = ids()
    assert found["Ġ"] == found["Ċ"] == found["ĠĉčĊĠ"]
    assert found["Ġ"] != found["<empty>"]


def test_partial_bytes_stay_apart() -> None:
    """H1: tokens that are part of a UTF-8 sequence are keyed by their raw form."""
    found = ids()
    assert found["Ã"] != found["Ä"]


def test_lower_case_has_no_context() -> None:
    """H1: lower-casing is per character: a capital sigma at a word's end is the medial one."""
    found = ids()
    assert found["s1"] == found["s3"]
    assert found["s1"] != found["s2"]


def test_new_ids_come_in_first_seen_order() -> None:
    """H1: new ids are numbered in the order in which their key is first seen."""
    mapping, size = build_token_map([("b", "b"), ("a", "a"), ("B", "B"), ("c", "c")])
    assert mapping.tolist() == [0, 1, 0, 2]
    assert (size, mapping.dtype.name) == (3, "int32")


def test_a_wrong_size_is_refused() -> None:
    """H2: a compressed vocabulary that differs from the configuration's is refused at start."""
    build_token_map(TEXTS[:3], expected_size=1)
    with pytest.raises(UsageError, match="1 compressed ids; expected 2") as caught:
        build_token_map(TEXTS[:3], expected_size=2)
    assert caught.value.code == "token-map-size"

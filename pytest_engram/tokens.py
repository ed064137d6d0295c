"""Token ids to the smaller id space that n-grams are hashed over (contract H1, H2)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pytest_engram.errors import UsageError

_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_LONE_SPACE = "\ue000"  # stands for a text that is one space while the ends are stripped


def build_token_map(
    tokens: Iterable[tuple[str, str]], *, expected_size: int | None = None
) -> tuple[NDArray[np.int32], int]:
    """(int32 [vocabulary] token id -> compressed id, number of compressed ids).

    ``tokens`` gives each id's (decoded text with special tokens kept, raw token) in id order.  Tokens whose
    normalised texts agree share an id; new ids come in first-seen order.  Raises ``UsageError`` if the size is not
    ``expected_size``: every multiplier derives from it (H2).
    """
    ids: dict[str, int] = {}
    found = [ids.setdefault(_key(text, raw), len(ids)) for text, raw in tokens]
    if expected_size is not None and len(ids) != expected_size:
        raise UsageError(
            f"{len(ids)} compressed ids", code="token-map-size", who="token map", expected=str(expected_size),
            way_out="use the tokenizer that the checkpoint was trained with",
        )  # fmt: skip
    return np.array(found, dtype=np.int32), len(ids)


def synthetic_token_map(compressed: int = 99_092, vocabulary: int = 129_280) -> NDArray[np.int32]:
    """A map int32 [vocabulary] onto all of ``compressed`` ids, without a tokenizer; no id maps to itself by rule."""
    step = next(prime for prime in (1_000_003, 1_000_033) if compressed % prime)
    return ((np.arange(vocabulary, dtype=np.int64) * step + 17) % compressed).astype(np.int32)


def _key(text: str, raw: str) -> str:
    return raw if "\ufffd" in text else _normalised(text) or text  # U+FFFD: part of a UTF-8 sequence


def _normalised(text: str) -> str:
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = (char for char in plain if not unicodedata.category(char).startswith("M"))
    lower = "".join(char.lower() for char in bare)  # per character: no context rule for a final sigma
    spaced = re.sub(r"[ \t\r\n]+", " ", lower)  # other white space stays
    return (_LONE_SPACE if spaced == " " else spaced.strip(_WHITE_SPACE)).replace(_LONE_SPACE, " ")

"""Strict JSON: what is refused on the way in names its line and column; what is not finite never gets out."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any

from pytest_engram.errors import UsageError

_WAY_OUT = "pass a complete file that pytest-engram wrote"


class _RefusedError(ValueError):
    """Valid for Python's reader, not for ours: a key that comes twice, or NaN."""


def load(path: Path) -> Any:
    """The tree in a file; a ``UsageError`` names the file, line and column of what is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _usage(path, error.strerror or str(error), "unreadable") from None
    try:
        return loads(data.decode("utf-8"), source=str(path))
    except UnicodeDecodeError as error:
        raise _usage(path, f"byte {error.start} is not UTF-8", "bad-json") from None


def loads(text: str, *, source: str = "JSON") -> Any:
    """Like :func:`json.loads`, but a duplicate key, NaN or Infinity is a ``UsageError`` with its position."""
    if not text.strip():
        raise _usage(source, "line 1 column 1: the file is empty", "empty-file")
    try:
        return _decode(text)
    except json.JSONDecodeError as error:
        raise _usage(source, f"line {error.lineno} column {error.colno}: {error.msg}", "bad-json") from None
    except RecursionError:
        raise _usage(source, "nested too deeply", "bad-json") from None
    except _RefusedError as error:
        raise _usage(source, f"{_position(text)}: {error}", "bad-json") from None


def finite(tree: Any, path: str = "$") -> tuple[Any, list[str]]:
    """The tree with NaN and infinities replaced by null, and the paths where that happened."""
    if isinstance(tree, dict):
        cells = {str(key): finite(value, f"{path}.{key}") for key, value in tree.items()}
        return {key: value for key, (value, _) in cells.items()}, [
            lost for _, names in cells.values() for lost in names
        ]
    if isinstance(tree, (list, tuple)):
        parts = [finite(value, f"{path}[{number}]") for number, value in enumerate(tree)]
        return [value for value, _ in parts], [name for _, names in parts for name in names]
    if isinstance(tree, float) and not math.isfinite(tree):
        return None, [path]
    return tree, []


def dumps(tree: Any) -> bytes:
    """UTF-8 JSON that every strict reader accepts; raises ``ValueError`` for NaN, so call :func:`finite` first."""
    return (json.dumps(tree, allow_nan=False, ensure_ascii=False, indent=1) + "\n").encode()


def _decode(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) == len(pairs):
        return tree
    twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
    raise _RefusedError(f"key {twice!r} comes twice in the object that ends here")


def _no_constant(name: str) -> Any:
    raise _RefusedError(f"{name} is not JSON")


def _position(text: str) -> str:
    """Where the reader gave up: the shortest prefix that is refused rather than merely incomplete."""

    def refused(length: int) -> bool:
        try:
            _decode(text[:length])
        except json.JSONDecodeError:
            return False
        except _RefusedError:
            return True
        return False

    end = bisect_left(range(len(text)), True, key=refused) - 1  # noqa: FBT003 - the value that is searched
    line = text.count("\n", 0, end) + 1
    return f"line {line} column {end - text.rfind(chr(10), 0, end)}"


def _usage(source: Path | str, seen: str, code: str) -> UsageError:
    return UsageError(seen, code=code, where=str(source), expected="strict JSON", way_out=_WAY_OUT)

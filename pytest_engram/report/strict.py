"""Strict JSON: what is refused on the way in names its line and column; what is not finite never gets out."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from pytest_engram.errors import UsageError


def load(path: Path) -> Any:
    """The tree in a (perhaps gzipped) file; a ``UsageError`` names the file, line and column of what is wrong."""
    try:
        data = path.read_bytes()
        return loads((gzip.decompress(data) if path.suffix == ".gz" else data).decode(), source=str(path))
    except (OSError, EOFError, zlib.error) as error:
        _refuse(path, getattr(error, "strerror", None) or str(error))
    except UnicodeDecodeError as error:
        _refuse(path, f"byte {error.start} is not UTF-8")


def loads(text: str, *, source: str = "JSON") -> Any:
    """Like :func:`json.loads`, but a duplicate key, NaN or Infinity is a ``UsageError`` with its position."""
    try:
        return _decode(text)
    except json.JSONDecodeError as error:
        wrong = error.msg if text.strip() else "the file is empty"
        _refuse(source, f"line {error.lineno} column {error.colno}: {wrong}")
    except RecursionError:
        _refuse(source, "nested too deeply")
    except ValueError as error:  # raised by our own hooks, which are told no position
        _refuse(source, f"{_position(text)}: {error}")


def finite(tree: Any, root: str = "$") -> tuple[Any, list[str]]:
    """The tree with NaN and infinities replaced by null, and the paths where that happened."""
    lost: list[str] = []

    def clean(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {str(key): clean(inner, f"{path}.{key}") for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(inner, f"{path}[{number}]") for number, inner in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            return lost.append(path)
        return value

    return clean(tree, root), lost


def dumps(tree: Any) -> bytes:
    """UTF-8 JSON that every strict reader accepts; raises ``ValueError`` for NaN, so call :func:`finite` first."""
    return (json.dumps(tree, allow_nan=False, ensure_ascii=False, indent=1) + "\n").encode()


def _decode(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f"key {key!r} comes twice in the object that ends here")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _position(text: str) -> str:
    """Where the reader gave up: the shortest prefix that is refused rather than merely incomplete."""

    def refused(length: int) -> bool:
        try:
            _decode(text[:length])
        except ValueError as error:
            return not isinstance(error, json.JSONDecodeError)
        return False

    end = bisect_left(range(len(text)), True, key=refused) - 1  # noqa: FBT003 - the value that is searched
    return f"line {text.count(chr(10), 0, end) + 1} column {end - text.rfind(chr(10), 0, end)}"


def _refuse(source: Path | str, seen: str) -> NoReturn:
    raise UsageError(
        seen, code="bad-json", where=str(source), expected="strict JSON",
        way_out="pass a complete file that pytest-engram wrote",
    ) from None  # fmt: skip

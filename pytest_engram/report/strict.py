"""Strict JSON: what is refused on the way in names its line and column; what is not finite never gets out."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from pytest_engram.errors import UsageError


def load(path: Path) -> Any:
    """The tree in a (perhaps gzipped) file; a ``UsageError`` names the file and what is wrong in which line and column.

    A duplicate key, NaN and Infinity are wrong, too.
    """
    text = ""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        seen = f"line {error.lineno} column {error.colno}: {error.msg if text.strip() else 'the file is empty'}"
    except UnicodeDecodeError as error:
        seen = f"byte {error.start} is not UTF-8"
    except (OSError, EOFError, zlib.error, RecursionError, ValueError) as error:
        seen = getattr(error, "strerror", None) or str(error)
    expected, way = "strict JSON", "pass a complete file that pytest-engram wrote"
    raise UsageError(seen, code="bad-json", where=str(path), expected=expected, way_out=way)


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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f"key {key!r} comes twice in the object that ends here")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

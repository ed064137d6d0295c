"""Records to strict JSON and back; the only module that knows how a record looks on disk.

What is refused on the way in names its line and column; what is not finite never gets out.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from pytest_engram.errors import UsageError

Record = TypeVar("Record")


def encode(record: Any) -> bytes:
    """UTF-8 JSON of a record; NaN and infinities become null, numpy scalars are refused by msgspec."""
    return msgspec.json.encode(record)


def to_builtins(record: Any) -> Any:
    """Dicts, lists and scalars that any JSON writer accepts."""
    return msgspec.to_builtins(record, str_keys=True)


def decode(data: bytes | str, kind: type[Record], *, source: str = "JSON") -> Record:
    """The record in ``data``; a ``UsageError`` names the file and the position or field that is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # ValidationError is a DecodeError
        raise _bad(str(error), source, f"a {kind.__name__} record") from None


def from_builtins(tree: Any, kind: type[Record], *, source: str = "JSON") -> Record:
    """Like :func:`decode`, from an already parsed tree."""
    try:
        return msgspec.convert(tree, type=kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _bad(str(error), source, f"a {kind.__name__} record") from None


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside the target, then rename: a reader sees the old file or the whole new one, never 0 bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load(path: Path) -> Any:
    """The tree in a (perhaps gzipped) file; a ``UsageError`` names the file and what is wrong in which line and column.

    A duplicate key, NaN and Infinity are wrong, too.
    """
    text = ""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole)
    except json.JSONDecodeError as error:
        seen = f"line {error.lineno} column {error.colno}: {error.msg if text.strip() else 'the file is empty'}"
    except UnicodeDecodeError as error:
        seen = f"byte {error.start} is not UTF-8"
    except (OSError, EOFError, zlib.error, RecursionError, ValueError) as error:
        seen = getattr(error, "strerror", None) or str(error)
    raise _bad(seen, str(path), "strict JSON")


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


def _bad(seen: str, where: str, expected: str) -> UsageError:
    way_out = "pass a complete file that pytest-engram wrote"
    return UsageError(seen, code="bad-json", where=where, expected=expected, way_out=way_out)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f"key {key!r} comes twice in the object that ends here")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _whole(text: str) -> int:
    if len(text) > 20:  # beyond 64 bits
        raise ValueError(f"{text[:20]}… is larger than any number here")
    return int(text)

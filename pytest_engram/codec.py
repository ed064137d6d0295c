"""Records to strict JSON and back; the only module that knows how a record looks on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

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
        raise UsageError(
            str(error), code="bad-json", where=source, expected=f"a {kind.__name__} record",
            way_out="pass a complete file that pytest-engram wrote",
        ) from None  # fmt: skip


def from_builtins(tree: Any, kind: type[Record], *, source: str = "JSON") -> Record:
    """Like :func:`decode`, from an already parsed tree."""
    try:
        return msgspec.convert(tree, type=kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise UsageError(str(error), code="bad-json", where=source, expected=f"a {kind.__name__} record") from None


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

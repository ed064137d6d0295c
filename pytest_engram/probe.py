"""What an engine or its plugin imports to say where its tables are and when things happened: JSON lines, no more.

Standard library only.  ``$PYTEST_ENGRAM_PROBE`` names a folder, read once at import; each process appends to its own
``PID.jsonl`` there, one ``write`` per line.  Unset, a call returns at once.  Nothing raises into the engine: the first
failure of a process is one line on stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "PYTEST_ENGRAM_PROBE"
_folder = os.environ.get(VARIABLE)
_files: dict[int, int] = {}  # pid -> descriptor: a forked child opens its own
_complained: set[int] = set()


def record_table(
    *, data_ptr: int, nbytes: int, head_range: tuple[int, int] | None = None, group: str | None = None,
    backing: str | None = None, path: str | None = None,
) -> None:  # fmt: skip
    """One table in host memory: first byte's address, length in bytes, heads [first, end), TP/DP group, identity.

    ``backing`` is "major:minor:inode" as in smaps where known, ``path`` the object's name when it was created.
    """
    if _folder:
        _append("table", data_ptr=data_ptr, nbytes=nbytes, head_range=head_range, group=group, backing=backing,
                path=path)  # fmt: skip


def mark(kind: str, layer: int, rank: int, t_ns: int | None = None) -> None:
    """One moment of a timeline, e.g. ``mark("lookup-submit", 1, 0)``; ``t_ns``: CLOCK_MONOTONIC ns, now if None."""
    if _folder:
        _append("mark", mark=kind, layer=layer, rank=rank, t_ns=time.monotonic_ns() if t_ns is None else t_ns)


def started(stat: str) -> int:
    """Field 22 of /proc/PID/stat, clock ticks since boot: tells a process from a later one with the same pid."""
    return int(stat.rpartition(")")[2].split()[19])


def read_records(file: Path) -> tuple[list[dict[str, Any]], int]:
    """(The records of one process, how many lines were torn); raises ``OSError``."""
    lines, records = file.read_bytes().splitlines(), list[dict[str, Any]]()
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            records.append(dict(json.loads(line)))
    return records, len(lines) - len(records)


def _append(kind: str, **fields: Any) -> None:
    pid = os.getpid()
    try:
        if pid not in _files:
            _files[pid] = _open(pid)
        os.write(_files[pid], _line(kind, fields))
    except Exception as error:  # noqa: BLE001 - a probe must never stop an engine
        if pid not in _complained:
            _complained.add(pid)
            with contextlib.suppress(Exception):
                sys.stderr.write(f"pytest-engram probe: {error!r}; records of process {pid} are incomplete\n")


def _open(pid: int) -> int:
    """The file, its first line naming the process and tying the two clocks together."""
    file = os.open(f"{_folder}/{pid}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    clocks = {"monotonic_ns": time.monotonic_ns(), "time_ns": time.time_ns()}
    os.write(file, _line("process", {"pid": pid, "started": started(Path("/proc/self/stat").read_text()), **clocks}))
    return file


def _line(kind: str, fields: dict[str, Any]) -> bytes:
    text = json.dumps({"kind": kind, **fields}, allow_nan=False,
                      default=lambda one: int(one) if hasattr(one, "__index__") else str(one))  # fmt: skip
    return f"{text}\n".encode()

"""The module that engines import: cheap when unset, one whole line per call, never an exception into the engine."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pytest_engram
from pytest_engram import probe
from pytest_engram.audit.judging import look
from pytest_engram.audit.reading import Limits, Source
from pytest_engram.model import Topology
from pytest_engram.numa import _syscalls

EMPTY = Topology(nodes=(), sockets={})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A probe that writes to a folder of this test."""
    monkeypatch.setattr(probe, "_folder", str(tmp_path))
    monkeypatch.setattr(probe, "_files", {})
    monkeypatch.setattr(probe, "_complained", set())
    yield tmp_path
    for descriptor in probe._files.values():
        os.close(descriptor)


def records(folder: Path, pid: int | None = None) -> list[dict[str, Any]]:
    return probe.read_records(folder / f"{pid or os.getpid()}.jsonl")[0]


@pytest.mark.alone
def test_unset_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable a call takes less than 1 µs and opens nothing."""
    monkeypatch.setattr(probe, "_folder", None)
    call = partial(probe.mark, "submit", 1, 0)
    best = min(timeit.repeat(call, timer=time.thread_time, number=2_000, repeat=9)) / 2_000
    assert best < 1e-6
    assert probe._files == {}


def test_records_and_marks(folder: Path) -> None:
    """A process line that ties the clocks, then tables and marks as they came."""
    probe.record_table(data_ptr=4096, nbytes=100, head_range=(0, 12), group="DP0", backing="00:1a:7", path="/dev/shm/x")
    probe.mark("lookup-submit", 14, 3, t_ns=5)
    probe.mark("lookup-done", 14, 3)
    process, table, first, second = records(folder)
    assert process["pid"] == os.getpid()
    assert process["started"] == probe.started(Path("/proc/self/stat").read_text())
    picked = [table[name] for name in ("data_ptr", "head_range", "group", "backing")]
    assert picked == [4096, [0, 12], "DP0", "00:1a:7"]
    assert first == {"kind": "mark", "mark": "lookup-submit", "layer": 14, "rank": 3, "t_ns": 5}
    assert second["t_ns"] > process["monotonic_ns"]


def test_the_variable_is_read_at_import(tmp_path: Path) -> None:
    """An engine's process that starts with the variable set records; the file is one per process, forks too."""
    code = "import os; from pytest_engram import probe; probe.mark('a', 1, 0); pid = os.fork(); probe.mark('b', 1, 0)\n"
    code += "os.waitpid(pid, 0) if pid else os._exit(0)"
    paths = {probe.VARIABLE: str(tmp_path), "PYTHONPATH": str(Path(pytest_engram.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=os.environ | paths, check=True)
    found = [probe.read_records(file)[0] for file in tmp_path.iterdir()]
    assert sorted([one["mark"] for one in some if one["kind"] == "mark"] for some in found) == [["a", "b"], ["b"]]


def test_nothing_is_raised(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is absent, NaN and foreign objects cost one line on stderr at most, never an exception."""
    probe.mark("odd", object(), 0)  # type: ignore[arg-type]
    assert records(folder)[-1]["layer"].startswith("<object")
    assert capsys.readouterr().err == ""
    probe.mark("nan", 1, 0, t_ns=float("nan"))  # type: ignore[arg-type]
    probe.mark("nan", 1, 0, t_ns=float("nan"))  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("pytest-engram probe: ValueError") == 1
    monkeypatch.setattr(probe, "_folder", "/nonexistent")
    monkeypatch.setattr(probe, "_complained", set())
    monkeypatch.setattr(probe, "_files", {})
    probe.record_table(data_ptr=1, nbytes=1)
    assert "No such file" in capsys.readouterr().err


def test_lines_of_threads_stay_whole(folder: Path) -> None:
    """Concurrent appends give whole lines; a torn one, as a full disk leaves it, is counted and skipped."""
    threads = [threading.Thread(target=lambda: [probe.mark("x", 1, n) for n in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file = folder / f"{os.getpid()}.jsonl"
    found, torn = probe.read_records(file)
    assert (sum(one["kind"] == "mark" for one in found), torn) == (800, 0)
    with file.open("a") as end:
        end.write('{"kind": "ma')
    assert probe.read_records(file)[1] == 1


def test_the_audit_uses_recorded_ranges(folder: Path) -> None:
    """A recorded range is the table, clipped to its pages, in place of the mapping that it lies in."""
    with mmap.mmap(-1, 64 << 12) as mapped:
        mapped[:] = b"x" * len(mapped)
        address = _syscalls.address_of(mapped)
        probe.record_table(data_ptr=address + (8 << 12) + 64, nbytes=(4 << 12) - 64, head_range=(0, 12), group="DP1")
        limits = Limits(min_bytes=4096, probe=folder)
        kinds = {table.name: table for table in look(Source(), [os.getpid()], limits, EMPTY).tables}
        table = kinds["heads [0, 12], group DP1, no path"]
        assert (table.kind, table.nbytes, table.pages, table.unplaced) == ("probe", 4 << 12, {0: 4}, {})
        assert not any(f"{address:x}" in other.key for other in kinds.values())
        assert table.key.endswith(f"+{8 << 12:#x}")


@pytest.mark.parametrize(("change", "code"), [("started", "stale-probe"), ("range", "not-mapped")])
def test_records_that_do_not_fit_are_gaps(folder: Path, change: str, code: str) -> None:
    """A file of an earlier process with this pid, and a range that is gone, are named gaps, not tables."""
    probe.record_table(data_ptr=4096 if change == "range" else 1 << 40, nbytes=4096)
    if change == "started":
        file = folder / f"{os.getpid()}.jsonl"
        file.write_text(file.read_text().replace('"started": ', '"started": 9'))
    report = look(Source(), [os.getpid()], Limits(probe=folder), EMPTY)
    assert code in [gap.code for gap in report.workers[0].problems if gap.where == "probe"]
    assert not any(table.kind == "probe" for table in report.tables)


def test_numpys_numbers_are_numbers(folder: Path) -> None:
    """An address or a head number that is numpy's is an integer in the record, not its text."""
    probe.record_table(data_ptr=np.int64(4096), nbytes=np.uint64(64), head_range=(np.int32(0), np.int32(3)))
    table = records(folder)[-1]
    assert (table["data_ptr"], table["nbytes"], table["head_range"]) == (4096, 64, [0, 3])


@pytest.mark.parametrize("line", ["7", "null", "[1]", '"x"'])
def test_a_line_that_is_no_record_is_torn(folder: Path, line: str) -> None:
    """JSON that is no object is a torn line like any other."""
    file = folder / "1.jsonl"
    file.write_text(f'{line}\n{{"kind": "mark"}}\n')
    assert probe.read_records(file) == ([{"kind": "mark"}], 1)


@pytest.mark.parametrize("address", [1 << 40, "text", None])
def test_one_bad_record_does_not_hide_the_others(folder: Path, address: Any) -> None:
    """A table that was freed, or a record that another program wrote, is a gap beside the tables that are there."""
    with mmap.mmap(-1, 4 << 12) as mapped:
        mapped[:] = b"x" * len(mapped)
        probe.record_table(data_ptr=address, nbytes=4096)
        probe.record_table(data_ptr=_syscalls.address_of(mapped), nbytes=4096)
        report = look(Source(), [os.getpid()], Limits(probe=folder), EMPTY)
    assert [table.pages for table in report.tables if table.kind == "probe"] == [{0: 1}]
    assert [gap.where for gap in report.workers[0].problems].count("probe") == 1


def test_a_relative_folder_is_the_workers(tmp_path: Path) -> None:
    """A folder that the variable names from where the engine was started is found from anywhere."""
    (tmp_path / "here").mkdir()
    code = "import ctypes, sys; from pytest_engram import probe; kept = ctypes.create_string_buffer(1 << 22)\n"
    code += "ctypes.memset(kept, 1, 1 << 22); probe.record_table(data_ptr=ctypes.addressof(kept), nbytes=1 << 22)\n"
    code += "print('ready', flush=True); sys.stdin.read()"
    paths = {probe.VARIABLE: "here", "PYTHONPATH": str(Path(pytest_engram.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | paths, cwd=tmp_path, stdin=-1, stdout=-1, text=True
    ) as engine:
        assert engine.stdout
        assert engine.stdout.readline() == "ready\n"
        tables = look(Source(), [engine.pid], Limits(), EMPTY).tables
        engine.communicate()
    assert [sum(table.pages.values()) for table in tables if table.kind == "probe"] in ([1024], [1025])

"""What a machine may hold against the audit: odd names, odd mappings, processes that end, texts that lie."""

from __future__ import annotations

import errno
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pytest_engram.audit as command
from pytest_engram.audit.judging import Report, engines, look
from pytest_engram.audit.reading import Limits, Source, _asked
from pytest_engram.model import Topology

MIB = 1 << 20
PAGES = MIB // 4096


def audit(*words: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The command's exit code and its output."""
    code = command.main([str(word) for word in words])
    return code, capsys.readouterr().out


def live(*pids: int, **limits: Any) -> Report:
    """One look at running processes."""
    return look(Source(), pids, Limits(numa_maps=True, **limits), Topology(nodes=(), sockets={}))


def codes(report: Report) -> list[str]:
    return [one.code for one in report.findings]


def judged(recorded: Any, topology: Topology, placed: Callable[[int, int], int], **limits: Any) -> Report:
    return look(recorded.source(placed), (101,), Limits(**limits), topology)


@pytest.mark.parametrize(
    "odd", [" a b", "\n\nFinding", "\rcr", "\x0cff", "\u2028", "\x85", "\x1b[2J", "\udcff", "\\040"]
)
def test_no_name_hides_a_table(
    serve: Callable[..., Any], shm_name: str, odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """K30: whatever another program calls its file, all tables of the worker are read and no line is forged."""
    name = shm_name + odd
    try:
        serve(name, MIB).touch(0, 9)
        server = serve(name, MIB)
        server.touch(0, 256)
        (table,) = (one for one in live(server.pid).tables if one.name.startswith(shm_name))
        assert (table.pages, table.views[0].numa_maps_bytes) == ({0: PAGES}, {0: MIB})
        _, text = audit(server.pid, capsys=capsys)
        assert all(line.isprintable() for line in text.splitlines())
        assert text.splitlines().count("Finding") == 1
    finally:
        os.unlink(name)


@pytest.mark.parametrize("touched", [(0,), (1,), (0, 1)])
def test_a_table_mapped_twice_counts_once(serve: Callable[..., Any], shm_name: str, touched: Sequence[int]) -> None:
    """K29: a page is placed if either mapping has touched it; numa_maps counts both, which contradicts nothing."""
    server = serve(shm_name, MIB, "--twice")
    for which in touched:
        server.touch(0, 256, which=which)
    report = live(server.pid)
    assert [(one.pages, one.nbytes) for one in report.tables] == [({0: PAGES}, MIB)]
    assert report.tables[0].views[0].numa_maps_bytes is None
    assert codes(report) == []


def test_a_private_copy_is_a_table_of_its_own(serve: Callable[..., Any], shm_name: str) -> None:
    """Pages that a private mapping has copied are other pages than the shared object's, and no contradiction."""
    server = serve(shm_name, MIB, "--private")
    server.touch(0, 256)
    server.touch(0, 50, which=1)
    report = live(server.pid)
    shared, private = sorted(report.tables, key=lambda table: len(table.key))
    assert private.key.startswith(f"{shared.key}+{server.pid}@")
    assert [table.pages for table in (shared, private)] == [{0: PAGES}, {0: 50}]
    assert codes(report) == []


@pytest.mark.parametrize("asked", [0, 64, 1 << 20])
def test_parts_far_apart_are_both_asked(serve: Callable[..., Any], shm_name: str, asked: int) -> None:
    """Two mapped MiB of a 64 TiB object are two MiB of table: the hole between them is not sampled in their place."""
    server = serve(shm_name, MIB, "--far")
    server.touch(0, 256)
    server.touch(0, 256, which=1)
    (table,) = live(server.pid, pages=asked).tables
    assert (table.nbytes, table.unplaced) == (2 * MIB, {})
    assert table.pages == {0: min(asked or 2 * PAGES, 2 * PAGES)}


def test_thousands_of_parts_are_one_table(recorded: Any, two_nodes: Topology) -> None:
    """An object mapped page by page in 20,000 places is one table, each page asked once."""
    recorded.worker(101)
    lines = (f"{recorded.START + n * 8192:x}-{recorded.START + n * 8192 + 4096:x} rw-s {n * 8192:08x} 00:1a 77 "
             "/dev/shm/vllm_engram_a\n" for n in range(20_000))  # fmt: skip
    recorded.write("proc/101/maps", "".join(lines))
    (table,) = judged(recorded, two_nodes, lambda pid, address: 1).tables
    assert (table.pages, table.nbytes, table.bound) == ({1: 20_000}, 20_000 * 4096, 0.0)


def test_the_bound_counts_placed_pages_only(recorded: Any, two_nodes: Topology) -> None:
    """Of 512 asked pages 16 lie somewhere: their shares are known to ±24.5 %, so a quarter away is no finding yet."""
    recorded.worker(101, pages=1024)

    def placed(pid: int, address: int) -> int:
        stratum = (address - recorded.START) // 8192
        return -errno.ENOENT if stratum % 32 else int(stratum % 128 == 0)

    report = judged(recorded, two_nodes, placed, pages=512)
    assert (report.tables[0].pages, report.tables[0].bound) == ({0: 12, 1: 4}, 0.245)
    assert (report.tables[0].views[0].remote, codes(report)) == (0.25, [])
    assert codes(judged(recorded, two_nodes, placed, pages=0)) == ["remote-pages"]


def test_libraries_of_a_checkout_are_no_tables(recorded: Any, two_nodes: Topology) -> None:
    """Only a file's own name makes it a table, and never a library's."""
    for path in ("/home/x/pytest-engram/venv/lib/libm.so.6", "/opt/vllm_engram_ops.cpython-312-x86_64-linux-gnu.so"):
        recorded.worker(101, path=path)
        assert judged(recorded, two_nodes, lambda pid, address: 0).tables == ()
    recorded.worker(101, path="/dev/shm/vllm_engram_so")
    assert len(judged(recorded, two_nodes, lambda pid, address: 0).tables) == 1


@pytest.mark.parametrize(("asked", "shown", "found"), [
    ("0", "bind=static:0", []), ("0", "bind=static|balancing:1", ["membind-dropped"]), ("all", "bind:0-1", []),
    ("0-", "bind:0", []), ("0-99999999999", "bind:0", []), ("0", "prefer:0", ["membind-dropped"]),
])  # fmt: skip
def test_requests_in_other_words(recorded: Any, two_nodes: Topology, asked: str, shown: str, found: list[str]) -> None:
    """A policy with mode flags is still that policy; a request that names no nodes cannot be contradicted."""
    recorded.worker(101, title=f"numactl --membind={asked} vllm", policy=shown)
    assert codes(judged(recorded, two_nodes, lambda pid, address: 0)) == found


def test_a_title_does_not_hold_the_audit_up() -> None:
    """A command line is anybody's text: sixty words that may be read in two ways are read in one."""
    assert _asked(["numactl " + "-1 " * 60 + "x"]) == {}
    assert _asked(["numactl -C 0-3 -m 1 vllm"]) == {"membind": "1"}


def test_a_dangling_name_is_a_leftover(
    serve: Callable[..., Any], shm_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """K32: a link to nowhere under a table's name is named like any other leftover."""
    server = serve(shm_name, MIB)
    server.touch(0, 1)
    link = Path(f"{shm_name}-link")
    link.symlink_to("/nonexistent")
    try:
        code, text = audit(server.pid, capsys=capsys)
    finally:
        link.unlink()
    assert code == 1
    assert f"{link}: holds 0 bytes" in text


@pytest.mark.parametrize(("number", "found"), [(errno.EACCES, []), (errno.ESRCH, ["leftover"])])
def test_unread_maps_leave_no_leftover(recorded: Any, two_nodes: Topology, number: int, found: list[str]) -> None:
    """K6: who may not read a worker's mappings cannot say that it does not map a table; of an ended one he can."""

    class Shut(Source):
        def text(self, pid: int, name: str) -> str:
            if name == "maps":
                raise OSError(number, "maps")
            return Source.text(self, pid, name)

    recorded.worker(101)
    recorded.write("dev/shm/vllm_engram_a", "x")
    assert codes(look(Shut(recorded.root), (101,), Limits(), two_nodes)) == found


def test_a_worker_that_ends_between_two_reads_has_no_pages(recorded: Any, two_nodes: Topology) -> None:
    """move_pages answers EINVAL without memory to look at: the worker has gone, nobody says what it did not map."""
    recorded.worker(101)

    def gone(pid: int, addresses: Sequence[int]) -> bytes:
        raise OSError(errno.EINVAL, "move_pages")

    report = look(Source(recorded.root, gone), (101,), Limits(), two_nodes)
    assert (report.tables[0].pages, report.tables[0].unplaced, report.tables[0].views) == ({}, {}, ())
    assert report.workers[0].problems[-1].code == "gone"
    assert "--match" in report.next_command


def test_a_zombie_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that nobody has waited for has no memory: exit code 12 and the way to the server's present ones."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        code, text = audit(ended.pid, capsys=capsys)
    assert code == 12
    assert "a process has ended" in text


def test_a_match_without_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    """--match that finds nobody is not measured, and does not blame a missing probe."""
    code, text = audit("--match", "no-such-server-anywhere", capsys=capsys)
    assert code == 12
    assert text.splitlines()[-1].strip().startswith("ps -ef")


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_watching_every_minus_one_second(
    serve: Callable[..., Any], shm_name: str, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interval that is no interval is none at all."""
    server = serve(shm_name, MIB)
    server.touch(0, 1)
    code, text = audit(server.pid, "--watch", seconds, "--rounds", 2, capsys=capsys)
    assert code == 0
    assert text.splitlines()[-1].endswith("no change")


def test_a_reader_that_leaves_is_no_finding(serve: Callable[..., Any], shm_name: str) -> None:
    """``audit PID | head`` ends with the audit's own code and without a traceback."""
    server = serve(shm_name, MIB)
    server.touch(0, 1)
    run = f"import sys, pytest_engram.audit as one; sys.stdin.read(); sys.exit(one.main(['{server.pid}']))"
    with subprocess.Popen([sys.executable, "-c", run], stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stdin.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 0)


COUNT = 'vllm:time_to_first_token_seconds_count{engine="0"} 4.0\n'


@pytest.mark.parametrize(("value", "mean"), [
    ("2.0", 500.0), ("2.0 1700000000000", 500.0), ("2e0", 500.0), ("1e", None), ("1e999", None), ("NaN", None),
    ("+Inf", None), ("-1", None), ("1.2.3", None), ("9" * 400, None), (None, None),
])  # fmt: skip
def test_a_sum_that_is_no_number_is_no_mean(value: str | None, mean: float | None) -> None:
    """Unknown stays unknown: a sum that is absent or no finite number is None beside its count, never 0 ms."""
    assert [one.ttft_ms for one in engines(COUNT.replace("count", "sum") + COUNT[:-1], (), ())] == [None]
    row = "" if value is None else COUNT.replace("count", "sum").replace("4.0", value)
    assert [one.ttft_ms for one in engines(row + COUNT, (), ())] == [mean]


@pytest.mark.parametrize("url", ["http://[bad", "http://localhost:port/", "http://local host/", "http://127.0.0.1:1/é"])
def test_a_bad_address_is_a_usage_error(url: str) -> None:
    """What is no URL is exit code 4, not a traceback."""
    assert command.main([str(os.getpid()), "--metrics", url]) == 4


@pytest.fixture
def endpoint() -> Iterator[Callable[[bytes], str]]:
    """``endpoint(bytes)``: the address of a server that answers its first request with just these."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as made:

        def start(answer: bytes) -> str:
            def handle(connection: Any, *_address: Any) -> None:
                connection.recv(1 << 16)
                connection.sendall(answer)

            made.finish_request = handle  # type: ignore[assignment, method-assign]
            threading.Thread(target=made.handle_request, daemon=True).start()
            return f"http://127.0.0.1:{made.server_port}/metrics"

        yield start


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_another_protocol_is_a_usage_error(endpoint: Callable[[bytes], str], answer: bytes) -> None:
    """A port that speaks something else is exit code 4, not a traceback."""
    assert command.main([str(os.getpid()), "--metrics", endpoint(answer)]) == 4


def test_a_slow_server_is_left(
    endpoint: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer that has not ended after five seconds is given up, however often a byte of it comes."""
    clock = SimpleNamespace(monotonic=iter([0.0, 5.1]).__next__, sleep=time.sleep)
    monkeypatch.setattr(command, "time", clock)
    code = command.main([str(os.getpid()), "--metrics", endpoint(b"HTTP/1.0 200 OK\r\n\r\n" + COUNT.encode())])
    assert code == 4
    assert "5 s and no end" in capsys.readouterr().err

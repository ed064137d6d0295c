"""The audit of processes that run: what it finds, that it touches nothing, what it says without permission."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pytest_engram.audit as command

MIB = 1 << 20
PAGES = MIB // 4096
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")


def run(*words: Any) -> tuple[int, str]:
    """The command's exit code and its whole output."""
    out, saved = io.StringIO(), sys.stdout
    sys.stdout = out
    try:
        return command.main([str(word) for word in words]), out.getvalue()
    finally:
        sys.stdout = saved


def seen(*words: Any) -> dict[str, Any]:
    """The JSON of one look; NaN and infinities are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return dict(json.loads(run(*words, "--json")[1], parse_constant=refuse))


def counters(pid: int) -> tuple[int, str]:
    """(Minor faults, Rss line) of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]), Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1]


def test_every_backing_is_found(serve: Callable[..., Any], shm_name: str) -> None:
    """An unlinked vllm_engram object, a memfd, a pinned device mapping and huge anonymous memory, page by page."""
    server = serve(shm_name, MIB, "--all")
    os.unlink(shm_name)
    for which in range(3):
        server.touch(0, 10 * (which + 1), which=which)
    server.touch(0, 1, which=3)
    report = seen(server.pid, "--min-mib", 1)
    found = {table["kind"]: table for table in report["tables"]}
    missing = {kind: table["unplaced"].get("ENOENT") for kind, table in found.items() if kind != "anonymous"}
    assert missing == {"engram": PAGES - 10, "memfd": PAGES - 20, "pinned": PAGES - 30}
    assert found["engram"]["name"] == f"{shm_name} (deleted)"
    assert found["engram"]["pages"] == {"0": 10}
    assert f"worker {server.pid}: near and remote pages are not told apart, it maps no GPU" in report["evidence"]
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        smaps = Path(f"/proc/{server.pid}/smaps").read_text()
        (kb,) = re.findall(r"\nSize: +65536 kB.*?AnonHugePages: +(\d+)", smaps, re.DOTALL)
        assert found["anonymous"]["views"][0]["huge_share"] == (kb != "0")  # none: the machine had none to give


def test_small_ordinary_memory_is_no_table(serve: Callable[..., Any]) -> None:
    """Without a table nothing is measured: exit code 12 and the way to record one."""
    assert run(serve("-", MIB).pid)[0] == 12


def test_looking_touches_nothing(serve: Callable[..., Any], shm_name: str) -> None:
    """K27: the target's minor faults and Rss and the object's blocks stay; one touch of its own changes both."""
    server = serve(shm_name, 4 * MIB)
    for _ in range(2):  # the second time has no faults of its own behind the answer
        server.touch(0, 5)
    before, blocks = counters(server.pid), os.stat(shm_name).st_blocks
    run(server.pid, "--numa-maps")
    assert (counters(server.pid), os.stat(shm_name).st_blocks) == (before, blocks)
    server.touch(5, 105)
    assert counters(server.pid)[0] - before[0] >= 100
    assert os.stat(shm_name).st_blocks == blocks + 800


def test_two_workers_share_one_table(serve: Callable[..., Any], shm_name: str) -> None:
    """K29: one backing by device and inode, each page once, PSS halved where both touched, views apart."""
    first, second = serve(shm_name, MIB, "Worker_DP0"), serve(shm_name, MIB, "Worker_DP1")
    first.touch(0, 200)
    second.touch(100, 256)
    report = seen(first.pid, second.pid, "--numa-maps")
    (table,) = report["tables"]
    assert (table["pages"], table["unplaced"], table["asked"]) == ({"0": PAGES}, {}, PAGES)
    assert [view["unplaced"] for view in table["views"]] == [{"ENOENT": 56}, {"ENOENT": 100}]
    assert [view["numa_maps_bytes"] for view in table["views"]] == [{"0": 200 << 12}, {"0": 156 << 12}]
    assert sum(view["pss_bytes"] for view in table["views"]) == MIB
    assert [worker["engine"] for worker in report["workers"]] == ["0", "1"]
    assert all(worker["numastat"]["0"] > MIB / 2 for worker in report["workers"])


def test_a_long_walk_is_left_out(serve: Callable[..., Any], shm_name: str) -> None:
    """The stall bound: smaps that would hold the lock too long is a named gap, and move_pages still answers."""
    server = serve(shm_name, MIB)
    server.touch(0, 256)
    report = seen(server.pid, "--stall", 0)
    assert report["tables"][0]["pages"] == {"0": PAGES}
    assert report["tables"][0]["views"][0]["huge_share"] is None
    assert [gap["where"] for gap in report["workers"][0]["problems"] if gap["code"] == "stall"] == ["smaps"]
    assert "--stall" in report["next_command"]


def test_a_sample_states_its_bound(serve: Callable[..., Any], shm_name: str) -> None:
    """A table of more pages than --pages is sampled, and the report says how well."""
    serve(shm_name, MIB).touch(0, 256)
    server = serve(shm_name, MIB)
    server.touch(0, 256)
    _, text = run(server.pid, "--pages", 100)
    assert "N0 100.0% ±9.80%" in text
    assert "100 of 256 pages, one per stratum" in text


def test_match_finds_workers_by_title(serve: Callable[..., Any], shm_name: str) -> None:
    """--match takes processes by command line, leaves out this one, and those without a table."""
    server, bystander = serve(shm_name, MIB, "XyzServer"), serve("-", MIB, "xyzserver")
    server.touch(0, 1)
    assert [worker["pid"] for worker in seen("--match", "xyzSERVER")["workers"]] == [server.pid]
    assert [worker["pid"] for worker in seen(bystander.pid, server.pid)["workers"]] == [bystander.pid, server.pid]


def test_leftovers_are_named_and_left(serve: Callable[..., Any], shm_name: str, tmp_path: Path) -> None:
    """K32: a named table in /dev/shm that no audited worker maps is a finding; nothing removes it."""
    server = serve(shm_name, MIB)
    server.touch(0, 1)
    assert not any(one["who"] == shm_name for one in seen(server.pid)["findings"])
    leftover = Path(f"{shm_name}-left")
    leftover.write_bytes(b"x" * 5000)
    try:
        code, text = run(server.pid)
        assert code == 1
        assert f"{leftover}: holds 8192 bytes" in text
        assert leftover.exists()
    finally:
        leftover.unlink()


def test_watch_prints_what_changed(serve: Callable[..., Any], shm_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--watch looks again, prints only differences, and ends after --rounds."""
    server = serve(shm_name, MIB)
    server.touch(0, 56)
    steps: Iterator[Callable[[], None]] = iter([lambda: None, lambda: server.touch(56, 256)])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(steps)())
    _, text = run(server.pid, "--watch", 30, "--rounds", 3)
    first, quiet, changed = text.rpartition("Next command")[2].splitlines()[-3:]
    assert "--watch 10" in first
    assert quiet.endswith(" no change")
    assert "+  engram" in changed
    assert "200 pages ENOENT" in changed


def test_watch_survives_the_end_of_a_worker(
    serve: Callable[..., Any], shm_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ends while being watched becomes a gap; an interrupt ends the watch with an answer."""
    server = serve(shm_name, MIB)
    server.touch(0, 56)

    def interrupted(seconds: float) -> None:
        server.stop() if server.process.poll() is None else (_ for _ in ()).throw(KeyboardInterrupt)

    clock = SimpleNamespace(sleep=interrupted, strftime=time.strftime)  # subprocess sleeps too, when the end is slow
    monkeypatch.setattr(command, "time", clock)
    code, text = run(server.pid, "--watch", 1)
    assert text.endswith("stopped\n")
    assert "ENOENT" in text
    assert code == 12


def test_metrics_are_fetched(serve: Callable[..., Any], shm_name: str) -> None:
    """--metrics joins a server's own latencies over HTTP; one that cannot be reached is a usage error."""

    class Endpoint(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            rows = ("sum", "3.0"), ("count", "4.0")
            name = "vllm:time_to_first_token_seconds"
            self.wfile.write("".join(f'{name}_{part}{{engine="0"}} {value}\n' for part, value in rows).encode())

        def log_message(self, *words: Any) -> None:
            """Stay silent."""

    server = serve(shm_name, MIB, "Worker_DP0")
    server.touch(0, 1)
    with http.server.HTTPServer(("127.0.0.1", 0), Endpoint) as endpoint:
        threading.Thread(target=endpoint.handle_request, daemon=True).start()
        _, text = run(server.pid, "--metrics", f"http://127.0.0.1:{endpoint.server_port}/metrics")
    assert f"engine 0: TTFT 750.00 ms, ITL unknown ms, remote unknown, pids [{server.pid}]" in text
    assert run(server.pid, "--metrics", f"http://127.0.0.1:{endpoint.server_port}/metrics")[0] == 4
    assert run(server.pid, "--metrics", "file:///etc/passwd")[0] == 4


def test_no_process_is_a_usage_error() -> None:
    """Neither a PID nor --match: exit code 4; a PID that does not exist: nothing measured, and it says gone."""
    assert run()[0] == 4
    code, text = run(2**22 + 1)
    assert code == 12
    assert f"worker {2**22 + 1}, status not read: ENOENT" in text
    assert "--match vllm   (a process has ended" in text


@pytest.fixture(scope="module")
def pyz() -> Iterator[Path]:
    """The single file, in a folder that every user may read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, stat.S_IRWXU | stat.S_IROTH | stat.S_IXOTH)
        target = Path(folder) / "pytest-engram-audit.pyz"
        command.bundle(target)
        target.chmod(0o755)
        yield target


def test_the_single_file_needs_the_standard_library_only(serve: Callable[..., Any], shm_name: str, pyz: Path) -> None:
    """The .pyz runs without site-packages, gives the same answer, and imports nothing else."""
    server = serve(shm_name, MIB)
    server.touch(0, 256)
    isolated = [sys.executable, "-I", "-S", str(pyz)]
    done = subprocess.run([*isolated, str(server.pid), "--json"], capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert json.loads(done.stdout)["tables"][0]["pages"] == {"0": PAGES}
    code = "import sys; sys.path.insert(0, sys.argv[1]); import pytest_engram.audit as audit; audit._fetch(None)\n"
    code += "tops = {name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'__main__'}\n"
    code += "print(sorted(tops), audit.__file__)"
    done = subprocess.run([*isolated[:3], "-c", code, str(pyz)], capture_output=True, text=True, check=True)
    assert done.stdout == f"['pytest_engram'] {pyz}/pytest_engram/audit/__init__.py\n"


@pytest.mark.skipif(os.geteuid() != 0 or not PYTHON, reason="needs root and a Python that other users may run")
def test_another_user_is_told_which_permission(serve: Callable[..., Any], shm_name: str, pyz: Path) -> None:
    """K6: another user learns EACCES, the capability that would help and the command, and gets no invented pages."""
    server = serve(shm_name, MIB)
    server.touch(0, 256)
    done = subprocess.run(
        [str(PYTHON), "-I", "-S", str(pyz), str(server.pid)], capture_output=True, text=True, check=False,
        user=65534, group=65534, extra_groups=(), cwd="/",
    )  # fmt: skip
    assert done.returncode == 12, done.stderr
    assert f"worker {server.pid}, maps not read: EACCES" in done.stdout
    assert "CAP_SYS_PTRACE" in done.stdout
    assert f"sudo pytest-engram audit {server.pid}" in done.stdout
    assert "N0" not in done.stdout

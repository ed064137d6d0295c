"""``pytest-engram audit``: where a live server's tables lie.  Read-only, standard library only, also one .pyz file."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
import tempfile
import time
import zipapp
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from pytest_engram.audit.judging import Report, look
from pytest_engram.audit.reading import Limits, Source, Worker
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.gpu.nvml import gpu_sources
from pytest_engram.numa.topology import read_topology

_BUNDLE = ("__init__", "errors", "probe", "model/*", "audit/*", "gpu/__init__", "gpu/nvml", "numa/__init__",
           "numa/_syscalls", "numa/devices", "numa/pages", "numa/procfs", "numa/topology", "numa/tree")  # fmt: skip
_REASONS = {
    "ENOENT": "not touched through this worker's own mapping; a peer's touch does not count",
    "EFAULT": "the zero page, a special mapping, or unmapped meanwhile",
    "UNMAPPED": "not mapped by this worker",
    "ENODATA": "left unanswered by the kernel",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.add_argument("pids", nargs="*", type=int, metavar="PID")
    command.add_argument("--match", metavar="TEXT", help="every process with TEXT in its command line or title")
    command.add_argument("--metrics", metavar="URL", help="the server's Prometheus text, e.g. http://HOST:8000/metrics")
    command.add_argument("--probe", type=Path, metavar="FOLDER", help="table records of pytest_engram.probe")
    command.add_argument("--numa-maps", action="store_true", help="second route, shown policies and numastat")
    command.add_argument("--min-mib", type=int, default=64, metavar="N", help="smallest unnamed mapping (default 64)")
    command.add_argument("--pages", type=int, default=1 << 20, metavar="N", help="most pages asked per table (0: all)")
    command.add_argument("--stall", type=float, default=0.5, metavar="S", help="longest hold of a worker's mmap lock")
    command.add_argument("--json", action="store_true", help="one JSON object per look")
    command.add_argument("--watch", type=float, metavar="S", help="look again every S seconds, print what changed")
    command.add_argument("--rounds", type=int, default=0, metavar="N", help="stop watching after N looks (0: never)")


def run(arguments: argparse.Namespace) -> int:
    """Look once or repeatedly.  0: nothing contradicts, 1: findings.  Raises ``NotMeasurable`` without any answer."""
    if not arguments.pids and not arguments.match:
        raise UsageError("no process is named", code="no-process", where="audit", way_out="give PIDs or --match vllm")
    rounds, shown, report = 1, "", _look(arguments)
    try:
        while True:
            text = json.dumps(asdict(report), allow_nan=False) if arguments.json else render(report)
            news = [line for line in difflib.unified_diff(shown.splitlines(), text.splitlines(), n=0, lineterm="")
                    if line[:2] not in ("--", "++", "@@")]  # fmt: skip
            _say(text if arguments.json or not shown else f"{time.strftime('%X')} {'; '.join(news) or 'no change'}")
            if arguments.watch is None or rounds == arguments.rounds:
                break
            time.sleep(min(max(0.0, arguments.watch), 1e6))
            rounds, shown, report = rounds + 1, text, _look(arguments)
    except KeyboardInterrupt:
        _say("stopped")
    if not any(view.pages for table in report.tables for view in table.views):
        raise NotMeasurable("no page answered", code="no-page", where="audit", way_out=report.next_command)
    return 1 if report.findings else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command on its own, for the single file."""
    parser = argparse.ArgumentParser(prog="pytest-engram-audit", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except EngramError as error:
        sys.stderr.write(f"{error}\n")
        return 12 if isinstance(error, NotMeasurable) else 4


def bundle(target: Path) -> None:
    """Write this command and the modules it needs as one executable file."""
    package = Path(__file__).parents[1]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for file in (file for name in _BUNDLE for file in package.glob(f"{name}.py")):
            copy = Path(folder, "pytest_engram", file.relative_to(package))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        Path(folder, "__main__.py").write_text("import sys\nfrom pytest_engram.audit import main\nsys.exit(main())\n")
        zipapp.create_archive(folder, target, interpreter="/usr/bin/env python3", compressed=True)


def _look(arguments: argparse.Namespace) -> Report:
    source = Source()
    driver = {name: ask for name, ask in gpu_sources().items() if name.startswith("nvml")}  # without CUDA's cuInit
    limits = Limits(min_bytes=arguments.min_mib << 20, pages=arguments.pages, stall_s=arguments.stall,
                    numa_maps=arguments.numa_maps, probe=arguments.probe)  # fmt: skip
    pids = dict.fromkeys([*arguments.pids, *_matching(source, arguments.match)])
    return look(source, list(pids), limits, read_topology(gpu_sources=driver), metrics=_fetch(arguments.metrics),
                matched=arguments.match is not None)  # fmt: skip


def _matching(source: Source, text: str | None) -> list[int]:
    """Processes with ``text`` in their title, without this one and its ancestors, who have it as an argument."""
    own, pids = source.titles(os.getpid()), map(int, source.tree.names("proc", r"\d+"))
    return [pid for pid in pids if text and pid not in own and text.lower() in source.titles(pid)[pid].lower()]


def _fetch(url: str | None) -> str:
    from http.client import HTTPException
    from urllib.request import urlopen

    if url is None:
        return ""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r}", code="bad-url", where="--metrics", expected="http:// or https://")
    try:
        body, end = bytearray(), time.monotonic() + 5
        with urlopen(url, timeout=5) as answer:  # noqa: S310 - the scheme is checked
            while len(body) < 32 << 20 and (piece := answer.read1(1 << 20)):
                body += piece
                if time.monotonic() > end:
                    raise TimeoutError(f"{len(body)} bytes in 5 s and no end")
        return body.decode(errors="replace")
    except (OSError, HTTPException, ValueError) as error:
        raise UsageError(f"{url}: {error}", code="no-metrics", where="--metrics") from None


def _say(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as behind | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise KeyboardInterrupt from None


def render(report: Report) -> str:
    """The report for a person."""
    lines = [line for worker in report.workers for line in _worker(report, worker)]
    for table in report.tables:
        lines.append(f"{table.kind} {table.name} [{table.key}] {_size(table.nbytes)}, {len(table.views)} workers")
        lines.append(f"  each page once: {_where(table.pages, table.unplaced, table.bound)}")
    for one in report.engines:
        ttft, itl, pids = _said(one.ttft_ms, ".2f"), _said(one.itl_ms, ".2f"), list(one.pids) or "unknown"
        remote = _said(one.remote, ".1%")
        lines.append(f"engine {one.engine}: TTFT {ttft} ms, ITL {itl} ms, remote {remote}, pids {pids}")
    found = [f"{gap.who}: {gap.message} ({gap.code})" for gap in report.findings]
    for title, text in (
        ("Finding", found or ["nothing that was answered contradicts a request or the GPU map"]),
        ("Evidence", report.evidence),
        ("What this does not prove", report.not_proven),
        ("Next command", [report.next_command]),
    ):
        lines += ["", title, *(f"  {line}" for line in text)]
    return "\n".join(line if line.isprintable() else line.encode("unicode_escape").decode() for line in lines)


def _worker(report: Report, worker: Worker) -> Iterator[str]:
    yield f"worker {worker.pid}  {worker.title[:90]}"
    yield f"  CPUs {worker.cpus}; Mems_allowed {worker.mems} (allowed, not a policy); engine {_said(worker.engine)}"
    yield f"  task policy shown: {_said(worker.task_policy)}; asked: {worker.asked or 'nothing seen'}"
    yield f"  GPUs {worker.gpus or 'none mapped'}, near node {_said(worker.node)}; {_said(worker.shm)}"
    yield f"  numastat bytes {'not read (--numa-maps)' if worker.numastat is None else worker.numastat}"
    views = [(table, view) for table in report.tables for view in table.views if view.pid == worker.pid]
    for table, view in views:
        yield f"  {table.kind} {table.name} {_size(table.nbytes)}: {_where(view.pages, view.unplaced, table.bound)}"
        yield f"    page {_said(view.page_kb)} KiB, huge {_said(view.huge_share, '.1%')}, PSS {_size(view.pss_bytes)}"
        yield f"    remote {_said(view.remote, '.1%')}, policy shown: {view.policy_shown or 'not read (--numa-maps)'}"


def _where(pages: dict[int, int], unplaced: dict[str, int], bound: float) -> str:
    error = f" ±{bound:.2%}" if bound else ""
    shares = [f"N{node} {count / sum(pages.values()):.1%}{error}" for node, count in pages.items()] or ["none placed"]
    gaps = [f"{count} pages {name} ({_REASONS.get(name, 'see move_pages(2)')})" for name, count in unplaced.items()]
    return ", ".join([*shares, *gaps])


def _said(value: float | str | None, form: str = "") -> str:
    return "unknown" if value is None else format(value, form)


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / (1 << 30):.3f} GiB"

"""``pytest-engram audit``: where a live server's tables lie.  Read-only, standard library only, also one .pyz file."""

from __future__ import annotations

import argparse
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
from typing import Any

from pytest_engram.audit.judging import REASONS, Report, Worker, look
from pytest_engram.audit.reading import Limits, Source
from pytest_engram.errors import EngramError, NotMeasurable, UsageError
from pytest_engram.gpu.nvml import gpu_sources
from pytest_engram.model import Topology
from pytest_engram.numa.topology import read_topology

_BUNDLE = ("__init__", "errors", "probe", "model/*", "audit/*", "gpu/__init__", "gpu/nvml", "numa/__init__",
           "numa/_syscalls", "numa/devices", "numa/pages", "numa/procfs", "numa/topology", "numa/tree")  # fmt: skip


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.add_argument("pids", nargs="*", type=int, metavar="PID")
    command.add_argument("--match", metavar="TEXT", help="every process with TEXT in its command line or title")
    command.add_argument("--metrics", metavar="URL", help="the server's Prometheus endpoint, e.g. http://…:8000/metrics")
    command.add_argument("--probe", type=Path, metavar="FOLDER", help="table records of pytest_engram.probe")
    command.add_argument("--numa-maps", action="store_true", help="second route, shown policies and numastat")
    command.add_argument("--min-mib", type=int, default=64, help="smallest unnamed mapping to look at (default 64)")
    command.add_argument("--pages", type=int, default=1 << 20, help="most pages asked about per table (0: all)")
    command.add_argument("--stall", type=float, default=0.5, metavar="S", help="longest hold of a worker's mmap lock")
    command.add_argument("--json", action="store_true", help="one JSON object per look")
    command.add_argument("--watch", type=float, metavar="S", help="look again every S seconds, print what changed")
    command.add_argument("--rounds", type=int, default=0, metavar="N", help="stop watching after N looks (0: never)")


def run(arguments: argparse.Namespace) -> int:
    """Look once or repeatedly.  0: nothing contradicts; 1: findings.  Raises ``NotMeasurable`` without any answer."""
    if not arguments.pids and not arguments.match:
        raise UsageError("no process is named", code="no-process", where="audit", way_out="give PIDs or --match vllm")
    driver = {name: source for name, source in gpu_sources().items() if name.startswith("nvml")}
    topology, source = read_topology(gpu_sources=driver), Source()
    report = _look(arguments, source, topology)
    _say(json.dumps(asdict(report), allow_nan=False) if arguments.json else render(report))
    rounds = 1
    try:
        while arguments.watch is not None and rounds != arguments.rounds:
            time.sleep(arguments.watch)
            before, report, rounds = report, _look(arguments, source, topology), rounds + 1
            news = list(differences(asdict(before), asdict(report)))
            stamp = time.strftime("%H:%M:%S")
            _say(json.dumps({"time": stamp, "changes": news}) if arguments.json else "\n".join(
                f"{stamp} {line}" for line in news or ["no change"]))  # fmt: skip
    except KeyboardInterrupt:
        _say("stopped")
    if not any(view.pages for table in report.tables for view in table.views):
        raise NotMeasurable("no page of any table was answered", code="no-table", where="audit", way_out=report.command)
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


def differences(before: Any, after: Any) -> Iterator[str]:
    """``path: old -> new`` of every leaf that changed between two reports."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            yield f"{path}: {old.get(path, 'absent')} -> {new.get(path, 'absent')}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            names = [item.get(name) for name in ("pid", "key", "engine", "code")] if isinstance(item, dict) else []
            yield from _leaves(item, f"{path}[{next((n for n in names if n is not None), index)}]")
    else:
        yield path, value


def _look(arguments: argparse.Namespace, source: Source, topology: Topology) -> Report:
    pids = list(dict.fromkeys([*arguments.pids, *_matching(source, arguments.match)]))
    limits = Limits(min_bytes=arguments.min_mib << 20, pages=arguments.pages, stall_s=arguments.stall,
                    numa_maps=arguments.numa_maps, probe=arguments.probe)  # fmt: skip
    report = look(source, pids, limits, topology, metrics=_fetch(arguments.metrics), match=arguments.match)
    return report


def _matching(source: Source, text: str | None) -> list[int]:
    """Processes with ``text`` in their command line, without this one and its ancestors, who have it as an argument."""
    if not text:
        return []
    own = {pid for pid, _ in source.titles(os.getpid())}
    pids = [int(name) for name in source.tree.names("proc", r"\d+")]
    return [pid for pid in pids if pid not in own and text.lower() in source.title(pid).lower()]


def _fetch(url: str | None) -> str | None:
    if url is None:
        return None
    from urllib.request import urlopen

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r}", code="bad-url", where="--metrics", expected="http:// or https://")
    try:
        with urlopen(url, timeout=5) as answer:  # noqa: S310 - the scheme is checked
            return str(answer.read(32 << 20).decode(errors="replace"))
    except OSError as error:
        raise UsageError(f"{url}: {error}", code="no-metrics", where="--metrics", expected="a reachable server") from None


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def render(report: Report) -> str:
    """The report for a person."""
    lines = [line for worker in report.workers for line in _worker(report, worker)]
    for table in report.tables:
        lines.append(f"{table.kind} {table.name} [{table.key}] {_size(table.nbytes)}, {len(table.views)} workers, "
                     f"each page once: {_where(table.pages, table.unplaced, table.bound)}")  # fmt: skip
    for one in report.engines:
        remote = "unknown" if one.remote is None else f"{one.remote:.1%}"
        ttft, itl = ("no samples" if v is None else f"{v:.2f} ms" for v in (one.ttft_ms, one.itl_ms))
        lines.append(f"engine {one.engine}: TTFT {ttft}, ITL {itl}, remote {remote}, workers {list(one.pids) or 'unknown'}")
    for title, text in (("Finding", [f"{one.who}: {one.text} ({one.code})" for one in report.findings] or
                         ["nothing that was answered contradicts a request or the GPU map"]),
                        ("Evidence", report.evidence), ("What this does not prove", report.not_proven),
                        ("Next command", [report.command])):  # fmt: skip
        lines += ["", title, *(f"  {line}" for line in text)]
    return "\n".join(lines)


def _worker(report: Report, worker: Worker) -> Iterator[str]:
    yield f"worker {worker.pid}  {worker.title[:90]}"
    yield f"  CPUs {worker.cpus}; Mems_allowed {worker.mems} (allowed, not a policy); engine {worker.engine or 'unknown'}"
    yield f"  task policy shown {worker.task_policy or 'unknown'}; asked {worker.asked or 'nothing seen'}"
    yield f"  GPU node {report.near[worker.pid]}; /dev/shm {worker.shm or 'unknown'}"
    stat = "not read (--numa-maps)" if worker.numastat is None else _where(worker.numastat, {}, 0)
    yield f"  numastat {stat}"
    for table, view in ((table, view) for table in report.tables for view in table.views if view.pid == worker.pid):
        yield f"  {table.kind} {table.name} {_size(table.nbytes)}: {_where(view.pages, view.unplaced, table.bound)}"
        huge, remote = ("unknown" if v is None else f"{v:.1%}" for v in (view.huge_share, view.remote))
        yield (f"    page {view.page_kb or '?'} KiB, huge {huge}, remote {remote}, PSS {_size(view.pss_bytes)}, "
               f"policy shown {view.policy_shown or 'not read'}")  # fmt: skip
    for problem in worker.problems:
        yield f"  not read: {problem.where}: {problem.message}"


def _where(pages: dict[int, int], unplaced: dict[str, int], bound: float) -> str:
    placed = sum(pages.values())
    shares = [f"N{node} {count / placed:.1%}" + (f"±{bound:.2%}" if bound else "") for node, count in pages.items()]
    gaps = [f"{count} pages {name} ({REASONS.get(name, 'see move_pages(2)')})" for name, count in unplaced.items()]
    return ", ".join([*(shares or ["no page placed"]), *gaps])


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / (1 << 30):.2f} GiB"

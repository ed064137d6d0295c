"""One call's worth of GPU jobs, in order: ``python tests/gpu/session_on_gpu.py --out DIR --minutes 9 --jobs a,b,…``.

While a job runs, DIR/JOB.log grows; right after it, log and report go into DIR/JOB.tgz and DIR/summary.json is written
anew: a call that is cut loses one job.  A job that does not fit into what is left is NOT_RUN, with the reason.
``--list`` shows commands and seconds, ``--dry`` takes CPUs.  Exit 1 if a job was stopped, 2 if a package is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as it will be for the jobs
STOP_S, SLACK = 25.0, 1.5  # for an interrupted pytest to write what it has; a job's limit over its estimate
PACKAGES = ("msgspec", "numpy", "pytest", "pytest_benchmark", "xdist", "yaml", "pytest_engram.fixtures")
LARGE_GIB, SIX = 96, "--engram-pairs 6"
# Some virtual machines show memory only once it was touched, and a table must fit into what is shown.
GROW = """import mmap, sys
shown = lambda: int(open("/proc/meminfo").readline().split()[1]) >> 20
gib, before, private = int(sys.argv[1]), shown(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
held = mmap.mmap(-1, max(gib, 1) << 30, private); held.madvise(mmap.MADV_HUGEPAGE)
[held.madvise(23, at << 30, 1 << 30) for at in range(gib if before < gib else 0)]  # MADV_POPULATE_WRITE
print(before, "GiB, then", shown())"""


class Job(NamedTuple):
    seconds: float  # on an H200
    command: str  # of Python; {out} is the job's own folder
    dry: str = ""  # where there is none the job needs a GPU


def gates(file: str, *more: str) -> str:
    """The pytest command of one overlap experiment."""
    start = "-m pytest -p no:cacheprovider suites/overlap -m overlap"
    chosen = f"--engram-experiments fixtures/experiments/{file}.yaml --engram-report {{out}}"
    return " ".join((start, "--benchmark-quiet", chosen, *more))


def overlap(seconds: float, name: str, *more: str) -> Job:
    """An experiment of ``cuda/``; dry it is its like for CPUs, or another."""
    like = name if (ROOT / f"fixtures/experiments/more/{name}.yaml").exists() else "B1-wait"
    small = gates(f"more/{like}", "--engram-engine cpu --engram-rows 5000", SIX)
    return Job(seconds, gates(f"cuda/{name}", "--engram-engine cuda", *more), small)


SIXES = {"B1-graph": 100, "B1-inline": 95, "B1-repeated": 95, "B1-wait": 80, "B1-streams": 80}
JOBS: dict[str, Job] = {
    "on_gpu": Job(80, "tests/gpu/on_gpu.py --out {out} --gib 8 --repeats 10 --peer-kernel vllm@0.31.0"),
    "backings": Job(125, "tests/gpu/backings_on_gpu.py --out {out} --reserve-hugetlb",
                    "tests/gpu/backings_on_gpu.py --out {out} --cpu --gib 0.01 --shared-gib 0.005"),
    "conformance": Job(40, "-m pytest_engram.cli conformance --engine cuda vllm@0.31.0 vllm@0.33.0 reference",
                       "-m pytest_engram.cli conformance reference"),
    "populate": Job(60, "tests/gpu/populate_sweep.py --out {out} --gib 2 --rounds 5",
                    "tests/gpu/populate_sweep.py --out {out} --gib 0.02 --rounds 2"),
    "B1-huge": overlap(140, "B1-huge"), "B2-huge": overlap(230, "B2-huge"),
    **{name: overlap(seconds, name, SIX) for name, seconds in SIXES.items()},
    "grow": Job(45, f"-c {shlex.quote(GROW)} {LARGE_GIB + 16}", f"-c {shlex.quote(GROW)} 0"),
    "B1-large": overlap(340, "B1", SIX, f"--engram-rows {(LARGE_GIB << 30) // 528}"),
    # These two want two GPUs.
    "adopted": Job(70, "tests/gpu/adopted_on_gpu.py --out {out}",
                   "tests/gpu/adopted_on_gpu.py --out {out} --engine cpu --backend reference --rows 5000"),
    "B1-tp": overlap(120, "B1-tp", SIX),
}  # fmt: skip


def run(words: list[str], log: Path, seconds: float) -> int | str:
    """Exit code of a Python command whose output goes to ``log``; over time it is interrupted, then killed."""
    environment = {"NCCL_NVLS_ENABLE": "0", **os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, **how)
        try:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(seconds)
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                return f"stopped after {seconds:.0f} s, then exit code {process.wait(STOP_S)}"
        finally:
            process.kill()
            process.wait()
    time.sleep(3)  # its ranks die with it, and give their pinned memory back
    return f"killed after {seconds + STOP_S:.0f} s"


def pack(out: Path, name: str, folder: Path) -> None:
    """The report folder and the log as one file, which is there whole or not at all; the log alone goes."""
    part, log = out / f".{name}.part", out / f"{name}.log"
    with tarfile.open(part, "w:gz") as archive:
        archive.add(folder, name)
        archive.add(log, log.name)
    part.replace(out / f"{name}.tgz")
    log.unlink()


def perform(name: str, job: Job, out: Path, left: float, *, dry: bool) -> dict[str, Any]:
    """One job's record: command, exit code, seconds, last lines; or NOT_RUN with the reason."""
    command = job.dry if dry else job.command
    if not command or left < job.seconds:
        why = f"takes {job.seconds:.0f} s, {left:.0f} s are left" if command else "needs a GPU"
        return {"job": name, "command": command or job.command, "exit": "NOT_RUN", "reason": why}
    with tempfile.TemporaryDirectory() as folder:
        log, begin, limit = out / f"{name}.log", time.monotonic(), max(1.0, min(SLACK * job.seconds, left - STOP_S))
        code = run(shlex.split(command.format(out=folder)), log, limit)
        seconds, tail = time.monotonic() - begin, log.read_text("utf-8", "replace").splitlines()[-12:]
        pack(out, name, Path(folder))
    return {"job": name, "command": command, "exit": code, "seconds": round(seconds, 1), "tail": tail}


def main(argv: list[str] | None = None) -> int:
    """The jobs, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/run-gpu"))
    parser.add_argument("--minutes", type=float, default=9.5, help="for all jobs together")
    parser.add_argument("--jobs", type=lambda text: text.split(","), default=list(JOBS), help=",".join(JOBS))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(argv)
    if unknown := set(options.jobs) - set(JOBS):
        parser.error(f"no job {', '.join(sorted(unknown))}")
    if options.list:
        print("\n".join(f"{name:12} {JOBS[name].seconds:4.0f} s  {JOBS[name].command}" for name in options.jobs))
        return 0
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        print(f"missing packages: {', '.join(missing)}; of ours: python -m pip install --no-deps -e .")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job hands it on as ignored
    done, part, end = list[dict[str, Any]](), options.out / ".summary", time.monotonic() + 60 * options.minutes
    for name in options.jobs:
        done.append(one := perform(name, JOBS[name], options.out, end - time.monotonic(), dry=options.dry))
        part.write_text(json.dumps(done, indent=1) + "\n", "utf-8")
        part.replace(options.out / "summary.json")
        print(f"== {name}: {one['exit']} {one.get('reason', '')}", *one.get("tail", ()), sep="\n", flush=True)
    return int(any(str(one["exit"]).startswith(("stopped", "killed")) for one in done))


if __name__ == "__main__":
    raise SystemExit(main())

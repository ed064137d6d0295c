"""Boot the guests, run the suites in ``inside`` there, merge their JUnit and print what was asked and got.

``python tests/guest/run.py [--out DIR]``: exit code 0 only if every suite of every guest passed with no skip, 69 with
the word NOT_MEASURED where no guest can be had, 1 otherwise.  Run it with the interpreter that has the package.
"""

from __future__ import annotations

import argparse
import compileall
import os
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import boot

INSIDE = Path(__file__).parent / "inside"
TIMEOUT_S = 900.0  # per boot, on a loaded machine; a quiet one needs a third
TABLES = {  # the suites' own tables and their columns
    "policies": "asked | backing | got | by routes | huge pages | gate 1",
    "policies-four": "asked | backing | got | by routes | gate 1",
    "stock": "situation | got | placed, or what numa_maps shows",
    "faults": "planted | caught by | code",
    "experiments": "experiment | gate | status | reason | observed",
    "engine": "order | situation | pages after replay | gate 1 | label",
}
ENDS = {boot.TIMED_OUT: "timed out", boot.PANICKED: "panicked"}


@dataclass(frozen=True)
class Job:
    """One boot: a machine and the suites that run in it."""

    name: str
    machine: str
    suites: tuple[str, ...]
    needs: tuple[str, ...] = ()  # modules, and paths in the checkout

    @property
    def lacks(self) -> list[str]:
        """What the job needs and this machine has not: then it is not measured."""
        return [need for need in self.needs if not ((boot.ROOT / need).exists() if "/" in need else find_spec(need))]


JOBS = (  # the longest first
    Job("A1", "two", ("test_guest_experiments.py::test_placement_is_proven_and_nothing_else[A1]",)),
    Job("A2", "two", ("test_guest_experiments.py::test_placement_is_proven_and_nothing_else[A2]",)),
    Job("engine", "two", ("test_guest_engine.py",), needs=("torch", "triton", ".cache/vllm-0.31.0/receipt.json")),
    Job("two", "two", ("test_guest_policies.py", "test_guest_stock.py", "test_guest_faults.py")),
    Job("patch", "two", ("test_guest_experiments.py::test_a_patch_moves_the_table_that_each_build_allocates",)),
    Job("four", "four", ("test_guest_four.py",)),
)


@dataclass(frozen=True)
class Result:
    """What one boot left: its exit code, its seconds and its JUnit suite, None if it wrote none."""

    job: Job
    code: int
    seconds: float
    suite: ET.Element | None

    @property
    def counts(self) -> dict[str, int]:
        """Tests, failures, errors and skips; all 0 without a suite."""
        names = ("tests", "failures", "errors", "skipped")
        return {name: int(self.suite.get(name, "0")) if self.suite is not None else 0 for name in names}

    @property
    def passed(self) -> bool:
        """Tests ran, all of them, and none failed."""
        bad = sum(self.counts[name] for name in ("failures", "errors", "skipped"))
        return self.code == 0 and self.counts["tests"] > 0 and bad == 0

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count or name == "tests")
        end = ENDS.get(self.code, f"exit {self.code}")
        word = "PASS" if self.passed else "FAIL"
        return f"{word} guest {self.job.name} ({self.job.machine} nodes): {counted}; {end}, {self.seconds:.0f} s"


def command(job: Job) -> list[str]:
    """What runs in the guest: only the plugins of the suites, nothing written but ``$OUT``."""
    return [
        "env", f"PYTHONPATH={boot.ROOT}:{INSIDE}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1",
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib",
        "-q", "--tb=short", "--color=no",
        f"--junitxml={boot.GUEST_OUT}/junit.xml", *(str(INSIDE / name) for name in job.suites),
    ]  # fmt: skip


def run(job: Job, out: Path) -> Result:
    """Boot, wait, read what came out."""
    start, folder = time.monotonic(), out / job.name
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (folder / name for name in ("junit.xml", *(f"{table}.txt" for table in TABLES))):
        stale.unlink(missing_ok=True)
    with (folder / "console.txt").open("wb") as console:
        machine = boot.MACHINES[job.machine]
        code = boot.boot(machine, command(job), folder, timeout=TIMEOUT_S, console=console)
    return Result(job, code, time.monotonic() - start, junit(folder / "junit.xml", job.name))


def junit(path: Path, name: str) -> ET.Element | None:
    """The one suite of a guest's file, under the guest's name; None where there is no such file."""
    try:
        suite = ET.parse(path).getroot().find("testsuite")  # noqa: S314 - our own file
    except (OSError, ET.ParseError):
        return None
    if suite is not None:
        suite.set("name", f"numa-guest-{name}")
    return suite


def report(results: Sequence[Result], out: Path) -> None:
    """Tables, the console of what failed, one line per guest, one merged JUnit file."""
    root = ET.Element("testsuites")
    root.extend(result.suite for result in results if result.suite is not None)
    ET.ElementTree(root).write(out / "numa-guest.xml", encoding="utf-8", xml_declaration=True)
    for table, columns in TABLES.items():
        lines = [text for result in results for text in _lines(out / result.job.name / f"{table}.txt")]
        print(f"\n== {table}: {columns} ({len(lines)} lines)", *lines, sep="\n")
    for result in results:
        if not result.passed:
            print(f"\n== console of {result.job.name}", *_lines(out / result.job.name / "console.txt")[-80:], sep="\n")
    print("", *results, sep="\n")


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def main() -> int:
    """Run every job, as many at a time as there are CPUs: one thread emulates a whole guest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="where consoles, JUnit and evidence go")
    parser.add_argument("--only", choices=[job.name for job in JOBS], action="append", help="not the whole: a part")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="numa-guest-"))
    wanted = [job for job in JOBS if not arguments.only or job.name in arguments.only]
    jobs = [job for job in wanted if not job.lacks]
    for job in wanted:
        if job.lacks:
            print(f"guest {job.name}: NOT_MEASURED: no {', '.join(job.lacks)}")
    if not jobs:
        return boot.UNAVAILABLE
    start = time.monotonic()
    try:
        boot.prepare()
    except boot.Unavailable as reason:
        print(f"numa-guest: NOT_MEASURED: {reason}")
        return boot.UNAVAILABLE
    for folder in (boot.ROOT / "pytest_engram", INSIDE):  # the guest cannot write them
        compileall.compile_dir(folder, quiet=2)
    with ThreadPoolExecutor(min(len(jobs), len(os.sched_getaffinity(0)))) as pool:
        results = list(pool.map(lambda job: run(job, out), jobs))
    report(results, out)
    good = all(result.passed for result in results)
    part = "" if len(jobs) == len(JOBS) else f" (only {', '.join(job.name for job in jobs)}: not the whole)"
    print(f"numa-guest: {'PASS' if good else 'FAIL'}{part} in {time.monotonic() - start:.0f} s, files in {out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""The script for one call's GPU jobs, with jobs of a moment: what is kept when a job, or the whole call, is cut."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_engram import codec
from pytest_engram.model import Evidence

SCRIPT = Path(__file__).with_name("session_on_gpu.py")
ROOT = SCRIPT.parents[2]
START = f"""
import runpy, sys
script = runpy.run_path({str(SCRIPT)!r})
script["JOBS"].clear()
script["JOBS"].update({{name: script["Job"](seconds, command, command) for name, seconds, command in JOBS}})
raise SystemExit(script["main"](sys.argv[1:]))
"""
QUICK = "-c \"import pathlib, sys; pathlib.Path(r'{out}', 'found').write_text('7'); print('done'); sys.exit(3)\""
SLOW = '-c "import os, time; print(os.getpid(), flush=True); time.sleep(60)"'
TIDY = """-I -S -c "
import pathlib, time
try:
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(r'{out}', 'partly').write_text('1')
" """


def start(out: Path, *jobs: tuple[str, float, str]) -> subprocess.Popen[str]:
    """The script in a process of its own, with these jobs and five minutes."""
    words = [sys.executable, "-c", START.replace("JOBS}", f"{jobs!r}}}"), "--dry", "--out", str(out), "--minutes", "5"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(out: Path) -> dict[str, dict[str, Any]]:
    """The summary by job."""
    return {one["job"]: one for one in json.loads((out / "summary.json").read_text())}


def packed(out: Path, job: str) -> set[str]:
    """The names of a job's files."""
    with tarfile.open(out / f"{job}.tgz") as archive:
        return {member.name for member in archive if member.isfile()}


def test_a_cut_call_loses_the_running_job_only(tmp_path: Path) -> None:
    """SIGKILL in the second job: the first's record, report and log are whole, and of the second the log so far."""
    session, log = (
        start(tmp_path, ("first", 40, QUICK), ("second", 99, SLOW), ("third", 40, QUICK)),
        tmp_path / "second.log",
    )
    while not (log.exists() and log.read_text().endswith("\n")):
        assert session.poll() is None, session.communicate()[0]
        time.sleep(0.02)
    session.kill()
    os.kill(int(log.read_text()), signal.SIGKILL)
    session.communicate()
    assert {name: one["exit"] for name, one in records(tmp_path).items()} == {"first": 3}
    assert records(tmp_path)["first"]["tail"] == ["done"]
    assert packed(tmp_path, "first") == {"first/found", "first.log"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.tgz", "second.log", "summary.json"]


def test_a_job_over_its_time_is_interrupted_and_the_next_runs(tmp_path: Path) -> None:
    """It may write what it has; one that does not fit any more is NOT_RUN with the reason; the exit code tells."""
    session = start(tmp_path, ("tidy", 4, TIDY), ("quick", 40, QUICK), ("long", 999, QUICK))
    told = session.communicate()[0]
    assert session.returncode == 1, told
    found = records(tmp_path)
    assert re.fullmatch(r"stopped after 6 s, then exit code 0", found["tidy"]["exit"])
    assert packed(tmp_path, "tidy") == {"tidy/partly", "tidy.log"}
    assert (found["quick"]["exit"], found["long"]["exit"]) == (3, "NOT_RUN")
    assert re.fullmatch(r"takes 999 s, 2\d\d s are left", found["long"]["reason"])
    assert not (tmp_path / "long.log").exists()


def test_an_own_exit_code_is_no_failure_of_the_call(tmp_path: Path) -> None:
    """A verdict's exit code is the reader's: the call ended as it should."""
    session = start(tmp_path, ("quick", 40, QUICK))
    session.communicate()
    assert (session.returncode, records(tmp_path)["quick"]["exit"]) == (0, 3)


def test_what_a_command_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Every script and every experiment of both kinds of commands is a file here; ``--list`` shows every job."""
    script = runpy.run_path(str(SCRIPT))
    for name, job in script["JOBS"].items():
        for command in (job.command, job.dry):
            for path in re.findall(r"\S+\.(?:py|yaml)\b", command):
                assert (ROOT / path).is_file(), (name, path)
    assert script["main"](["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " s  " in line] == list(script["JOBS"])


def test_a_missing_package_is_told_before_any_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So is a job that does not exist."""
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["main"].__globals__, "PACKAGES", ("json", "absent_package"))
    assert script["main"](["--dry", "--out", str(tmp_path / "out")]) == 2
    assert "missing packages: absent_package" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        script["main"](["--jobs", "B1-huge,B9"])
    assert "no job B9" in capsys.readouterr().err


@pytest.mark.slow
def test_an_engines_own_tables_dry(tmp_path: Path) -> None:
    """Three worlds adopt what the reference allocates; rows without room, a missing audit and a patch that fell back
    are faults."""
    script = SCRIPT.with_name("adopted_on_gpu.py")
    command = [sys.executable, str(script), "--engine", "cpu", "--backend", "reference"]
    done = [
        subprocess.run(
            [*command, "--rows", rows, "--out", str(tmp_path / rows)], capture_output=True, text=True, check=False
        )
        for rows in ("5000", "380000000")
    ]
    assert [one.returncode for one in done] == [0, 1], done[0].stdout + done[0].stderr
    assert done[0].stdout.count("by the engine, asked") == 6
    assert "too-large" in done[1].stdout
    evidence = codec.decode((tmp_path / "5000" / "evidence.json").read_bytes(), Evidence)
    (run,), faults = [one for one in evidence.runs if one.arm == "B"], runpy.run_path(str(script))["faults"]
    stock = [
        replace(one, distributions=tuple(replace(page, policy_text="default") for page in one.distributions))
        for one in run.placement
    ]
    assert [*faults(run, 2)] == []
    assert ["fell back" in one for one in faults(replace(run, placement=tuple(stock)), 2)] == [True]
    assert [one[:6] for one in faults(replace(run, placement=run.placement[:1]), 2)] == ["audits"]

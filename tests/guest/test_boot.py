"""The launcher of the NUMA guests, without booting one: qemu's words, what is missing here, what exit codes mean."""

import importlib.util
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def load(name):
    """A script of this folder as a module, as ``python tests/guest/NAME.py`` would import its neighbours."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


boot = load("boot")
run = load("run")


def pairs(words, option):
    """What stands behind each occurrence of an option."""
    return [after for word, after in pairwise(words) if word == option]


def test_two_nodes_in_qemus_words():
    """Each node has its memory and its CPU, the distance is given once, a display sits behind each node's port."""
    words = boot.numa_arguments(boot.MACHINES["two"])
    assert pairs(words, "-object") == ["memory-backend-ram,id=m0,size=1536M", "memory-backend-ram,id=m1,size=1536M"]
    assert pairs(words, "-numa") == [
        "node,nodeid=0,cpus=0,memdev=m0", "node,nodeid=1,cpus=1,memdev=m1", "dist,src=0,dst=1,val=21"
    ]  # fmt: skip
    assert pairs(words, "-device") == [
        "pxb-pcie,id=pxb0,bus_nr=64,bus=pcie.0,numa_node=0",
        "pcie-root-port,id=rp0,bus=pxb0,chassis=11,slot=11", "bochs-display,bus=rp0",
        "pxb-pcie,id=pxb1,bus_nr=96,bus=pcie.0,numa_node=1",
        "pcie-root-port,id=rp1,bus=pxb1,chassis=12,slot=12", "bochs-display,bus=rp1",
    ]  # fmt: skip


def test_four_nodes_in_qemus_words():
    """A node without memory names no memdev and one without CPUs no CPUs; every pair has its distance."""
    words = boot.numa_arguments(boot.MACHINES["four"])
    nodes = pairs(words, "-numa")
    assert nodes[2:4] == ["node,nodeid=2,cpus=2", "node,nodeid=3,memdev=m3"]
    assert [word for word in nodes if word.startswith("dist,")] == [
        f"dist,src={a},dst={b},val={value}"
        for a, b, value in ((0, 1, 21), (0, 2, 12), (0, 3, 31), (1, 2, 22), (1, 3, 17), (2, 3, 33))
    ]
    assert len(pairs(words, "-object")) == 3


@pytest.mark.parametrize(("name", "cpus", "memory"), [("two", 2, 3072), ("four", 3, 2816)])
def test_the_whole_command(name, cpus, memory):
    """One socket per CPU, the sum of the nodes' memory, one emulating thread, the host's root read-only, no KVM."""
    words = boot.arguments(boot.MACHINES[name], Path("/k"), Path("/i"), Path("/o"))
    assert pairs(words, "-smp") == [f"{cpus},sockets={cpus}"]
    assert pairs(words, "-m") == [f"{memory}M"]
    assert pairs(words, "-accel") == ["tcg,thread=single,tb-size=512"]
    assert not any("kvm" in word.lower() for word in words)
    shares = pairs(words, "-fsdev")
    assert ["readonly=on" in share for share in shares] == [True, False]
    assert "path=/o," in shares[1]
    assert {"-no-reboot", "isa-debug-exit,iobase=0xf4,iosize=0x04"} <= set(words)


@pytest.mark.parametrize(
    ("status", "code"), [(1, 0), (3, 1), (139, 69), (255, 127), (0, 70), (2, 70), (-9, 70), (-11, 70)]
)
def test_exit_codes(status, code):
    """Odd is the command's own code; 0 is a panic, and so is whatever else ends qemu: never a pass."""
    assert boot.exit_code(status) == code


def test_a_guest_that_hangs_is_no_pass(monkeypatch, tmp_path):
    """A time-out has its own exit code, and the command that hung is on record."""

    def hang(command, **_how):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(boot, "prepare", lambda: (Path("/k"), Path("/i")))
    monkeypatch.setattr(boot.subprocess, "run", hang)
    code = boot.boot(boot.MACHINES["two"], ["echo", "it's"], tmp_path, timeout=1)
    assert code == boot.TIMED_OUT
    assert (tmp_path / "command.sh").read_text().endswith("exec echo 'it'\"'\"'s'\n")


def test_places_below_tmp_are_kept():
    """A checkout or an interpreter below /tmp would vanish under the guest's own /tmp: each is named once."""
    assert boot.below_tmp("/tmp/a", "/usr", "/tmp/a/.venv", "/tmp/ab", "/tmp/a") == ["/tmp/a", "/tmp/ab"]
    assert boot.below_tmp("/work", "/home/x/tmp/y") == []


@pytest.mark.parametrize("script", [["boot.py", "two", "--", "true"], ["run.py"]])
def test_without_tools_it_is_not_measured(script, tmp_path):
    """With an empty PATH both scripts say NOT_MEASURED, name the tool, and exit 69: neither green nor red."""
    done = subprocess.run(
        [sys.executable, str(HERE / script[0]), *script[1:]],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 69
    assert "NOT_MEASURED" in done.stdout
    assert "qemu-system-x86_64 is not installed" in done.stdout


def test_a_kernel_that_cannot_be_fetched_is_not_measured(monkeypatch, tmp_path):
    """No package, no network: the step that failed is named, and nothing half made stays behind."""
    monkeypatch.setattr(boot.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(boot, "_output", lambda *_command: "")
    with pytest.raises(boot.Unavailable, match=r"linux-image.* is known"):
        boot.prepare(tmp_path)
    monkeypatch.setattr(boot, "_output", lambda *_command: "  Depends: linux-image-6.12.0-amd64\n")
    failed = subprocess.CompletedProcess([], 100, b"", b"E: Failed to fetch\n")
    monkeypatch.setattr(boot.subprocess, "run", lambda *_command, **_how: failed)
    with pytest.raises(boot.Unavailable, match=r"apt-get download .*Failed to fetch"):
        boot.prepare(tmp_path)
    assert not list(tmp_path.iterdir())


def junit(tmp_path, **counts):
    """A JUnit file as pytest writes it."""
    counts = {"tests": 3, "failures": 0, "errors": 0, "skipped": 0} | counts
    words = " ".join(f'{name}="{count}"' for name, count in counts.items())
    path = tmp_path / "junit.xml"
    path.write_text(f'<testsuites><testsuite name="pytest" {words}><testcase name="t"/></testsuite></testsuites>')
    return run.junit(path, "two")


def test_a_clean_guest_passes(tmp_path):
    """All tests ran and passed: the suite bears the guest's name."""
    suite = junit(tmp_path)
    assert run.Result(run.JOBS[0], 0, 1.0, suite).passed
    assert suite.get("name") == "numa-guest-two"


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        (1, {}), (0, {"failures": 1}), (0, {"errors": 1}), (0, {"skipped": 1}), (0, {"tests": 0}),
        (boot.TIMED_OUT, {}), (boot.PANICKED, {}),
    ],
)  # fmt: skip
def test_everything_else_does_not(code, counts, tmp_path):
    """A failure, an error, a skip, an empty suite, a panic, a time-out: none is a pass."""
    assert not run.Result(run.JOBS[0], code, 1.0, junit(tmp_path, **counts)).passed


def test_a_guest_that_wrote_nothing_does_not_pass(tmp_path):
    """No JUnit file, or half of one, is no result even where the exit code says 0."""
    (tmp_path / "half.xml").write_text("<testsuites><testsuite")
    for name in ("absent.xml", "half.xml"):
        suite = run.junit(tmp_path / name, "two")
        assert suite is None
        assert not run.Result(run.JOBS[0], 0, 1.0, suite).passed


def test_every_suite_of_the_guest_is_run():
    """No file in ``inside`` is forgotten."""
    listed = {suite.split("::")[0] for job in run.JOBS for suite in job.suites}
    assert listed == {path.name for path in (HERE / "inside").glob("test_*.py")}


def test_a_job_that_lacks_its_engine_is_not_measured(tmp_path, monkeypatch, capsys):
    """Without the engine's files the job boots nothing: it is named as not measured, and alone it is no success."""
    (job,) = [job for job in run.JOBS if job.name == "engine"]
    assert "/" in job.needs[-1]
    monkeypatch.setattr(boot, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "engine", "--out", str(tmp_path)])
    assert run.main() == boot.UNAVAILABLE
    assert f"guest engine: NOT_MEASURED: no {job.needs[-1]}" in capsys.readouterr().out.replace("torch, triton, ", "")

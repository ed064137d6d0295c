"""What all tests share: one thread per computation, Triton's interpreter without a GPU, a pytest run in-process."""

import importlib
import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # threads that spin beside other tests take ten times as long
    os.environ.setdefault(pool, "1")
if not Path("/dev/nvidiactl").exists():  # must be decided before the first import of triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def run_here(monkeypatch, tmp_path):
    """``run_here(*arguments, cwd=ROOT)`` -> returncode, stdout, stderr of one pytest run in this process.

    A process of its own would spend seconds on imports; modules that lie beside a test's own files are forgotten.
    """
    unused = ("cacheprovider", "faulthandler", "unraisableexception")  # the last collects all garbage, five times
    ours = ["--assert=plain", *(f"-pno:{name}" for name in unused), f"--engram-report={tmp_path}/report"]

    def run(*arguments, cwd=ROOT):
        out, err, before = io.StringIO(), io.StringIO(), set(sys.modules)
        importlib.invalidate_caches()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(cwd)
            patch.setattr(sys, "path", [*sys.path])
            code = pytest.main([*ours, *map(str, arguments)])
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path.parent)):
                del sys.modules[name]
        return SimpleNamespace(returncode=int(code), stdout=out.getvalue(), stderr=err.getvalue())

    return run

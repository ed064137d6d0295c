"""Real vLLM Engram modules for the tests, and the reason where there are none."""

import os
import threading
from functools import cache
from pathlib import Path

import pytest

from pytest_engram.backends.vllm_source import TESTED, locate
from pytest_engram.errors import EngramError

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any test imports Triton


@cache
def absence(version):
    """Why a release is not here, or None; in conformance mode that is an error."""
    try:
        locate(version)
    except EngramError as error:
        if os.environ.get("PYTEST_ENGRAM_CONFORMANCE") == "1":
            raise
        return f"{error.seen}; {error.way_out}"


def pytest_runtest_setup(item):
    """Skip what needs a release that is not here; from this one place, so that the summary folds them to a line."""
    version = getattr(item, "callspec", None) and item.callspec.params.get("vllm_version")
    if version and (why := absence(version)):
        pytest.skip(why)


@pytest.fixture(scope="session", params=sorted(TESTED))
def vllm_version(request):
    """Each release that the contract was run against."""
    return request.param


@pytest.fixture(scope="session")
def vllm_backend(vllm_version):
    """The backend on that release, interpreted where there is no CUDA device."""
    pytest.importorskip("torch", reason="vLLM's modules need torch")
    pytest.importorskip("triton", reason="vLLM's modules need Triton")
    from pytest_engram.backends.vllm import VllmBackend

    return VllmBackend(f"vllm@{vllm_version}")


class ThreadGroup:
    """One of two ranks in this process; a peer that never comes breaks the barrier instead of hanging."""

    size = 2

    def __init__(self, rank, values, barrier):
        self.rank, self._values, self._barrier = rank, values, barrier

    def all_gather(self, value, *, step):
        self._values[self.rank] = value
        self.barrier(step=step)
        seen = list(self._values)
        self.barrier(step=step)
        return seen

    def broadcast(self, value, *, step):
        return self.all_gather(value, step=step)[0]

    def barrier(self, *, step):
        self._barrier.wait(timeout=60)


@pytest.fixture
def two_ranks():
    """Call a function with each rank's group in two threads; what both returned, or the first rank's error."""

    def run(function):
        values, barrier = [None, None], threading.Barrier(2)
        results, errors = [None, None], []

        def rank(index):
            try:
                results[index] = function(ThreadGroup(index, values, barrier))
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    return run

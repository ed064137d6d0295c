"""Backends with one planted property each, for the experiment base against candidate."""

import time

from pytest_engram.backends.reference import ReferenceBackend

DELAY_S = 0.003


def burn(seconds):
    """Keep the calling thread's CPU busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Slow(ReferenceBackend):
    """The base: every lookup takes three milliseconds longer than it must, without using a CPU."""

    def lookup(self, shard, ids, out, *, cap=None):
        """Sleep, then look up."""
        time.sleep(DELAY_S)
        return super().lookup(shard, ids, out, cap=cap)


class Faster(ReferenceBackend):
    """A candidate that is really faster: the delay is gone and nothing else changed."""


class FasterWrongRow(ReferenceBackend):
    """The same candidate with one corrupted row per lookup."""

    def lookup(self, shard, ids, out, *, cap=None):
        """Flip one bit of the first row."""
        launch = super().lookup(shard, ids, out, cap=cap)
        if len(out):
            out[0, 0, 0] ^= 1
        return launch


class SameAgain(Slow):
    """Another name for identical behaviour."""


class OnlyShorterWait(ReferenceBackend):
    """The wait is gone, and the main computation pays exactly for it."""

    def gate(self, hidden, key, value, query_norm, key_norm, keep):
        """Burn on the main thread what the lookup no longer sleeps."""
        burn(DELAY_S)
        return super().gate(hidden, key, value, query_norm, key_norm, keep)

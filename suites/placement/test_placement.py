"""A1 to A3: does the placement change what the reader of the pages sees, and does it pay?"""

import pytest

pytestmark = [pytest.mark.numa, pytest.mark.engram_experiments("policy")]


def test_gates(engram_settle):
    """The whole schedule of one placement experiment runs and its five gates are judged in order."""
    engram_settle()


def test_arm(engram_publish):
    """The samples of one arm, replayed for pytest-benchmark's tools."""
    engram_publish()

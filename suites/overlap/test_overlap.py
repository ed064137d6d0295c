"""B1, B2 and what engines do today: does hiding the lookup pay, and how much of the machine may it take?"""

import pytest

VARIABLES = ("submission", "cap", "inline_above", "wait", "streams", "graph")
pytestmark = [pytest.mark.overlap, pytest.mark.engram_experiments(*VARIABLES)]


def test_gates(engram_settle):
    """The whole schedule of one prefetch experiment runs and its five gates are judged in order."""
    engram_settle()


def test_arm(engram_publish):
    """The samples of one arm, replayed for pytest-benchmark's tools."""
    engram_publish()

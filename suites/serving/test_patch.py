"""Patch experiments: the base backend against a candidate, end to end."""

import pytest

pytestmark = [pytest.mark.serving, pytest.mark.engram_experiments("backend")]


def test_gates(engram_settle):
    """The whole schedule of base against candidate runs and its five gates are judged in order."""
    engram_settle()


def test_arm(engram_publish):
    """The samples of one arm, replayed for pytest-benchmark's tools."""
    engram_publish()

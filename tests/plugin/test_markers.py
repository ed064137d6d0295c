"""Markers that stand for hardware skip where it is not there, and only there."""

import pytest

ITEMS = """
    import pytest

    @pytest.mark.gpu
    def test_one(): pass

    @pytest.mark.multigpu(2)
    def test_two(): pass

    @pytest.mark.gpu
    @pytest.mark.multigpu(3)
    def test_three(): pass

    def test_none(): pass
"""


@pytest.mark.parametrize(("count", "passed"), [(0, 1), (1, 2), (2, 3), (4, 4)])
def test_items_skip_without_their_devices(pytester, monkeypatch, count, passed):
    """An item marked `gpu` needs one CUDA device and `multigpu(n)` needs n; the reason counts what was found."""
    monkeypatch.setattr("pytest_engram.engines.cuda_devices", lambda: (count, "" if count else "the driver is gone"))
    pytester.makepyfile(ITEMS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(passed=passed, skipped=4 - passed)
    if count < 3:
        why = ": the driver is gone" if count == 0 else ""
        result.stdout.fnmatch_lines(f"*needs 3 CUDA device(s), found {count}{why}")


def test_the_count_may_be_named(pytester, monkeypatch):
    """`multigpu(n=2)` is `multigpu(2)`; without a number it is an error that says so, and no item runs."""
    monkeypatch.setattr("pytest_engram.engines.cuda_devices", lambda: (1, ""))
    pytester.makepyfile("""
        import pytest

        @pytest.mark.multigpu(n=2)
        def test_named(): pass

        @pytest.mark.multigpu
        def test_bare(): pass
    """)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(skipped=1, errors=1)
    result.stdout.fnmatch_lines(["*missing 1 required positional argument: 'n'", "*needs 2 CUDA device(s), found 1"])


def test_unmarked_items_ask_no_driver(pytester, monkeypatch):
    """Negative control: what carries neither marker runs without a question to CUDA."""
    monkeypatch.setattr("pytest_engram.engines.cuda_devices", lambda: pytest.fail("asked"))
    pytester.makepyfile("def test_plain(): pass")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)

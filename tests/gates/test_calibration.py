"""The published error rates, in small."""

import pytest

from pytest_engram import calibration, cli
from pytest_engram.calibration import Scenario, simulate

TRIALS = 20_000


def _row(title, **fields):
    return simulate(Scenario(title=title, **fields), trials=TRIALS, seed=5)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"noise": 0.03},
        {"heavy": True},
        {"truth": 0.02, "margin": 0.02},
        {"drift": 0.02},
        {"drift": 0.02, "blocks": 20},
    ],
    ids=str,
)
def test_random_blocks_hold_the_level(fields):
    """Under the null, at the margin, with heavy tails and with drift at most 2.8 % are declared."""
    assert _row("null", **fields).declared <= 0.028


def test_a_bad_schedule_breaks_every_rule():
    """A…A B…B under a 2 % drift declares a third or more: the schedule matters more than the test."""
    bad = _row("bad", drift=0.02, randomised=False, blocks=20)
    assert bad.declared > 0.35
    assert bad.passed > 0.3  # A/A alone does not save it


def test_power():
    """+2 % is found in about 95 % at 1 % noise and in about 22 % at 3 % noise."""
    assert _row("power", truth=0.02).declared == pytest.approx(0.95, abs=0.02)
    assert _row("weak", truth=0.02, noise=0.03).declared == pytest.approx(0.22, abs=0.02)


def test_a_a_invalidates_at_its_own_level():
    """Sound worlds are invalidated in about 1 % of schedules."""
    assert 0.004 < _row("aa").invalidated < 0.013


def test_the_table_is_seeded_and_complete():
    """The same seed gives the same table; every scenario is a row of the Markdown."""
    rows = calibration.table(trials=300, seed=1)
    assert rows == calibration.table(trials=300, seed=1)
    text = calibration.render(rows)
    assert all(scenario.title in text for scenario in calibration.SCENARIOS)
    assert text.count("\n| ") == len(calibration.SCENARIOS) + 1


@pytest.mark.parametrize("options", [["--trials", "0"], ["--trials", "-5"], ["--seed", "-1"]])
def test_numbers_that_cannot_be_are_refused(options, capsys):
    """No trial or a negative seed is a usage error (exit 4), not a table of NaN or a traceback."""
    assert cli.main(["calibrate", *options]) == 4
    assert "one trial or more" in capsys.readouterr().err

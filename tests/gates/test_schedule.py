"""The schedule is the seed's own, and any other order is noticed."""

from collections import Counter
from dataclasses import replace

import pytest

from pytest_engram import schedule
from pytest_engram.model import ScheduledRun


def test_every_block_holds_every_arm_once(lab):
    """A block is A, A' and every candidate, each once, in an order of its own."""
    runs = schedule.make(lab.experiment("B2"), 1)
    orders = [[run.arm for run in runs if run.block == block] for block in range(9)]
    assert all(sorted(order) == sorted(["A", "A'", "cap8", "cap16", "cap33", "cap132"]) for order in orders)
    assert len({tuple(order) for order in orders}) > 4
    assert [run.index for run in runs] == list(range(54))


def test_the_order_is_stable_for_ever(lab):
    """The same seed gives the same order on any Python and NumPy; these were drawn once."""
    runs = schedule.make(lab.experiment("B1"), 3)[:6]
    assert [run.arm for run in runs] == ["A", "B", "A'", "B", "A", "A'"]


def test_orders_are_balanced(lab):
    """Over many blocks every order of three arms is about equally frequent."""
    runs = schedule.make(lab.experiment("B1", blocks=1200), 5)
    orders = Counter("".join(run.arm for run in runs[3 * block : 3 * block + 3]) for block in range(1200))
    assert len(orders) == 6
    assert all(150 < count < 250 for count in orders.values())


@pytest.mark.parametrize(
    "alter",
    [
        lambda runs: runs[1:],
        lambda runs: (*runs, ScheduledRun(index=24, block=8, arm="A")),
        lambda runs: (replace(runs[0], arm="C"), *runs[1:]),
        lambda runs: tuple(replace(run, arm=other.arm) for run, other in zip(runs, runs[::-1], strict=True)),
    ],
)
def test_an_altered_schedule_is_named(lab, alter):
    """A run left out, added, renamed or moved is found."""
    chosen = lab.experiment("B1")
    runs = schedule.make(chosen, 7)
    assert schedule.verify(runs, chosen, 7) is None
    assert schedule.verify(alter(runs), chosen, 7)


def test_another_seed_is_another_schedule(lab):
    """A schedule does not pass for that of another seed."""
    chosen = lab.experiment("B1")
    assert schedule.verify(schedule.make(chosen, 7), chosen, 8)


def test_only_complete_blocks_count():
    """A block that lacks an arm is not complete."""
    cells = [(0, "A"), (0, "A'"), (0, "B"), (1, "A"), (1, "B"), (2, "A"), (2, "A'"), (2, "B")]
    assert schedule.complete_blocks(cells, ("A", "A'", "B")) == (0, 2)

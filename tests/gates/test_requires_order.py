"""An experiment is measured and judged after all that it requires, and after what that requires."""

from pathlib import Path

import pytest

from pytest_engram import experiment, experiment_rules
from pytest_engram.errors import UsageError
from pytest_engram.session import Session

B1 = Path(__file__).resolve().parents[2] / "fixtures" / "experiments" / "B1.yaml"


@pytest.mark.parametrize(("selected", "order"), [("A3 A1 B1", ["B1", "A1", "A3"]), ("A3 B1", ["A3"])])
def test_a_session_measures_what_is_required_first(lab, monkeypatch, selected, order):
    """A3 needs A1, which needs B1; only what was selected is measured, and each experiment once."""
    needs, measured = {"A3": ("A1",), "A1": ("B1",), "B1": ()}, []
    session = Session({"--engram-experiments": None}.get)
    session.experiments = {name: lab.experiment(name, requires=found) for name, found in needs.items()}
    session.selected = set(selected.split())
    monkeypatch.setattr(session, "_measure", lambda chosen: measured.append(chosen.id))
    for name in ("A3", "A3"):
        session.outcome(name)
    assert measured == order


def test_experiments_that_require_each_other_are_refused(tmp_path):
    """A circle of three is named; a chain of three is none, though its files stand the other way round."""
    text = B1.read_text()
    for name, needs in (("A", "B"), ("B", "C"), ("C", "D")):
        (tmp_path / f"{name}.yaml").write_text(text.replace("id: B1", f"id: {name}\nrequires: [{needs}]"))
    assert experiment_rules.in_order(experiment.load_all(tmp_path).values()) == ["D", "C", "B", "A"]
    (tmp_path / "D.yaml").write_text(text.replace("id: B1", "id: D\nrequires: [B]"))
    with pytest.raises(UsageError, match=r"required by each other: .*C") as caught:
        experiment.load_all(tmp_path)
    assert caught.value.code == "bad-experiment"

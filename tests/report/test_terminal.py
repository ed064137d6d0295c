"""The ladder on a terminal: what a tired person sees for each status."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pytest_engram import gates
from pytest_engram.model import GATE_NAMES, Claim, Effect, Problem, Status
from pytest_engram.report import numbers, terminal
from pytest_engram.report.account import Account

STOPS = {"reason": "exposed-wait-did-not-move", "observed": "exposed wait −0.4 % [−1.2, +0.5]",
         "next_step": "look at the timeline: the first consumer may wait for another dependency"}  # fmt: skip


def test_a_failed_ladder_reads_from_top_to_bottom(make_verdict):
    """A FAIL at gate 2 shows five rungs, explains the third alone, and leaves the blocked ones short."""
    assert terminal.ladder(make_verdict("FAIL", at=2, gate=STOPS)) == [
        "B1  Submit early or at consumption  [improves, suite loop]                                      FAIL",
        "  0 correctness  PASS         96/96 checks in 24 runs | needs every check",
        "  1 treatment    PASS         submission differs on 2/2 ranks | needs every rank",
        "  2 mechanism    FAIL         exposed wait −0.4 % [−1.2, +0.5] | needs below 0 %",
        "      why   exposed-wait-did-not-move",
        "      next  look at the timeline: the first consumer may wait for another dependency",
        "  3 no offset    BLOCKED",
        "  4 end to end   BLOCKED",
    ]


@pytest.mark.parametrize("status", [status for status in Status if status not in (Status.PASS, Status.BLOCKED)])
@pytest.mark.parametrize("at", range(5))
def test_only_the_deciding_gate_explains_itself(make_verdict, status, at):
    """For every status and gate the reason and the next step stand directly under the rung that stopped."""
    lines = terminal.ladder(make_verdict(status.value, at=at, gate=STOPS))
    rung = next(number for number, line in enumerate(lines) if line.startswith(f"  {at} "))
    assert lines[rung].split()[len(GATE_NAMES[at].split("_")) + 1] == status.value
    assert lines[rung + 1].split() == ["why", STOPS["reason"]]
    assert lines[rung + 2].split()[0] == "next"
    assert sum("why" in line for line in lines) == 1
    assert [line.split()[-1] for line in lines[rung + 3 :]] == ["BLOCKED"] * (4 - at)
    assert lines[0].endswith(status.value)


def test_an_experiment_that_is_blocked_as_a_whole_says_by_what(make_verdict):
    """A BLOCKED gate that decides (a required experiment did not pass) is not short: it shows what was seen and why."""
    gate = {"reason": "requires-B1", "observed": "B1 is FAIL", "next_step": "pass B1 first"}
    lines = terminal.ladder(make_verdict("BLOCKED", at=0, gate=gate))
    assert lines[1] == "  0 correctness  BLOCKED      B1 is FAIL"
    assert [line.split()[0] for line in lines[2:4]] == ["why", "next"]
    assert all(line.endswith("BLOCKED") for line in lines[4:])


def test_a_passed_ladder_has_six_lines_and_no_why(make_verdict):
    """A PASS is a header and five rungs, nothing else."""
    lines = terminal.ladder(make_verdict())
    assert len(lines) == 6
    assert all(" PASS " in line for line in lines[1:])
    assert not any("why" in line or "next" in line for line in lines)


def test_a_characterising_ladder_reports_effects_without_judging(characterised):
    """Unjudged gates show the effect with its interval, and no why although they are not PASS."""
    lines = terminal.ladder(characterised)
    assert lines[3] == "  2 mechanism    reported     lookup −3.1 % [−4.0, −2.2]"
    assert not any("why" in line for line in lines)
    assert lines[0].split()[-1] == "PASS"


def test_an_unjudged_gate_that_is_blocked_says_so(characterised):
    """A gate behind a failed one stays BLOCKED for a characterising claim too."""
    blocked = replace(characterised.gates[2], status=Status.BLOCKED)
    lines = terminal.ladder(replace(characterised, gates=(*characterised.gates[:2], blocked)))
    assert lines[3].split() == ["2", "mechanism", "BLOCKED"]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_lines_keep_to_the_width(make_verdict, width):
    """Long texts wrap under their own column; no line of words exceeds the width."""
    gate = {**STOPS, "observed": "word " * 60, "next_step": "step " * 60}
    lines = terminal.ladder(make_verdict("INVALID", at=1, gate=gate), width=width)
    assert max(map(len, lines)) <= width
    wrapped = [line for line in lines if "word word" in line]
    assert len(wrapped) > 1
    assert {line.index("word") for line in wrapped} == {lines[1].index("96/96")}


def test_colours_do_not_move_columns(make_verdict):
    """Markup receives words that are padded already; removing it gives the plain text again."""
    verdict = make_verdict("FAIL", at=2, gate=STOPS)
    coloured = terminal.ladder(verdict, markup=lambda text, status: f"<{status.value}>{text}</>")
    assert "<FAIL>FAIL        </>" in coloured[3]
    plain = [re.sub(r"</?[A-Z_]*>", "", line).rstrip() for line in coloured]
    assert plain == terminal.ladder(verdict)


def test_colours_come_from_a_terminal_writer():
    """Each status has a colour that pytest's own terminal writer knows."""
    from io import StringIO

    from _pytest._io import TerminalWriter

    writer = TerminalWriter(StringIO())
    writer.hasmarkup = True
    painted = {terminal.colours(writer)("x", status) for status in Status}
    assert all("\x1b[" in text for text in painted)


def _everything(verdict):
    return "\n".join([*terminal.ladder(verdict), *terminal.summary([verdict])])


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("claim", list(Claim))
def test_the_word_appears_only_through_the_verdicts_sentence(make_verdict, status, claim):
    """Without a sentence the word "speed-up" is nowhere; a sentence is printed for a passed `improves` alone."""
    verdict = make_verdict(status.value, at=5 if status is Status.PASS else 2, claim=claim)
    assert "speed" not in _everything(verdict).lower()
    spoken = _everything(replace(verdict, sentence="B1: a speed-up of 4.6 % for suite loop"))
    assert ("speed-up" in spoken) == (status is Status.PASS and claim is Claim.IMPROVES)


def test_the_summary_is_one_line_per_experiment(make_verdict, characterised):
    """Statuses stand in one column and each line says what this run can say."""
    failed = make_verdict("NOT_MEASURED", at=1, gate=STOPS)
    assert terminal.summary([characterised, failed, make_verdict("FAIL", at=2, gate=STOPS, experiment="patch")]) == [
        "A1     PASS          reported, no winner declared: lookup −3.1 % [−4.0, −2.2]",
        "B1     NOT_MEASURED  stopped at gate 1 treatment: exposed-wait-did-not-move",
        "patch  FAIL          stopped at gate 2 mechanism: exposed-wait-did-not-move",
    ]
    assert terminal.summary([]) == []


def test_progress_lines(make_run):
    """A run's line shows where the schedule stands; a lost run names its problem."""
    run = make_run(6, "A'", block=2)
    assert terminal.run_line("B1", 7, 24, run, 48.2) == "B1  run  7/24  block 3  A'  2.9 s  eta 48 s"
    lost = make_run(6, "B", block=2, problems=(Problem(code="peer-died", message=""),))
    assert terminal.run_line("B1", 7, 24, lost, None).endswith("B   2.9 s  peer-died")


def test_an_absent_effect_is_said_and_never_zero():
    """No estimate gives "absent" with its reason; an open interval has an infinite end; a measured zero is a zero."""
    effect = Effect(metric="ttft_p95", arm="B", estimate=None, low=None, high=None, p_value=None, blocks=3,
                    note="needs 3 more")  # fmt: skip
    assert numbers.effects([effect]) == "ttft_p95 absent (needs 3 more)"
    open_end = replace(effect, estimate=0.0, low=-0.01)
    assert numbers.effects([open_end]) == "ttft_p95 +0.0 % [−1.0, +∞]"


def test_effects_name_their_arms_once_there_are_several(lookup_effect):
    """Two candidates are told apart; a single one needs no name; a difference is in percentage points."""
    other = replace(lookup_effect, arm="C", metric="rejection_rate")
    assert numbers.effects([lookup_effect]) == "lookup −3.1 % [−4.0, −2.2]"
    assert numbers.effects([lookup_effect, other]) == (
        "B: lookup −3.1 % [−4.0, −2.2], C: rejection_rate −3.1 pp [−4.0, −2.2]"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "absent"), (0.0, "0 ns"), (4.5e-7, "450 ns"), (4.5e-5, "45.0 µs"), (0.0123, "12.3 ms"), (2.94, "2.9 s"),
     (48.2, "48 s"), (444.0, "7.4 min")],
)  # fmt: skip
def test_seconds_have_a_unit_that_fits(value, text):
    """Times from ns to minutes keep two or three digits; absent is not zero."""
    assert numbers.seconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, "absent"), (0, "0 B"), (12_672, "12.4 KiB"), (24 << 30, "24.0 GiB")]
)
def test_sizes_are_binary(count, text):
    """Bytes are shown in binary units."""
    assert numbers.size(count) == text


def test_an_experiment_is_named_once(make_experiment):
    """What could not be measured names its experiment in the header alone; another culprit keeps its name."""
    for who, seen in (("B1", "needs two"), ("rank 1", "rank 1: needs two")):
        problem = Problem(code="absent", message="needs two", who=who, status=Status.NOT_MEASURED)
        lines = terminal.ladder(gates.not_measured(make_experiment("B1"), problem))
        assert lines[1] == f"  0 correctness  NOT_MEASURED {seen} "[: len(lines[1])]
        assert lines[1].endswith(seen)


def test_hypotheses_are_short(make_verdict, make_evidence):
    """One entry per hypothesis and one per experiment, within the width; nothing where nothing was measured."""
    lines = terminal.explained(Account([make_verdict()], [make_evidence()]), width=80)
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines if line[2:3].isdigit()] == [[str(n), "undecided"] for n in (1, 2, 3, 4)]
    assert any(line.startswith("  B1  no recommendation: ") for line in lines)
    assert terminal.explained(Account([make_verdict()], [])) == []


@pytest.mark.parametrize(("code", "step"), [
    ("no-candidate", "name the build of the patch with --engram-candidate"),
    ("over-time-budget", "raise --engram-time-budget"), ("no-gpu-driver", "measure where this is available"),
])  # fmt: skip
def test_the_next_step_is_one_that_helps(make_experiment, code, step):
    """What an option left out is not sent to another machine; what this machine lacks is."""
    problem = Problem(code=code, message="absent", status=Status.NOT_MEASURED)
    assert gates.not_measured(make_experiment("B1"), problem).gates[0].next_step.startswith(step)

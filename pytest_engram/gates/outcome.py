"""What a run's verdicts mean to the shell that started it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_engram.model import Status, Verdict

EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_NOT_MEASURED, EXIT_INVALID = 10, 11, 12, 13

_CODES = {
    Status.PASS: 0,
    Status.FAIL: EXIT_FAIL,
    Status.INCONCLUSIVE: EXIT_INCONCLUSIVE,
    Status.NOT_MEASURED: EXIT_NOT_MEASURED,
    Status.BLOCKED: EXIT_NOT_MEASURED,
    Status.INVALID: EXIT_INVALID,
}
_PRECEDENCE = (EXIT_INVALID, EXIT_FAIL, EXIT_NOT_MEASURED, EXIT_INCONCLUSIVE, 0)


def exit_code(verdicts: Sequence[Verdict], required: Mapping[str, int] | None = None) -> int:
    """13 > 10 > 12 > 11 > 0 over the verdicts; no verdict at all is NOT_MEASURED.

    ``required`` maps an experiment to the last gate that it must reach: those decide alone, up to that gate, and a
    required experiment without a verdict is NOT_MEASURED.
    """
    if required is None:
        codes = {_CODES[verdict.status] for verdict in verdicts}
    else:
        known: dict[str, list[Verdict]] = {}
        for verdict in verdicts:
            known.setdefault(verdict.experiment, []).append(verdict)
        codes = {_reached(one, gate) for name, gate in required.items() for one in known.get(name, [])}
        codes |= {EXIT_NOT_MEASURED for name in required if name not in known}
    return next((code for code in _PRECEDENCE if code in codes), EXIT_NOT_MEASURED)


def _reached(verdict: Verdict, gate: int) -> int:
    """The code of the first judged gate up to ``gate`` that is not PASS; a gate that is missing was not measured."""
    if {result.gate for result in verdict.gates} < set(range(gate + 1)):
        return EXIT_NOT_MEASURED
    rungs = [result for result in verdict.gates if result.judged and result.gate <= gate]
    return next((_CODES[rung.status] for rung in rungs if rung.status is not Status.PASS), 0)

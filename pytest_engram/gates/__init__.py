"""The acceptance gates: one ordered, closed list, decided by one pure function."""

from pytest_engram.gates.ladder import EXIT_NOT_MEASURED, evaluate, exit_code, not_measured, unmeasured
from pytest_engram.gates.reasons import REASONS
from pytest_engram.schedule import plan_hash

__all__ = ["EXIT_NOT_MEASURED", "REASONS", "evaluate", "exit_code", "not_measured", "plan_hash", "unmeasured"]

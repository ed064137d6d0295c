"""The acceptance gates: one ordered, closed list, decided by one pure function."""

from pytest_engram.gates.ladder import evaluate as evaluate
from pytest_engram.gates.ladder import not_measured as not_measured
from pytest_engram.gates.outcome import EXIT_FAIL as EXIT_FAIL
from pytest_engram.gates.outcome import EXIT_INCONCLUSIVE as EXIT_INCONCLUSIVE
from pytest_engram.gates.outcome import EXIT_INVALID as EXIT_INVALID
from pytest_engram.gates.outcome import EXIT_NOT_MEASURED as EXIT_NOT_MEASURED
from pytest_engram.gates.outcome import exit_code as exit_code
from pytest_engram.gates.protocol import plan_hash as plan_hash
from pytest_engram.gates.protocol import protocol_hash as protocol_hash
from pytest_engram.gates.reasons import REASONS as REASONS

"""Hooks that a project may implement in its ``conftest.py`` or plugin; none of them can change a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_engram.model import Verdict


@pytest.hookspec
def pytest_engram_verdict(config: pytest.Config, verdict: Verdict) -> None:
    """Called once per experiment in the controlling process, after its verdict stands and before it is printed.

    The verdict is frozen: send it on, do not decide again.  To keep one line per verdict in a shared log::

        # conftest.py
        def pytest_engram_verdict(config, verdict):
            with open("/srv/lab/verdicts.log", "a") as log:
                stopped = next((gate for gate in verdict.gates if gate.status.value != "PASS"), None)
                print(verdict.experiment, verdict.status.value, stopped and stopped.reason, file=log)
    """


@pytest.hookspec
def pytest_engram_provenance(config: pytest.Config) -> Mapping[str, str] | None:
    """Extra fingerprint entries that only your lab knows; asked once, before the first sample.

    Every arm carries them, so two files that differ in one of them are never pooled.  Return strings only, or
    ``None`` to add nothing.  To tell machines apart by the firmware setting that splits a socket in NUMA nodes::

        # conftest.py
        def pytest_engram_provenance(config):
            return {"lab.bios.nps": open("/srv/lab/nps").read().strip()}
    """

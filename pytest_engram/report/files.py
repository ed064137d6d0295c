"""The run folder: ``verdict.json``, one ``evidence-<id>.json`` per experiment, ``report.md``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_engram import codec
from pytest_engram.model import Evidence, Problem, Verdict
from pytest_engram.report import markdown, strict
from pytest_engram.report.records import VERDICT_FILE, engram_section


@dataclass(frozen=True, slots=True)
class RunFolder:
    """``reports/<run>/``: ``verdict.json``, one ``evidence-<id>.json`` per experiment, ``report.md``."""

    path: Path

    def write(
        self,
        verdicts: Sequence[Verdict],
        evidences: Sequence[Evidence],
        *,
        provenance: Mapping[str, Any] | None = None,
        problems: Sequence[Problem] = (),
        command: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Write every file atomically, the verdict last; returns the section with the evidence embedded."""
        names = _names(evidences)
        for name, evidence in zip(names, evidences, strict=True):
            codec.write_atomic(self.path / name, codec.encode(evidence))
        known = dict(provenance or next((evidence.provenance for evidence in evidences), {}))
        text = markdown.render(verdicts, evidences, {**known, "command": shlex.join(command)})
        codec.write_atomic(self.path / "report.md", text.encode())
        section = engram_section(verdicts, evidences, provenance=known, problems=problems, command=command)
        stored = {**section, "evidence": [], "evidence_files": names}
        codec.write_atomic(self.path / VERDICT_FILE, strict.dumps({"engram": stored}))
        return section


def _names(evidences: Sequence[Evidence]) -> list[str]:
    """One file per evidence; a second evidence of the same experiment gets a number."""
    names: list[str] = []
    for evidence in evidences:
        name = f"evidence-{evidence.plan.experiment.id}"
        count = sum(known == f"{name}.json" or known.startswith(f"{name}.") for known in names)
        names.append(f"{name}.{count + 1}.json" if count else f"{name}.json")
    return names

"""A run's evidence for the repository: ``python tests/gpu/curate.py REPORT_FOLDER reports/h200 [--name NAME]``.

Writes evidence-NAME.json.gz without what names a container, a session or a folder of the machine, the same bytes each
time, and renders NAME.md from that file: whoever judges it again reads what the report was made of.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pytest_engram.report.records import read_results
from pytest_engram.report.results import gate_results

PRIVATE = ("cgroup.paths", "namespace.", "hostname")  # of provenance
STAMPED = "machine."  # how a run's fingerprint names the same


def curated(evidence: dict[str, Any]) -> dict[str, Any]:
    """The evidence without private lines, in its provenance and in its runs; the experiment's file by its own name."""
    experiment = evidence["plan"]["experiment"]
    inside = experiment["source"].rpartition("fixtures/")
    source = "".join(inside[1:]) if inside[1] else Path(experiment["source"]).name
    return {
        **evidence, "provenance": public(evidence["provenance"]),
        "plan": {**evidence["plan"], "experiment": {**experiment, "source": source}},
        "runs": [{**run, "fingerprint": public(run["fingerprint"])} for run in evidence["runs"]],
    }  # fmt: skip


def public(lines: dict[str, Any]) -> dict[str, Any]:
    """Without the private ones, and the kernel's version without its builder's suffix."""
    kept = {name: value for name, value in lines.items() if not name.removeprefix(STAMPED).startswith(PRIVATE)}
    if isinstance(kernel := kept.get("kernel"), dict):
        kept["kernel"] = {**kernel, "value": kernel["value"].partition("-")[0]}
    if stamp := kept.get(f"{STAMPED}kernel"):
        kept[f"{STAMPED}kernel"] = stamp.partition("-")[0]
    return kept


def main() -> None:
    """One folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", help="otherwise the experiment's")
    options = parser.parse_args()
    (file,) = options.folder.glob("evidence-*.json")
    evidence = curated(json.loads(file.read_text("utf-8")))
    name = options.name or evidence["plan"]["experiment"]["id"]
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / f"evidence-{name}.json.gz"
    text = json.dumps(evidence, ensure_ascii=False, separators=(",", ":")).encode()
    kept.write_bytes(gzip.compress(text, mtime=0))
    _, code, lines = gate_results(read_results([kept]), markdown=options.out / f"{name}.md")
    print("\n".join(lines[-3:]), code)


if __name__ == "__main__":
    main()

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


def curated(evidence: dict[str, Any]) -> dict[str, Any]:
    """The evidence without private provenance; the experiment's file is named from the repository's root."""
    kept = {name: value for name, value in evidence["provenance"].items() if not name.startswith(PRIVATE)}
    kernel = {"kernel": {**kept["kernel"], "value": kept["kernel"]["value"].partition("-")[0]}}
    experiment = evidence["plan"]["experiment"]
    source = "fixtures" + experiment["source"].rpartition("fixtures")[2]
    return {
        **evidence, "provenance": kept | kernel,
        "plan": {**evidence["plan"], "experiment": {**experiment, "source": source}},
    }  # fmt: skip


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

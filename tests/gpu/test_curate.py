"""Evidence for the repository loses what names a machine's folders and sessions, and nothing else."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRIVATE = {"cgroup.paths": {"value": {"unified": "/job/17"}}, "namespace.pid": {"value": "pid:[4]"}}


def test_private_lines_go_and_the_verdict_stays(tmp_path):
    """A real run with private provenance and fingerprints comes out as the committed file and as a report."""
    source = ROOT / "reports/h200/variants/evidence-B1-wait.json.gz"
    tree = json.loads(gzip.decompress(source.read_bytes()))
    tree["provenance"] |= {**PRIVATE, "kernel": {**tree["provenance"]["kernel"], "value": "6.18.44-job-7"}}
    for run in tree["runs"]:
        run["fingerprint"] |= {"machine.namespace.pid": "pid:[4]", "machine.kernel": "6.18.44-job-7"}
    experiment = tree["plan"]["experiment"]
    experiment["source"] = f"/home/somebody/checkout/{experiment['source']}"
    (tmp_path / "evidence-B1-wait.json").write_text(json.dumps(tree))
    command = [sys.executable, "tests/gpu/curate.py", str(tmp_path), str(tmp_path / "out"), "--name", "kept"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "B1-wait  PASS" in said
    assert json.loads(gzip.decompress((tmp_path / "out/evidence-kept.json.gz").read_bytes())) == json.loads(
        gzip.decompress(source.read_bytes())
    )
    report = (tmp_path / "out/kept.md").read_text("utf-8")
    assert "— PASS" in report
    assert "somebody" not in report

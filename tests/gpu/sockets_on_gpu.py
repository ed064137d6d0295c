"""All GPUs of one host, and its sockets if they show: ``python tests/gpu/sockets_on_gpu.py --out DIR``, one call.

Phases, each on its own whatever became of the others, from the checkout:
``doctor``: NUMA nodes, distances, GPU to node by every source.
``nccl``: one table of all ranks by the product's protocol, right rows, lookups alone and together, and the gather of
staged rows on its own line (``peers_on_gpu``).
``experiments``: ``fixtures/experiments/peers`` with as many ranks as there are GPUs; every run also lets only 1, 2, 4 …
of them work.  B1 and B2 come first, since they need no second node; A1 to A3 end NOT_MEASURED where there is one.
``gate``: all evidence judged again offline, and the hypotheses.
JSON lines go to DIR/sockets.jsonl, what the commands printed to DIR/PHASE.txt, evidence to DIR/run.  Exit 1 if a phase
FAILED; what cannot be had here, or not in ``--minutes``, is NOT_MEASURED.  ``--engine cpu`` is the dry run.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from pytest_engram import hypotheses, metrics, planning, sweeps
from pytest_engram.errors import NotMeasurable
from pytest_engram.model import Evidence, SweepSample, Verdict
from pytest_engram.report.records import Result, read_results
from pytest_engram.report.results import gate_results
from pytest_engram.report.terminal import ladder, stopped_at
from pytest_engram.schedule import base_arm

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "fixtures" / "experiments"
CLI = ("-m", "pytest_engram.cli")
SUITES = ("suites/overlap", "suites/placement")  # in this order: B1 and B2 need no second node
STOP_S, JUDGE_S = 45.0, 30.0  # for an interrupted pytest to write what it has; for the last phase

Lines = list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The one call: what was asked, where records go, until when."""

    options: argparse.Namespace
    write: Callable[..., None]
    end: float

    def left(self, reserve: float = 0.0) -> float:
        """Seconds that a phase may take if ``reserve`` must remain for the others."""
        return max(1.0, self.end - time.monotonic() - reserve)

    def kept(self, name: str, arguments: Sequence[str], seconds: float) -> int:
        """Exit code of a Python command whose output stays in ``name``; over time it is interrupted: it may report."""
        with (self.options.out / name).open("w", encoding="utf-8") as out:
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait(STOP_S)
                raise NotMeasurable(f"over {seconds:.0f} s", code="over-time", who=name) from None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()


def doctor(call: Call) -> Lines:
    """The machine for people and as JSON; one record of what decides the rest."""
    for name, more in (("doctor.txt", ()), ("doctor.json", ("--json",))):
        require(call.kept(name, [*CLI, "doctor", *more], call.left(60)) == 0, name)
    topology = json.loads((call.options.out / "doctor.json").read_text())["topology"]
    nodes = {str(node["id"]): node["distances"] for node in topology["nodes"]}
    gpus = {gpu["pci"]: gpu["node_by_source"] for gpu in topology["gpus"]}
    call.write(nodes=nodes, gpu_node_by_source=gpus)
    return [f"NUMA nodes and distances {nodes}", *(f"GPU {pci}: {sources}" for pci, sources in gpus.items())]


def nccl(call: Call) -> Lines:
    """One world of all ranks over one table, its gather included."""
    out, ranks = call.options.out / "nccl", str(call.options.ranks)
    small = ["--cpu", "--gib", "0.01"] if call.options.engine == "cpu" else ["--gib", "1"]
    script = [str(Path(__file__).with_name("peers_on_gpu.py")), "--only", "table", "--out", str(out), "--rounds", "2"]
    code = call.kept("nccl.txt", [*script, "--ranks", ranks, *small], min(120.0, call.left(JUDGE_S)))
    records = [json.loads(line) for line in (out / "peers_on_gpu.jsonl").read_text().splitlines()]
    (told,) = (record for record in records if "phase" in record)
    for record in records:
        if "gather" in record:
            call.write(gather=record["gather"], rank=record["rank"], wrong=record["wrong"])
        elif "all_us" in record:
            call.write(together=record)
    require(code == 0, told["told"])
    if call.options.ranks == 1:
        raise NotMeasurable("one rank has no collectives", code="one-rank")
    return [line for line in (call.options.out / "nccl.txt").read_text().splitlines() if "gather" in line]


def experiments(call: Call) -> Lines:
    """The whole protocol through pytest; what was measured stands even if time ran out."""
    options, run = call.options, call.options.out / "run"
    files = copies(options)
    chosen = [word for file in files for word in ("--engram-experiments", str(file))]
    more = ["--engram-engine", options.engine, "--engram-report", str(run), "--engram-gate", "report"]
    more += ["--engram-rows", str(options.rows)] if options.rows else []
    problem: NotMeasurable | None = None
    try:
        command = [
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *plugin(),
            *SUITES,
            "-m",
            "numa or overlap",
            *chosen,
            *more,
        ]
        code = call.kept("experiments.txt", command, call.left(STOP_S + JUDGE_S))
        require(code in (0, 5), f"pytest's exit code is {code}, see experiments.txt")
    except NotMeasurable as over:
        problem = over
    found = read_results([run]) if run.exists() else []
    for result in found:
        call.write(**outcome(result))
        for record in measured(result.evidence):
            call.write(experiment=result.experiment, **record)
    if problem:
        raise problem
    return [line for result in found if result.stored for line in ladder(result.stored)]


def plugin() -> list[str]:
    """A checkout that is not installed names the plugin itself; an installed one must not, or it would come twice."""
    known = any(entry.value == "pytest_engram.plugin" for entry in entry_points(group="pytest11"))
    return [] if known else ["-p", "pytest_engram.plugin"]


def copies(options: argparse.Namespace) -> list[Path]:
    """The YAMLs with this call's ranks; the dry run takes model and load of the CPUs' own B1, but as few requests."""
    folder = options.out / "experiments"
    folder.mkdir(parents=True, exist_ok=True)
    small = yaml.safe_load((FOLDER / "B1.yaml").read_text(encoding="utf-8"))
    for name in options.experiments:
        tree = yaml.safe_load((FOLDER / "peers" / f"{name}.yaml").read_text(encoding="utf-8"))
        tree["ranks"] = options.ranks
        if options.engine == "cpu":
            tree["workload"]["model"] = small["workload"]["model"]
            tree["serving"] = {**small["serving"], "requests": tree["serving"]["requests"]}
            if tree["variable"] != "cap":  # which keeps its own reason: there is no grid
                tree.pop("engines", None)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return [folder / f"{name}.yaml" for name in options.experiments]


def outcome(result: Result) -> dict[str, Any]:
    """Status, and the gate, reason and words of where the experiment stopped; its notes carry A3's collectives."""
    verdict, evidence = result.stored, result.evidence
    if verdict is None:
        return {"experiment": result.experiment, "status": "FAILED", "reason": "no verdict beside its evidence"}
    stop = stopped_at(verdict)
    return {
        "experiment": verdict.experiment, "status": verdict.status.value, "runs": len(evidence.runs) if evidence else 0,
        "gate": stop and stop.gate, "reason": stop and stop.reason, "observed": stop and stop.observed,
        "notes": verdict.notes,
    }  # fmt: skip


def measured(evidence: Evidence | None) -> Iterator[dict[str, Any]]:
    """Records of one experiment: contention by arm and peers, audits, collectives of a query, the positive control."""
    if evidence is None:
        return
    found: dict[tuple[str, int, int], list[SweepSample]] = {}
    for run in evidence.runs:
        for one in sweeps.samples(run, evidence.plan.experiment.ranks):
            if one.lookup_ns:
                found.setdefault((base_arm(run.arm), one.tokens, one.peers), []).append(one)
    for (arm, tokens, peers), several in sorted(found.items()):
        lookups = [ns / 1e3 for one in several for ns in one.lookup_ns]
        tail = {f"p{q:g}_us": metrics.quantile(lookups, q / 100).value for q in (50, 95, 99)}
        together = sweeps.rate(several, peers) / 1e9
        yield {"arm": arm, "tokens": tokens, "peers": peers, **tail, "aggregate_gb_s": together, "steps": len(lookups)}
    pages = [page for run in evidence.runs for sample in run.placement for page in sample.distributions]
    yield {"audits": Counter(f"rank {page.rank} {page.moment.value}" for page in pages)}
    ledger = planning.step_ledger(evidence.plan)
    yield {"query_collectives": ledger.collectives, "query_bytes": ledger.gather}
    for run in evidence.control:
        yield {"control": run.arm, "lookup_ns": metrics.value(run, "lookup")}


def gate(call: Call) -> Lines:
    """Everything judged again by its evidence; the hypotheses with all their lines."""
    run = call.options.out / "run"
    if not run.exists():
        raise NotMeasurable("no experiment left a result", code="no-results")
    verdicts, code, lines = gate_results(read_results([run]))
    (call.options.out / "gate.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    evidences = [result.evidence for result in read_results([run]) if result.evidence is not None]
    short = [line for line in lines if line.startswith("hypotheses")]
    for one in hypotheses.adjudicate(evidences, verdicts):
        call.write(hypothesis=one.number, statement=one.statement, outcome=one.outcome, lines=one.lines)
        short.append(f"  {one.number} {one.outcome}: {'; '.join(one.lines)}")
    call.write(gate_exit_code=code, verdicts={verdict.experiment: said(verdict) for verdict in verdicts})
    return short


def said(verdict: Verdict) -> str:
    """Status and reason in one line."""
    stop = stopped_at(verdict)
    return f"{verdict.status.value} at gate {stop.gate}: {stop.reason}" if stop else verdict.status.value


def require(good: object, what: str) -> None:
    """What must hold for a phase to have run."""
    if not good:
        raise RuntimeError(what)


PHASES: dict[str, Callable[[Call], Lines]] = {
    "doctor": doctor, "nccl": nccl, "experiments": experiments, "gate": gate
}  # fmt: skip


def run_phase(name: str, call: Call) -> bool:
    """Whether it did not fail; its record is written and its lines are printed."""
    begin, status, reason, lines = time.monotonic(), "done", "", Lines()
    try:
        lines = PHASES[name](call)
    except NotMeasurable as absent:
        status, reason = "NOT_MEASURED", f"{absent.code}: {absent.seen}"
    except Exception as error:
        status, reason = "FAILED", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    seconds = time.monotonic() - begin
    call.write(phase=name, status=status, reason=reason, seconds=seconds)
    print("\n".join([f"== {name}: {status} {reason}, {seconds:.1f} s", *lines]), flush=True)
    return status != "FAILED"


def gpus() -> int:
    """How many GPUs this process may use, by CUDA's own answer; no context is created."""
    import torch

    return torch.cuda.device_count()


def main() -> int:
    """The phases, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted((path.stem for path in (FOLDER / "peers").glob("*.yaml")), key=lambda name: (name[0] != "B", name))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=PHASES, nargs="+", default=list(PHASES))
    parser.add_argument("--experiments", choices=names, nargs="+", default=names)
    parser.add_argument("--ranks", type=int, help="peers (default: one per GPU)")
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, help="rows per Engram layer instead of the YAMLs'")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all phases together")
    parser.add_argument(
        "--evidence", type=Path, nargs="+", default=[], help="runs of earlier calls, judged beside this"
    )
    options = parser.parse_args()
    options.ranks = options.ranks or (gpus() if options.engine == "cuda" else 2)
    if not options.ranks:
        parser.error("no GPU is visible: --engine cpu is the dry run")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job hands it on as ignored
    with (options.out / "sockets.jsonl").open("w", encoding="utf-8") as lines:

        def write(**record: Any) -> None:
            lines.write(json.dumps(record, default=str) + "\n")
            lines.flush()

        call = Call(options=options, write=write, end=time.monotonic() + 60 * options.minutes)
        done = [run_phase(name, call) for name in PHASES if name in options.only]
    return 0 if all(done) else 1


if __name__ == "__main__":
    raise SystemExit(main())

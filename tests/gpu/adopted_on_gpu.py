"""Tables that an engine allocates and registers itself: ``python tests/gpu/adopted_on_gpu.py --out DIR``, one block.

The placement-patch experiment's first block, three worlds of two ranks, stock and patched, by the one runner: whether
the engine's own tables are adopted, audited, read and given back.  Where there is one NUMA node both arms are asked for
that one: no placement can differ there, and nothing is judged.  Evidence goes to DIR/evidence.json, lines for a person
to the output.  Exit 1 if a run has a problem, wrong rows, or a rank without its audits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pytest_engram import codec, engines, experiment, planning, runner
from pytest_engram.model import Moment, Plan, RunRecord
from pytest_engram.session import this_machine

ROOT = Path(__file__).resolve().parents[2]
PATCHED = "pytest_engram.backends.vllm_patch:PatchedVllmBackend"
MOMENTS = {Moment.REGISTERED, Moment.LOADED, Moment.REPLAYED}


def block(options: argparse.Namespace) -> Plan:
    """The first block's plan."""
    machine = this_machine()
    one = experiment.load(ROOT / "fixtures/experiments/more/placement-patch.yaml")
    if len(machine.memory_nodes) < one.memory_nodes:
        one = replace(one, memory_nodes=1, hold={**one.hold, "policy": f"bind:{machine.memory_nodes[0].id}"})
    choices = planning.Choices(
        engine=engines.choose(options.engine), engines=engines.availability(), backend=options.backend,
        candidate=PATCHED if options.backend.startswith("vllm") else options.backend, rows=options.rows,
    )  # fmt: skip
    plan = planning.make_plan(one, machine, choices)
    return replace(plan, schedule=tuple(run for run in plan.schedule if run.block == 0))


def faults(run: RunRecord, ranks: int) -> Iterator[str]:
    """What is wrong with a run."""
    yield from (f"{one.code}: {one.message}" for one in run.problems)
    checks = (*run.correctness_before, *run.correctness_after)
    yield from (f"{one.case}: {one.detail}" for one in checks if one.supported and not one.passed)
    seen = {(one.rank, page.moment) for one in run.placement for page in one.distributions if not page.unplaced}
    if seen != {(rank, moment) for rank in range(ranks) for moment in MOMENTS}:
        yield f"audits {sorted((rank, moment.value) for rank, moment in seen)}"
    if run.arm == "B" and "default" in {page.policy_text for one in run.placement for page in one.distributions}:
        yield "the patch set no policy: it fell back to the stock order"


def main() -> int:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="vllm@0.31.0")
    parser.add_argument("--rows", type=int, default=4_000_000, help="of each of the two Engram layers: 2 GiB in all")
    options = parser.parse_args()
    plan = block(options)
    evidence = runner.run(plan)
    options.out.mkdir(parents=True, exist_ok=True)
    codec.write_atomic(options.out / "evidence.json", codec.encode(evidence))
    wrong = [line for run in evidence.runs for line in faults(run, plan.experiment.ranks)]
    for run in evidence.runs:
        print(f"{run.arm}: {plan.backends[run.arm[0]]}, {run.seconds:.1f} s")
        for receipt in (receipt for one in run.startup for receipt in one.receipts):
            print(f"  rank {receipt.rank} {receipt.step}: {receipt.seconds:.2f} s {receipt.detail}")
        for page in (page for one in run.placement for page in one.distributions):
            print(
                f"  rank {page.rank} {page.moment.value}: {page.pages} {page.policy_text}, not placed {page.unplaced}"
            )
    print("\n".join([*wrong, f"{len(wrong)} faults in {len(evidence.runs)} runs"]))
    return int(bool(wrong) or len(evidence.runs) != 3)


if __name__ == "__main__":
    raise SystemExit(main())

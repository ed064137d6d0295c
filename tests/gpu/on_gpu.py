"""What only a real GPU can show; run ``python tests/gpu/on_gpu.py --out DIR`` from the checkout, on its own.

Checks first (bit-exact rows from HBM and host, views, finalizers, graph replay, missing dependencies, hash ids, whole
steps: eager, captured, marked, sharded, in all settings), then times; JSON lines go to DIR/on_gpu.jsonl, a short table
comes last.  Exit 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import gpu_hash_checks
import gpu_memory_checks
import gpu_step_checks
import gpu_stream_checks
from gpu_times import measure

from pytest_engram.gpu.registration import unavailable


def run_checks(write: Callable[[dict[str, Any]], None]) -> int:
    """Every check once; the number of those that failed."""
    failed = 0
    modules = gpu_memory_checks, gpu_stream_checks, gpu_step_checks, gpu_hash_checks
    for name, check in [each for module in modules for each in vars(module).items()]:  # a warning adds to them
        if not name.startswith("check_"):
            continue
        begin = time.monotonic()
        try:
            write({"check": name, "ok": True, **check(), "seconds": round(time.monotonic() - begin, 2)})
        except Exception as error:
            failed += 1
            write({"check": name, "ok": False, "error": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
    return failed


def main() -> int:
    """Checks, then times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=24.0, help="size of the timed tmpfs table")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--peer-kernel", help="vllm@VERSION whose lookup kernel is timed in alternation, or a file that defines it"
    )
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        print(f"nothing to check: {reason}")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "on_gpu.jsonl").open("w", encoding="utf-8") as lines:

        def write(record: dict[str, Any]) -> None:
            lines.write(json.dumps(record, default=float) + "\n")
            lines.flush()
            print(json.dumps(record, default=float)[:400], flush=True)

        failed = run_checks(write)
        table = [asdict(row) for row in measure(options.gib, options.repeats, options.peer_kernel)]
        for row in table:
            lines.write(json.dumps(row) + "\n")
    for row in table:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(f"{failed} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The lookup kernel: bit by bit under Triton's interpreter, and its compiled form for real GPUs without one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES_FILE = Path(__file__).with_name("gather_cases.py")
CASES = {
    node.name: ast.get_docstring(node)
    for node in ast.parse(CASES_FILE.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """What each case said, from one interpreter process."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(CASES_FILE)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str | None] = json.loads(done.stdout)
    return outcomes


def environment() -> dict[str, str]:
    """This checkout's package, no GPU, and Triton's compiler unless the program itself chooses the interpreter."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**inherited, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("case", CASES)
def test_under_the_interpreter(case: str, outcomes: dict[str, str | None]) -> None:
    """L1-L5: the case of gather_cases.py, whose docstring names the behaviour."""
    assert outcomes.get(case, "the case did not run") is None, CASES[case]


COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from pytest_engram.gpu._kernels import lookup_kernel as kernel, spin_kernel
names = kernel.arg_names
types = dict(weight="*u8", scales="*u8", ids="*i32", out="*bf16", HEAD_START=0, LOCAL_HEADS=24, TOTAL_HEADS=24,
             DIM=256, BLOCK=32, TILE=16)
signature = {n: "constexpr" if isinstance(types.get(n), int) else types.get(n, "i32") for n in names}
constants = {(i,): types[n] for i, n in enumerate(names) if isinstance(types.get(n), int)}
aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in ("weight", "scales", "out")}
found = {}
for capability in (75, 80, 90):
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    found[capability] = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]
found["spin"] = compile(ASTSource(fn=spin_kernel, signature={"nanoseconds": "i64"}, constexprs={}),
                        target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
free = [p.name for p in kernel.params if p.do_not_specialize]
print(json.dumps({"ptx": found, "free": free}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """PTX of the kernels for Turing, Ampere and Hopper; no GPU is needed to compile."""
    pytest.importorskip("triton")
    cache = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**environment(), **cache}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("capability", ["75", "80", "90"])
def test_rows_are_read_sixteen_bytes_at_a_time(compiled: Any, capability: str) -> None:
    """Two 16-byte loads a thread cover a tile; FP32 keeps its subnormals (no ftz)."""
    ptx = compiled["ptx"][capability]
    assert ptx.count("ld.global.v4.b32") == 2
    assert ".ftz" not in ptx
    assert "st.global.v4.b32" in ptx


def test_no_token_count_recompiles(compiled: Any) -> None:
    """H19's rule for lookups: nothing that changes with the batch or the shard's bounds specialises the kernel."""
    assert set(compiled["free"]) == {"rows", "start", "end", "stride_t", "stride_h"}


def test_the_spin_kernel_reads_the_global_timer_in_a_loop(compiled: Any) -> None:
    """The kernel of known length measures by a clock of its own, and the compiler keeps its loop."""
    ptx = compiled["ptx"]["spin"]
    assert ptx.count("%globaltimer") == 2
    assert "bra" in ptx

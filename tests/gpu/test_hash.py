"""The hash kernels: every contract case under Triton's interpreter, and their compiled form."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES_FILE = Path(__file__).with_name("hash_cases.py")
ROOT = Path(__file__).parents[2]
OWN = [
    node.name
    for node in ast.parse(CASES_FILE.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


def run(*arguments: str, **changes: str) -> Any:
    """The JSON that a Python program with this checkout's package prints; no GPU, no interpreter unless it chooses."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **changes}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """What each case said, from one interpreter process."""
    found: dict[str, str | None] = run(str(CASES_FILE))
    return found


@pytest.mark.parametrize("case", OWN)
def test_own_cases_under_the_interpreter(case: str, outcomes: dict[str, str | None]) -> None:
    """H5-H11: the case of hash_cases.py, whose docstring names the behaviour."""
    assert outcomes.get(case, "the case did not run") is None


def test_every_contract_case_under_the_interpreter(outcomes: dict[str, str | None]) -> None:
    """H2-H18: all cases of the check set, with and without a slot cache, through the kernels: none differs."""
    spec = importlib.util.spec_from_file_location("hash_cases_names", CASES_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {case.name for case in module.CASES}
    assert len(names) >= 28
    assert {name: outcomes.get(name, "the case did not run") for name in names} == dict.fromkeys(names)


COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from pytest_engram.gpu._kernels import hash_kernel, slot_kernel
fixed = dict(DEAD=-1, NGRAM=4, HEADS=8, WIDE=8, TILE=64)
wide = dict(positions="*i64", slots="*i64", multipliers="*i64", primes="*i64", offsets="*i64",
            dead="*i1", window_dead="*i1")
narrow = {"tokens", "starts", "window", "table", "cache", "token_map", "out"}
found = {}
for kernel, cached in ((hash_kernel, True), (hash_kernel, False), (slot_kernel, None)):
    names, fixed["CACHED"] = kernel.arg_names, cached
    types = {n: "constexpr" if n in fixed else wide.get(n, "*i32" if n in narrow else "i32") for n in names}
    constants = {(names.index(n),): fixed[n] for n in names if n in fixed}
    for capability in (75, 90):
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        text = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]
        found[f"{kernel.__name__} {capability} {cached}"] = len(text)
    found[kernel.__name__] = [p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize]
print(json.dumps(found))
"""


def test_the_kernels_compile_and_no_batch_recompiles_them(tmp_path: Path) -> None:
    """H19: only pointers specialise, and those lie on 16-byte boundaries for every batch."""
    found = run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    kinds = ("hash_kernel {} True", "hash_kernel {} False", "slot_kernel {} None")
    assert all(found[kind.format(capability)] for kind in kinds for capability in (75, 90))
    assert found["slot_kernel"] == ["tokens", "dead", "slots", "token_map", "cache"]
    assert found["hash_kernel"] == [
        "tokens", "positions", "starts", "dead", "window", "window_dead", "table", "cache", "token_map",
        "multipliers", "primes", "offsets", "out",
    ]  # fmt: skip

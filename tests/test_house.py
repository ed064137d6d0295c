"""The house keeps its own rules: layers, budget, imports, what the wheel ships."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pytest_engram"
LAYERS = (
    ("errors", "model", "codec"),
    (
        "layout", "hashing", "rows", "policies", "queueing", "ledger", "stats", "schedule", "metrics", "gates",
        "experiment", "experiment_rules", "needs", "calibration", "tokens", "sweeps", "hypotheses", "recommendation",
    ),
    ("numa", "gpu"),
    (
        "planning", "provenance", "engines", "backends", "serving", "checks", "cases", "tables", "replay", "peer",
        "runner",
    ),
    ("forecast", "session", "report", "hookspecs", "doctor", "audit", "probe", "provide", "edge"),
    ("plugin", "cli"),
)  # fmt: skip
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = {"torch", "triton"}
HEAVY_HOMES = {"gpu", "engines", "backends", "serving"}
CODE_BUDGET = 12_383  # lines of code; the aim is 6,000: whoever adds takes more away
PYTEST_HOMES = {"provide", "edge", "plugin", "hookspecs", "report"}


def modules():
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def family(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """(module, line) of every import in a file, relative to nothing: the house uses absolute imports only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base, node.lineno
            if base == "pytest_engram":
                yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def violations(path, text=None):
    """Why the imports of a module break the ladder; an empty list where they do not."""
    found, home = [], family(path)
    for name, line in imported(path):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top == "pytest_engram" and target:
            if target not in RANK or home not in RANK:
                found.append(f"{path.name}:{line} {home} -> {target}: no layer")
            elif RANK[target] > RANK[home] or {home, target} == {"numa", "gpu"}:
                found.append(f"{path.name}:{line} {home} -> {target}")
        elif top in HEAVY and home not in HEAVY_HOMES:
            found.append(f"{path.name}:{line} {home} imports {top}")
        elif top in ("pytest", "_pytest") and home not in PYTEST_HOMES:
            found.append(f"{path.name}:{line} {home} imports pytest")
        elif top == "ctypes" and home == "numa" and path.name != "_syscalls.py":
            found.append(f"{path.name}:{line} ctypes outside numa/_syscalls.py")
    return found


def test_imports_only_climb_down():
    """Every module imports from its own layer or a lower one, and each rule-bound package only where it may."""
    assert [problem for path in modules() for problem in violations(path)] == []


def test_the_ladder_can_fail(tmp_path, monkeypatch):
    """A planted upward import, a stray torch and a stray ctypes are each found."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "numa").mkdir()
    planted = tmp_path / "numa" / "bad.py"
    lines = ("import ctypes", "import torch", "from pytest_engram.runner import run", "from pytest_engram import gpu")
    planted.write_text("\n".join(lines))
    assert len(violations(planted)) == 4


def test_no_import_cycle():
    """Module-level imports of the package form no cycle."""
    graph = {}
    for path in modules():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        names = {f"{node.module}.{alias.name}" for node in top for alias in node.names} | {n.module for n in top}
        graph[name] = {n for n in names if n.startswith("pytest_engram.")}
    done, active = set(), []

    def visit(name):
        assert name not in active, f"cycle: {' -> '.join([*active, name])}"
        if name in done or name not in graph:
            return
        active.append(name)
        for other in graph[name] - {name}:
            visit(other)
        active.pop()
        done.add(name)

    for name in graph:
        visit(name)


def code_lines(path):
    """Lines that are neither blank, nor a comment, nor part of a docstring."""
    text = path.read_text()
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = (line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in prose)
    return sum(bool(line) and not line.startswith("#") for line in lines)


def test_budget():
    """The package stays within its budget, files under 320 lines, functions under 40 but option declarations."""
    sizes = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert sum(map(code_lines, sizes)) <= CODE_BUDGET
    assert [f"{path.name}: {size}" for path, size in sizes.items() if size > 320] == []
    long = [
        f"{path.name}:{node.name}"
        for path in sizes
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 40
    ]
    assert [name for name in long if not name.endswith((":pytest_addoption", ":_parser"))] == []


@pytest.mark.parametrize("command", [["-m", "pytest", "--help"], ["-m", "pytest_engram.cli", "--help"]])
def test_help_is_light(command):
    """`pytest --help` and `pytest-engram --help` import neither torch nor scipy."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_module(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'scipy', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\nprint('LIGHT')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command[1:]], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "LIGHT" in done.stdout, done.stderr


def test_every_package_is_shipped():
    """Each folder with Python files below the package and the suites is listed for the wheel."""
    text = (ROOT / "pyproject.toml").read_text()
    for base, prefix in ((PACKAGE, "pytest_engram"), (ROOT / "suites", "pytest_engram.suites")):
        for folder in {path.parent for path in base.rglob("*.py")}:
            name = ".".join((prefix, *folder.relative_to(base).parts))
            assert f'"{name}"' in text, name

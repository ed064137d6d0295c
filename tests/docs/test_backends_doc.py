"""The examples of docs/BACKENDS.md run as printed, and the suites can fail them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow  # it copies a table of 2 GiB for one case more, whose lookup is the other backend's


@pytest.fixture
def suite(tmp_path, monkeypatch, run_here):
    """Run the correctness suite against a class of the document, optionally with one text replaced."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/BACKENDS.md").read_text(), re.DOTALL)

    def run(name, old="", new="", only=""):
        text = "\n".join(blocks)
        assert old in text
        (tmp_path / "my_module.py").write_text(text.replace(old, new) if old else text)
        monkeypatch.syspath_prepend(tmp_path)
        return run_here("suites/correctness", "-m", "correctness", "-k", only, f"--engram-backend=my_module:{name}")

    return run


@pytest.mark.parametrize(
    ("name", "only"), [("Plain", ""), ("OwnTables", "not wide-addresses"), pytest.param("OwnTables", "", marks=SLOW)]
)
def test_documented_backends_conform(suite, name, only):
    """Both documented backends pass every case that they offer; the rest is skipped as not supported."""
    done = suite(name, only=only)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "not supported by this backend" in done.stdout


def test_a_mistake_in_the_example_is_named(suite):
    """The control: a block that does not deepen fails with the contract line, token and layer."""
    done = suite("Plain", "np.logical_or.accumulate(dead | (", "(dead | (")
    assert done.returncode == 1
    assert all(word in done.stdout for word in ("H6", "token", "expected"))


def test_the_example_is_thirty_lines():
    """The complete backend is what it says: at most 30 lines that are not blank."""
    block = re.search(r"30 lines\n\n```python\n(.*?)```", (ROOT / "docs/BACKENDS.md").read_text(), re.DOTALL)
    assert sum(bool(line.strip()) for line in block[1].splitlines()) <= 30

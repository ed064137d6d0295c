"""The README's conformance table says what the committed reports say."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("readme_block", Path(__file__).with_name("readme_block.py"))
readme_block = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme_block)
ROOT = Path(__file__).parents[2]
REPORT = """# Engram contract conformance (seed 0)

| line | cases | vllm@1 | reference |
| ---- | ----- | ------ | --------- |
| H1   | a     | pass   | pass      |
| H2   | b, c  | pass (1 of 2) | pass |
| P1   | d     | {}     | pass      |

| outcome | what was seen |
| ------- | ------------- |
| pass    | H3            |
"""


def test_readme_equals_the_reports():
    """The block in the README is what `make conformance` writes from the committed reports."""
    readme = (ROOT / "README.md").read_text()
    assert readme_block.BEGIN in readme
    assert readme_block.replaced(readme, ROOT / "reports/conformance") == readme


def test_outcomes_are_counted_by_line(tmp_path):
    """Lines are counted per family and outcome, a failure is loud, and other tables are not read."""
    (tmp_path / "compiled-h200.md").write_text(REPORT.format("fail (1 of 2)"))
    (tmp_path / "interpreter.md").write_text(REPORT.format("not supported"))
    text = readme_block.block(tmp_path)
    assert "| H: hash ids | 2 pass | 2 pass |" in text
    assert "| P: prefetch | 1 FAIL | 1 not offered |" in text
    assert "reference" not in text


def test_a_stale_block_is_replaced(tmp_path):
    """What stands between the markers goes, what stands around them stays."""
    for stem in readme_block.REPORTS:
        (tmp_path / f"{stem}.md").write_text(REPORT.format("pass"))
    stale = f"before\n{readme_block.BEGIN}\n| old |\n{readme_block.END}\nafter\n"
    fresh = readme_block.replaced(stale, tmp_path)
    assert fresh.startswith("before\n")
    assert fresh.endswith("\nafter\n")
    assert "old" not in fresh

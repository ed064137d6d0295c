"""The interference map as a self-contained SVG: main compute beside lookups, by arm and by the size of the lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median

from pytest_engram import codec, sweeps
from pytest_engram.gates.comparison import Case, percent
from pytest_engram.model import Evidence
from pytest_engram.report import numbers
from pytest_engram.report.account import numbered
from pytest_engram.schedule import base_arm

_WIDE, _HIGH, _LEFT, _TOP = 124, 46, 200, 84  # px: a cell, and what stands before the first one
_MOST = 0.5  # the slowdown with the deepest colour
_SLOWER, _FASTER = (214, 96, 77), (67, 147, 195)  # light enough for black text
Cells = dict[tuple[str, int], tuple[float, int]]  # (arm, tokens) -> (slowdown, runs)


def figures(evidences: Sequence[Evidence]) -> Iterator[tuple[str, Evidence, Cells]]:
    """(file name, evidence, map) where the sweep has main compute with its quiet twin."""
    stems = numbered(evidence.plan.experiment.id for evidence in evidences)
    for stem, evidence in zip(stems, evidences, strict=True):
        if cells := interference(evidence):
            yield f"interference-{stem}.svg", evidence, cells


def write_figures(folder: Path, evidences: Sequence[Evidence]) -> None:
    """Write every figure of :func:`figures` into the folder."""
    for name, evidence, cells in figures(evidences):
        codec.write_atomic(folder / name, svg(evidence, cells).encode())


def interference(evidence: Evidence) -> Cells:
    """The median over runs of main / quiet main − 1 with all ranks at work, and the number of runs."""
    ranks, found = evidence.plan.experiment.ranks, dict[tuple[str, int], list[float]]()
    for run in evidence.runs:
        for tokens in {one.tokens for one in run.sweep}:
            ratio = sweeps.slowdown(one for one in run.sweep if (one.tokens, one.peers) == (tokens, ranks))
            if ratio is not None and not run.problems:
                found.setdefault((base_arm(run.arm), tokens), []).append(ratio)
    arms = [*evidence.plan.experiment.arms]
    ordered = sorted(found.items(), key=lambda cell: (arms.index(cell[0][0]), cell[0][1]))
    return {key: (median(ratios), len(ratios)) for key, ratios in ordered}


def svg(evidence: Evidence, cells: Cells) -> str:
    """The map: a row per arm, a column per batch size, in each cell the slowdown and its number of runs."""
    arms, sizes = [*dict.fromkeys(arm for arm, _ in cells)], sorted({tokens for _, tokens in cells})
    wide, high = max(_LEFT + _WIDE * len(sizes) + 20, 660), _TOP + _HIGH * len(arms) + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="13">', *_shapes(evidence, cells, arms, sizes), "</svg>", ""])


def _shapes(evidence: Evidence, cells: Cells, arms: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    case, chosen = Case(evidence), evidence.plan.experiment
    read = {one.tokens: one.source_bytes for run in evidence.runs for one in run.sweep}
    yield '<rect width="100%" height="100%" fill="#ffffff"/>'
    yield _text(12, 22, f"{chosen.id}: main compute beside the lookups against the same without them", weight="bold")
    yield _text(12, 42, "slowdown (n runs); columns: tokens of a step / bytes that its lookups read on a rank")
    for column, tokens in enumerate(sizes):
        x = _LEFT + _WIDE * column
        yield _text(x + _WIDE // 2, 74, f"{tokens:,} / {numbers.size(read[tokens])}", anchor="middle")
        for row, arm in enumerate(arms):
            y = _TOP + _HIGH * row
            ratio, runs = cells.get((arm, tokens), (None, 0))
            yield f'<rect x="{x}" y="{y}" width="{_WIDE - 2}" height="{_HIGH - 2}" fill="{_colour(ratio)}"/>'
            words = "not measured" if ratio is None else f"{percent(ratio)} (n = {runs})"
            yield _text(x + _WIDE // 2, y + 28, words, anchor="middle")
    for row, arm in enumerate(arms):
        yield _text(12, _TOP + _HIGH * row + 28, sweeps.named(case, arm))


def _text(x: int, y: int, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def _colour(ratio: float | None) -> str:
    if ratio is None:
        return "#eeeeee"
    depth = min(abs(ratio) / _MOST, 1.0)
    return "#" + "".join(f"{round(255 + depth * (end - 255)):02x}" for end in (_SLOWER if ratio > 0 else _FASTER))

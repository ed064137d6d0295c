"""What arms, batch sizes and peers at work amount to: readings that explain the gates' effects and feed none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from statistics import fmean, median

from pytest_engram import metrics
from pytest_engram.experiment_rules import settings
from pytest_engram.gates.comparison import Case, marked_steps, unusable
from pytest_engram.gates.timing import validity
from pytest_engram.model import Evidence, MetricRule, RunRecord, Status, SweepSample, Verdict

Cell = dict[int, SweepSample]  # of each rank
SLOWER_LAYER = 0.05  # layers whose times differ by less between arms are not named
_SPOKEN_OF = ("lookup", "exposed_wait", "main_compute", "step")  # A/A voids what is said of them, too


class Judged(Case):
    """Evidence with the verdict that it gave, to be explained."""

    def __init__(self, evidence: Evidence, verdict: Verdict) -> None:
        super().__init__(evidence)
        self.verdict = verdict

    def unfit(self, last: int) -> str | None:
        """Why these timings explain nothing: a gate up to ``last`` is not PASS, any is INVALID, or they are void."""
        for gate in self.verdict.gates:
            if gate.status is Status.INVALID or (gate.gate <= last and gate.status is not Status.PASS):
                return f"gate {gate.gate} {gate.name} is {gate.status.value}: {gate.reason}"
        return self._void

    @cached_property
    def _void(self) -> str | None:
        rules = [MetricRule(metric=name, direction="down") for name in _SPOKEN_OF]
        found = self.compare_all(rules, self.candidates[:1])
        spoken = [one for one in found if not one.absent]
        fault = next(validity(self), None) or next(unusable(spoken, self.experiment.aa_level), None)
        return f"{fault.reason}: {fault.observed}" if fault else None


def samples(run: RunRecord, ranks: int) -> Iterator[SweepSample]:
    """Every batch size of a run alike: its own, which has no quiet twin, as one more of its sweep."""
    for one in run.overlap:
        steps = [metrics.totals(line) for line in one.timelines if line.lookups]
        if steps:
            lookup_ns, exposed_ns = zip(*steps, strict=True)
            yield SweepSample(
                rank=one.rank, tokens=one.timelines[0].tokens, peers=ranks, lookup_ns=lookup_ns, exposed_ns=exposed_ns,
                main_ns=tuple(ns for work in run.compute if work.rank == one.rank for ns in work.main_ns),
                quiet_main_ns=(), source_bytes=one.source_bytes,
            )  # fmt: skip
    yield from run.sweep


def cells(run: RunRecord, ranks: int) -> dict[tuple[int, int], Cell]:
    """(tokens, peers at work) -> each rank's sample; no cell unless every one of these peers looked rows up."""
    found: dict[tuple[int, int], Cell] = {}
    for one in samples(run, ranks):
        if one.lookup_ns and one.source_bytes:
            found.setdefault((one.tokens, one.peers), {})[one.rank] = one
    return {key: cell for key, cell in found.items() if len(cell) == key[1]}


def rate(found: Iterable[SweepSample], peers: int) -> float:
    """Bytes per second that ``peers`` ranks read together: peers · mean over ``found`` of source bytes / median ΣL."""
    return 1e9 * peers * fmean(one.source_bytes / max(median(one.lookup_ns), 1) for one in found)


def slowdown(found: Iterable[SweepSample]) -> float | None:
    """Median of main / quiet main − 1: what the lookups beside it cost the main compute; None where it has no twin."""
    both = [(median(one.main_ns), median(one.quiet_main_ns)) for one in found if one.main_ns and one.quiet_main_ns]
    return metrics.middle(main / max(quiet, 1) - 1 for main, quiet in both)


def layer_times(runs: Sequence[RunRecord]) -> dict[int, float]:
    """First layer of a stretch -> median over marked steps of the ns that its pieces take, waits excluded."""
    found: dict[int, list[int]] = {}
    for _, line in marked_steps(runs):
        for layer in sorted({span.layer for span in line.spans}):
            found.setdefault(layer, []).append(sum(s.end - s.start for s in line.spans if s.layer == layer))
    return {layer: median(times) for layer, times in sorted(found.items())}


def stretch(first: int, known: Iterable[int], layers: int) -> str:
    """``2–13``: the layers from ``first`` to the next one of ``known`` (first layers of stretches)."""
    last = min((other for other in known if other > first), default=layers) - 1
    return str(first) if last == first else f"{first}–{last}"


def named(case: Case, arm: str) -> str:
    """An arm as a person calls it: ``cap 16``, ``cap 66 (default)``, ``submission early``."""
    value = settings(case.experiment, arm)[case.experiment.variable]
    if case.experiment.variable == "cap" and value is None:
        value = f"{max((str(grid) for *_, grid in case.launches(arm)), key=int, default='unknown')} (default)"
    return f"{case.experiment.variable} {value}".replace("_", " ")

"""Which arm of a prefetch experiment has the shortest step, with its price; said only where the gates allow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_engram import stats
from pytest_engram.gates.comparison import interval, percent
from pytest_engram.model import Claim, Evidence, MetricRule, Verdict
from pytest_engram.sweeps import SLOWER_LAYER, Judged, layer_times, named, stretch


def advice(evidence: Evidence, verdict: Verdict) -> str | None:
    """Which arm has the shortest step, with its interval and what the others cost, or why nothing is recommended.

    Only where gates 0 and 1 passed (all five, where an improvement is claimed), nothing is INVALID, and Holm resolves
    a difference of the unmarked step.  None where no advice is asked for.
    """
    if evidence.plan.experiment.variable in ("policy", "backend"):
        return None
    case = Judged(evidence, verdict)
    if fault := case.unfit(4 if verdict.claim is Claim.IMPROVES else 1):
        return f"no recommendation: {fault}"
    groups: dict[object, list[str]] = {}
    for arm in ("A", *case.candidates):
        groups.setdefault(case.launches(arm) if case.experiment.variable == "cap" else arm, []).append(arm)
    base, *others = groups.values()
    steps = [case.compare(MetricRule(metric="step", direction="down"), group[0]) for group in others]
    adjusted = stats.holm([stats.two_sided(one.effects) for one in steps])
    found = {one.arm: one.effect for one in steps}
    sure = {one.arm for one, p_value in zip(steps, adjusted, strict=True) if p_value <= 2 * case.experiment.alpha}
    words = {arm: f"{named(case, arm)} {percent(e.estimate)} {interval(e)}" for arm, e in found.items()}
    shorter = [arm for arm in sure if (found[arm].estimate or 0) < 0]
    if not shorter and len(sure) < len(steps):
        return f"no recommendation: no shorter step is resolved: {'; '.join(words.values())}"
    best = min(shorter, key=lambda arm: found[arm].estimate or 0, default="A")
    return f"recommended: {'; '.join(_clauses(case, best, words, [base, *others]))}"


def _clauses(case: Judged, best: str, words: dict[str, str], groups: Sequence[Sequence[str]]) -> Iterator[str]:
    level = f"{100 * (1 - 2 * case.experiment.alpha):g} % CI"
    if best == "A":
        yield f"{named(case, 'A')} stays: every other step is longer ({level})"
    else:
        found = words[best].replace(" [", f" step time, {level} [")
        yield f"{found} against {named(case, 'A')}, subject: {case.verdict.subject}"
    yield from (text for arm, text in words.items() if arm != best)
    yield from (f"{' and '.join(named(case, a) for a in g)}: one grid, no treatment" for g in groups if len(g) > 1)
    mine = layer_times(case.of(best))
    for arm in (group[0] for group in groups if best not in group):
        theirs = layer_times(case.of(arm))
        moved = [n for n in mine.keys() & theirs.keys() if abs(theirs[n] - mine[n]) > SLOWER_LAYER * mine[n]]
        if moved:
            names = ", ".join(stretch(n, mine, case.experiment.workload.layers) for n in sorted(moved))
            ratio = sum(theirs[n] for n in moved) / max(sum(mine[n] for n in moved), 1) - 1
            yield f"layers {names} {percent(ratio)} under {named(case, arm)}"

"""The four hypotheses by written rules.  They explain what was measured; no gate reads them.

Effects are paired in logs and shown with the interval that inverts the signed-rank test (:mod:`.stats`); "shown" below
means that the interval says so.  Timings of gates 0 and 1 that did not pass, or that validity refuses, decide nothing.

1. Remote placement dominates the wait (A1).  Supported: a rank's lookup time and the cross-socket traffic both move by
   more than MOVED with the pages, main compute within MOVED.  Weakened: the pages moved and the lookup stays within
   MOVED.  Without a counter of cross-socket traffic it stays undecided.
2. Peers contend (a sweep over ranks at work).  Supported, at some batch size: aggregate bytes/s rise and the lookup is
   longer than alone by more than MOVED.  Weakened: the lookup is not longer by MOVED.  Sizes at which the launch
   is what takes time (a token costs more than LAUNCH_BOUND times what it costs in the largest batch) do not speak.
3. Not enough lead (B1, early arm).  Supported: the first consumer's lookup is not done in more than MOST of the steps,
   and an earlier submission exists: submitted more than LAUNCH_NS after its hashes, or hashes that come that much after
   main compute began.  Weakened: not done in at most RARE of the steps.  The suite's own loop hashes before its compute
   and submits at once, so it has no such window; an engine that submits later (a trace, another backend) may.
4. Prefetch steals (B1, B2; the earlier submission or larger grid against the other).  Supported: the wait shrinks,
   main compute and the layers up to the last consumer slow down (main compute beyond its margin), and the step gains
   less than GAINLESS.  Weakened: main compute within its margin and a shorter step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

from pytest_engram import metrics, stats
from pytest_engram.experiment_rules import places, settings
from pytest_engram.gates.comparison import Case, marked_steps, percent
from pytest_engram.gates.placement import WAYS, prediction
from pytest_engram.gates.treatment import submission_of
from pytest_engram.model import Adjudication, Evidence, LookupMark, RunRecord, Timeline, Verdict
from pytest_engram.sweeps import Cell, Judged, cells, named, rate

MOVED = 0.05  # a lookup time or a counter that changes by less has barely moved
LAUNCH_BOUND = 2.0
LAUNCH_NS = 20_000  # what a launch may cost
MOST, RARE = 0.5, 0.1  # shares of marked steps
STEADY = 0.02  # main compute's margin where the experiment declares none
GAINLESS = 0.02
CROSS_SOCKET = "cross_socket"  # begins the keys of ``RunRecord.drift`` that count traffic between sockets

Opinion = tuple[str, str]  # outcome, evidence line
Rule = Callable[[Case], Iterator[Opinion]]
Reader = Callable[[RunRecord], float | None]


@dataclass(frozen=True, slots=True)
class Shift:
    """A paired effect in logs with the interval at its level."""

    name: str
    effects: tuple[float, ...]
    alpha: float

    def above(self, ratio: float = 0.0) -> bool:
        """The effect is shown to lie above ``ratio``."""
        return stats.p_above(self.effects, math.log1p(ratio)) <= self.alpha

    def below(self, ratio: float = 0.0) -> bool:
        """The effect is shown to lie below ``ratio``."""
        return stats.p_below(self.effects, math.log1p(ratio)) <= self.alpha

    def within(self, ratio: float) -> bool:
        """The effect is shown to be smaller than ``ratio`` either way."""
        return self.above(-ratio) and self.below(ratio)

    def __str__(self) -> str:
        if not self.effects:
            return f"{self.name} absent"
        if all(map(math.isinf, self.effects)):
            return f"{self.name} {'appears' if self.effects[0] > 0 else 'vanishes'}"
        ends = stats.estimate(self.effects), *stats.interval(self.effects, self.alpha)
        middle, low, high = (math.inf if end is None else math.expm1(end) for end in ends)
        return f"{self.name} {percent(middle)} [{percent(low, unit='')}, {percent(high, unit='')}]".replace("inf", "∞")


def adjudicate(evidences: Sequence[Evidence], verdicts: Sequence[Verdict]) -> tuple[Adjudication, ...]:
    """One outcome per hypothesis over all evidence; ``verdicts`` are those that the evidence gave."""
    cases = [Judged(evidence, verdict) for verdict, evidence in pairs(verdicts, evidences) if evidence is not None]
    found = []
    for number, (statement, missing, applies, last, rule) in enumerate(_RULES, 1):
        opinions = [
            (outcome, f"{case.experiment.id}: {line}")
            for case in cases
            if applies(case)
            for fault in [case.unfit(last)]
            for outcome, line in ([("undecided", fault)] if fault else rule(case))
        ]
        opinions.sort(key=lambda opinion: opinion[0] == "undecided")  # what decides stands first
        outcomes = {outcome for outcome, _ in opinions} - {"undecided"}
        lines = tuple(line for _, line in opinions) or (f"not measured: {missing}",)
        if len(outcomes) > 1:
            lines += ("some of this supports it and some weakens it",)
        outcome = outcomes.pop() if len(outcomes) == 1 else "undecided"
        found.append(Adjudication(number=number, statement=statement, outcome=outcome, lines=lines))
    return tuple(found)


def pairs(verdicts: Sequence[Verdict], evidences: Sequence[Evidence]) -> Iterator[tuple[Verdict, Evidence | None]]:
    """Every verdict with its evidence: the first of that experiment and protocol that no verdict before it took."""
    left = list(evidences)
    for verdict in verdicts:
        key = verdict.experiment, verdict.protocol_hash
        mine = next((one for one in left if (one.plan.experiment.id, one.plan.protocol_hash) == key), None)
        left = [one for one in left if one is not mine]
        yield verdict, mine


def _shift(case: Case, arm: str, name: str, *, sign: int = 1, read: Reader | None = None) -> Shift:
    """The effect of ``arm`` against A (``sign`` −1: of A against it); empty if a run of a complete block lacks it."""
    effects, alpha = [], case.experiment.alpha / len(case.candidates)
    for block in case.blocks:
        runs = [case.runs[block, one] for one in (*case.arms[:2], arm)]
        values = [read(run) if read else metrics.value(run, name) for run in runs]
        known = [value for value in values if value is not None and 0 <= value < math.inf]
        if len(known) < 3:
            return Shift(name, (), alpha)
        effects.append(sign * stats.block_effect(*known, direction="down"))
    return Shift(name, tuple(effects), alpha)


def _remote(case: Case) -> Iterator[Opinion]:
    for arm in case.candidates:
        main = _shift(case, arm, "main_compute")
        unread = [why for run in case.of(arm) for key, why in run.drift_absent.items() if CROSS_SOCKET in key]
        for rank in range(case.experiment.ranks):
            way, lookup = prediction(case, arm, rank), _shift(case, arm, f"lookup@{rank}")
            traffic = _shift(case, arm, CROSS_SOCKET, read=partial(_cross_socket, rank))
            line = f"{arm}: rank {rank} {WAYS[way]}, {lookup}, {main}"
            if not (way and lookup.effects and main.effects):
                yield "undecided", f"{line}; nothing is predicted, or not every run has it"
            elif not traffic.effects:
                yield "undecided", f"{line}; no counter of cross-socket traffic: {(*unread, 'none was read')[0]}"
            elif _with(lookup, way) and _with(traffic, way) and main.within(MOVED):
                yield "supported", f"{line}, {traffic}"
            else:
                yield "weakened" if lookup.within(MOVED) else "undecided", f"{line}, {traffic}"


def _copies(case: Case) -> bool:
    """Whether a patch is asked for several tables: stock code may have one, and then not only the distance differs."""
    return case.experiment.variable == "backend" and any(len(p.tables) > 1 for p in case.plan.placements.values())


def _with(shift: Shift, way: str) -> bool:
    return shift.below(-MOVED) if way == "down" else shift.above(MOVED)


def _cross_socket(rank: int, run: RunRecord) -> float | None:
    """The rank's own counters; rank 0's carry no prefix."""
    prefix = f"rank{rank}." if rank else ""
    found = [value for key, value in run.drift.items() if key.startswith(f"{prefix}{CROSS_SOCKET}")]
    return sum(found) if found else None


def _contention(case: Case) -> Iterator[Opinion]:
    found = [cells(run, case.experiment.ranks) for arm in case.arms[:2] for run in case.of(arm)]
    keys = sorted({key for run in found for key in run})
    sizes = {tokens: peers for tokens, peers in keys if peers > 1 and (tokens, 1) in keys}  # the most peers
    single = {t: median(median(one.lookup_ns) for run in found for one in run.get((t, 1), {}).values()) for t in sizes}
    if not sizes:
        yield "undecided", "one peer alone was not measured beside several"
    for tokens, peers in sizes.items():
        by_run = [(run.get((tokens, 1), {}), run.get((tokens, peers), {})) for run in found]
        both = [(alone, among) for alone, among in by_run if alone.keys() & among.keys()]
        alpha = case.experiment.alpha / len(sizes)
        longer = Shift("lookup", tuple(_longer(*pair) for pair in both), alpha)
        more = Shift("aggregate bytes/s", tuple(_more(*pair, peers) for pair in both), alpha)
        line = f"{tokens:,} tokens, {peers} peers against 1: {longer}, {more}, n = {len(both)} runs"
        if single[tokens] / tokens > LAUNCH_BOUND * single[max(single)] / max(single):
            yield "undecided", f"{line}; bound by its launch"
        elif longer.above(MOVED) and not more.above():
            yield "undecided", f"{line}; longer without more bytes: saturated, or something else is shared"
        else:
            yield "supported" if longer.above(MOVED) else "weakened" if longer.below(MOVED) else "undecided", line


def _longer(alone: Cell, among: Cell) -> float:
    """log of a rank's lookup time among peers over the same rank's alone, the mean over ranks."""
    both = [(among[rank].lookup_ns, alone[rank].lookup_ns) for rank in alone.keys() & among.keys()]
    return fmean(math.log(max(median(longer), 1) / max(median(shorter), 1)) for longer, shorter in both)


def _more(alone: Cell, among: Cell, peers: int) -> float:
    return math.log(rate(among.values(), peers) / rate(alone.values(), 1))


def _lead(case: Case) -> Iterator[Opinion]:
    for arm in (arm for arm in case.experiment.arms if _eager(case, arm)[0]):
        runs = [[*marked_steps([run])] for run in case.of(arm)]
        first = [[(tick, _first(line)) for tick, line in run] for run in runs if run]
        shares = [fmean(mark.done - mark.wait_before > tick for tick, mark in run) for run in first]
        late, window = median(shares), median(_window(line) for run in runs for _, line in run)
        line = f"{named(case, arm)}: the first lookup is late in {100 * late:.0f} % of steps, n = {len(shares)} runs"
        if late > MOST:
            room = f"could be submitted {window / 1000:,.1f} µs earlier" if window > LAUNCH_NS else "cannot be earlier"
            yield "supported" if window > LAUNCH_NS else "undecided", f"{line}, and within the step it {room}"
        else:
            yield "weakened" if late <= RARE else "undecided", line


def _first(line: Timeline) -> LookupMark:
    return min(line.lookups, key=lambda mark: mark.wait_before)


def _window(line: Timeline) -> int:
    """How much earlier the first lookup could have been submitted: after its hashes, or with hashes before compute."""
    mark, begun = _first(line), [span.start for span in line.spans if span.name == "compute"]
    return max(mark.submit - mark.hash_ready, mark.hash_ready - min(begun, default=mark.hash_ready))


def _steals(case: Case) -> Iterator[Opinion]:
    margins = [rule.margin for rule in case.experiment.no_offset if rule.metric == "main_compute"]
    margin = (*margins, STEADY)[0]
    for arm in case.candidates:
        mine, base = _eager(case, arm), _eager(case, "A")
        sign = (mine > base) - (mine < base)  # 1: the arm prefetches harder than A (earlier, or with a larger grid)
        shift = partial(_shift, case, arm, sign=sign)
        wait, main, step = shift("exposed_wait"), shift("main_compute"), shift("step")
        layers = shift("layers up to the last consumer", read=_earlier)
        who = " against ".join(named(case, one) for one in ((arm, "A") if sign > 0 else ("A", arm)))
        line = f"{who}: {wait}, {main}, {layers}, {step}"
        if not (sign and wait.effects and main.effects and step.effects):
            yield "undecided", f"{who}: no treatment, or not every run has waits, main compute and steps"
        elif wait.below() and main.above(margin) and layers.above() and step.above(-GAINLESS):
            yield "supported", line
        else:
            yield "weakened" if main.below(margin) and step.below() else "undecided", line


def _eager(case: Case, arm: str) -> tuple[bool, int]:
    asked = submission_of(settings(case.experiment, arm), case.experiment.workload.tokens)
    return asked == "early", max((grid for *_, grid in case.launches(arm)), default=0)


def _earlier(run: RunRecord) -> float | None:
    """ns that the layers up to the last Engram layer take, waits excluded."""
    return metrics.middle(
        sum(s.end - s.start for s in line.spans if s.layer <= max(mark.layer for mark in line.lookups))
        for _, line in marked_steps([run])
        if line.spans
    )


# statement, what is missing without evidence, which evidence speaks, the last gate it must have passed, the rule
_RULES: tuple[tuple[str, str, Callable[[Case], bool], int, Rule], ...] = (
    ("remote placement dominates the wait", "A1 on a machine with two memory nodes",
     lambda case: places(case.experiment) and not (case.plan.regrouped or _copies(case)), 1, _remote),
    ("data-parallel peers contend for the host's memory or PCIe", "two ranks or more, and one of them alone",
     lambda case: case.experiment.ranks > 1, 0, _contention),
    ("there is not enough prefetch lead", "B1", lambda case: case.experiment.variable == "submission", 1, _lead),
    ("the prefetch steals from the main compute", "B1 or B2",
     lambda case: case.experiment.variable in ("submission", "inline_above", "cap"), 1, _steals),
)  # fmt: skip

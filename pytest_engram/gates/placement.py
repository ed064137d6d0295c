"""Gate 1 of placement, and what gate 2 may predict from it: the kernel's page distributions on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_engram.experiment_rules import places, settings
from pytest_engram.gates.comparison import Case
from pytest_engram.gates.reasons import Finding
from pytest_engram.model import Moment, PageDistribution, RunRecord, TablePlan
from pytest_engram.schedule import BASE, base_arm

BOUND = 0.999  # share of a bound table's pages on its nodes
_HUGE = 2 << 20
EVEN = 0.02  # how far an interleaved table's share may lie from its weight
DIFFERENT = 0.05  # share of pages by which two arms must differ on some rank
WAYS = {"down": "nearer", "up": "farther", "": "as far as before", None: "at an unknown distance"}
Share = dict[int, float]  # NUMA node -> share of all pages


def placement(case: Case) -> Iterator[Finding]:
    """Every run as asked, and some rank's pages elsewhere than in A."""
    yield from as_held(case)
    shares = {arm: _after_replay(case, arm) for arm in ("A", *case.candidates)}
    moved = tuple(arm for arm in case.candidates if _differ(shares["A"], shares[arm]))
    words = "; ".join(f"{arm}: {_words(found)}" for arm, found in shares.items())
    limit = f"pages as asked in {len(case.runs)} runs, on every rank, at three moments"
    yield Finding("treatment-delivered" if moved else "no-treatment", words, limit, moved)


def as_held(case: Case) -> Iterator[Finding]:
    """What keeps a run's pages from being those that its arm asks for."""
    for run in case.runs.values():
        yield from _faults(case, run)


def huge_pages(case: Case) -> Iterator[Finding]:
    """A table that is to lie in transparent huge pages does so, but for an odd end: the kernel gives them or not."""
    for run in case.runs.values():
        asked = settings(case.experiment, run.arm)["backing"] == "anon-thp"
        for audit in (audit for sample in run.placement for audit in sample.distributions if asked):
            lost = audit.covered_bytes - (audit.huge_bytes or 0)
            if lost > max(_HUGE, (1 - BOUND) * audit.covered_bytes):
                where = f"arm {run.arm}, run {run.index}, {audit.moment.value}, rank {audit.rank}"
                yield Finding("pages-not-huge", f"{where}: {lost} of {audit.covered_bytes} bytes in base pages")


def _faults(case: Case, run: RunRecord) -> Iterator[Finding]:
    asked = case.plan.placements.get(base_arm(run.arm))
    tables = asked.tables if asked else ()
    patch = case.experiment.variable == "backend" and places(case.experiment)
    stock = patch and base_arm(run.arm) == BASE  # may ignore what the patch obeys
    if unplanned := {*range(case.experiment.ranks)} - {rank for table in tables for rank in table.ranks}:
        yield Finding("pages-not-audited", f"arm {run.arm}: no placement is planned for ranks {sorted(unplanned)}")
    audits = [audit for sample in run.placement for audit in sample.distributions]
    seen: set[str] = set()
    for number, table in enumerate(tables):
        where, own = f"arm {run.arm}, run {run.index}, table {number}", [a for a in audits if a.table == number]
        for rank in table.ranks:
            for moment in Moment:
                audit = next((a for a in own if (a.rank, a.moment) == (rank, moment)), None)
                wanted = replace(table, mode="default") if stock else table
                yield from _audited(wanted, audit, f"{where}, {moment.value}, rank {rank}")
        if not stock:
            yield from _sharing(table, {audit.identity for audit in own}, seen, where)


def _audited(table: TablePlan, audit: PageDistribution | None, where: str) -> Iterator[Finding]:
    if audit is None or not audit.routes:
        seen = "no audit" if audit is None else "no route answered"
        yield Finding("pages-not-audited", f"{where}: {seen}", "three moments on every rank")
        return
    lost = sum(audit.unplaced.values())
    total = sum(audit.pages.values()) + lost
    first, behind = audit.address // audit.page_bytes, -(-(audit.address + audit.table_bytes) // audit.page_bytes)
    if not total * audit.page_bytes == audit.covered_bytes == (behind - first) * audit.page_bytes:
        seen = f"{where}: {audit.covered_bytes} of {audit.table_bytes} bytes"
        yield Finding("pages-not-covered", seen, "coverage = table bytes")
    if lost > (1 - BOUND) * total:
        names = ", ".join(f"{count} {name}" for name, count in audit.unplaced.items() if count)
        yield Finding("pages-unplaced", f"{where}: {names} of {total} pages", f"{BOUND:.1%}")
    elif not as_asked(table, audit):
        nodes = ",".join(map(str, table.nodes)) + f" weights {table.weights}" * bool(table.weights)
        seen = f"{where}: {_words({audit.rank: share_of(audit)})}"
        yield Finding("not-as-asked", seen, f"{table.mode} on NUMA node {nodes}")


def as_asked(table: TablePlan, audit: PageDistribution) -> bool:
    """Whether the pages lie where the table plan wants them; ``default`` wants nothing."""
    share, nodes = share_of(audit), table.nodes
    if table.mode in ("bind", "preferred"):
        return sum(share.get(node, 0.0) for node in nodes) >= BOUND
    if table.mode in ("interleave", "weighted-interleave"):
        weights = table.weights or (1,) * len(nodes)
        grain = _HUGE if audit.huge_bytes else audit.page_bytes  # what the kernel interleaves by
        slack = EVEN + 2 * grain / max(audit.table_bytes, 1)
        wanted = {node: weight / sum(weights) for node, weight in zip(nodes, weights, strict=True)}
        return all(abs(share.get(node, 0.0) - wanted.get(node, 0.0)) <= slack for node in share.keys() | wanted.keys())
    return table.mode == "default"


def share_of(audit: PageDistribution) -> Share:
    """NUMA node -> share of all pages, those without a node included in the whole."""
    total = sum(audit.pages.values()) + sum(audit.unplaced.values())
    return {node: count / total for node, count in audit.pages.items() if count}


def _sharing(table: TablePlan, identities: set[str], seen: set[str], where: str) -> Iterator[Finding]:
    """One object at every moment and for every rank of the group, no other table's; a private one serves one rank."""
    if len(identities) > 1 or (identities == {"anon"} and len(table.ranks) > 1):
        objects = f"{where}: objects {', '.join(sorted(identities))} for ranks {', '.join(map(str, table.ranks))}"
        yield Finding("not-shared", objects, "one object, device and inode equal")
    if identities & seen:
        yield Finding("not-separate", f"{where} is an earlier one's object", "an object of its own")
    seen |= identities - {"anon"}


def _after_replay(case: Case, arm: str) -> dict[int, Share]:
    """What each rank reads after the replay, as the mean of the arm's runs: stock placement may differ between them.

    Those of A' count with A's, as they do in every effect.
    """
    runs = [run for (_, name), run in case.runs.items() if base_arm(name) == arm]
    found: dict[int, Share] = {}
    audits = (audit for run in runs for sample in run.placement for audit in sample.distributions)
    for audit in (audit for audit in audits if audit.moment is Moment.REPLAYED):
        mean = found.setdefault(audit.rank, {})
        for node, part in share_of(audit).items():
            mean[node] = mean.get(node, 0.0) + part / len(runs)
    return found


def _differ(one: dict[int, Share], other: dict[int, Share]) -> bool:
    """Whether enough pages of some rank lie elsewhere."""
    pairs = [(one[rank], other[rank]) for rank in one.keys() & other.keys()]
    return any(sum(max(0.0, part - b.get(node, 0.0)) for node, part in a.items()) >= DIFFERENT for a, b in pairs)


def _words(shares: dict[int, Share]) -> str:
    parts = {rank: "/".join(f"N{node} {part:.1%}" for node, part in sorted(s.items())) for rank, s in shares.items()}
    return ", ".join(f"rank {rank} {words or 'without a node'}" for rank, words in sorted(parts.items()))


def from_rank(case: Case, rank: int, node: int | str) -> int | None:
    """The firmware's distance from the rank's reader to a NUMA node; None if one end or the distance is unknown.

    The reader is the rank's GPU, or on the CPU engine its lookup worker, which has the rank's last CPU.
    """
    machine, plan = case.topology, case.plan
    if machine is None:
        return None
    if plan.engine == "cuda":
        home = machine.gpus[rank].numa_node if rank < len(machine.gpus) else None
    else:
        home = machine.node_of_cpu(plan.cpus[rank][-1])
    start = None if home is None else machine.node(home)
    return start.distances.get(int(node)) if start is not None and str(node).isdecimal() else None


def prediction(case: Case, arm: str, rank: int) -> str | None:
    """Is ``arm`` nearer than A ("down": times shrink), farther ("up") or as far ("")?  None: a distance is unknown."""
    before, after = _cost(case, "A", rank), _cost(case, arm, rank)
    if before is None or after is None:
        return None
    return "" if abs(after - before) < 0.01 * before else "down" if after < before else "up"


def _cost(case: Case, arm: str, rank: int) -> float | None:
    """The mean distance of the rank's pages, weighted by where the kernel says they lie in ``arm``."""
    share = _after_replay(case, arm).get(rank, {})
    parts = [(part, from_rank(case, rank, node)) for node, part in share.items()]
    known = [(part, away) for part, away in parts if away is not None]
    if not known or len(known) < len(parts):
        return None
    return sum(part * away for part, away in known) / sum(part for part, _ in known)

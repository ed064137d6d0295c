"""Gate 1 of placement: the kernel's page distributions, on every rank and at three moments, are what the arm asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_engram.gates.case import Case
from pytest_engram.gates.reasons import Finding
from pytest_engram.model import Moment, PageDistribution, Plan, RunRecord, TablePlan
from pytest_engram.schedule import base_arm

BOUND = 0.999  # share of a bound table's pages on its nodes
EVEN = 0.02  # how far an interleaved table's share may lie from its weight
DIFFERENT = 0.05  # share of pages by which two arms must differ on some rank


def placement(case: Case) -> Finding:
    """Every run as asked, and some rank's pages elsewhere than in A."""
    runs = [run for _, run in sorted(case.runs.items())]
    for run in runs:
        finding = next(_faults(case.plan, run), None)
        if finding is not None:
            return finding
    shares = {arm: shares_after_replay(case.of(arm)[0]) for arm in ("A", *case.candidates) if case.of(arm)}
    moved = tuple(arm for arm in case.candidates if arm in shares and distance(shares["A"], shares[arm]) >= DIFFERENT)
    observed = "; ".join(f"{arm}: {_words(found)}" for arm, found in shares.items())
    return Finding(
        reason="treatment-delivered" if moved else "no-treatment", observed=observed,
        threshold=f"pages as asked in {len(runs)} runs, on every rank, at three moments", passed=moved,
    )  # fmt: skip


def _faults(plan: Plan, run: RunRecord) -> Iterator[Finding]:
    asked = plan.placements.get(base_arm(run.arm))
    tables = asked.tables if asked else ()
    if not tables:
        yield Finding(reason="pages-not-audited", observed=f"arm {run.arm}: no placement is planned")
    audits = [audit for sample in run.placement for audit in sample.distributions]
    for number, table in enumerate(tables):
        for rank in table.ranks:
            own = {audit.moment: audit for audit in audits if (audit.rank, audit.table) == (rank, number)}
            where = f"arm {run.arm}, run {run.index}, rank {rank}, table {number}"
            yield from _rank_faults(table, own, where)
        yield from _sharing(table, [a for a in audits if a.table == number], f"arm {run.arm}, table {number}")
    named = [{a.identity for a in audits if a.table == number} - {"anon"} for number in range(len(tables))]
    for number, names in enumerate(named):
        if any(names & other for other in named[:number]):
            yield Finding(reason="not-separate", observed=f"arm {run.arm}: table {number} is an earlier one's object")


def _rank_faults(table: TablePlan, own: dict[Moment, PageDistribution], where: str) -> Iterator[Finding]:
    for moment in Moment:
        audit, at = own.get(moment), f"{where}, {moment.value}"
        if audit is None or not audit.routes:
            seen = f"{at}: no audit" if audit is None else f"{at}: no route answered"
            yield Finding(reason="pages-not-audited", observed=seen, threshold="three moments on every rank")
            continue
        if not _covered(audit):
            seen = f"{at}: {audit.covered_bytes} of {audit.table_bytes} bytes"
            yield Finding(reason="pages-not-covered", observed=seen, threshold="coverage = table bytes")
        total = sum(audit.pages.values()) + sum(audit.unplaced.values())
        lost = ", ".join(f"{count} {name}" for name, count in audit.unplaced.items() if count)
        if sum(audit.unplaced.values()) > (1 - BOUND) * total:
            yield Finding(reason="pages-unplaced", observed=f"{at}: {lost} of {total} pages", threshold=f"{BOUND:.1%}")
        elif not as_asked(table, audit):
            yield Finding(reason="not-as-asked", observed=f"{at}: {_pages(audit)}", threshold=_asked(table))


def _covered(audit: PageDistribution) -> bool:
    counted = (sum(audit.pages.values()) + sum(audit.unplaced.values())) * audit.page_bytes
    return counted == audit.covered_bytes and 0 <= audit.covered_bytes - audit.table_bytes < audit.page_bytes


def as_asked(table: TablePlan, audit: PageDistribution) -> bool:
    """Whether the pages lie where the table plan wants them; ``default`` wants nothing."""
    share, nodes = share_of(audit), table.nodes
    if table.mode in ("bind", "preferred"):
        return sum(share.get(node, 0.0) for node in nodes) >= BOUND
    if table.mode in ("interleave", "weighted-interleave"):
        weights = table.weights or (1,) * len(nodes)
        slack = EVEN + 2 * audit.page_bytes / max(audit.table_bytes, 1)
        wanted = {node: weight / sum(weights) for node, weight in zip(nodes, weights, strict=True)}
        return all(abs(share.get(node, 0.0) - wanted.get(node, 0.0)) <= slack for node in share.keys() | wanted.keys())
    return table.mode == "default"


def share_of(audit: PageDistribution) -> dict[int, float]:
    """NUMA node -> share of all pages, those without a node included in the whole."""
    total = sum(audit.pages.values()) + sum(audit.unplaced.values())
    return {node: count / total for node, count in audit.pages.items() if count} if total else {}


def _sharing(table: TablePlan, audits: Sequence[PageDistribution], where: str) -> Iterator[Finding]:
    """One object at every moment and for every rank of the group; a private mapping can serve one rank only."""
    identities = {audit.identity for audit in audits}
    if len(identities) > 1 or (identities == {"anon"} and len(table.ranks) > 1):
        seen = f"{where}: objects {', '.join(sorted(identities))} for ranks {', '.join(map(str, table.ranks))}"
        yield Finding(reason="not-shared", observed=seen, threshold="one object, device and inode equal")


Shares = dict[int, dict[int, float]]  # rank -> NUMA node -> share


def shares_after_replay(run: RunRecord) -> Shares:
    """What each rank reads, once the replay is over."""
    audits = [a for sample in run.placement for a in sample.distributions if a.moment is Moment.REPLAYED]
    return {audit.rank: share_of(audit) for audit in audits}


def distance(one: Shares, other: Shares) -> float:
    """The largest share of pages, over the ranks, that lies elsewhere."""
    ranks = one.keys() & other.keys()
    return max((_moved(one[rank], other[rank]) for rank in ranks), default=0.0)


def _moved(one: dict[int, float], other: dict[int, float]) -> float:
    return sum(abs(one.get(node, 0.0) - other.get(node, 0.0)) for node in one.keys() | other.keys()) / 2


def _words(shares: Shares) -> str:
    return ", ".join(f"rank {rank} " + _split(share) for rank, share in sorted(shares.items()))


def _split(share: dict[int, float]) -> str:
    return "/".join(f"N{node} {part:.1%}" for node, part in sorted(share.items()))


def _pages(audit: PageDistribution) -> str:
    return _split(share_of(audit)) or "no page has a node"


def _asked(table: TablePlan) -> str:
    nodes = ",".join(map(str, table.nodes))
    weights = f" weights {table.weights}" if table.weights else ""
    return f"{table.mode} on NUMA node {nodes}{weights}"

"""Ways to break synthetic evidence, loaded by the tests of the gates: most give a function of a run."""

from dataclasses import replace

from pytest_engram.model import SweepSample


def edit(**fields):
    return lambda run: replace(run, **fields)


def with_print(**values):
    return lambda run: replace(run, fingerprint={**run.fingerprint, **values})


def with_cases(where, make):
    return lambda run: replace(run, **{where: make(getattr(run, where))})


def with_audits(make):
    """Replace every page distribution by ``make(audit)``; None drops it."""

    def change(run):
        placed = (
            replace(sample, distributions=tuple(new for a in sample.distributions if (new := make(a)) is not None))
            for sample in run.placement
        )
        return replace(run, placement=tuple(placed))

    return change


def with_marks(make):
    """Replace every lookup mark by ``make(mark)``."""

    def change(run):
        overlap = (
            replace(s, timelines=tuple(replace(t, lookups=tuple(map(make, t.lookups))) for t in s.timelines))
            for s in run.overlap
        )
        return replace(run, overlap=tuple(overlap))

    return change


def without_marks(run):
    """A run whose steps were not marked."""
    return replace(run, overlap=tuple(replace(sample, timelines=()) for sample in run.overlap))


def with_point(tokens, *, early):
    """A sweep's point whose marked step is the run's own, of another size: with early lookups or without."""

    def change(run):
        line = run.overlap[0].timelines[0]
        if early:
            marks = tuple(replace(mark, submit=950 + n) for n, mark in enumerate(line.lookups))
            spans = tuple(replace(span, start=1000, end=1900) for span in line.spans if span.layer == 0)
            line = replace(line, lookups=marks, spans=spans)
        point = SweepSample(
            rank=0, tokens=tokens, peers=1, lookup_ns=(1,), exposed_ns=(0,), main_ns=(1,), quiet_main_ns=(1,),
            source_bytes=1, timeline=replace(line, tokens=tokens),
        )  # fmt: skip
        return replace(run, sweep=(point,))

    return change


def with_requests(make):
    def change(run):
        return replace(run, serving=tuple(replace(s, requests=tuple(map(make, s.requests))) for s in run.serving))

    return change


def sampled(field, rank=0, **fields):
    """A run in which the fields of one rank's sample are others."""
    return lambda run: replace(run, **{field: tuple(
        replace(one, **fields) if one.rank == rank else one for one in getattr(run, field))})  # fmt: skip


def timed(**fields):
    """A run in which the fields of every timeline are others."""

    def change(run):
        lines = (tuple(replace(line, **fields) for line in one.timelines) for one in run.overlap)
        overlap = (replace(one, timelines=made) for one, made in zip(run.overlap, lines, strict=True))
        return replace(run, overlap=tuple(overlap))

    return change


def is_b(run):
    return run.arm == "B"


def b_runs_as_a(change, evidence):
    """The marked steps of B are A's own."""
    base = next(run for run in evidence.runs if run.arm == "A")
    return change(evidence, edit(overlap=base.overlap), is_b)


def placed(lab, **kw):
    """A sound A3: the far rank gains by a copy of its own."""
    return lab.evidence("A3", effects={"B": {"goodput": 0.1}}, by_rank={"B": {1: -0.3}}, **kw)


def cases():
    """A table of cases, and the decorator that puts a function (lab, change) -> Evidence under its reason into it."""
    found = {}

    def reason(code, gate):
        def keep(build):
            found[f"{code}:{build.__name__}"] = (code, gate, build)
            return build

        return keep

    return found, reason

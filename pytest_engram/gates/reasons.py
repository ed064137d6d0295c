"""Every reason a gate may give, with the status it means and the next step for a person.  One table."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_engram.model import GATE_NAMES, Effect, GateResult, Problem, Status

_PASS, _FAIL, _OPEN = Status.PASS, Status.FAIL, Status.INCONCLUSIVE
_ABSENT, _BLOCKED, _INVALID = Status.NOT_MEASURED, Status.BLOCKED, Status.INVALID

REASONS: dict[str, tuple[Status, str]] = {
    # any gate
    "earlier-gate": (_BLOCKED, "look at the first gate above that is not PASS"),
    # 0 correctness
    "contract-kept": (_PASS, ""),
    "contract-broken": (_FAIL, "mend the arm that is named; no timing of this run may be compared"),
    "no-correctness": (_ABSENT, "run the arm with its contract checks before and after timing"),
    "cases-missing": (_ABSENT, "run the same contract cases in every arm, before and after timing"),
    "storage-not-checked": (
        _ABSENT, "this experiment changes who shares a table: run the storage (S) and replay (P5) cases in every arm"),
    "protocol-changed": (_INVALID, "the rules or the plan changed after they were hashed: plan and measure again"),
    "schedule-altered": (_INVALID, "keep the order that the seed gives: measure the whole schedule again"),
    "unscheduled-run": (_INVALID, "a run that the schedule does not have cannot be used: measure again"),
    # 1 treatment
    "treatment-delivered": (_PASS, ""),
    "undeclared-difference": (_INVALID, "make the arms equal in what is named, or declare it as the variable"),
    "no-fingerprint": (_ABSENT, "record what each arm really ran with; nothing else shows that only one thing differs"),
    "pages-not-audited": (_ABSENT, "audit every rank after registration, after load and after replay"),
    "pages-not-covered": (_OPEN, "the kernel's answer must cover the whole table: check the mapping and permissions"),
    "pages-unplaced": (_OPEN, "pages without a node are no evidence: write every page before registration"),
    "not-as-asked": (_FAIL, "the pages do not lie as the arm asks: set the policy before the first touch"),
    "not-shared": (_FAIL, "the ranks map different objects: a rank works on a private copy"),
    "not-separate": (_FAIL, "two tables are one object: the copies per socket were not made"),
    "no-treatment": (_FAIL, "the arms ran alike: choose values that change what really runs"),
    "no-timelines": (_ABSENT, "record marked steps in every arm"),
    "submission-not-as-asked": (_FAIL, "the lookups were not submitted where the arm says: check the prefetch switch"),
    "cap-not-obeyed": (_FAIL, "the launch ignored its cap: check how the cap reaches the kernel"),
    "no-receipts": (_ABSENT, "let both backends give receipts: version, commit, file hashes"),
    "identical-code": (_FAIL, "base and candidate are the same build: name the patched one with --engram-candidate"),
    # 2 mechanism, and whether timing may be judged at all
    "moved-as-predicted": (_PASS, ""),
    "no-schedule": (_OPEN, "measure with the suite's randomised schedule: order and drift cannot be told apart here"),
    "too-few-blocks": (_OPEN, "measure the missing blocks in one new schedule; do not add to this one"),
    "machine-drifted": (_INVALID, "let the machine settle, keep others off it, measure again"),
    "throttled": (_INVALID, "cool or power the device properly, measure again"),
    "not-a-serial-queue": (_INVALID, "the marks contradict one serial prefetch queue: check where they are taken"),
    "faster-than-link": (_INVALID, "the lookup beats its link: check that rows are distinct and marks on its stream"),
    "no-positive-control": (_ABSENT, "measure local against remote on this machine, at least six pairs"),
    "control-without-difference": (_OPEN, "near and far look alike here: this machine cannot judge a placement"),
    "distance-unknown": (_ABSENT, "find out each reader's NUMA node (firmware, NVML, sysfs) and the distances"),
    "no-predicted-change": (_OPEN, "no rank comes nearer to its table: there is nothing to predict here"),
    "aa-differs": (_INVALID, "A differs from A itself: find what disturbs the machine, then measure everything again"),
    "metric-absent": (_ABSENT, "record what is named in every run of every arm"),
    "mechanism-not-shown": (_OPEN, "neither shown nor excluded: plan more blocks or a quieter machine beforehand"),
    "mechanism-refuted": (_FAIL, "the mechanism went the other way: the explanation of the change is wrong"),
    # 3 no offset
    "not-slowed": (_PASS, ""),
    "slowed": (_FAIL, "the main path pays for the gain: spare it (a smaller cap, a later submission)"),
    "slowing-not-excluded": (_OPEN, "a slower main path is not excluded: plan more blocks or a quieter machine"),
    # 4 end to end
    "improved": (_PASS, ""),
    "failed-requests": (_INVALID, "requests failed: mend the server, then measure again; failures make loads lighter"),
    "no-successful-requests": (_OPEN, "no request met the limits in any arm: lower the load or widen the limits"),
    "improvement-not-shown": (_OPEN, "neither shown nor excluded: plan more blocks or a quieter machine beforehand"),
    "not-improved": (_FAIL, "end to end there is no gain beyond the margin: do not merge this as an improvement"),
    "guard-broken": (_FAIL, "the gain costs rejections or latency tails beyond the margin"),
    "guard-not-shown": (_OPEN, "a worse tail is not excluded: plan more blocks or more requests per run"),
    "requires-unmet": (_BLOCKED, "measure the required experiments first, in this run or with an equal fingerprint"),
    # a `characterises` claim
    "no-winner": (_OPEN, "reported only: the question was how the arms differ"),
}  # fmt: skip

_PROBLEM_STEPS = {
    _ABSENT: "measure where this is available; nothing follows from its absence",
    _INVALID: "mend the cause, then measure the whole schedule again",
    _FAIL: "mend the cause, then measure again",
    _OPEN: "remove the doubt, then measure again",
    _BLOCKED: "remove what blocks it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one gate found.  ``passed`` are the candidates that may go on; ``always_judged`` also where a
    ``characterises`` claim only reports."""

    reason: str
    observed: str = ""
    threshold: str = ""
    effects: tuple[Effect, ...] = ()
    passed: tuple[str, ...] = ()
    always_judged: bool = False
    problem: Problem | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def status(self) -> Status:
        """What the reason means; a problem brings its own."""
        if self.problem is not None:  # a problem in a record's place can never read as passed
            return Status.INVALID if self.problem.status is Status.PASS else self.problem.status
        return REASONS[self.reason][0]

    def result(self, gate: int, *, judged: bool) -> GateResult:
        """The rung of the ladder."""
        step = _PROBLEM_STEPS[self.status] if self.problem else REASONS[self.reason][1]
        return GateResult(
            gate=gate, name=GATE_NAMES[gate], status=self.status, reason=self.reason, observed=self.observed,
            threshold=self.threshold, next_step=step, effects=self.effects, judged=judged,
        )  # fmt: skip


def of_problem(problem: Problem) -> Finding:
    """A named absence or failure as a finding; its own code is the reason."""
    who = ", ".join(part for part in (problem.who, problem.where) if part and part not in problem.message)
    return Finding(
        reason=problem.code, problem=problem, observed=f"{who}: {problem.message}" if who else problem.message
    )

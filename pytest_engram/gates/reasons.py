"""Every reason a gate may give, with the status it means and the next step for a person.  One table."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_engram.model import GATE_NAMES, Claim, Effect, GateResult, Problem, Status

_PASS, _FAIL, _OPEN = Status.PASS, Status.FAIL, Status.INCONCLUSIVE
_ABSENT, _BLOCKED, _INVALID = Status.NOT_MEASURED, Status.BLOCKED, Status.INVALID

REASONS: dict[str, tuple[Status, str]] = {
    # any gate
    "earlier-gate": (_BLOCKED, "look at the first gate above that is not PASS"),
    # 0 correctness
    "contract-kept": (_PASS, ""),
    "contract-broken": (_FAIL, "mend the arm that is named; no timing of this run may be compared"),
    "stopped-after-correctness": (_FAIL, "mend the arm whose rows were wrong; the rest was not run for that"),
    "no-correctness": (_ABSENT, "run the arm with its contract checks before and after timing"),
    "cases-missing": (_ABSENT, "run the same contract cases in every arm, before and after timing"),
    "storage-not-checked": (_ABSENT, "the arms share tables differently: run the storage (S) and P5 cases in each"),
    "protocol-changed": (_INVALID, "the rules or the plan changed after they were hashed: plan and measure again"),
    "schedule-altered": (_INVALID, "keep the order that the seed gives: measure the whole schedule again"),
    "unscheduled-run": (_INVALID, "a run that the schedule does not have cannot be used: measure again"),
    # 1 treatment
    "treatment-delivered": (_PASS, ""),
    "samples-not-as-planned": (_INVALID, "record all that was planned, on every rank, and measure everything again"),
    "undeclared-difference": (_INVALID, "make the arms equal in what is named, or declare it as the variable"),
    "no-fingerprint": (_ABSENT, "record what each arm really ran with; nothing else shows that only one thing differs"),
    "pages-not-audited": (_ABSENT, "audit every rank after registration, after load and after replay"),
    "pages-not-covered": (_OPEN, "the kernel's answer must cover the whole table: check the mapping and permissions"),
    "pages-unplaced": (_OPEN, "pages without a node are no evidence: write every page before registration"),
    "pages-not-huge": (_ABSENT, "let the kernel give transparent huge pages (madvise, always), or ask for none"),
    "not-as-asked": (_FAIL, "the pages do not lie as the arm asks: set the policy before the first touch"),
    "not-shared": (_FAIL, "the ranks map different objects: a rank works on a private copy"),
    "not-separate": (_FAIL, "two tables are one object: the copies per socket were not made"),
    "no-treatment": (_FAIL, "the arms ran alike: choose values that change what really runs"),
    "no-timelines": (_ABSENT, "record marked steps in every arm"),
    "submission-not-as-asked": (_FAIL, "the lookups were not submitted where the arm says: check the prefetch switch"),
    "wait-not-as-asked": (_FAIL, "a consumer went on before the whole stream was done: check what it waits for"),
    "graph-not-as-asked": (_FAIL, "the engine replayed graphs where it should not, or none where it should"),
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
    "emulated-cpu": (_OPEN, "an emulated processor keeps no time: measure on a real machine"),
    "interpreted-kernels": (_OPEN, "an interpreter's times are not the kernel's: measure where it is compiled"),
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
_MEND = "mend the cause, then measure it all"
_CHOSEN = {  # problems that no other machine would solve: how this run was started is what is in the way
    "no-candidate": "name the build of the patch with --engram-candidate",
    "over-time-budget": "raise --engram-time-budget; fewer blocks (--engram-pairs) decide less",
    "benchmarks-disabled": "run without the option that disables, skips or filters benchmarks",
    "xdist-worker": "run the measurement alone, without -n", "never-ran": "run it again, to its end",
}  # fmt: skip
# What voids timings is judged where a `characterises` claim only reports, and so is whatever is INVALID.
_ALWAYS_JUDGED = ("no-schedule", "too-few-blocks", "emulated-cpu", "interpreted-kernels", "control-without-difference")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one gate found.  ``passed`` are the candidates that may go on; ``problem`` is the status of a problem whose
    code stands in the place of a reason of the table."""

    reason: str
    observed: str = ""
    threshold: str = ""
    passed: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()
    notes: tuple[str, ...] = ()
    problem: Status | None = None

    def result(self, gate: int, claim: Claim) -> GateResult:
        """The rung of the ladder; a `characterises` claim only reports gates 2 to 4, and there nothing can fail."""
        reason, (status, step) = self.reason, REASONS.get(self.reason, (_INVALID, ""))
        if self.problem:
            unnamed = "measure where this is available" if self.problem is _ABSENT else _MEND
            status, step = self.problem, _CHOSEN.get(self.reason, unnamed)
        unmeasured = gate == 2 and status is _ABSENT  # the effect is what a `characterises` claim is for
        judged = claim is Claim.IMPROVES or gate < 2 or status is _INVALID or unmeasured or reason in _ALWAYS_JUDGED
        if not judged and status is _FAIL:
            reason, (status, step) = "no-winner", REASONS["no-winner"]
        return GateResult(
            gate=gate, name=GATE_NAMES[gate], status=status, reason=reason, observed=self.observed,
            threshold=self.threshold, next_step=step, effects=self.effects, judged=judged,
        )  # fmt: skip


def of_problem(problem: Problem) -> Finding:
    """A named absence or failure as a finding; its own code is the reason, and it can never read as passed."""
    who = ", ".join(part for part in (problem.who, problem.where) if part and part not in problem.message)
    status = Status.INVALID if problem.status is Status.PASS else problem.status
    return Finding(problem.code, f"{who}: {problem.message}" if who else problem.message, problem=status)

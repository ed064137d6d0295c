"""What was observed: samples, receipts and the problems that stand in their place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pytest_engram.model.requests import Plan, Slo
from pytest_engram.model.words import SCHEMA_VERSION, Moment, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A named absence or failure that stands in a record's place; never a missing record."""

    code: str
    message: str
    who: str = ""
    where: str = ""
    status: Status = Status.INVALID


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectnessSample:
    """One contract case against one backend.  ``supported`` False is reported as such, never as passed."""

    case: str
    contract: str
    passed: bool
    supported: bool = True
    detail: str = ""
    token: int | None = None
    head: int | None = None
    layer: int | None = None
    expected: str | None = None
    seen: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDistribution:
    """Where the kernel says the pages of one mapping lie.

    ``pages`` counts base pages of ``page_bytes`` per NUMA node; ``unplaced`` counts pages per errno name that the
    kernel would not place (ENOENT: not resident).  ``covered_bytes`` = placed + unplaced, in bytes.
    """

    rank: int
    moment: Moment
    table: int
    identity: str  # "dev:inode" of the shared object, or "anon"
    address: int
    table_bytes: int
    page_bytes: int
    pages: dict[int, int]
    unplaced: dict[str, int]
    covered_bytes: int
    policy_text: str  # numa_maps' own words: shown, never believed
    routes: tuple[str, ...]  # which routes agreed: "move_pages", "numa_maps"
    pss_bytes: int | None = None
    huge_bytes: int | None = None
    shmem_growth: dict[int, int] = field(default_factory=dict)  # bytes per node since before the table, everybody's
    sample_bound: float = 0.0  # 95 % half-width of a node's share where pages were sampled; 0: all were asked


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReceipt:
    """What one protocol step did in one rank: faults and residency before and after are who-allocated evidence.

    ``object_pages`` counts pages of the shared object whoever faulted them (st_blocks); ``mapped_pages`` those this
    rank maps (smaps Rss).  ``not_applicable`` says why a step was replaced.
    """

    step: str
    rank: int
    seconds: float
    minor_faults: tuple[int, int]
    object_pages: tuple[int, int] | None
    mapped_pages: tuple[int, int] | None
    not_applicable: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPolicy:
    """What is in force for one worker: its CPUs, its task policy and the nodes it is allowed (not bound) to use."""

    rank: int
    cpus_allowed: str
    mems_allowed: str
    task_policy: str
    task_nodes: tuple[int, ...]
    staging: str | None = None  # where the engine's staging buffer lies after warm-up, as numa.pages.staging_place says


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSample:
    """One rank's audits at the three moments and its worker policy."""

    rank: int
    distributions: tuple[PageDistribution, ...]
    worker: WorkerPolicy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupSample:
    """Creation, registration and loading: never inside steady TTFT."""

    rank: int
    receipts: tuple[StepReceipt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupMark:
    """One lookup on the serial prefetch queue, in ns of the rank's clock.

    ``start``/``done`` bound the kernel (L_i = done − start); ``wait_before``/``wait_after`` bound the consumer's
    wait.  ``rows``, ``tiles`` and ``grid`` are the actual launch, not the request.
    """

    layer: int
    hash_ready: int
    submit: int
    start: int
    done: int
    wait_before: int
    wait_after: int
    rows: int
    tiles: int
    grid: int

    @property
    def ready(self) -> int:
        """r_i: its ids are hashed and it is submitted."""
        return max(self.hash_ready, self.submit)

    @property
    def queueing(self) -> int:
        """s_i − r_i."""
        return self.start - self.ready

    @property
    def kernel(self) -> int:
        """L_i."""
        return self.done - self.start

    @property
    def exposed(self) -> int:
        """E_i = max(0, f_i − c_i): what the consumer still had to wait for."""
        return max(0, self.done - self.wait_before)

    @property
    def waited(self) -> int:
        """What the consumer's wait took by its own marks; more than ``exposed`` where it waited for something else."""
        return self.wait_after - self.wait_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named piece of the main stream: compute (from ``layer`` to the next consumer), gather, projection or gate."""

    name: str
    layer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One marked step of one rank; every time on one base."""

    rank: int
    step: int
    begin: int
    end: int
    tokens: int
    lookups: tuple[LookupMark, ...]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """Marked steps of one run at fixed token batches.  ``resolution_ns`` is the timer's."""

    rank: int
    state: str  # "low-reuse" or "repeated"
    timelines: tuple[Timeline, ...]
    resolution_ns: int
    source_bytes: int  # per step, read from the host
    staging_bytes: int  # per step, written for the consumer
    alone_ns: tuple[int, ...] = ()  # ΣL_i of further batches with no main compute beside their lookups
    distinct_bytes: int | None = None  # per step, each row of the marked steps counted once: what the link must carry


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSample:
    """Unmarked steps of one run at fixed token batches; only the step clock runs.

    ``main_ns`` is the step without the consumer's waits; ``communication_ns`` is None on one rank.
    """

    rank: int
    tokens: int
    step_ns: tuple[int, ...]
    main_ns: tuple[int, ...]
    communication_ns: tuple[int, ...] | None = None
    communication_absent: str | None = "one rank has no collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSample:
    """Steps at one other batch size, or with fewer peers at work, in the arm's settings; its times feed no gate.

    One entry per step: ``lookup_ns`` is ΣL_i and ``exposed_ns`` ΣE_i of marked steps, ``main_ns`` the main compute of
    unmarked ones, ``quiet_main_ns`` that of steps in which every lookup runs at its consumer, with nothing beside it.
    ``peers`` ranks worked at the same time; ``timeline`` is the last marked step.
    """

    rank: int
    tokens: int
    peers: int
    lookup_ns: tuple[int, ...]
    exposed_ns: tuple[int, ...]
    main_ns: tuple[int, ...]
    quiet_main_ns: tuple[int, ...]
    source_bytes: int  # per step and rank, read from the host
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as its client saw it; times in ms since the load began, ``itl_ms`` are gaps between tokens."""

    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    status: str  # "ok", "rejected", "failed" or "incomplete"
    ttft_ms: float | None = None
    itl_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSample:
    """Every planned request of one open-loop run."""

    rank: int
    slo: Slo
    rate: float
    duration_s: float
    requests: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run of one arm: its samples, or the problems that stand in their place."""

    index: int
    block: int
    arm: str
    started_at: str  # ISO 8601, UTC
    seconds: float
    fingerprint: dict[str, str]
    correctness_before: tuple[CorrectnessSample, ...] = ()
    correctness_after: tuple[CorrectnessSample, ...] = ()
    placement: tuple[PlacementSample, ...] = ()
    startup: tuple[StartupSample, ...] = ()
    overlap: tuple[OverlapSample, ...] = ()
    compute: tuple[ComputeSample, ...] = ()
    sweep: tuple[SweepSample, ...] = ()
    serving: tuple[ServingSample, ...] = ()
    drift: dict[str, float] = field(default_factory=dict)  # rank 0's, and ``rank1.sm_mhz`` for the others
    drift_absent: dict[str, str] = field(default_factory=dict)  # counter -> why it could not be read
    problems: tuple[Problem, ...] = ()

    @property
    def correct(self) -> bool:
        """Whether no supported correctness case failed, before or after timing."""
        return all(s.passed or not s.supported for s in (*self.correctness_before, *self.correctness_after))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one schedule observed; evaluating it needs nothing else."""

    plan: Plan
    runs: tuple[RunRecord, ...]
    provenance: dict[str, Any]
    problems: tuple[Problem, ...] = ()
    control: tuple[RunRecord, ...] = ()  # the local/remote positive control, where placement is judged
    schema: int = SCHEMA_VERSION

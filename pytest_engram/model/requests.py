"""What is asked for: placements, workloads, experiments, the plan that the runner executes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pytest_engram.model.words import SCHEMA_VERSION, Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """One shared table that is asked for: which ranks map it and where its pages should lie.

    ``mode`` is one of default, bind, preferred, interleave, weighted-interleave; ``weights`` only for the last.
    """

    ranks: tuple[int, ...]
    mode: str
    nodes: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """What a policy name means on a given topology: the tables, their sharing groups and their NUMA nodes."""

    policy: str
    backing: str
    tables: tuple[TablePlan, ...]
    notes: tuple[str, ...] = ()  # what the placement costs that its tables do not show


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The suite loop's fixed shapes.  ``rows`` is per Engram layer; 0 means the layout's own full size."""

    hidden: int = 1024
    layers: int = 16
    engram_layers: tuple[int, ...] = (1, 14)
    tokens: int = 64
    steps: int = 24
    warmup: int = 4
    rows: int = 0
    reuse: str = "low-reuse"  # or "repeated"
    gemms_per_layer: int = 2
    sizes: tuple[int, ...] = ()  # further batches, tokens each, that every run measures beside ``tokens``
    tensor_parallel: bool = False  # the ranks share the heads and gather the staged rows in every step
    model: str = ""  # a preset: its entries stand where this workload gives none


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits in milliseconds that a successful request must meet to count as goodput."""

    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """An open-loop load: ``requests`` arrivals at ``rate`` per second, seeded, never slowed by the server."""

    rate: float
    requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    slo: Slo
    max_batch_tokens: int = 64
    max_running: int = 16
    max_waiting: int = 64
    timeout_s: float = 30.0
    arrivals: str = "poisson"  # or "fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRule:
    """One tested metric.  ``direction`` is where good lies; ``margin`` is a ratio (0.02 = 2 %), except for
    ``rejection_rate``, whose margin is an absolute difference."""

    metric: str
    direction: str  # "down" or "up"
    margin: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment as its YAML declares it, after validation.

    ``arms`` maps an arm's name to the settings that it changes; ``A`` is the base and every other name a
    candidate.  ``hold`` are the settings that all arms share.  All arms differ in exactly one ``variable``.
    """

    id: str
    title: str
    why: str
    claim: Claim
    subject: str
    variable: str
    arms: dict[str, dict[str, Any]]
    hold: dict[str, Any]
    unit: str  # "allocation" or "replay": what one run is
    ranks: int
    blocks: int
    cooldown_s: float
    aa_level: float
    alpha: float
    mechanism: tuple[MetricRule, ...]
    no_offset: tuple[MetricRule, ...]
    end_to_end: tuple[MetricRule, ...]
    guards: tuple[MetricRule, ...]
    workload: Workload
    serving: ServingPlan | None = None
    memory_nodes: int = 1
    engines: tuple[str, ...] = ("cpu", "cuda")
    requires: tuple[str, ...] = ()
    positive_control: bool = False
    direction_note: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun:
    """One cell of the randomised schedule; ``arm`` is A, A' or a candidate's name."""

    index: int
    block: int
    arm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything the runner needs, and nothing it could not have been told on another machine."""

    experiment: Experiment
    schedule: tuple[ScheduledRun, ...]
    seed: int
    protocol_hash: str
    engine: str
    backends: dict[str, str]  # arm name -> "reference" or "pkg.mod:Class"
    placements: dict[str, PlacementPlan]  # arm name -> what is asked of the kernel
    cpus: tuple[tuple[int, ...], ...]  # per rank, the CPUs it may use
    rows: int
    deadline_s: float = 60.0
    user: dict[str, str] = field(default_factory=dict)  # a project's own entries in every fingerprint
    schema: int = SCHEMA_VERSION

    @property
    def regrouped(self) -> bool:
        """Whether the arms share or back their tables differently."""
        return len({(p.backing, tuple(t.ranks for t in p.tables)) for p in self.placements.values()}) > 1

    @property
    def storage_in_question(self) -> bool:
        """Whether storage and replay cases belong to gate 0: the arms share differently, or allocate by themselves."""
        return self.regrouped or self.experiment.hold.get("placement_by") in ("engine", "mount")

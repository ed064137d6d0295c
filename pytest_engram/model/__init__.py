"""Every frozen record and enum that travels between processes or into a file.

Plain dataclasses of the standard library, so that the audit and the NUMA guest can use them; ``codec`` turns them
into strict JSON and back.  Requests (``Plan``, ``TablePlan``) and observations (samples, receipts) are different
types.  Times are integer nanoseconds of one monotonic clock per rank unless a name says otherwise.  ``None`` means
absent, with its reason in the neighbouring ``*_absent`` field or in a ``Problem``; 0 means a measured zero.
"""

# isort: off
from pytest_engram.model.machine import Gpu, NumaNode, Topology
from pytest_engram.model.observations import (
    ComputeSample, CorrectnessSample, Evidence, LookupMark, OverlapSample, PageDistribution, PlacementSample,
    Problem, RequestRecord, RunRecord, ServingSample, Span, StartupSample, StepReceipt, SweepSample, Timeline,
    WorkerPolicy,
)  # fmt: skip
from pytest_engram.model.requests import (
    Experiment, MetricRule, PlacementPlan, Plan, ScheduledRun, ServingPlan, Slo, TablePlan, Workload,
)  # fmt: skip
from pytest_engram.model.verdicts import Adjudication, Effect, GateResult, Verdict
from pytest_engram.model.words import GATE_NAMES, SCHEMA_VERSION, Claim, Moment, Status

__all__ = [
    "GATE_NAMES", "SCHEMA_VERSION", "Adjudication", "Claim", "ComputeSample", "CorrectnessSample", "Effect",
    "Evidence", "Experiment", "GateResult", "Gpu", "LookupMark", "MetricRule", "Moment", "NumaNode",
    "OverlapSample", "PageDistribution", "PlacementPlan", "PlacementSample", "Plan", "Problem", "RequestRecord",
    "RunRecord", "ScheduledRun", "ServingPlan", "ServingSample", "Slo", "Span", "StartupSample", "Status",
    "StepReceipt", "SweepSample", "TablePlan", "Timeline", "Topology", "Verdict", "WorkerPolicy", "Workload",
]  # fmt: skip

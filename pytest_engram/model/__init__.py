"""Every frozen record and enum that travels between processes or into a file.

Plain dataclasses of the standard library, so that the audit and the NUMA guest can use them; ``codec`` turns them
into strict JSON and back.  Requests (``Plan``, ``TablePlan``) and observations (samples, receipts) are different
types.  Times are integer nanoseconds of one monotonic clock per rank unless a name says otherwise.  ``None`` means
absent, with its reason in the neighbouring ``*_absent`` field or in a ``Problem``; 0 means a measured zero.
"""

from pytest_engram.model.machine import Gpu as Gpu
from pytest_engram.model.machine import NumaNode as NumaNode
from pytest_engram.model.machine import Topology as Topology
from pytest_engram.model.observations import ComputeSample as ComputeSample
from pytest_engram.model.observations import CorrectnessSample as CorrectnessSample
from pytest_engram.model.observations import Evidence as Evidence
from pytest_engram.model.observations import LookupMark as LookupMark
from pytest_engram.model.observations import OverlapSample as OverlapSample
from pytest_engram.model.observations import PageDistribution as PageDistribution
from pytest_engram.model.observations import PlacementSample as PlacementSample
from pytest_engram.model.observations import Problem as Problem
from pytest_engram.model.observations import RequestRecord as RequestRecord
from pytest_engram.model.observations import RunRecord as RunRecord
from pytest_engram.model.observations import ServingSample as ServingSample
from pytest_engram.model.observations import Span as Span
from pytest_engram.model.observations import StartupSample as StartupSample
from pytest_engram.model.observations import StepReceipt as StepReceipt
from pytest_engram.model.observations import SweepSample as SweepSample
from pytest_engram.model.observations import Timeline as Timeline
from pytest_engram.model.observations import WorkerPolicy as WorkerPolicy
from pytest_engram.model.requests import Experiment as Experiment
from pytest_engram.model.requests import MetricRule as MetricRule
from pytest_engram.model.requests import PlacementPlan as PlacementPlan
from pytest_engram.model.requests import Plan as Plan
from pytest_engram.model.requests import ScheduledRun as ScheduledRun
from pytest_engram.model.requests import ServingPlan as ServingPlan
from pytest_engram.model.requests import Slo as Slo
from pytest_engram.model.requests import TablePlan as TablePlan
from pytest_engram.model.requests import Workload as Workload
from pytest_engram.model.verdicts import Adjudication as Adjudication
from pytest_engram.model.verdicts import Effect as Effect
from pytest_engram.model.verdicts import GateResult as GateResult
from pytest_engram.model.verdicts import Verdict as Verdict
from pytest_engram.model.words import GATE_NAMES as GATE_NAMES
from pytest_engram.model.words import SCHEMA_VERSION as SCHEMA_VERSION
from pytest_engram.model.words import Claim as Claim
from pytest_engram.model.words import Moment as Moment
from pytest_engram.model.words import Status as Status

"""What an experiment may not say: contradictions that types cannot see, each with the place and the way out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_engram.metrics import METRICS
from pytest_engram.model import Claim, Experiment, MetricRule
from pytest_engram.policies import POLICIES
from pytest_engram.schedule import BASE, MINIMUM_BLOCKS, TWIN, candidates

Where = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One contradiction: the keys that lead to it, what stands there, what is expected."""

    where: Where
    seen: str
    expected: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that an arm may change or that all arms hold."""

    valid: Callable[[Any], bool]
    expected: str
    variable: bool = False


def _policy(value: Any) -> bool:
    """Spelled as the table of policies says; whether this machine has the nodes is known when it is resolved."""
    name, colon, argument = str(value).partition(":")
    return name in POLICIES and POLICIES[name].accepts(colon, argument)


SETTINGS: dict[str, Setting] = {
    "policy": Setting(
        _policy, "one of: " + ", ".join(policy.usage for policy in POLICIES.values()), variable=True
    ),
    "submission": Setting(("early", "at_consumption").__contains__, "early or at_consumption", variable=True),
    "cap": Setting(lambda v: v is None or (type(v) is int and v > 0), "null or a number of programs", variable=True),
    "backend": Setting(lambda v: isinstance(v, str) and v != "", "a backend's name", variable=True),
    "backing": Setting(lambda v: isinstance(v, str) and v != "", "a backing such as tmpfs or memfd"),
    "grid": Setting(("background", "foreground").__contains__, "background or foreground"),
    "cpu_offload": Setting(lambda v: v is True, "true"),
    "dp_shared_memory": Setting(lambda v: v is True, "true"),
}  # fmt: skip
VARIABLES = tuple(name for name, setting in SETTINGS.items() if setting.variable)

REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("cpu_offload", False, "CPU offload off moves the weights: it is no control for prefetch; change `submission`"),
    ("dp_shared_memory", False, "unsharing is no private-copy baseline: A3 compares one shared table with per-socket"),
    ("grid", "foreground", "a foreground grid in one arm changes the kernel too: B1 keeps the background grid"),
)


def faults(experiment: Experiment) -> Iterator[Fault]:
    """Every fault, in the order in which a reader of the file would want to know them."""
    for rule in (_identity, _refused, _arms, _settings, _statistics, _rules, _claim, _workload, _serving):
        yield from rule(experiment)


def _identity(e: Experiment) -> Iterator[Fault]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", e.id):
        yield Fault(("id",), repr(e.id), "letters, digits, - and _")
    yield from _one_of("variable", e.variable, VARIABLES)
    yield from _one_of("unit", e.unit, ("allocation", "replay", "server"))
    yield from _one_of("subject", e.subject, ("suite loop", "engine modules", "served engine"))
    if not e.engines or not set(e.engines) <= {"cpu", "cuda"}:
        yield Fault(("engines",), str(list(e.engines)), "one or both of cpu, cuda")
    if e.id in e.requires:
        yield Fault(("requires",), "itself", "other experiments")


def _refused(e: Experiment) -> Iterator[Fault]:
    for place, settings in ((("hold",), e.hold), *((("arms", arm), chosen) for arm, chosen in e.arms.items())):
        for key, value, why in REFUSED:
            if key in settings and settings[key] == value and not (key == "grid" and place == ("hold",)):
                yield Fault((*place, key), f"{value!r} is a refused control", why)


def _arms(e: Experiment) -> Iterator[Fault]:
    if BASE not in e.arms or len(e.arms) < 2 or TWIN in e.arms:
        yield Fault(("arms",), ", ".join(e.arms) or "none", "A, the base, and at least one candidate; A' is added here")
        return
    for arm, settings in e.arms.items():
        for key in settings:
            if key != e.variable:
                yield Fault(
                    ("arms", arm, key), f"a second changed variable beside {e.variable!r}",
                    "one change per experiment; what all arms share belongs in `hold`",
                )  # fmt: skip
        if e.variable not in settings:
            yield Fault(("arms", arm), f"{e.variable} missing", f"a value for {e.variable}, the variable")
    for arm in candidates(e):
        if e.arms[arm] == e.arms[BASE]:
            yield Fault(("arms", arm), "the same as A", f"another {e.variable}")


def _settings(e: Experiment) -> Iterator[Fault]:
    if e.variable in e.hold:
        yield Fault(("hold", e.variable), "held and changed at once", "the variable in the arms only")
    for place, settings in ((("hold",), e.hold), *((("arms", arm), chosen) for arm, chosen in e.arms.items())):
        yield from _known_settings(place, settings)


def _known_settings(place: Where, settings: Mapping[str, Any]) -> Iterator[Fault]:
    for key, value in settings.items():
        if key not in SETTINGS:
            yield Fault((*place, key), "unknown setting", f"one of: {', '.join(SETTINGS)}")
        elif not SETTINGS[key].valid(value):
            yield Fault((*place, key), repr(value), SETTINGS[key].expected)


def _statistics(e: Experiment) -> Iterator[Fault]:
    yield from _at_least(("blocks",), e.blocks, MINIMUM_BLOCKS, " blocks: with fewer no signed-rank test can decide")
    if not 0 < e.alpha <= 0.05:
        yield Fault(("alpha",), f"{e.alpha:g}", "a one-sided level above 0 and up to 0.05; 0.025 is usual")
    tests = max(1, (len(e.arms) - 1) * len(e.mechanism))
    if 0 < e.alpha < tests * 2.0**-e.blocks:
        seen = f"{e.blocks} for {tests} tests that share {e.alpha:g} by Holm"
        yield Fault(("blocks",), seen, f"at least {math.ceil(math.log2(tests / e.alpha))}")
    if not 0 < e.aa_level <= 0.2:
        yield Fault(("aa_level",), f"{e.aa_level:g}", "a two-sided level above 0 and up to 0.2")
    yield from _at_least(("cooldown_s",), e.cooldown_s, 0)
    yield from _at_least(("ranks",), e.ranks, 1)
    yield from _at_least(("memory_nodes",), e.memory_nodes, 1)


RULE_LISTS = ("mechanism", "no_offset", "end_to_end", "guards")
_TESTED_FOR_HARM = ("no_offset", "guards")


def _rules(e: Experiment) -> Iterator[Fault]:
    for name in RULE_LISTS:
        rules: tuple[MetricRule, ...] = getattr(e, name)
        for index, rule in enumerate(rules):
            yield from _rule(e, name, (name, index), rule)
            if rule.metric in [other.metric for other in rules[:index]]:
                yield Fault((name, index, "metric"), f"{rule.metric} given twice", "each metric once")


def _rule(e: Experiment, name: str, where: Where, rule: MetricRule) -> Iterator[Fault]:
    base, _, rank = rule.metric.partition("@")
    if base not in METRICS or (rank and not (rank.isdigit() and int(rank) < e.ranks)):
        yield Fault((*where, "metric"), repr(rule.metric), f"one of: {', '.join(METRICS)}; NAME@RANK for one rank")
        return
    metric = METRICS[base]
    if rule.direction != metric.direction:
        yield Fault((*where, "direction"), repr(rule.direction), f"{metric.direction}, where good lies for {base}")
    if not 0 <= rule.margin < 1:
        yield Fault((*where, "margin"), f"{rule.margin:g}", "a share from 0 to below 1, e.g. 0.02 for 2 %")
    elif name in _TESTED_FOR_HARM and rule.margin == 0:
        yield Fault((*where, "margin"), "0", "above 0: that two arms are exactly equal can never be shown")
    if metric.served and e.serving is None:
        yield Fault((*where, "metric"), f"{base} without a load", "a `serving` section")
    elif metric.served and e.serving is not None:
        samples = e.serving.requests * e.ranks * (e.serving.output_tokens[1] if base.startswith("itl") else 1)
        if samples < metric.minimum:
            yield Fault((*where, "metric"), f"{samples} samples planned", f"at least {metric.minimum} for {base}")


def _claim(e: Experiment) -> Iterator[Fault]:
    if not e.mechanism:
        yield Fault(("mechanism",), "empty", "at least one metric with the predicted direction")
    if e.claim is Claim.IMPROVES:
        for name in ("no_offset", "end_to_end"):
            if not getattr(e, name):
                yield Fault((name,), "empty", "at least one metric: `claim: improves` is judged by all five gates")
    if e.variable == "policy" and e.unit != "allocation":
        yield Fault(("unit",), repr(e.unit), "allocation: placement is decided before the first page")
    if e.positive_control and e.variable != "policy":
        yield Fault(("positive_control",), "true", "false: local against remote is a control for placement only")


def _workload(e: Experiment) -> Iterator[Fault]:
    work = e.workload
    for name in ("hidden", "layers", "tokens", "steps"):
        yield from _at_least(("workload", name), getattr(work, name), 1)
    for name in ("warmup", "rows", "gemms_per_layer"):
        yield from _at_least(("workload", name), getattr(work, name), 0)
    rising = sorted(set(work.engram_layers)) == list(work.engram_layers)
    if not work.engram_layers or not rising or not 0 <= work.engram_layers[0] <= work.engram_layers[-1] < work.layers:
        yield Fault(
            ("workload", "engram_layers"), str(list(work.engram_layers)), f"rising layer numbers below {work.layers}"
        )
    if work.reuse not in ("low-reuse", "repeated"):
        yield Fault(("workload", "reuse"), repr(work.reuse), "low-reuse or repeated")


def _serving(e: Experiment) -> Iterator[Fault]:
    load = e.serving
    if load is None:
        return
    for name in ("requests", "max_batch_tokens", "max_running", "max_waiting"):
        yield from _at_least(("serving", name), getattr(load, name), 1)
    for name, number in (("rate", load.rate), ("timeout_s", load.timeout_s)):
        if not 0 < number < float("inf"):
            yield Fault(("serving", name), f"{number:g}", "above 0 and finite")
    for name in ("prompt_tokens", "output_tokens"):
        low, high = getattr(load, name)
        if not 1 <= low <= high:
            yield Fault(("serving", name), f"[{low}, {high}]", "[least, most] with 1 ≤ least ≤ most")
    if not (load.slo.ttft_ms > 0 and load.slo.itl_ms > 0):
        yield Fault(("serving", "slo"), f"{load.slo.ttft_ms:g} and {load.slo.itl_ms:g} ms", "limits above 0")
    if load.arrivals not in ("poisson", "fixed"):
        yield Fault(("serving", "arrivals"), repr(load.arrivals), "poisson or fixed")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> Iterator[Fault]:
    if value not in allowed:
        yield Fault((key,), repr(value), f"one of: {', '.join(allowed)}")


def _at_least(where: Where, value: float, least: int, why: str = "") -> Iterator[Fault]:
    if not value >= least:
        yield Fault(where, f"{value:g}", f"at least {least}{why}")

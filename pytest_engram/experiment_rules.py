"""What an experiment may not say: contradictions that types cannot see, each with the place and the way out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from pytest_engram.errors import UsageError
from pytest_engram.metrics import METRICS
from pytest_engram.model import Claim, Experiment, MetricRule
from pytest_engram.policies import BACKING_NAMES, POLICIES
from pytest_engram.schedule import BASE, MINIMUM_BLOCKS, TWIN, base_arm

Where = tuple[str | int, ...]
Bound = tuple[Callable[[Any], object], str]  # what is valid, and how it is said


class Fault(NamedTuple):
    """One contradiction: the keys that lead to it, what stands there, what is expected."""

    where: Where
    seen: str
    expected: str


def _among(*words: str) -> Bound:
    return words.__contains__, f"one of: {', '.join(words)}"


def _from(least: float, most: float, why: str = "") -> Bound:
    return lambda value: least <= value <= most, f"at least {least} and at most {most}{why}"


def _policy(value: Any) -> bool:
    """Spelled as the table of policies says; whether this machine has the nodes is known when it is resolved."""
    name, colon, argument = str(value).partition(":")
    return name in POLICIES and POLICIES[name].accepts(colon, argument)


_NAME: Bound = (lambda name: isinstance(name, str) and name != "", "a name")
_VARIABLES: dict[str, Bound] = {
    "policy": (_policy, "one of: " + ", ".join(policy.usage for policy in POLICIES.values())),
    "submission": (("early", "at_consumption").__contains__, "early or at_consumption"),
    "cap": (lambda cap: cap is None or (type(cap) is int and 0 < cap < 1 << 31), "null or a number of programs"),
    "backend": _NAME,
    "wait": (("layer", "stream").__contains__, "layer (its own lookup) or stream (all that was submitted)"),
    "inline_above": (lambda n: n is None or (type(n) is int and 0 <= n < 1 << 31), "null or a number of tokens"),
    "streams": (lambda count: type(count) is int and count in (1, 2), "1, or 2 as a negative control"),
    "graph": (lambda on: type(on) is bool, "true (replay a CUDA graph) or false"),
}
_HELD: dict[str, Bound] = {
    "backing": _among(*BACKING_NAMES),
    "placement_by": (
        ("order", "engine", "mount").__contains__,
        "order (the suite's own), engine (the backend's storage is asked), or mount (its stock storage, mpol= mount)",
    ),
    "grid": (("background", "foreground").__contains__, "background or foreground; B1 keeps the background grid"),
    "cpu_offload": (lambda on: on is True, "true: CPU offload off moves the weights; change `submission` instead"),
    "dp_shared_memory": (lambda on: on is True, "true: unsharing is no private-copy baseline of A3"),
}  # fmt: skip
SETTINGS = _VARIABLES | _HELD  # what an arm may change, and what all arms hold
_DEFAULTS = {
    "policy": "default", "backing": "tmpfs", "submission": "early", "cap": None, "wait": "layer", "inline_above": None,
    "streams": 1, "graph": False, "placement_by": "order",
}  # fmt: skip
_SPAN: Bound = (lambda span: 1 <= span[0] <= span[1] <= 1 << 20, "[least, most] with 1 ≤ least ≤ most ≤ 1048576")
_MOST = {"hidden": 65_536, "layers": 1024, "tokens": 65_536, "steps": 100_000}  # far above any model, below any memory
_POSITIVE: Bound = (lambda value: 0 < value < math.inf, "above 0 and finite")

_BOUNDS: dict[str, Bound] = {
    "id": (re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*").fullmatch, "letters, digits, - and _"),
    "variable": _among(*_VARIABLES),
    "unit": _among("allocation", "replay"),
    "subject": _among("suite loop"),
    "engines": (lambda names: bool(names) and {*names} <= {"cpu", "cuda"}, "one or both of cpu, cuda"),
    "blocks": _from(MINIMUM_BLOCKS, 1000, " blocks: with fewer no signed-rank test can decide"),
    "alpha": (lambda level: 1e-300 < level <= 0.05, "a one-sided level above 0 and up to 0.05; 0.025 is usual"),
    "aa_level": (lambda level: 0 < level <= 0.2, "a two-sided level above 0 and up to 0.2"),
    "cooldown_s": _from(0, 3600),
    "ranks": _from(1, 64),
    "memory_nodes": _from(1, 1024),
    "mechanism": (bool, "at least one metric with the predicted direction"),
    **{f"workload.{name}": _from(1, most) for name, most in _MOST.items()},
    **{f"workload.{name}": _from(0, most) for name, most in (("warmup", 100_000), ("gemms_per_layer", 1000))},
    "workload.rows": _from(0, 1 << 40),
    "workload.sizes": (
        lambda sizes: all(1 <= size <= _MOST["tokens"] for size in sizes) and [*sizes] == sorted({*sizes}),
        f"rising numbers of tokens, 1 to {_MOST['tokens']}",
    ),
    "workload.reuse": (("low-reuse", "repeated").__contains__, "low-reuse or repeated"),
    **{f"serving.{key}": _from(1, 1 << 20) for key in ("requests", "max_batch_tokens", "max_running", "max_waiting")},
    **{f"serving.{name}": _POSITIVE for name in ("rate", "timeout_s", "slo.ttft_ms", "slo.itl_ms")},
    **{f"serving.{name}": _SPAN for name in ("prompt_tokens", "output_tokens")},
    "serving.arrivals": (("poisson", "fixed").__contains__, "poisson or fixed"),
}  # fmt: skip
RULE_LISTS = ("mechanism", "no_offset", "end_to_end", "guards")  # every second one tests for harm


def settings(experiment: Experiment, arm: str) -> dict[str, Any]:
    """All that ``arm`` runs with: its own change, what every arm holds, and the defaults of what nobody names."""
    return {**_DEFAULTS, **experiment.hold, **experiment.arms[base_arm(arm)]}


def places(experiment: Experiment) -> bool:
    """Whether the arms differ in where pages lie: by their policies, or by backends that place their own tables."""
    own = settings(experiment, BASE)["placement_by"] == "engine"
    return experiment.variable == "policy" or (experiment.variable == "backend" and own)


def in_order(experiments: Iterable[Experiment]) -> list[str]:
    """Every id behind those that it requires; raises ``UsageError`` (``bad-experiment``) where some require each other.

    Several experiments of one id, of several results, count as one that requires what any of them does.
    """
    needs: dict[str, tuple[str, ...]] = {}
    for one in experiments:
        needs[one.id] = (*needs.get(one.id, ()), *one.requires)
    try:
        return [*TopologicalSorter(needs).static_order()]
    except CycleError as error:
        seen = f"required by each other: {', '.join(error.args[1][1:])}"
        raise UsageError(seen, code="bad-experiment", where="requires", expected="no circle of experiments") from None


def faults(experiment: Experiment) -> Iterator[Fault]:
    """Every fault, in the order in which a reader of the file would want to know them."""
    for check in (_bounds, _settings, _arms, _rules, _together):
        yield from check(experiment)


def _bounds(e: Experiment) -> Iterator[Fault]:
    for path, (valid, expected) in _BOUNDS.items():
        where = tuple(path.split("."))
        value = reduce(lambda record, name: getattr(record, name, None), where, e)  # type: ignore[arg-type,return-value]
        if value is not None and not valid(value):
            yield Fault(where, repr(value), expected)


def _settings(e: Experiment) -> Iterator[Fault]:
    places: dict[Where, dict[str, Any]] = {("hold",): e.hold, **{("arms", arm): held for arm, held in e.arms.items()}}
    for place, settings in places.items():
        for key, value in settings.items():
            valid, expected = SETTINGS.get(key, (lambda _: False, f"a setting, one of: {', '.join(SETTINGS)}"))
            if not valid(value):
                yield Fault((*place, key), repr(value) if key in SETTINGS else "unknown setting", expected)


def _arms(e: Experiment) -> Iterator[Fault]:
    if BASE not in e.arms or len(e.arms) < 2 or TWIN in e.arms:
        yield Fault(("arms",), ", ".join(e.arms) or "none", "A, the base, and at least one candidate; A' is added here")
    for arm, settings in e.arms.items():
        for key in [key for key in settings if key != e.variable]:
            expected = f"one change per experiment; `hold` has what all arms share, {key} as {SETTINGS[key][1]}"
            yield Fault(("arms", arm, key), f"a second changed variable beside {e.variable!r}", expected)
        if e.variable not in settings:
            yield Fault(("arms", arm), f"{e.variable} missing", f"a value for {e.variable}, the variable")
        if arm != BASE and settings == e.arms[BASE]:
            yield Fault(("arms", arm), "the same as A", f"another {e.variable}")


def _rules(e: Experiment) -> Iterator[Fault]:
    for name in RULE_LISTS:
        seen: list[str] = []
        for index, rule in enumerate(getattr(e, name)):
            for key, found, expected in _rule(e, rule, seen, harm=name in RULE_LISTS[1::2]):
                yield Fault((name, index, key), found, expected)
            seen.append(rule.metric)


def _rule(e: Experiment, rule: MetricRule, earlier: list[str], *, harm: bool) -> Iterator[tuple[str, str, str]]:
    base, _, rank = rule.metric.partition("@")
    if base not in METRICS or ("@" in rule.metric and not (rank.isdecimal() and int(rank) < e.ranks)):
        yield "metric", repr(rule.metric), f"one of: {', '.join(METRICS)}; NAME@RANK for one rank"
        return
    metric = METRICS[base]
    if rule.metric in earlier:
        yield "metric", f"{rule.metric} given twice", "each metric once"
    if rule.direction != metric.direction:
        yield "direction", repr(rule.direction), f"{metric.direction}, where good lies for {base}"
    if not 0 <= rule.margin < 1:
        yield "margin", f"{rule.margin:g}", "a share from 0 to below 1, e.g. 0.02 for 2 %"
    if harm and rule.margin == 0:
        yield "margin", "0", "above 0: that two arms are exactly equal can never be shown"
    if metric.source == "serving" and e.serving is None:
        yield "metric", f"{base} without a load", "a `serving` section"
    elif metric.source == "serving" and e.serving is not None:
        samples = e.serving.requests * e.ranks * (e.serving.output_tokens[1] if base.startswith("itl") else 1)
        if samples < metric.minimum:
            yield "metric", f"{samples} samples planned", f"at least {metric.minimum} for {base}"


def _together(e: Experiment) -> Iterator[Fault]:
    """What is right alone and wrong beside something else."""
    layers, depth, placed = list(e.workload.engram_layers), e.workload.layers, BASE in e.arms and places(e)
    tests = (len(e.arms) - 1) * len(e.mechanism)
    needed = math.ceil(math.log2(tests / e.alpha))  # 2**-blocks is the least p-value, which Holm multiplies
    gates = [name for name in ("no_offset", "end_to_end") if e.claim is Claim.IMPROVES and not getattr(e, name)]
    wrong: list[tuple[bool, str, object, str]] = [
        (e.variable in e.hold, f"hold.{e.variable}", "held and changed at once", "the variable in the arms only"),
        (e.id in e.requires, "requires", "itself", "other experiments"),
        (e.blocks < needed, "blocks", f"{e.blocks} for {tests} tests that share {e.alpha:g}", f"at least {needed}"),
        *((True, name, "empty", "a metric: `claim: improves` is judged by all five gates") for name in gates),
        (e.workload.tensor_parallel and e.ranks < 2, "ranks", e.ranks, "at least 2, which share the heads"),
        (e.workload.tensor_parallel and e.serving is not None, "serving", "a load of its own for every rank",
         "none: ranks that share the heads take every step together"),
        (placed and e.unit != "allocation", "unit", e.unit, "allocation: placement precedes the first page"),
        (placed and e.variable == "backend" and settings(e, BASE)["policy"] == "default", "hold.policy", "default",
         "one that the candidate must obey: pages that nobody asks for wander from run to run, in any build"),
        (e.positive_control and not placed, "positive_control", "true", "false: it is for placement only"),
        (not layers or layers != sorted({*layers} & {*range(depth)}), "workload.engram_layers", layers,
         f"rising layer numbers below {depth}"),
    ]  # fmt: skip
    yield from (Fault(tuple(path.split(".")), str(seen), expected) for bad, path, seen, expected in wrong if bad)

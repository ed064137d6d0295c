"""Numbers as people read them: a unit, few digits, the true minus sign; ``None`` is said, never shown as 0."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_engram.metrics import METRICS
from pytest_engram.model import Effect

ABSENT = "absent"


def signed(ratio: float | None, open_end: str = ABSENT) -> str:
    """A ratio − 1 in per cent without the sign of per cent: −0.031 is ``−3.1``."""
    return open_end if ratio is None else f"{100 * ratio:+.1f}".replace("-", "−")


def interval(effect: Effect) -> str:
    """``[−4.0, −2.2]``; an end that the test could not close is open."""
    return f"[{signed(effect.low, '−∞')}, {signed(effect.high, '+∞')}]"


def effect(effect: Effect, *, arm: bool = False) -> str:
    """``lookup −3.1 % [−4.0, −2.2]``, with the arm in front where a gate compares several."""
    head = f"{effect.arm}: {effect.metric}" if arm else effect.metric
    if effect.estimate is None:
        return f"{head} {ABSENT}" + (f" ({effect.note})" if effect.note else "")
    return f"{head} {signed(effect.estimate)} {points(effect.metric)} {interval(effect)}"


def points(metric: str) -> str:
    """The unit of an effect: per cent of a ratio, percentage points of a difference."""
    row = METRICS.get(metric.partition("@")[0])
    return "pp" if row is not None and row.additive else "%"


def effects(found: Iterable[Effect]) -> str:
    """All effects in one line; arms are named once there is more than one."""
    found = tuple(found)
    several = len({each.arm for each in found}) > 1
    return ", ".join(effect(each, arm=several) for each in found)


def seconds(value: float | None) -> str:
    """``48 s``, ``2.9 s``, ``12.3 ms``, ``450 ns``; minutes from 100 s on."""
    if value is None:
        return ABSENT
    if value >= 100:
        return f"{value / 60:.1f} min"
    if value >= 10:
        return f"{value:.0f} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value * 1e9:.0f} ns".replace("-", "−")


def nanoseconds(value: float | None) -> str:
    """Like :func:`seconds`, from ns."""
    return seconds(None if value is None else value / 1e9)


def size(count: float | None) -> str:
    """Bytes in binary units: ``24.0 GiB``."""
    if count is None:
        return ABSENT
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def count(value: float | None) -> str:
    """``6,291,456``."""
    return ABSENT if value is None else f"{value:,.0f}".replace("-", "−")


def median(values: Iterable[float | None]) -> float | None:
    """The median of what is there; ``None`` of nothing."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

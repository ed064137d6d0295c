"""Numbers as people read them: a unit, few digits, the true minus sign; ``None`` is said, never shown as 0."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_engram.gates.comparison import interval, percent
from pytest_engram.metrics import METRICS
from pytest_engram.model import Effect

ABSENT = "absent"
_TIMES = ((100, 60, "min", 1), (10, 1, "s", 0), (1, 1, "s", 1), (1e-3, 1e-3, "ms", 1), (1e-6, 1e-6, "µs", 1))


def measured(effect: Effect) -> tuple[str, str]:
    """``−3.1 %`` (``pp`` for a difference) and ``[−4.0, −2.2]``, open where the test closed no end; or the absence."""
    if effect.estimate is None:
        return ABSENT, f"({effect.note})" if effect.note else ""
    row = METRICS.get(effect.metric.partition("@")[0])
    unit = "pp" if row is not None and row.additive else "%"
    return percent(effect.estimate, unit=f" {unit}"), interval(effect)


def effects(found: Sequence[Effect]) -> str:
    """``lookup −3.1 % [−4.0, −2.2], …`` in one line; arms are named once there is more than one."""
    several = len({each.arm for each in found}) > 1
    named = [f"{each.arm}: {each.metric}" if several else each.metric for each in found]
    return ", ".join(" ".join((name, *measured(each))).rstrip() for name, each in zip(named, found, strict=True))


def seconds(value: float | None) -> str:
    """``48 s``, ``2.9 s``, ``12.3 ms``, ``450 ns``; minutes from 100 s on."""
    if value is None:
        return ABSENT
    _, scale, unit, digits = next((row for row in _TIMES if value >= row[0]), (0, 1e-9, "ns", 0))
    return f"{value / scale:.{digits}f} {unit}".replace("-", "−")


def size(count: float | None) -> str:
    """Bytes in binary units: ``24.0 GiB``."""
    if count is None:
        return ABSENT
    power = min(max(int(count).bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:,.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def count(value: float | None) -> str:
    """``6,291,456``."""
    return ABSENT if value is None else f"{value:,.0f}".replace("-", "−")

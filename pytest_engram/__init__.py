"""Placement, correctness and overlap gates for Engram tables in LLM serving engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_engram.layout import EngramLayout as EngramLayout

__all__ = ["EngramLayout"]


def __getattr__(name: str) -> Any:
    """Load numpy only when the layout is asked for: `pytest --help` stays light."""
    if name == "EngramLayout":
        from pytest_engram.layout import EngramLayout

        return EngramLayout
    raise AttributeError(name)

"""Engines that run the suite loop, loaded by name so that asking for one never imports another's torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pytest_engram.errors import NotMeasurable, UsageError

ENGINES = {"cpu": "pytest_engram.engines.cpu:CpuEngine", "cuda": "pytest_engram.engines.cuda:CudaEngine"}


def engine_class(name: str) -> Any:
    """The engine class called ``name``; raises ``UsageError`` for an unknown one."""
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}", code="unknown-engine", expected=f"one of {', '.join(ENGINES)}")
    module, attribute = ENGINES[name].split(":")
    return getattr(import_module(module), attribute)


def availability() -> dict[str, str | None]:
    """Engine name -> None if it can run here, else the reason why not."""
    return {name: engine_class(name).unavailable() for name in ENGINES}


def cuda_devices() -> tuple[int, str]:
    """How many GPUs this process can use, and why there is none."""
    reason = availability()["cuda"]
    if reason is not None:
        return 0, reason
    import torch

    return torch.cuda.device_count(), ""


def choose(request: str) -> str:
    """The engine for ``auto|cpu|cuda``: ``auto`` takes cuda where it can run; a named engine never falls back."""
    if request == "auto":
        return "cuda" if engine_class("cuda").unavailable() is None else "cpu"
    reason = engine_class(request).unavailable()
    if reason is not None:
        raise NotMeasurable(
            reason, code="engine-unavailable", who=f"engine {request}", way_out="use --engram-engine auto"
        )
    return request

"""What the host's link carries at best: the ceiling above which a lookup of distinct rows is a broken measurement."""

from __future__ import annotations

from typing import Any

_BYTES, _REPEATS = 256 << 20, 5
_TWIN_BYTES = 1 << 20  # a stand-in on CPUs copies no faster for more


def link_bytes_per_s(cuda: Any, device: Any) -> float | str:
    """Bytes/s of the best of five sequential copies from pinned host memory to ``device``, or why there is none.

    A ceiling and no calibration: random rows are bound by address translation long before the link is.
    """
    import torch

    real = device.type == "cuda"
    source = torch.empty(_BYTES if real else _TWIN_BYTES, dtype=torch.uint8, pin_memory=real)
    target = torch.empty_like(source, device=device)
    best = min(_copy_ms(cuda, target, source) for _ in range(_REPEATS))
    nbytes = source.nbytes
    del source
    if real and (empty := getattr(torch._C, "_host_emptyCache", None)):
        empty()  # or torch keeps those pages pinned
    return nbytes / best * 1e3 if best > 0 else "a copy takes no time on this device"


def _copy_ms(cuda: Any, target: Any, source: Any) -> float:
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(cuda.current_stream())
    target.copy_(source, non_blocking=True)
    end.record(cuda.current_stream())
    cuda.synchronize()
    return float(begin.elapsed_time(end))

"""Arrays on their way to and from a backend: numpy on the CPU engine, torch tensors on the CUDA engine."""

from __future__ import annotations

from typing import Any

import numpy as np


def place(array: Any, engine: str) -> Any:
    """A numpy array as the backends of ``engine`` take it; a view with a stride stays a view with that stride."""
    if engine == "cpu":
        return array
    import torch

    if array.flags.c_contiguous:
        return torch.from_numpy(array).cuda()
    wide = torch.from_numpy(np.repeat(array, 2, axis=-1)).cuda()
    return wide[..., ::2]


def place_bf16(bits: Any, engine: str) -> Any:
    """bf16 bit patterns u16 as the backends of ``engine`` take bf16: as they are, or as bfloat16 in torch."""
    if engine == "cpu":
        return bits
    import torch

    return place(bits.view(np.int16), engine).view(torch.bfloat16)


def to_numpy(array: Any) -> Any:
    """A numpy array of a backend's answer; bfloat16 tensors become u16 bit patterns."""
    if isinstance(array, np.ndarray):
        return array
    import torch

    tensor = array.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def host_tensor(array: Any) -> Any:
    """A tensor over the memory of a numpy array (u16 becomes int16); anything else stays as it is."""
    if not isinstance(array, np.ndarray):
        return array
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()  # torch refuses both
    import torch

    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
